import re
import sys

import gymnasium
import numpy as np
import pytest
from adapter_play import infos_after, plausible, play
from hostile_strings import HOSTILE_STRINGS
from team_play import act, begin

import forge_agents as fa
from forge_agents import imports
from forge_agents.envs.env import may_be_silent
from forge_agents.errors import ArgumentError, UntrustedModuleError
from forge_agents.imports import restrict_modules

pytest.importorskip("rlcard")
CLASSIC = ("connect_four", "hanabi", "leduc_holdem", "rps", "texas_holdem", "texas_holdem_no_limit", "tictactoe")
GYMNASIUM = ("Blackjack-v1", "CliffWalking-v1", "FrozenLake-v1", "Taxi-v4")


def test_chess_is_played_by_squares_and_won_by_mate():
    env = begin(fa.make("pettingzoo/chess-v6"))
    assert "g2g4" in env.infos["player_0"]["legal_actions"] and "1 R N B Q K B N R" in env.observe("player_0")
    for move in ("f2f3", "I answer e7e5", "g2g4", "d8h4"):
        env.step(move)
    assert env.rewards == {"player_0": -1, "player_1": 1} and all(env.terminations.values())


def test_castling_and_promotion_have_their_names():
    env = begin(fa.make("pettingzoo/chess-v6"))
    for move in ["e2e4", "e7e5", "g1f3", "b8c6", "f1c4", "f8c5", "e1g1"]:
        env.step(move)
    assert env.observe("player_1").splitlines()[7].startswith("1 R N B Q . R K")


def test_go_points_have_letters_without_i():
    env = begin(fa.make("pettingzoo/go-v5", board_size=9))
    env.step("J9")
    row = env.observe("white_0").splitlines()[0]
    assert row == " 9 . . . . . . . . X"
    act(env, "pass", "A1", "B9")
    assert env.observe("black_0").splitlines()[8].startswith(" 1 X")
    assert env.observe("black_0").splitlines()[0] == env.observe("white_0").splitlines()[0] == " 9 . O . . . . . . X"


def test_hanabi_takes_the_seeds_of_evaluations_and_benchmarks():
    env, seen = fa.make("pettingzoo/hanabi"), []
    for seed in (2**31, 3 * 2**30, 3 * 2**30, 2**32 - 1):
        env.reset(seed=seed)
        seen.append(env.observe("player_0"))
    assert seen[1] == seen[2] and len(set(seen)) == 3


def test_cards_and_moves_are_named():
    env = begin(fa.make("pettingzoo/leduc_holdem"), 1)
    agent = env.agent_selection
    assert set(env.infos[agent]["legal_actions"]) <= {"call", "raise", "fold", "check"}
    assert env.observe(agent).startswith("Your cards: ")
    other = next(name for name in env.agents if name != agent)
    assert env.observe(other).endswith("Not your turn.") and "legal_actions" not in env.infos[other]
    env.step("I fold.")
    assert sum(env.rewards.values()) == 0 and env.rewards[agent] < 0


def test_a_text_without_a_legal_move_ends_the_game():
    env = begin(fa.make("pettingzoo/tictactoe", illegal_reward=-2.0))
    act(env, "4", "4")
    assert env.rewards == {"player_1": 0.0, "player_2": -2.0} and "4" in env.infos["player_2"]["illegal"]


@pytest.mark.parametrize(
    ("game", "moves", "cost"),
    [
        ("gymnasium/CliffWalking-v1", [], -20_000.0),
        ("gymnasium/CliffWalking-v1", ["right", "up"], -19_800.0),
        ("gymnasium/Taxi-v4", [], -2000.0),
        ("gymnasium/FrozenLake-v1", [], -1.0),
        ("pettingzoo/leduc_holdem", [], -7.0),
        ("pettingzoo/texas_holdem", [], -25.0),
        ("pettingzoo/texas_holdem_no_limit", ["all in"], -100.0),
        ("pettingzoo/rps", [], -15.0),
        ("pettingzoo/tictactoe", [], -1.0),
    ],
)
def test_illegal_text_costs_no_less_than_the_worst_play(game, moves, cost):
    """Otherwise a player leaves each game that it is about to lose."""
    env = begin(fa.make(game))
    act(env, *moves)
    agent = env.agent_selection
    env.step("no idea")
    assert env.rewards[agent] == cost and may_be_silent(env), "a full context costs as much"
    lowest = min(min(fa.play(game, fa.Random(), seed=seed).rewards.values()) for seed in range(10))
    assert moves or lowest >= cost


@pytest.mark.parametrize(
    ("game", "move"),
    [("leduc_holdem", "raise"), ("texas_holdem", "raise"), ("texas_holdem_no_limit", "raise full pot")],
)
def test_illegal_text_in_poker_gives_the_rival_what_a_fold_gives(game, move):
    for options in ({}, {"invalid_action": "end"}):
        folds, forfeits = (begin(fa.make(f"pettingzoo/{game}", **options)) for _ in range(2))
        act(folds, move, "fold")
        act(forfeits, move, "no idea")
        (rival,) = (name for name, reward in folds.rewards.items() if reward > 0)
        assert forfeits.rewards[rival] == folds.rewards[rival] > 0
        assert min(forfeits.rewards.values()) < min(folds.rewards.values())


