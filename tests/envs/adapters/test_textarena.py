import copy
import random
import sys

import numpy as np
import pytest
from adapter_play import plausible, play, survives
from hostile_strings import HOSTILE_STRINGS

import forge_agents as fa
from forge_envs.adapters.catalog import TEXTARENA_EXCLUDED
from forge_envs.adapters.textarena import outcomes

pytest.importorskip("textarena")


def test_a_won_game_is_told_and_rewarded_as_textarena_does():
    env = fa.make("textarena/TicTacToe-v0")
    env.reset(seed=0)
    assert "You are Player 1 in Tic Tac Toe" in env.instructions("player_1")
    for square in ("0", "[3]", "I take [1]", "[4]", "[2]"):
        env.step(square)
    assert env.rewards == {"player_0": 1.0, "player_1": -1.0}
    assert env.infos["player_0"]["outcome"] == "win" and env.infos["player_1"]["outcome"] == "loss"
    assert env.infos["player_0"]["forfeits"] == [] and "has won" in env.infos["player_1"]["reason"]


def test_a_seat_reads_what_others_did_but_not_its_own_words():
    env = fa.make("textarena/TicTacToe-v0")
    env.reset(seed=0)
    env.step("[4] because")
    seen = env.observe("player_1")
    assert "[4] because" in seen and "placed their symbol" in seen and seen == env.observe("player_1")
    env.step("[0] my answer")
    assert "[0] my answer" in env.observe("player_0") and "because" not in env.observe("player_0")


def test_a_forfeit_is_no_win():
    env = fa.make("textarena/TicTacToe-v0")
    env.reset(seed=0)
    env.step("nothing")
    assert "invalid move" in env.observe("player_0"), "the game allows one mistake"
    env.step("nothing again")
    assert env.rewards == {"player_0": -1.0, "player_1": 1.0}
    assert env.infos["player_1"]["outcome"] == "void" and env.infos["player_0"]["outcome"] == "forfeit"
    assert env.infos["player_1"]["forfeits"] == ["player_0"]


@pytest.mark.parametrize(
    ("score", "forfeits", "verdict"),
    [
        ({"a": 1.0, "b": -1.0}, [], ["win", "loss"]),
        ({"a": 0.0, "b": 0.0}, [], ["draw", "draw"]),
        ({"a": 1.0, "b": -1.0}, ["b"], ["void", "forfeit"]),
        ({"a": 1.0, "b": -1.0, "c": -1.0}, ["c"], ["win", "loss", "forfeit"]),
        ({"a": 1.0, "b": -1.0, "c": -1.0}, ["b", "c"], ["void", "forfeit", "forfeit"]),
        ({"a": 2.0, "b": 2.0}, [], ["win", "win"]),
        ({"a": 0.4}, [], ["partial"]),
        ({"a": 1.0}, [], ["solved"]),
        ({"a": 0.3}, ["a"], ["forfeit"]),
    ],
)
def test_outcomes(score, forfeits, verdict):
    found = outcomes(score, forfeits)
    assert [found[agent] for agent in score] == verdict


def test_global_randomness_is_untouched_and_each_instance_has_its_own():
    def alone(seed):
        return play(fa.make("textarena/Bandit-v0"), seed, plausible)

    def globals_now():
        return random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    random.seed(5)
    before = globals_now()
    first = alone(3)
    assert globals_now() == before
    random.seed(99)
    assert alone(3) == first != alone(4)
    one, other = fa.make("textarena/PigDice-v0"), fa.make("textarena/PigDice-v0")
    texts = {}
    for name, envs in (("together", (one, other)), ("apart", (fa.make("textarena/PigDice-v0"),))):
        for env in envs:
            env.reset(seed=8)
        for _ in range(12):
            for env in envs:
                env.step("[roll]")
        texts[name] = envs[0].observe("player_0")
    assert texts["together"] == texts["apart"]


def test_a_fork_plays_on_alone():
    env = fa.make("textarena/PigDice-v0")
    env.reset(seed=1)
    env.step("[roll]")
    fork = copy.deepcopy(env)
    for each in (env, fork):
        each.step("[roll]")
        each.step("[hold]")
    assert env.observe(env.agent_selection) == fork.observe(fork.agent_selection)


def test_the_number_of_players_is_the_games_to_allow():
    assert len(fa.make("textarena/LiarsDice-v0", num_players=5).possible_agents) == 5
    with pytest.raises(ValueError, match="takes 2 to 15 players"):
        fa.make("textarena/LiarsDice-v0", num_players=1)


def test_a_crash_inside_a_game_is_a_forfeit(monkeypatch):
    env = fa.make("textarena/TicTacToe-v0")
    env.reset(seed=0)

    def broken(action):
        raise KeyError("boom")

    monkeypatch.setattr(env._game, "step", broken)
    env.step("[0]")
    assert env.rewards == {"player_0": -1.0, "player_1": 0.0}
    assert env.infos["player_1"] | {"reason": ""} == {
        "outcome": "void", "forfeits": ["player_0"], "score": 0.0, "reason": "", "role": "", "error": "KeyError: 'boom'"
    }  # fmt: skip


SOME = ("Nim", "ConnectFour", "KuhnPoker", "LiarsDice", "Mastermind", "Sudoku", "Hangman", "PublicGoodsGame", "Poker")


@pytest.mark.parametrize("game", SOME)
def test_random_episodes_end_in_an_outcome(game):
    env = fa.make(f"textarena/{game}-v0")
    for seed in range(3):
        infos = play(env, seed, plausible, max_turns=1500)[-1]
        assert all("outcome" in info and "error" not in info for info in infos.values())


@pytest.mark.parametrize("game", ["TicTacToe", "Nim", "LiarsDice", "SimpleNegotiation", "GuessTheNumber", "Snake"])
def test_hostile_texts_are_moves_like_others(game):
    survives(f"textarena/{game}-v0", HOSTILE_STRINGS)


def test_excluded_games_are_not_listed_and_have_a_reason():
    listed = {fa.spec(id_).kwargs["game"].split("-v0")[0] for id_ in fa.list_envs("textarena")}
    assert not listed & set(TEXTARENA_EXCLUDED) and all(TEXTARENA_EXCLUDED.values())
    assert len(listed) >= (80 if sys.version_info < (3, 12) else 86)
