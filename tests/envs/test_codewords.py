import re

import pytest
from team_play import act, begin, shown, with_oracle

import forge_agents as fa
from forge_agents.testing import check_levels
from forge_envs.games.codewords import KINDS, Codewords
from forge_envs.oracles.games import KIND, THEME
from forge_envs.oracles.games import Codewords as Oracle

NAME = "forge/Codewords-v0"


class ByTheme(Oracle):
    """Gives clues by theme."""

    sorts = THEME


class Slips(Oracle):
    def guesser(self, seen):
        board = re.search(r"Board: (.+)\.", seen)[1].split(", ")
        return self.rng.choice(board) if self.rng.random() < 0.5 else super().guesser(seen)


def begun(seed=0, **settings):
    return begin(Codewords(**settings), seed)


def test_no_word_hides_another():
    words = [*KIND, *KINDS, *(kind for kinds in KINDS.values() for kind in kinds)]
    assert len(set(words)) == len(words) == 152
    assert not [(one, other) for one in words for other in words if one != other and one in other]


@pytest.mark.parametrize("level", [1, 6])
def test_a_team_that_knows_the_kinds_always_earns_one(level):
    settings = fa.spec(f"{NAME}@{level}").kwargs
    for seed in range(4):
        env, reward = shown(NAME, seed, level=level)
        assert reward == 1.0, env.render()
        assert env.infos == {} and sum(env.played.values()) == settings["groups"]
        assert sorted(env.key.values()).count("") == settings["groups"] * settings["size"]


def test_ambiguous_clue_finds_fewer_words():
    """Near words share the theme, but not the kind."""
    far, near = ([shown(NAME, seed, ByTheme, near=n, spare=0)[1] for seed in range(40)] for n in (0, 4))
    assert sum(far) == 40 and sum(near) < 20


def test_each_level_is_harder_for_a_team_that_slips():
    means = check_levels(with_oracle(NAME, Slips), fa.Oracle(), episodes=60)
    assert means[0] > 0.5 > means[-1]


@pytest.mark.parametrize(
    ("clue", "fault"),
    [
        ("{own} 2", "may not contain"), ("{own}s 2", "may not contain"), ("a 2", "may not contain"),
        ("colour", "one word and a number"), ("colour 0", "one word and a number"),
        ("\u0441olour 2", "one word and a number"), ("{wide} 2", "may not contain"),
        ("two words 2", "one word and a number"), ("", "one word and a number"), ("colour 22", "one word"),
    ],
)  # fmt: skip
def test_illegal_clue_is_refused_and_the_second_ends_the_round(clue, fault):
    env = begun(spare=1)
    own = env.left("")[0]
    bad = clue.format(own=own, wide="".join(chr(ord(letter) + 0xFEE0) for letter in own))
    if bad == "a 2":
        assert any("a" in word for word in env.hidden)
    env.step(bad)
    assert env.agent_selection == "master" and fault in env.observe("master").rpartition("Refused: ")[2]
    assert fault in env.infos["master"]["illegal"] and "Refused" not in env.observe("guesser")
    env.step(bad)
    assert env.played == {"": 1} and env.agent_selection == "master" and "Refused" not in env.observe("master")
    env.step("Clue: Colour 2!")
    assert env.observe("guesser").endswith("Clue: colour 2")


def test_words_are_uncovered_in_text_order_until_one_is_wrong():
    env = begun(size=3, others=4)
    right, wrong = env.left(""), env.left("nobody")
    act(env, "colour 3", f"First {right[1].upper()}, then {wrong[0]}; {right[0]}")
    assert f"colour 3: {right[1]} yes, {wrong[0]} nobody." in env.observe("master")
    assert right[1] not in env.hidden and right[0] in env.hidden
    env.step("colour 1"), env.step(f"{right[0]} {right[2]}")
    assert right[2] in env.hidden, "no more words than the clue's number"
    env.step("colour 1"), env.step("nothing of that")
    assert env.rewards == {"master": 1 / 6, "guesser": 1 / 6} and not env.infos["guesser"]["success"]


@pytest.mark.parametrize("other", ["trap", "nobody"])
def test_nothing_is_turned_over_once_all_words_are_found(other):
    env = begun(size=2, traps=1)
    words = env.left("")
    env.step("colour 9"), env.step(" ".join((*words, env.left(other)[0])))
    assert env.rewards == {"master": 1, "guesser": 1} and env.infos["guesser"]["success"]


def test_a_trap_ends_the_game_with_nothing():
    env = begun(traps=1)
    trap, right = env.left("trap")[0], env.left("")[0]
    env.step("colour 2"), env.step(f"{right} {trap}")
    assert env.rewards == {"master": 0, "guesser": 0} and env.terminations["master"]
    assert env.infos["master"]["found"] == 1 and env.infos["master"]["key"][trap] == "trap"


@pytest.mark.parametrize("met", ["red", "blue", "trap", "nothing"])
def test_uncovering_the_other_teams_words_helps_it(met):
    env = begun(teams=2, groups=1, size=1, traps=1, others=3)
    words = {whose: env.left(whose)[0] for whose in ("red", "blue", "trap")}
    env.step("colour 1")
    assert env.agent_selection == "red_guesser" and words["blue"] in env.observe("blue_guesser")
    env.step(words.get(met, "pass"))
    for word in ("colour 1", "pass", "colour 1", "pass", "colour 1", "pass") if met == "nothing" else ():
        env.step(word)
    reward = {"red": 1, "blue": -1, "trap": -1, "nothing": 0}[met]
    assert env.rewards == dict(zip(env.possible_agents, [reward, reward, -reward, -reward], strict=True))
    assert [env.infos[agent]["success"] for agent in ("red_master", "blue_master")] == [reward > 0, reward < 0]


def test_oracles_beat_silent_players_and_split_against_each_other():
    mute = fa.Scripted(lambda seen: "")
    blue = {agent: fa.Oracle() if "blue" in agent else mute for agent in begun(teams=2).possible_agents}
    assert all(fa.play("forge/CodewordsDuel-v0", blue, seed=n).rewards["blue_master"] == 1 for n in range(5))
