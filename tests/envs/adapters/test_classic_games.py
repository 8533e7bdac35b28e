import builtins
import copy
import sys

import numpy as np
import pytest
from team_play import act, begin

import forge_agents as fa
from forge_agents.errors import ForgeError

IDS = ("forge/TicTacToe-v0", "forge/ConnectFour-v0")


def played(env_id, moves):
    env = begin(fa.make(env_id))
    for move in moves.split():
        env.step(move)
    return env


def test_tic_tac_toe_is_drawn_for_the_agent_that_looks():
    env = played("forge/TicTacToe-v0", "4 0")
    assert env.last()[0] == "O 3 6\n1 X 7\n2 5 8\nFree: 1, 2, 3, 5, 6, 7, 8"
    env.step("1")
    assert env.last()[0].startswith("X 3 6\nO O 7\n2 5 8\n")
    act(env, "8", "I go to 7.")
    assert env.rewards == {"player_1": 1, "player_2": -1} and all(env.terminations.values())


def test_connect_four_is_drawn_for_the_agent_that_looks():
    env = played("forge/ConnectFour-v0", "3 3 2 6")
    rows = [". . . . . . ."] * 4 + [". . . O . . .", ". . X X . . O", "0 1 2 3 4 5 6", "Free: 0, 1, 2, 3, 4, 5, 6"]
    assert env.last()[0] == "\n".join(rows)
    for move in ("4", "6", "5"):
        env.step(move)
    assert env.rewards == {"player_0": 1, "player_1": -1}
    full = played("forge/ConnectFour-v0", "0 0 0 0 0 0")
    assert full.last()[0].endswith("Free: 1, 2, 3, 4, 5, 6")


@pytest.mark.parametrize("text", ["4", "", "9", "ten", "-1", "1.5", "4" * 99])
def test_illegal_texts_lose(text):
    env = played("forge/TicTacToe-v0", "4")
    env.step(text)
    assert env.rewards == {"player_1": 0, "player_2": -1} and env.infos["player_2"]["illegal"]


@pytest.mark.parametrize("env_id", IDS)
def test_a_copy_has_the_same_board_and_its_own(env_id):
    env = played(env_id, "4 3")
    twin = copy.deepcopy(env)
    assert twin.last()[0] == env.last()[0]
    twin.step("2")
    assert env.agent_selection != twin.agent_selection and "X" in env.last()[0]


def test_a_missing_library_is_named_with_its_command(monkeypatch):
    def without_pygame(name, *args, **kwargs):
        if name == "pygame":
            raise ModuleNotFoundError("No module named 'pygame'", name="pygame")
        return result(name, *args, **kwargs)

    result = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without_pygame)
    monkeypatch.delitem(sys.modules, "pettingzoo.classic.tictactoe.tictactoe", raising=False)
    with pytest.raises(ForgeError, match="pip install pygame-ce"):
        fa.make("forge/TicTacToe-v0")


def test_acting_agent_sees_legal_moves_and_random_players_use_them():
    env = begin(fa.make("forge/TicTacToe-v0"))
    first, second = env.possible_agents
    assert env.infos[first]["legal_actions"] == list("012345678") and "legal_actions" not in env.infos[second]
    env.step("4")
    assert env.infos[second]["legal_actions"] == list("01235678") and "legal_actions" not in env.infos[first]
    rng = np.random.default_rng(0)
    while not any(env.terminations.values()):
        env.step(str(rng.choice(env.infos[env.agent_selection]["legal_actions"])))
    assert not any("illegal" in info or "legal_actions" in info for info in env.infos.values())


def test_line_on_the_last_free_square_of_connect_four_wins():
    columns = iter("123615046113131330226523645522460454406005")
    episode = fa.play(fa.make("forge/ConnectFour-v0"), fa.Scripted(lambda observation: next(columns)))
    assert len(episode.turns) == 42 and episode.rewards == {"player_0": -1.0, "player_1": 1.0}
