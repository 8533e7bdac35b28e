import pickle
import random
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pettingzoo.test import api_test, seed_test
from plain_env import Plain, act
from refusals import raises

import forge_agents as fa
from forge_agents.envs.env import Observation, TextSpace, writable
from forge_agents.testing import check_env


class Dice(fa.TurnEnv):
    """Three agents in turn. Each turn pays a roll, "stop" ends the game, and "again" repeats the turn."""

    possible_agents = ["x", "y", "z"]

    def setup(self, rng):
        self.rolls = [int(rng.integers(1, 7))]

    def instructions(self, agent):
        return f"You are {agent}."

    def observe_text(self, agent):
        return f"rolls {self.rolls}"

    def act(self, agent, action):
        self.rolls.append(int(self.rng.integers(1, 7)))
        return fa.Outcome(
            next=agent if action == "again" else None,
            rewards={agent: self.rolls[-1], "z": 0.5} if agent != "z" else {"z": 1},
            done=action == "stop",
            info={agent: {"said": action}},
        )


def started(cls=Dice, seed=0, **kwargs):
    env = cls(**kwargs)
    env.reset(seed=seed)
    return env


def test_agents_take_turns_and_rewards_wait_for_their_owner():
    env = started()
    env.step("go")
    assert env.agent_selection == "y" and env.rewards == {"x": env.rolls[1], "y": 0, "z": 0.5}
    env.step("go")
    assert env.agent_selection == "z" and env.last()[1] == 1.0
    env.step("go")
    assert env.last()[1] == env.rolls[1] and env.rewards["x"] == 0
    env.step("go")
    assert env._cumulative_rewards["x"] == env.rolls[4], "what last() told is spent by acting"


def test_next_overrides_the_order():
    env = started()
    env.step("again")
    assert env.agent_selection == "x"


def test_setup_may_choose_who_starts():
    class Late(Dice):
        def setup(self, rng):
            super().setup(rng)
            return "z"

    env = started(Late)
    assert env.agent_selection == "z"
    env.step("go")
    assert env.agent_selection == "x"


def test_the_end_reaches_every_agent_once():
    env = started()
    act(env, "go", "stop")
    seen = []
    for agent in env.agent_iter(9):
        _, _, terminated, truncated, _ = env.last()
        assert terminated and not truncated
        seen.append(agent)
        env.step(None)
    assert sorted(seen) == ["x", "y", "z"] and env.agents == []
    raises(RuntimeError, "reset", env.step, "go")


def test_the_turn_limit_truncates_and_a_natural_end_wins():
    env = started(max_turns=2)
    env.step("go")
    assert not any(env.truncations.values())
    env.step("go")
    assert all(env.truncations.values()) and not any(env.terminations.values())
    env = started(max_turns=1)
    env.step("stop")
    assert all(env.terminations.values()) and not any(env.truncations.values())


def test_infos_merge_and_stay():
    env = started()
    env.step("hello")
    saved = env.infos["x"]
    env.step("go")
    assert env.infos["x"] == {"said": "hello"} and env.infos["z"] == {}
    act(env, "go", "new")
    assert env.infos["x"]["said"] == "new" and saved == {"said": "hello"}, "an info once handed out does not change"


def test_legal_actions_are_the_deciding_agents():
    class Listed(Dice):
        def legal_actions(self, agent):
            return ("go", "stop")

    env = started(Listed)
    assert env.infos == {"x": {"legal_actions": ["go", "stop"]}, "y": {}, "z": {}}
    env.step("stop")
    assert all("legal_actions" not in info for info in env.infos.values())


def test_same_seed_same_rolls_and_fresh_ones_without():
    def rolls(seed):
        env = started(seed=seed)
        for _ in range(8):
            env.step("go")
        return env.rolls

    assert rolls(5) == rolls(5) != rolls(6)
    assert rolls(None) != rolls(None)
    env = started(seed=None)
    again = started(seed=env.episode_seed)
    assert env.rolls == again.rolls


