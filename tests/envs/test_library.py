import pytest
from team_play import begin, shown, with_oracle

import forge_agents as fa
from forge_agents.testing import check_levels
from forge_envs.oracles.library import Oracle
from forge_envs.teams.library import Library, read_answer

NAME = "forge/Library-v0"


class Uncited(Oracle):
    def note(self):
        return self.thing


class Hasty(Oracle):
    """Reports the first thing that it finds."""

    def searcher(self, seen):
        said = super().searcher(seen)
        return self.note() if self.pages else said


class Tired(Oracle):
    """Sometimes gives up."""

    def searcher(self, seen):
        said = super().searcher(seen)
        return "no idea" if self.pages and self.rng.random() < 0.25 else said


@pytest.mark.parametrize("level", [1, 6])
def test_a_team_that_follows_the_pages_always_earns_one(level):
    for seed in range(4):
        env, reward = shown(NAME, seed, level=level)
        assert reward == 1.0, f"{seed}\n{env.question}\n{env.render()}"
        assert len(env.path) == fa.spec(f"{NAME}@{level}").kwargs["hops"] == env.searches


def test_answer_without_citations_earns_half():
    assert [shown(NAME, seed, Uncited, hops=2)[1] for seed in range(5)] == [0.5] * 5
    assert sum(shown(NAME, seed, Hasty, hops=3)[1] for seed in range(20)) == 0


@pytest.mark.parametrize("wrapped", [
    "{}", "The {}.", "on the {}", "On the river {}", "in {}", ' "{}" ', "**{}**", "Answer: {}", "The answer is {}.",
    "`{}`", "\u201c{}\u201d", "Final answer: *{}*\n\nSources:",
])  # fmt: skip
def test_correct_answer_may_have_filler_words(wrapped):
    env = begin(Library(), 3)
    env.step("no idea")
    env.step(wrapped.format(env.answer) + "".join(f" [{number}]" for number in env.path))
    assert env.rewards["writer"] == 1.0


@pytest.mark.parametrize(
    "form", ["[{}, {}]", "[{}] and [{}]", "([{}] [{}])", "[page {}], [p. {}]", "[pages {} and {}]"]
)
def test_pages_may_be_cited_in_other_forms(form):
    env = begin(Library(hops=2), 3)
    env.step("no idea")
    env.step(f"{env.answer} {form.format(*env.path)}")
    assert env.rewards["writer"] == 1.0 and env.infos["writer"]["cited"] == sorted(env.path)


@pytest.mark.parametrize("form", ["not {}", "{} or Oder", "{} " + " " * 20_000 + "no", "Answer", "pages and sources"])
def test_words_that_say_more_are_no_answer(form):
    env = begin(Library(), 3)
    env.step("no idea")
    env.step(form.format(env.answer) + f" [{env.path[0]}]")
    assert env.rewards["writer"] == 0.0


def test_citing_the_whole_library_is_no_citation():
    env = begin(Library(hops=2), 3)
    env.step("no idea")
    env.step(f"{env.answer} " + " ".join(f"[{number}]" for number in range(1, 49)))
    assert env.rewards["writer"] == 0.5 and env.infos["searcher"]["correct"]


def test_levels_get_harder_for_a_team_that_gives_up():
    means = check_levels(with_oracle(NAME, Tired), fa.Oracle(), episodes=40)
    assert means[0] > 0.6 and means[-1] == pytest.approx(0.75**6, abs=0.2)


def test_search_finds_names_and_survives_any_text():
    env = begin(Library(towns=60), 5)
    for name, page in list(env.pages.items())[:40]:
        assert env.search(name).startswith(f"[{page.number}] {name} ")
    for odd in ("", '"', "a* OR (b", "NEAR(", "é" * 1000, "x " * 5000):
        env.search(odd)
    assert env.search("zzz") == "Nothing is found."
    assert env.searches == 47


@pytest.mark.parametrize(
    ("text", "value", "pages"),
    [
        ("1911 [4] [17]", "1911", [4, 17]),
        ("1911 (4, 17)", "1911", [4, 17]),
        ("Year 1911 [4;17]", "1911", [4, 17]),
        ("Elbe River [3]", "elbe", [3]),
        ("(1911)", "1911", []),
        ("1911 (born) [4]", "1911 born", [4]),
    ],
)
def test_answers_and_citations_are_parsed_in_common_forms(text, value, pages):
    assert read_answer(text) == (value, pages)