@pytest.mark.parametrize("game", CLASSIC)
def test_random_classic_games_end(game):
    env = fa.make(f"pettingzoo/{game}")
    for seed in range(2):
        first = play(env, seed, plausible)
        assert first == play(fa.make(f"pettingzoo/{game}"), seed, plausible) and not env.agents


@pytest.mark.parametrize(
    ("game", "move"),
    [
        ("pettingzoo/rps", None),
        ("pettingzoo/texas_holdem", r"\[fold\]"),
        ("pettingzoo/texas_holdem_no_limit", r"\[fold\]"),
        ("pettingzoo/tictactoe", r".*(?<!\d)\d(?!\d).*"),
        ("gymnasium/Taxi-v4", None),
    ],
)
def test_hostile_texts_are_moves_or_illegal(game, move):
    infos = infos_after(game, HOSTILE_STRINGS)
    legal = [text for text, info in infos if "illegal" not in info]
    assert len(infos) == len(HOSTILE_STRINGS) and bool(legal) == bool(move)
    assert all(re.fullmatch(move, text, re.DOTALL) for text in legal)
    assert not [info["error"] for _, info in infos if "error" in info]


def test_an_unknown_classic_game_names_the_known_ones():
    with pytest.raises(KeyError, match="pettingzoo/"):
        fa.make("pettingzoo/tictactoo-v3")


def test_frozen_lake_is_walked_by_words():
    env = begin(fa.make("gymnasium/FrozenLake-v1", is_slippery=False))
    assert "[S]FFF" in env.observe("player")
    for word in ("right", "right", "go down!", "down", "down", "right"):
        env.step(word)
    assert env.rewards["player"] == 1.0 and env.terminations["player"]


@pytest.mark.parametrize("game", GYMNASIUM)
def test_random_gymnasium_episodes(game):
    env = fa.make(f"gymnasium/{game}")
    assert play(env, 1, plausible) == play(fa.make(f"gymnasium/{game}"), 1, plausible)
    env.reset(seed=0)
    env.step("nothing here")
    lost = {"CliffWalking-v1": -20_000.0, "Taxi-v4": -2000.0}.get(game, -1.0)
    assert env.rewards["player"] == lost and "names none of" in env.infos["player"]["illegal"]


class Echo(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(10_000)
    action_space = gymnasium.spaces.Text(10_000)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say it", {"answer": np.str_("it"), "action_mask": np.ones(2)}

    def step(self, action):
        return action, float(action == "it"), True, False, {"answer": "it", "steps": np.int64(1)}


def test_users_own_text_environments_are_found_by_name():
    gymnasium.register("EchoForAdapters-v0", entry_point=Echo)
    env = begin(fa.make("gymnasium/EchoForAdapters-v0"))
    assert env.observe("player") == "say it" and "legal_actions" not in env.infos["player"]
    env.step(" it\n")
    assert env.rewards["player"] == 1.0 and env.infos["player"] == {"answer": "it", "steps": 1}
    for text in ("é", "x" * 10_001):
        env = begin(fa.make("gymnasium/EchoForAdapters-v0"))
        env.step(text)
        assert env.rewards["player"] == -1.0 and "is not in Text(" in env.infos["player"]["illegal"]
        assert env.infos["player"]["answer"] == "it", "rules compare illegal answers, too"


def test_environments_of_arrays_are_refused():
    with pytest.raises(TypeError, match="wrap"):
        fa.make("gymnasium/CartPole-v1")


def test_file_makes_gymnasium_import_no_other_module(tmp_path, monkeypatch):
    (tmp_path / "lakes_of_mine.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Lake-v0', 'gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv', max_episode_steps=9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    file = {"env_args": {"game": "this:X-v0", "of_mine": "lakes_of_mine:Lake-v0"}}
    try:
        restrict_modules([file])
        with pytest.raises(UntrustedModuleError, match="names code of this"):
            fa.make("gymnasium/FrozenLake-v1", game="this:X-v0")
        assert "this" not in sys.modules
        with pytest.raises(UntrustedModuleError, match="names code of this"):
            fa.make("gymnasium/FrozenLake-v1", game="this:X-v0", isolation="process")
        monkeypatch.setattr(imports, "_run_folders", [tmp_path])
        for isolation in (None, "process"):
            with pytest.raises(UntrustedModuleError, match="lakes_of_mine lies in the folder of a run"):
                fa.make("gymnasium/FrozenLake-v1", game="lakes_of_mine:Lake-v0", isolation=isolation)
        monkeypatch.setattr(imports, "_run_folders", [])
        assert fa.make("gymnasium/FrozenLake-v1", game="lakes_of_mine:Lake-v0").unwrapped._env.spec.id == "Lake-v0"
    finally:
        restrict_modules([])
        gymnasium.registry.pop("Lake-v0", None)


def test_unknown_environment_of_gymnasium_is_an_error_of_its_name():
    with pytest.raises(ArgumentError, match="Gymnasium cannot make 'Nowhere-v1': Environment `Nowhere` doesn't exist"):
        fa.make("gymnasium/Nowhere-v1")
    with pytest.raises(ArgumentError, match="Gymnasium cannot make 'no_such_module:X-v0': No module named"):
        fa.make("gymnasium/FrozenLake-v1", game="no_such_module:X-v0")