def test_environments_do_not_share_random_generators():
    alone, beside, other = started(seed=1), started(seed=1), started(seed=2)
    before = random.getstate(), str(np.random.get_state())  # noqa: NPY002  # the global one is what is looked at
    for _ in range(9):
        alone.step("go")
    for _ in range(9):
        beside.step("go")
        other.step("go")
    assert alone.rolls == beside.rolls != other.rolls
    assert (random.getstate(), str(np.random.get_state())) == before  # noqa: NPY002


def test_a_constructor_without_super_works():
    class Careless(Dice):
        def __init__(self):
            self.possible_agents = ["x", "z"]

    env = started(Careless)
    env.step("stop")
    assert env.terminations == {"x": True, "z": True}


@pytest.mark.parametrize(
    ("outcome", "error", "says"),
    [
        (fa.Outcome(rewards={"w": 1}), ValueError, r"Dice.*'w'.*\['x', 'y', 'z'\]"),
        (fa.Outcome(rewards={"y": float("nan")}), ValueError, "Dice.*'y' is nan"),
        (fa.Outcome(rewards={"y": float("inf")}), ValueError, "Dice.*'y' is inf"),
        (fa.Outcome(rewards={"y": "1"}), ValueError, "Dice.*'y' is '1'"),
        (fa.Outcome(next="nobody"), ValueError, "Dice.*'nobody'"),
        (fa.Outcome(info={"nobody": {}}), ValueError, "Dice.*'nobody'"),
        (None, TypeError, "Return an Outcome"),
        (fa.Outcome(rewards=1.0), TypeError, "Dice: Outcome.rewards is 1.0 after act.*Set a dict of rewards by agent"),
        (fa.Outcome(done={"x": True, "y": False}), TypeError, "Outcome.done is .*'y': False.*collection of agents"),
        (fa.Outcome(truncated={"x": False}), TypeError, "Outcome.truncated is .*collection of agents"),
    ],
)
def test_wrong_outcomes_name_environment_and_agent(monkeypatch, outcome, error, says):
    env = started()
    monkeypatch.setattr(Dice, "act", lambda self, agent, action: outcome)
    raises(error, says, env.step, "go")


@pytest.mark.parametrize("action", [3, None, b"go"])
def test_actions_of_live_agents_are_text(action):
    raises(TypeError, "'x' must act with text", started().step, action)


@pytest.mark.parametrize(("text", "error"), [(3, TypeError), ("a" * 40_000, ValueError)])
def test_observations_are_text_that_fits(monkeypatch, text, error):
    monkeypatch.setattr(Dice, "observe_text", lambda self, agent: text)
    raises(error, "Dice", started().last)


def test_forgotten_methods_are_named():
    class Empty(fa.TurnEnv):
        possible_agents = ["a"]

    raises(NotImplementedError, "Empty must define setup", started, Empty)


def test_transcript_names_the_author_of_each_text():
    env = started()
    env.step("hello")
    assert env.render() == f"[x] hello\n  x {env.rolls[1]:+g}\n  z +0.5\n"
    env.reset()
    assert env.render() == ""


@given(st.text())
def test_spaces_hold_any_text_that_utf8_can_write(text):
    space = TextSpace(50)
    assert space.contains(text[:50]) and Observation(text) == text
    assert not space.contains("a" * 51) and not space.contains("\ud800") and not space.contains(5)
    assert writable(text) == text and writable(text + "\udcff") == text + "\ufffd"


def test_lone_surrogates_are_replaced_before_the_game_sees_them():
    env = started()
    env.step("a\ud800")
    assert env.infos["x"]["said"] == "a\ufffd"


def test_samples_are_in_their_space_and_spaces_are_cached():
    env = Dice()
    assert env.action_space("x") is env.action_space("x")
    assert env.action_space("x").contains(env.action_space("x").sample())
    raises(ValueError, "'w'", env.action_space, "w")


def test_observations_travel_as_plain_strings():
    assert type(pickle.loads(pickle.dumps(Observation("hi")))) is str


class Survivors(Plain):
    """Each action costs the named agent a life. An agent without lives is out, and the last one wins."""

    possible_agents = ["player_0", "player_1", "player_2"]
    min_agents = 2

    def setup(self, rng):
        self.lives = dict.fromkeys(self.agents, 1)

    def observe_text(self, agent):
        return f"lives {self.lives}"

    def act(self, agent, action):
        assert self.lives[agent], "the game was asked about an agent that is out"
        named = [a for a in self.agents if a == action and a != agent] or [next(a for a in self.agents if a != agent)]
        self.lives[named[0]] = 0
        left = [a for a in self.agents if self.lives[a]]
        return fa.Outcome(rewards={named[0]: -1.0} | (dict.fromkeys(left, 1.0) if len(left) == 1 else {}), done=named)


