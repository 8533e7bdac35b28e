"""Errors of environments fail an episode, never the run."""

import asyncio

import numpy as np
import pytest
from pettingzoo.utils.conversions import parallel_to_aec
from plain_env import Opened, PlainAEC, PlainParallel

import forge_agents as fa
from forge_agents.envs.env import TextSpace
from forge_agents.envs.wrappers import InvalidAction
from forge_agents.errors import UnknownIdError
from forge_agents.rollout.episode import play
from forge_agents.rollout.rollout import Rollout, agents_of


class OddError(Exception):
    def __str__(self):
        raise RuntimeError("not even its text")


class Broken:
    """A game of two agents that fails at `where`, and otherwise ends after four decisions."""

    possible_agents = ["a", "b"]

    def __init__(self, where="", error=None):
        self.where, self.error = where, error or RuntimeError("boom")
        self.at("make")
        super().__init__()

    def at(self, where):
        if where == self.where:
            raise self.error

    def setup(self, rng):
        self.said = 0
        self.at("reset")

    def instructions(self, agent):
        self.at("instructions")
        return ""

    def observe_text(self, agent):
        if self.said == 2:
            self.at("observe")
        return f"{self.said}"

    def happens(self, agents):
        self.said += len(agents)
        if self.said == 2:
            self.at("step")
        if self.said == 2 and self.where == "state":
            self.agents = None
        return fa.Outcome(rewards=dict.fromkeys(agents, 1.0), done=self.said >= 4)

    def close(self):
        self.at("close")

    def __deepcopy__(self, memo):
        self.at("fork")
        return self


class Turns(Broken, fa.TurnEnv):
    def act(self, agent, action):
        return self.happens([agent])

    def last(self, observe=True):
        told = super().last(observe)
        odd = {"reward": None, "nan": float("nan"), "text": "much"}
        reward = odd.get(self.where, told[1]) if self.said == 2 else told[1]
        info = {"odd": OddError()} if self.said == 2 and self.where == "info" else told[4]
        return told[0], reward, told[2], told[3], info


class Rounds(Broken, fa.ParallelTurnEnv):
    def act_all(self, actions):
        return self.happens(list(actions))

    def step(self, actions):
        observations, rewards, terminated, truncated, infos = super().step(actions)
        if self.where == "reward":
            rewards["a"] = None
        if self.where == "missing":
            del observations["a"], terminated["b"]
        if self.where == "stranger":
            self.agents.append("c")
            observations["c"] = ""
        if self.where == "shape":
            return observations
        return observations, rewards, terminated, truncated, infos


def group_of(make, size=1, players=None, **more):
    players = players or fa.Scripted(lambda seen: "x")
    return asyncio.run(Rollout(make_env=make, env_id="t/It-v0", policies=players, **more).group(seed=1, size=size))


IN_TURNS = {
    "make": "make",
    "reset": "reset",
    "instructions": "observe",
    "observe": "observe",
    "step": "step",
    "reward": "reward",
    "nan": "reward",
    "text": "reward",
    "info": "observe",
    "state": "step",
}
IN_ROUNDS = {
    "make": "make",
    "reset": "reset",
    "instructions": "observe",
    "observe": "step",
    "step": "step",
    "reward": "reward",
    "missing": "step",
    "shape": "step",
    "stranger": "step",
}


ERRORS = [RuntimeError("boom"), SystemExit(3), StopIteration(), OddError(), UnknownIdError("of its own")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("where", "told"), IN_TURNS.items())
def test_a_game_in_turns_that_breaks_is_data(where, told, error):
    if where == "make" and isinstance(error, UnknownIdError):
        pytest.skip("a mistake of the caller")
    failed = group_of(lambda: Turns(where, error)).failed
    assert [episode.error.where for episode in failed] == [told]
    if told == where and where in ("make", "reset", "observe", "step"):
        assert failed[0].error.kind == type(error).__name__ and "test_env_failures" in failed[0].error.trace
        assert type(error) is not RuntimeError or failed[0].error.message == "boom"
        assert len(failed[0].turns) == (2 if where in ("observe", "step") else 0)
    assert failed[0].end_reason == "error"


@pytest.mark.parametrize("reward", [float("nan"), -float("inf"), np.float32("inf"), np.float16("nan"), 10**400, "1"])
def test_reward_that_is_no_finite_number_is_named(reward):
    class Paid(Turns):
        def act(self, agent, action):
            return fa.Outcome(rewards={agent: reward}, done=True)

    (episode,) = group_of(Paid).failed
    told = f"the reward of 'a' is {reward!r} after act('a', ...). Rewards must be finite numbers"
    assert episode.error.message.endswith(told)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reward", [np.float32(0.5), np.float16(0.5), np.bool_(True), 1])
