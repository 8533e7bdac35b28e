import random
import threading

import numpy as np
import pytest

import forge_agents as fa
from forge_agents.errors import UnknownIdError
from forge_agents.testing import ConformanceError, check_env


class Good(fa.TurnEnv):
    """Two seats guess a secret number in two rounds."""

    possible_agents = ["a", "b"]

    def setup(self, rng):
        self.number, self.rounds = int(rng.integers(1000, 10000)), 0

    def instructions(self, agent):
        return "Guess the number. Answer yes or no."

    def observe_text(self, agent):
        return f"Round {self.rounds}. Odd?"

    def secrets(self, agent):
        return [str(self.number)]

    def act(self, agent, action):
        self.rounds += 1
        right = ("yes" in action) == bool(self.number % 2)
        return fa.Outcome(rewards={agent: float(right)}, done=self.rounds == 4, info={agent: {"right": right}})


def failures(env, **kwargs):
    return {f.check: f for f in check_env(env, episodes=4, raise_on_failure=False, **kwargs).failures}


def test_a_good_environment_passes_every_check():
    report = check_env(Good)
    assert report.ok and len(report.findings) == 11 and str(report).startswith("Good: 11 of 11 checks passed")


def test_failures_raise_and_say_what_to_do():
    class Endless(Good):
        def act(self, agent, action):
            return fa.Outcome()

    with pytest.raises(AssertionError, match=r"(?s)no end after .* fix: .*max_turns") as caught:
        check_env(Endless, episodes=1)
    assert isinstance(caught.value, ConformanceError)
    assert [f.check for f in caught.value.report.failures] == ["ends"]


class _Fragile(Good):
    def act(self, agent, action):
        int(action)
        return super().act(agent, action)


class _Unicode(Good):
    def act(self, agent, action):
        action.encode("latin-1")
        return super().act(agent, action)


class _GlobalNumpy(Good):
    def setup(self, rng):
        super().setup(rng)
        self.number = int(np.random.randint(1000, 10000))  # noqa: NPY002  # the breach to find

    def observe_text(self, agent):
        return f"{self.number % 7}"


class _GlobalPython(Good):
    def act(self, agent, action):
        random.random()
        return super().act(agent, action)


class _Shared(Good):
    count = [0]

    def observe_text(self, agent):
        return f"{self.count}"

    def act(self, agent, action):
        self.count[0] += 1
        return super().act(agent, action)


class _Unseeded(Good):
    def setup(self, rng):
        super().setup(np.random.default_rng())

    def observe_text(self, agent):
        return f"about {self.number // 10}"


class _Consuming(Good):
    def setup(self, rng):
        super().setup(rng)
        self.looks = 0

    def observe_text(self, agent):
        self.looks += 1
        return f"look {self.looks}"


class _Leaking(Good):
    def observe_text(self, agent):
        return f"Do not say that it is {self.number}."


class _Locked(Good):
    def setup(self, rng):
        super().setup(rng)
        self.lock = threading.Lock()


class _Surrogate(Good):
    def observe_text(self, agent):
        return "\ud83c"


class _Long(Good):
    max_observation_chars = 4


class _Unjson(Good):
    def act(self, agent, action):
        outcome = super().act(agent, action)
        return fa.Outcome(rewards=outcome.rewards, done=outcome.done, info={agent: {"rng": self.rng}})


class _Nan(Good):
    def act(self, agent, action):
        return fa.Outcome(rewards={agent: float("nan")}, done=True)


@pytest.mark.parametrize(
    ("env", "check", "says"),
    [
        (_Fragile, "odd actions", "answered '': ValueError"),
        (_Unicode, "odd actions", "UnicodeEncodeError"),
        (_GlobalNumpy, "global randomness", "numpy.random"),
        (_GlobalPython, "global randomness", "generator of random was"),
        (_Shared, "determinism", "observation of step"),
        (_Shared, "fork", "from step"),
        (_Unseeded, "determinism", "seed 0"),
        (_Unseeded, "pettingzoo seed", "Incorrect"),
        (_Consuming, "observing", "twice"),
        (_Leaking, "leak", "can read the secret"),
        (_Locked, "fork", "deepcopy"),
        (_Surrogate, "spaces", "outside its space"),
        (_Long, "spaces", "max_observation_chars"),
        (_Unjson, "rewards and infos", "not JSON"),
        (_Nan, "rewards and infos", "nan"),
    ],
)
def test_each_breach_is_found_by_its_check(env, check, says):
    found = failures(env)
    assert check in found and says in found[check].message and found[check].fix


def test_a_secret_that_another_seat_told_is_no_leak():
    class Told(Good):
        def setup(self, rng):
            super().setup(rng)
            self.said = "nothing"

        def secrets(self, agent):
            return ["yes"]

        def instructions(self, agent):
            return "Answer."

        def legal_actions(self, agent):
            return ["yes", "no"]

        def observe_text(self, agent):
            return f"Heard: {self.said[:50]}"

        def act(self, agent, action):
            self.said = action
            return super().act(agent, action)

    assert "leak" not in failures(Told)


def test_the_leak_check_is_left_out_without_the_hook_and_says_so():
    class Open(fa.TurnEnv):
        possible_agents = ["a"]

        def setup(self, rng):
            pass

        def instructions(self, agent):
            return ""

        def observe_text(self, agent):
            return "?"

        def act(self, agent, action):
            return fa.Outcome(done=True)

    (leak,) = [f for f in check_env(Open).findings if f.check == "leak"]
    assert leak.ok and leak.message == "left out: no method secrets(agent)"


def test_the_global_generators_are_left_as_they_were():
    before = random.getstate(), str(np.random.get_state())  # noqa: NPY002  # the global one is what is looked at
    assert check_env(Good).ok
    assert (random.getstate(), str(np.random.get_state())) == before  # noqa: NPY002


def test_nothing_is_printed(capsys):
    check_env("forge/KuhnPoker-v0")
    assert capsys.readouterr().out == ""


def test_mistakes_of_the_caller_raise_themselves():
    with pytest.raises(UnknownIdError, match="forge/Relay-v0"):
        check_env("forge/Rely-v0")
    with pytest.raises(TypeError, match="max_nmber"):
        check_env("forge/Relay-v0", max_nmber=3)
    with pytest.raises(TypeError, match="function making an environment"):
        check_env(Good())
    with pytest.raises(ValueError, match="episodes"):
        check_env(Good, episodes=0)