class Winner(Survivors):
    """The same, but the last two agents end together."""

    def act(self, agent, action):
        outcome = super().act(agent, action)
        return replace(outcome, done=True) if sum(self.lives.values()) == 1 else outcome


def test_agents_die_mid_game_and_pettingzoos_tests_pass():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(NumPy|spaces.box)")
        api_test(Winner(), num_cycles=50)
        seed_test(Winner, num_cycles=50)
    assert check_env(Winner, episodes=2, checks=("ends", "num agents", "fork", "determinism", "odd actions")).ok


def test_dead_agents_are_skipped_in_the_order():
    env = started(Survivors)
    env.step("player_1")
    assert env.agent_selection == "player_1" and env.last()[1:3] == (-1.0, True)
    env.step(None)
    assert env.agents == ["player_0", "player_2"] and env.agent_selection == "player_2"
    env.step("player_0")
    assert env.terminations == {"player_0": True, "player_2": False} and env.rewards["player_2"] == 1


def test_single_agents_are_cut_off_apart_from_ends(monkeypatch):
    env = started(Survivors)
    monkeypatch.setattr(Survivors, "act", lambda *_: fa.Outcome(truncated=["player_2"], done=["player_0"]))
    env.step("go")
    assert env.terminations == {"player_0": True, "player_1": False, "player_2": False}
    assert env.truncations == {"player_0": False, "player_1": False, "player_2": True}


@pytest.mark.parametrize(
    ("outcome", "error", "says"),
    [
        (fa.Outcome(next="player_1"), ValueError, "whose game has ended"),
        (fa.Outcome(rewards={"player_1": 1.0}), ValueError, "after its game ended"),
        (fa.Outcome(info={"player_1": {}}), ValueError, "Use self.agents"),
        (fa.Outcome(done="player_0"), TypeError, "collection of agents"),
        (fa.Outcome(done=["player_7"]), ValueError, "Outcome.done has 'player_7'"),
    ],
)
def test_outcomes_about_agents_that_are_out_are_named(monkeypatch, outcome, error, says):
    env = started(Survivors)
    act(env, "player_1", None)
    monkeypatch.setattr(Survivors, "act", lambda *_: outcome)
    raises(error, says, env.step, "go")


def test_a_reward_of_zero_may_name_everybody(monkeypatch):
    env = started(Survivors)
    act(env, "player_1", None)
    monkeypatch.setattr(Survivors, "act", lambda self, *_: fa.Outcome(rewards=dict.fromkeys(self.possible_agents, 0)))
    env.step("go")
    assert env.rewards == {"player_0": 0, "player_2": 0}


def test_reset_chooses_the_number_of_agents():
    env = Survivors()
    env.reset(seed=1, options={"num_agents": 2})
    assert env.agents == ["player_0", "player_1"] and env.lives == {"player_0": 1, "player_1": 1}
    env.reset(seed=1)
    assert env.num_agents == env.max_num_agents == 3
    for number in (1, 4, "2"):
        with pytest.raises(ValueError, match=f"num_agents={number!r} is not possible. The game needs 2 to 3 agents"):
            env.reset(options={"num_agents": number})
    raises(ValueError, "exactly 3 agents", started(Dice).reset, options={"num_agents": 2})


def test_a_game_may_draw_its_agents(monkeypatch):
    monkeypatch.setattr(
        Survivors, "select_agents", lambda self, rng: self.possible_agents[: int(rng.integers(2, 4))], raising=True
    )
    numbers = [len(started(Survivors, seed=seed).agents) for seed in range(12)]
    assert set(numbers) == {2, 3} and numbers == [len(started(Survivors, seed=seed).agents) for seed in range(12)]
    monkeypatch.setattr(Survivors, "select_agents", lambda self, rng: ["player_0", "player_0"])
    raises(ValueError, "select_agents returned", started, Survivors)


