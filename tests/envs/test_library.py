import random
import re

import pytest
from team_play import play

import forge_agents as fa
from forge_agents.testing import check_env, check_levels
from forge_envs.teams.library import GOODS, RIVERS, Library

WHOLE = (
    (r"the town where (.+) was born", "born"),
    (r"the company that (.+) founded", "founded"),
    (r"the founder of (.+)", "founder"),
    (r"the town where (.+) has its seat", "seat"),
    (r"the mayor of (.+)", "mayor"),
)
ASKED = (
    (r"In which year was (.+) born\?", "year"),
    (r"What does (.+) make\?", "makes"),
    (r"On which river does (.+) lie\?", "river"),
)
SAYS = {
    "born": r"was born in (\w+) in \d+",
    "year": r"was born in \w+ in (\d+)",
    "founded": r"founded is (.+)\.$",
    "founder": r"Its founder is (.+?),",
    "seat": r"its seat is in (\w+)\.",
    "makes": r"makes (\w+)\.",
    "mayor": r"Its mayor is (.+)\.$",
    "river": r"on the river (\w+)\.",
}


class Team:
    """Plays both seats from their own observations; `gives_up` after so many searches and tells the last value.

    With probability `tires` it does so after each, and forgets the value as well.
    """

    def __init__(self, *, gives_up=99, cites=True, tires=0.0):
        self.gives_up, self.cites, self.tires, self.rng = gives_up, cites, tires, random.Random(0)

    def __call__(self, seen, agent):
        return getattr(self, agent)(seen)

    def searcher(self, seen):
        if not seen.startswith(("[", "Nothing")) and "\n[" not in seen:
            self.steps, self.pages, self.value = [], [], ""
            for form, relation in ASKED:
                if found := re.fullmatch(form, seen):
                    self.steps, rest = [relation], found[1]
            while found := [(relation, m[1]) for form, relation in WHOLE if (m := re.fullmatch(form, rest))]:
                self.steps, rest = [found[0][0], *self.steps], found[0][1]
            self.thing = rest
            return f'CALL search("{self.thing}")'
        page = next(m for m in re.finditer(r"\[(\d+)\] (.+)", seen) if m[2].startswith(self.thing))
        self.pages.append(page[1])
        if self.rng.random() < self.tires:
            return "no idea"
        self.value = self.thing = re.search(SAYS[self.steps.pop(0)], page[2])[1]
        if self.steps and len(self.pages) < self.gives_up:
            return f'CALL search("{self.thing}")'
        return f"{self.value} " + " ".join(f"[{number}]" for number in self.pages)

    def writer(self, seen):
        note = seen.rpartition("Note: ")[2]
        return note if self.cites else note.partition(" [")[0]


def played(team, seed, **settings):
    env = Library(**settings)
    return env, play(env, team, seed)


def test_the_environment_keeps_the_contract():
    check_env("forge/Library-v0")
    check_env("forge/Library-v0@6")


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5, 6])
def test_a_team_that_follows_the_pages_always_earns_one(level):
    settings = dict(fa.spec(f"forge/Library-v0@{level}").kwargs)
    for seed in range(12):
        env, reward = played(Team(), seed, **settings)
        assert reward == 1.0, f"{seed}\n{env.question}\n{env.render()}"
        assert len(env.path) == settings["hops"] == env.searches


def test_an_answer_without_its_pages_is_half_of_one_and_a_shorter_path_is_none():
    assert [played(Team(cites=False), seed, hops=2)[1] for seed in range(5)] == [0.5] * 5
    assert sum(played(Team(gives_up=1), seed, hops=3)[1] for seed in range(20)) == 0


@pytest.mark.parametrize("wrapped", ["{}", "The {}.", "on the {}", "On the river {}", "in {}", ' "{}" '])
def test_a_right_answer_may_stand_in_words_that_say_no_more(wrapped):
    env = Library()
    env.reset(seed=3)
    env.step("no idea")
    env.step(wrapped.format(env.answer) + "".join(f" [{number}]" for number in env.path))
    assert env.rewards["writer"] == 1.0


def test_citing_the_whole_library_is_no_citation():
    env, _ = played(Team(), 3, hops=2)
    env.reset(seed=3)
    env.step("no idea")
    env.step(f"{env.answer} " + " ".join(f"[{number}]" for number in range(1, 49)))
    assert env.rewards["writer"] == 0.5 and env.infos["searcher"]["correct"]


@pytest.mark.parametrize(
    "say",
    [lambda seen: "", lambda seen: seen, lambda seen: "lamps [1] [2] [3]", lambda seen: "Oder", lambda seen: "1900 [1]",
     lambda seen: " ".join((*GOODS, *RIVERS))],
    ids=["silence", "copying", "a good", "a river", "a year", "everything"],
)  # fmt: skip
def test_what_knows_nothing_earns_next_to_nothing(say):
    for level in (1, 3):
        episodes = [fa.play(f"forge/Library-v0@{level}", fa.Scripted(say), seed=seed) for seed in range(40)]
        assert sum(episode.rewards["writer"] for episode in episodes) <= 2


def test_each_level_is_harder_for_a_team_that_sometimes_gives_up():
    team = Team(tires=0.25)
    means = check_levels("forge/Library-v0", fa.Scripted(team), episodes=40)
    assert means[0] > 0.6 and means[-1] == pytest.approx(0.75**6, abs=0.2)


def test_a_search_finds_a_thing_by_its_name_and_survives_what_is_typed():
    env = Library(towns=60)
    env.reset(seed=5)
    for name, page in list(env.pages.items())[:40]:
        assert env.search(name).startswith(f"[{page.number}] {name} ")
    for odd in ("", '"', "a* OR (b", "NEAR(", "é" * 1000, "x " * 5000):
        env.search(odd)
    assert env.search("zzz") == "Nothing is found."
    assert env.searches == 47


def test_forks_and_seeds_give_the_same_library():
    here, there = Library(), Library()
    here.reset(seed=9), there.reset(seed=9)
    assert here.pages == there.pages and here.question == there.question
    there.reset(seed=10)
    assert here.question != there.question


def test_settings_that_make_no_library_are_told():
    for wrong in ({"hops": 0}, {"hops": 7}, {"towns": 3}, {"hits": 0}, {"max_note_chars": 0}):
        with pytest.raises(ValueError, match="must be 1 to 6"):
            Library(**wrong)