def test_reward_of_any_type_of_number_is_taken_without_a_warning(reward):
    class Paid(Turns):
        def act(self, agent, action):
            return fa.Outcome(rewards={agent: reward}, done=True)

    (episode,) = group_of(Paid).episodes
    assert episode.rewards["a"] == float(reward)


@pytest.mark.parametrize(("where", "told"), IN_ROUNDS.items())
def test_a_game_in_rounds_that_breaks_is_data(where, told):
    assert [episode.error.where for episode in group_of(lambda: Rounds(where)).failed] == [told]


@pytest.mark.parametrize("where", ["make", "reset", "observe", "step", "instructions"])
@pytest.mark.parametrize(
    "dress",
    [
        lambda where: parallel_to_aec(Rounds(where)),
        lambda where: fa.wrap(Turns(where), obs_to_text=lambda o, a: o, text_to_action=lambda t, a, s: t),
        lambda where: InvalidAction(Turns(where), "ask"),
    ],
    ids=["converted", "wrapped", "asked again"],
)
def test_library_and_wrapped_environments_fail_in_the_same_way(dress, where):
    (episode,) = group_of(lambda: dress(where)).failed
    assert episode.error.message == "boom"


def test_a_fork_that_raises_is_data():
    (episode,) = group_of(lambda: InvalidAction(Turns("fork"), "ask")).failed
    assert (episode.error.where, episode.error.message) == ("step", "boom")


@pytest.mark.parametrize("kind", [Turns, Rounds])
def test_episode_counts_although_close_fails(kind):
    with pytest.warns(RuntimeWarning, match=r"close\(\) raised RuntimeError: boom \(.*test_env_failures.py:\d"):
        group = group_of(lambda: kind("close"), size=2)
    assert [e.error for e in group.episodes] == [None, None] and group.episodes[0].rewards == {"a": 2.0, "b": 2.0}


@pytest.mark.parametrize("where", ["make", "reset", "step"])
def test_failed_episode_is_retried_in_a_new_environment(where):
    made = []

    def make():
        made.append(len(made))
        return Turns(where if len(made) == 2 else "")

    assert not group_of(make, size=3).failed and len(made) == 4


def test_constructor_failure_fails_only_its_episode():
    made = []

    def make():
        made.append(len(made))
        return Turns("make" if len(made) in (2, 3) else "")  # both tries of one

    group = group_of(make, size=3)
    assert [episode.error is None for episode in group.episodes] == [True, False, True]
    assert not group.failed[0].trajectories


def test_a_mistake_of_the_caller_raises():
    with pytest.raises(UnknownIdError, match="forge/Kuhn"):
        group_of(lambda: fa.make("forge/Kuhn-v0"))
    with pytest.raises(KeyError):
        asyncio.run(play(Turns(), {"a": fa.Random()}, seed=0))


def test_failed_close_is_a_warning_when_agents_are_looked_up():
    made = []

    def make():
        made.append(len(made))
        return Turns("make" if len(made) == 1 else "close")

    with pytest.warns(RuntimeWarning, match="boom"):
        assert agents_of(make, "t/It-v0") == ("a", "b")
    with pytest.raises(RuntimeError, match="boom"):
        agents_of(lambda: Turns("make"), "t/It-v0")


def test_inspected_environment_is_closed_if_it_cannot_be_read():
    closed = []

    class Broken:
        def close(self):
            closed.append(self)

    with pytest.raises(AttributeError, match="possible_agents"):
        agents_of(Broken, "t/It-v0")
    assert len(closed) == 2


@pytest.mark.parametrize("where", ["make", "reset", "observe", "step", "close"])
def test_a_benchmark_goes_on(where, tmp_path):
    class Rare(Turns):
        made = 0

        def __init__(self):
            Rare.made += 1  # the first is asked for its agents
            super().__init__(where if where == "close" or Rare.made > 4 else "")

    fa.register(f"t/Rare{where}-v0", entry_point=Rare)
    players = {"one": fa.Scripted(lambda seen: "x")}

    def bench():
        return fa.benchmark(players, f"t/Rare{where}-v0", episodes=6, out_dir=tmp_path, progress=False)

    if where == "close":
        with pytest.warns(RuntimeWarning, match="boom"):
            report = bench()
        assert report.complete
    else:
        report = bench()
        assert len(report.records) == 6 and not report.missing and not report.complete
        assert sum(not record.error for record in report.records) == 3
        assert all("boom" in record.error for record in report.records if record.error)