@pytest.mark.parametrize("name", ["last", "_text", "_begin", "_check_names", "_was_dead_step"])
def test_state_that_hides_a_method_is_named(name):
    class Hiding(Dice):
        def setup(self, rng):
            super().setup(rng)
            setattr(self, name, "nothing")

    raises(ValueError, f"the attribute '{name}' hides a method", started, Hiding)


def test_private_methods_cannot_be_overridden_by_accident():
    class Early(Dice):
        def __init__(self):
            super().__init__()
            self._begin = 3

    class Callable(Dice):
        def setup(self, rng):
            super().setup(rng)
            self._text = str.upper

    class Shadow(Dice):
        _space = "a meadow"

    class Method(Dice):
        def _ended(self):
            return True

    for game, name in ((Early, "_begin"), (Callable, "_text"), (Shadow, "_space"), (Method, "_ended")):
        raises(ValueError, f"the attribute '{name}' hides a method", started, game)


def test_public_methods_and_new_private_names_may_be_set():
    class Game(Dice):
        _words = ("a", "b")

        def setup(self, rng):
            super().setup(rng)
            self._rule, self.compact = str.upper, lambda agent, left_out: "short"

    assert started(Game).compact("player_0", []) == "short"


def test_fork_snapshot_and_restore():
    env = started()
    env.step("go")
    fork, before = env.fork(), env.snapshot()
    env.step("go")
    fork.step("go")
    assert fork.rolls == env.rolls and fork.infos == env.infos and len(before["rolls"]) == 2
    env.restore(before)
    env.step("go")
    other = Dice()
    other.restore(before)
    other.step("go")
    assert env.rolls == fork.rolls == other.rolls and before["num_turns"] == 1


class Nameless(fa.TurnEnv):
    def setup(self, rng):
        self.question = "1 + 1?"

    def instructions(self, agent):
        return ""

    def observe_text(self, agent):
        return self.question

    def act(self, agent, action):
        return fa.Outcome(done=True)


class Quiz(Nameless):
    possible_agents = ["a", "b"]


def test_environment_before_reset_asks_for_it():
    raises(RuntimeError, r"Quiz: no episode is running. Call reset\(\) before observe\(\)", Quiz().observe, "a")
    raises(AttributeError, r"Quiz: no episode is running. Call reset\(\) first", Quiz().last)


def test_text_of_an_agent_whose_game_has_ended_is_refused():
    env = Quiz()
    env.reset(seed=0)
    env.step("2")
    raises(ValueError, r"Quiz: the game of 'a' has ended, so its action must be None. Call reset\(\)", env.step, "2")
    env.step(None)
    env.step(None)
    assert env.agents == []


@pytest.mark.parametrize("seed", ["1", 1.5, -1, np.float64(2)])
def test_seeds_that_are_no_whole_numbers_from_0_on_are_refused(seed):
    raises(ValueError, "Quiz: seed=.* is no seed. Pass a whole number from 0 on", Quiz().reset, seed=seed)


def test_seeds_of_numpy_are_seeds():
    env = Quiz()
    env.reset(seed=np.int64(7))
    assert (env.episode_seed, type(env.episode_seed)) == (7, int)


def test_agents_that_are_missing_or_one_text_are_refused():
    class Text(Quiz):
        possible_agents = "ab"

    class Late(Nameless):
        def __init__(self):
            self.possible_agents = ["a"]

    raises(AttributeError, "Nameless names no agents. Set a list of names, such as", fa.play, Nameless, fa.Random())
    raises(TypeError, "Text: possible_agents is the string 'ab'. Set a list of names", Text().reset)
    assert fa.play(Late, fa.Random(), seed=0).error is None and not hasattr(Nameless(), "possible_agents")


def test_legal_actions_are_a_list_of_texts():
    class Letters(Dice):
        def legal_actions(self, agent):
            return "red"

    raises(TypeError, "legal_actions returned the text 'red' for 'x'. Return a list of texts", started, Letters)


@pytest.mark.parametrize("value", [5, property(lambda self: 5)])
def test_class_attribute_that_hides_a_method_is_named(value):
    raises(ValueError, "the attribute 'state' hides a method", started, type("Hiding", (Dice,), {"state": value}))