@pytest.mark.parametrize("text", [None, [1, 2]])
@pytest.mark.parametrize("kind", [PlainAEC, PlainParallel])
def test_observations_and_instructions_must_be_texts(kind, text):
    class Odd(kind):
        def observe(self, agent):
            return text

    class Mute(kind):
        def instructions(self, agent):
            return text

    def error_of(env):
        with pytest.warns(RuntimeWarning, match="not text"):
            return fa.play(env, fa.Scripted(str), seed=0).error

    error, name = error_of(Odd()), type(text).__name__
    assert (error.where, error.kind) == ("observe" if kind is PlainAEC else "reset", "TypeError")
    assert f"the observation of 'a' is {name}, not text. Return a string. fa.wrap adapts" in error.message
    assert f"the result of instructions('a') is {name}, not text" in error_of(Mute()).message
    (finding,) = fa.check_env(Mute, checks=("spaces",), raise_on_failure=False).failures
    assert finding.message == f"the result of instructions('a') is {name}, not text"


def test_selected_agent_that_has_left_is_named():
    class Stale(Opened):
        """A plain environment that keeps selecting "a", also after "a" has left."""

        metadata, possible_agents, observe = PlainAEC.metadata, ["a", "b"], PlainAEC.observe

        def step(self, action):
            self.terminations["a"] = True
            if action is None:
                self._was_dead_step(None)
                self.agent_selection = "a"

    message = "agent_selection is 'a', which has left. The agents are ['b']"
    error = fa.play(Stale(), fa.Scripted(lambda _: "go")).error
    assert (error.where, error.message) == ("observe", message)
    (finding,) = fa.check_env(Stale, checks=("ends",), raise_on_failure=False).failures
    assert (finding.message, finding.fix) == (message, "select one of env.agents at the end of step()")


class TwoRounds(PlainParallel):
    """Two agents. "a" ends after the first round, "b" after the second. Ended agents stay in `agents`."""

    possible_agents = ["a", "b"]

    def __init__(self):
        super().__init__()
        self.observation_spaces = self.action_spaces = dict.fromkeys("ab", TextSpace(100))

    def reset(self, seed=None, options=None):
        self.agents, self.round = ["a", "b"], 0
        return {"a": "?", "b": "?"}, {"a": {}, "b": {}}

    def step(self, actions):
        self.round += 1
        ended = {"a": self.round == 1, "b": self.round == 2}
        return dict.fromkeys("ab", "?"), dict.fromkeys(actions, 1.0), ended, dict.fromkeys("ab", False), {"a": {}}


def test_ended_agents_that_stay_in_the_list_decide_no_more():
    episode = fa.play(TwoRounds, fa.Scripted(lambda _: "go"))
    assert [turn.agent for turn in episode.turns] == ["a", "b", "b"]
    assert (episode.end_reason, episode.rewards) == ("terminated", {"a": 1.0, "b": 2.0})


def test_agents_that_leave_without_a_flag_have_ended():
    class Short(TwoRounds):
        def step(self, actions):
            observations, rewards, *_ = super().step(actions)
            self.agents = []
            return observations, rewards, {}, {}, {}

    episode = fa.play(Short, fa.Scripted(lambda _: "go"))
    assert (episode.end_reason, [turn.terminated for turn in episode.turns]) == ("terminated", [True, True])


WANTED = "by agent: observations, rewards, terminations, truncations, infos"


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("reset", lambda full: None, "reset() returned NoneType. A ParallelEnv returns 2 dictionaries by agent"),
        ("reset", lambda full: full[0], "reset() returned dict. A ParallelEnv returns 2 dictionaries by agent"),
        (
            "step",
            lambda full: full[:4],
            f"step() returned 4 values. A ParallelEnv returns 5 dictionaries {WANTED}",
        ),
        ("step", lambda full: (full[0], 1.0, *full[2:]), "step() returned float as rewards. A ParallelEnv returns 5"),
    ],
)
def test_results_that_are_no_dictionaries_by_agent_are_named(method, result, message):
    class Odd(TwoRounds):
        pass

    full = getattr(TwoRounds, method)
    setattr(Odd, method, lambda self, *args, **kwargs: result(full(self, *args, **kwargs)))
    error = fa.play(Odd, fa.Scripted(lambda _: "go")).error
    assert (error.where, error.kind) == (method, "TypeError") and error.message.startswith(message)
    (finding,) = fa.check_env(Odd, checks=("ends",), raise_on_failure=False).failures
    assert finding.message.startswith(f"TypeError: {message}")


@pytest.mark.parametrize(
    ("agents", "error", "message"),
    [
        ([], ValueError, "is empty. Name one or more agents"),
        ([0, 1], TypeError, "has 0. Names of agents must be strings"),
    ],
)
def test_environment_has_agents_named_by_strings(agents, error, message):
    class Odd(TwoRounds):
        possible_agents = agents

    with pytest.raises(error, match=f"possible_agents {message}, such as 'player_0'"):
        fa.play(Odd, fa.Random())
