import importlib
import inspect
import random
import re
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from gymnasium.spaces import Text
from plain_env import Plain, PlainAEC, PlainParallel
from refusals import raises

import forge_agents as fa
from forge_agents.envs.conformance.checks import MAX_QUOTED
from forge_agents.envs.env import TextSpace
from forge_agents.envs.reasoning import split_reasoning
from forge_agents.errors import UnknownIdError
from forge_agents.testing import ConformanceError, check_env


class Good(fa.TurnEnv):
    """Two agents guess a secret number in two rounds."""

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


def failures(env, *checks, **kwargs):
    result = check_env(env, episodes=4, checks=checks or None, raise_on_failure=False, **kwargs)
    return {f.check: f for f in result.failures}


def line(cls, text):
    """Return ``file:line`` of the line of a class in this module that contains `text`."""
    lines, first = inspect.getsourcelines(cls)
    return f"test_conformance.py:{first + next(i for i, each in enumerate(lines) if text in each)} "


def test_a_good_environment_passes_every_check():
    report = check_env(Good)
    assert report.ok and len(report.findings) == 17 == len(report.passed) + len(report.skipped)
    skipped = {finding.check: finding.message for finding in report.skipped}
    assert skipped == {
        "pettingzoo parallel": "not a ParallelEnv",
        "num agents": "min_agents is None",
        "legal actions": "no legal actions are listed",
        "information sets": "no method swap_secrets(agent, rng)",
    }
    assert str(report).startswith("Good: 17 checks, 13 passed, 0 failed, 4 skipped\n")
    assert f"  skip {'num agents':<20} min_agents is None" in str(report)
    assert report.level == "full" and report.seconds > 0


def test_plain_pettingzoo_environment_passes_every_check():
    report = check_env(PlainAEC)
    assert report.ok and {"pettingzoo api", "pettingzoo seed", "spaces"} <= {finding.check for finding in report.passed}


def test_characters_outside_of_gymnasiums_text_space_are_named():
    class LettersOnly(PlainAEC):
        def __init__(self):
            super().__init__()
            self.observation_spaces = {"a": Text(100)}

    result = failures(LettersOnly)
    assert set(result) == {"pettingzoo api", "spaces"}
    assert result["spaces"].message.endswith("is outside its space, which does not allow '?'")
    assert "TextSpace(max_chars)" in result["spaces"].fix


def test_failures_raise_and_say_what_to_do():
    class Endless(Good):
        def act(self, agent, action):
            return fa.Outcome()

    with pytest.raises(AssertionError, match=r"(?s)no end after .* fix: .*max_turns") as caught:
        check_env(Endless, episodes=1, checks=("ends",))
    assert isinstance(caught.value, ConformanceError)
    assert [f.check for f in caught.value.report.failures] == ["ends"]


class _Fragile(Good):
    def act(self, agent, action):
        int(action)
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


class _Leaking(Good):
    def observe_text(self, agent):
        return f"Do not say that it is {self.number}."


class _SavesAndDraws(Good):
    """Restores the global generator, but depends on it."""

    def setup(self, rng):
        super().setup(rng)
        state = random.getstate()
        self.number = random.randrange(1000, 10000)
        random.setstate(state)

    def observe_text(self, agent):
        return f"{self.number}"


class _Telling(Good):
    """Reveals the beginning of the secret."""

    def observe_text(self, agent):
        return f"It begins with {str(self.number)[0]}."

    def swap_secrets(self, agent, rng):
        self.number = int(rng.integers(1000, 10000))


class _Hinting(_Telling):
    def observe_text(self, agent):
        return "Odd?"

    def legal_actions(self, agent):
        return ["yes"] if self.number % 2 else ["no"]


class _Uncopied(list):
    def __deepcopy__(self, memo):
        return self


class _Remembering(Good):
    """Observes how many actions there were. Copies share the list, which shows only after one of them has played on."""

    def setup(self, rng):
        super().setup(rng)
        self.actions = _Uncopied()

    def observe_text(self, agent):
        return f"{len(self.actions)} actions"

    def act(self, agent, action):
        self.actions.append(action)
        return super().act(agent, action)


class _Gossiping(Good):
    """Receives reasoning and repeats it."""

    observes_reasoning = True

    def setup(self, rng):
        super().setup(rng)
        self.heard = ""

    def observe_text(self, agent):
        return f"Heard: {self.heard}"

    def act(self, agent, action):
        self.heard = action[:200]
        return super().act(agent, action)


class _Discreet(_Gossiping):
    def act(self, agent, action):
        return super().act(agent, split_reasoning(action)[1])


def changed(base=Good, *, after_setup=None, before_act=None, info=None, **members):
    """A subclass with other members, code around `setup` and `act`, or another info of actions."""

    def setup(self, rng):
        base.setup(self, rng)
        after_setup(self)

    def act(self, agent, action):
        if before_act is not None:
            before_act(self, action)
        outcome = base.act(self, agent, action)
        return outcome if info is None else replace(outcome, info=info(self, agent, action))

    members |= {"setup": setup} if after_setup else {}
    members |= {"act": act} if before_act or info else {}
    return type("Changed", (base,), members)


def look(self, agent):
    self.looks = getattr(self, "looks", 0) + 1
    return f"look {self.looks}"


SHARED = []
_shared = changed(before_act=lambda self, action: SHARED.append(1), observe_text=lambda self, agent: f"{len(SHARED)}")
_unseeded = changed(
    setup=lambda self, rng: Good.setup(self, np.random.default_rng()),
    observe_text=lambda self, agent: f"about {self.number // 10}",
)


@pytest.mark.parametrize(
    ("env", "check", "message"),
    [
        (_Fragile, "odd actions", "answered '': ValueError"),
        (changed(before_act=lambda self, action: action.encode("latin-1")), "odd actions", "UnicodeEncodeError"),
        (_GlobalNumpy, "global randomness", "numpy.random"),
        (_GlobalPython, "global randomness", "generator of random was"),
        (_SavesAndDraws, "global randomness", "seeded in two ways"),
        (_shared, "determinism", "observation of step"),
        (_shared, "fork", "of step"),
        (_unseeded, "determinism", "seed 0"),
        (_unseeded, "pettingzoo seed", "Incorrect"),
        (changed(observe_text=look), "observing", "twice"),
        (_Leaking, "leak", "can read the secret"),
        (changed(after_setup=lambda self: setattr(self, "lock", threading.Lock())), "fork",
         "copying self.lock, a _thread.lock: TypeError"),
        (_Remembering, "fork", "of step"),
        (changed(legal_actions=lambda self, agent: ["no"],
                 info=lambda self, agent, action: {agent: {"illegal": "" if "yes" in action else "only yes"}}),
         "legal actions", "seed 0: 'no' is in the legal actions of 'a', but was refused: only yes"),
        (changed(info=lambda self, agent, action: {agent: {"legal_actions": "no"}}), "legal actions",
         "has the text 'no' as its legal_actions. Give a list of texts"),
        (_Telling, "information sets", "becomes"),
        (_Hinting, "information sets", "depends on information hidden from it"),
        (changed(_Telling, observe_text=lambda self, agent: "Odd?", swap_secrets=lambda self, agent, rng: None),
         "information sets", "changed nothing"),
        (_Gossiping, "reasoning", "'b' can read reasoning of 'a' in observe_text"),
        (changed(_Gossiping, observe_text=lambda self, agent: "Odd?",
                 info=lambda self, agent, action: {"a": {"last": self.heard}}),
         "reasoning", "'a' can read reasoning of 'b' in info"),
        (changed(min_agents=1, select_agents=lambda self, rng: self.possible_agents), "num agents",
         "num_agents=1 gives the agents ['a', 'b']"),
        (changed(observe_text=lambda self, agent: "\ud83c"), "spaces", "outside its space"),
        (changed(max_observation_chars=4), "spaces", "max_observation_chars"),
        (changed(info=lambda self, agent, action: {agent: {"rng": self.rng}}), "rewards and infos", "not JSON"),
        (changed(act=lambda self, agent, action: fa.Outcome(rewards={agent: float("nan")}, done=True)),
         "rewards and infos", "nan"),
        (changed(max_reward=0.5, act=lambda self, agent, action: fa.Outcome(rewards={agent: 2.0}, done=True)),
         "rewards and infos", "seed 0: 'a' earns 2 in an episode, more than max_reward=0.5"),
    ],
)  # fmt: skip
def test_each_breach_is_found_by_its_check(env, check, message):
    findings = failures(env, check)
    assert check in findings and message in findings[check].message and findings[check].fix


@pytest.mark.parametrize(
    ("loss", "judges", "tags", "is_free"),
    [(-1.0, False, (), True), (0.0, False, (), False), (-1.0, True, (), False), (-1.0, False, ("zero-sum",), False)],
)
def test_games_in_which_a_full_context_avoids_a_loss_are_named(own_registry, loss, judges, tags, is_free):
    def act(self, agent, action):
        self.rounds += 1
        return fa.Outcome(rewards={"b": loss if self.rounds == 4 else 0.0}, done=self.rounds == 4)

    losing = changed(act=act, judges_silence=judges)
    fa.register("test/Losing-v0", losing, tags=tags)
    (finding,) = check_env("test/Losing-v0", checks=["rewards and infos"]).findings
    assert finding.ok and ("set judges_silence = True" in finding.message) == is_free


def test_answer_that_raised_is_named_with_the_odd_one_before_it():
    def refuse_second(self, action):
        if self.num_turns:
            raise ValueError(repr(action))

    message = failures(changed(before_act=refuse_second), "odd actions")["odd actions"].message
    assert re.fullmatch(r"'a' answered '', then 'b' answered ('.+'): ValueError: \1", message), message


@pytest.mark.parametrize(
    ("env", "check", "text", "method"),
    [
        (_Fragile, "odd actions", "int(action)", "act"),
        (_GlobalNumpy, "global randomness", "np.random.randint", "_GlobalNumpy.setup"),
        (_GlobalPython, "global randomness", "random.random()", "_GlobalPython.act"),
        (_Leaking, "leak", "def observe_text", "_Leaking.observe_text"),
        (_Hinting, "information sets", "def legal_actions", "_Hinting.legal_actions"),
        (changed(act=lambda self, agent, action: fa.Outcome(rewards={agent: float("nan")})), "spaces", None, ""),
    ],
)
def test_findings_name_the_line(env, check, text, method):
    where = failures(env, check)[check].where
    assert where == "" if text is None else line(env, text) in where and where.endswith(method)


def test_space_that_is_new_in_each_call_is_named_once():
    class Fresh(PlainAEC):
        def action_space(self, agent):
            return TextSpace(2000)

    report = check_env(Fresh, raise_on_failure=False)
    ((checks, finding),) = [group for group in report.grouped() if not group[1].ok]
    assert checks == ("pettingzoo api", "pettingzoo seed")
    assert (
        finding.message == "action_space('a') returns a new object in each call, so a seed of the space has no effect"
    )
    assert finding.fix == "create the spaces once, and return the same object from action_space"
    assert finding.where.endswith("Fresh.action_space")


@pytest.mark.parametrize(("base", "check"), [(PlainAEC, "pettingzoo seed"), (PlainParallel, "pettingzoo parallel")])
def test_action_space_that_two_environments_share_is_named(base, check):
    shared = TextSpace(2000)

    class Shared(base):
        def action_space(self, agent):
            return shared

    finding = failures(Shared, check)[check]
    assert finding.message == "action_space('a') is one object in two environments, so both sample from one generator"
    assert finding.fix == "create the spaces in the constructor" and finding.where.endswith("Shared.action_space")


def test_quoted_message_of_pettingzoo_is_short():
    message = failures(_unseeded, "pettingzoo seed")["pettingzoo seed"].message
    assert len(message) <= len("seed_test: two environments with seed 42 differ: ") + MAX_QUOTED


def test_reward_that_is_not_a_number_is_no_difference_of_two_episodes():
    class Unpaid(PlainAEC):
        def step(self, action):
            super().step(action)
            if self.agents:
                self._cumulative_rewards["a"] = float("nan")

    assert set(failures(Unpaid, "determinism", "rewards and infos")) == {"rewards and infos"}


class _Broken(Good):
    def setup(self, rng):
        raise OSError("no board")


def test_identical_failures_are_merged_into_one_finding():
    report = check_env(_Broken, raise_on_failure=False)
    assert len(report.findings) == 17 and len(report.failures) == 14
    ((checks, finding),) = [group for group in report.grouped() if not group[1].ok]
    assert checks == tuple(f.check for f in report.failures) and finding.message == "OSError: no board"
    lines = [line for line in str(report).splitlines() if "OSError" in line]
    assert len(lines) == 1 and lines[0].endswith("fork, leak, reasoning, other process (14 checks) OSError: no board")


STRANGERS = """
import random
from gymnasium.spaces import Discrete
from pettingzoo import ParallelEnv


class Sums(ParallelEnv):
    metadata = {"name": "sums_v0"}
    render_mode = None
    possible_agents = ["a_0", "a_1"]
    spaces = Discrete(30)

    def observation_space(self, agent):
        return self.spaces

    def action_space(self, agent):
        return self.spaces

    def reset(self, seed=None, options=None):
        self.agents, self.start = list(self.possible_agents), (seed or 0) % 7
        return dict.fromkeys(self.agents, self.start), {}

    def step(self, actions):
        return self._ended(actions)

    def _ended(self, actions):
        both, self.agents = self.agents, []
        total = sum(100 // (7 - action) for action in actions.values())
        return dict.fromkeys(both, 0), dict.fromkeys(both, total), dict.fromkeys(both, True), {}, {}


class Drawing(Sums):
    def reset(self, seed=None, options=None):
        seen, infos = super().reset(seed, options)
        return dict.fromkeys(seen, random.randrange(7)), infos
"""


@pytest.fixture
def strangers(tmp_path, monkeypatch):
    """A module of foreign games, and a function that wraps them."""
    (tmp_path / "strangers.py").write_text(STRANGERS)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("strangers")
    yield lambda cls, act=lambda text, agent, space: int(text), legal=("1", "2"): lambda: fa.wrap(
        getattr(module, cls)(),
        obs_to_text=lambda seen, agent: f"{seen}, 7, 8",
        text_to_action=act,
        legal_actions=(lambda seen, agent: legal) if legal else None,
    )  # fmt: skip
    del sys.modules["strangers"]


def test_exception_in_a_library_game_is_attributed_to_the_library(strangers):
    result = failures(strangers("Sums", legal=("7",)), "ends", "rewards and infos")
    assert len(result) == 2
    for finding in result.values():
        assert "ZeroDivisionError" in finding.message and finding.where.startswith("strangers.py:")
        assert "code of sums_v0 of strangers: if an action caused it, reject the action in text_to_act" in finding.fix


def test_exception_in_wrap_functions_is_attributed_to_the_user(strangers):
    def read(text, agent, space):
        return int(re.match(r"move (\d)", text)[1])

    result = failures(strangers("Sums", read), "odd actions")["odd actions"]
    assert "answered '': TypeError: 'NoneType'" in result.message and "test_conformance.py:" in result.where
    assert "let text_to_action return None or raise ValueError, LookupError or ArithmeticError" in result.fix
    result = failures(strangers("Sums", read), "ends")["ends"]
    assert result.message.startswith("TypeError") and "for a text that is no action" in result.fix


def test_randomness_of_a_wrapped_game_is_attributed_to_it(strangers):
    (fork,) = check_env(strangers("Sums"), checks=("fork",)).findings
    assert fork.skipped and fork.message == "no method fork"
    result = failures(strangers("Drawing"), "global randomness", "determinism")
    assert len(result) == 2 and all("the wrapped game uses other randomness" in f.fix for f in result.values())
    assert result["global randomness"].where.startswith("strangers.py:")
    assert result["determinism"].where.endswith("Drawing.reset")


def test_array_game_gets_one_error_that_suggests_wrap(strangers):
    report = check_env(lambda: strangers("Sums")().env, raise_on_failure=False)  # what wrap was given, taking turns
    (result,) = [group for group in report.grouped() if "not text" in group[1].message]
    assert len(result[0]) == 9 and result[1].message == "the observation of 'a_0' is int, not text"
    assert "fa.wrap" in result[1].fix


def test_a_report_says_when_no_text_was_an_action(strangers):
    mute = strangers("Sums", lambda *_: None, None)
    (finding,) = check_env(mute, checks=("legal actions",), episodes=3).findings
    assert finding.skipped and finding.message.startswith("all 3 texts were illegal (not an action: None): list legal")


def write_module(folder, monkeypatch, body):
    """A class `Game` in a module that other processes can import."""
    name = f"conformance_{folder.name.replace('-', '_')}"
    lines = ["import forge_agents as fa", "class Game(fa.TurnEnv):", "    possible_agents = ['a']", *body.splitlines()]
    (folder / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(name).Game


BODY = """
    def setup(self, rng):
        self.word = sorted({f"word {n}" for n in range(500)})[int(rng.integers(500))]
    def instructions(self, agent):
        return "Say it."
    def observe_text(self, agent):
        return self.word
    def act(self, agent, action):
        return fa.Outcome(done=True)
"""


def test_another_process_plays_the_same_episodes(tmp_path, monkeypatch):
    good = write_module(tmp_path, monkeypatch, BODY)
    (finding,) = check_env(good, checks=("other process",)).findings
    assert finding.message == ""


def test_an_order_that_only_this_process_has_is_found(tmp_path, monkeypatch):
    # Of 500 words no two hash seeds give the same 8 draws; of few, some pair does.
    hashed = write_module(tmp_path, monkeypatch, BODY.replace("sorted({", "list({"))
    result = failures(hashed, "other process", "determinism")
    assert list(result) == ["other process"] and "observation of step 0" in result["other process"].message
    assert "set order" in result["other process"].fix and result["other process"].where.endswith("Game.setup")


def test_other_process_check_is_skipped_for_classes_not_importable():
    class Local(Good):
        pass

    (finding,) = check_env(Local, checks=("other process",)).findings
    assert finding.skipped and finding.message.startswith("another process cannot import")
    (finding,) = check_env("forge/Relay-v0", checks=("other process",), operators={"+"}).findings
    assert finding.ok and "cannot be written as JSON for another process" in finding.message


def test_a_hang_ends_at_the_deadline_and_is_a_finding():
    class Hanging(Good):
        def act(self, agent, action):
            time.sleep(60)

    report = check_env(Hanging, checks=("ends", "leak"), timeout_s=0.2, raise_on_failure=False)
    late, rest = report.findings
    assert (late.check, late.ok) == ("ends", False) and "0.2 s" in late.message
    assert (rest.check, rest.skipped, rest.message) == ("leak", True, "the checks took longer than 0.2 s")


def test_game_that_observes_reasoning_may_show_answers():
    assert not failures(_Discreet, "reasoning")


def test_adapters_are_checked_by_playing(own_registry):
    fa.register("t/Adapted-v0", tags=("adapter",))(_GlobalPython)
    report = check_env("t/Adapted-v0")
    assert [f.check for f in report.findings] == ["plays", "spaces", "determinism", "reasoning"]
    assert report.level == "adapter" and report.findings[0].message == "20 episodes"
    assert not check_env("t/Adapted-v0", level="full", checks=("global randomness",), raise_on_failure=False).ok
    raises(ConformanceError, r"seed 0: ValueError.*\n.*at:", check_env, _Fragile, level="adapter")


class _Heard(_Gossiping):
    """The secret is a text that an agent says aloud."""

    observes_reasoning = False

    def secrets(self, agent):
        return ["yes"]

    def instructions(self, agent):
        return "Answer."

    def legal_actions(self, agent):
        return ["yes", "no"]


def test_secret_that_another_agent_wrote_is_no_leak():
    assert "leak" not in failures(_Heard, "leak")


class _Silent(Good):
    def secrets(self, agent):
        return []


@pytest.mark.parametrize(
    ("env", "check", "reason"),
    [
        (Plain, "leak", "no method secrets(agent)"),
        (_Silent, "leak", "secrets(agent) was empty in all episodes"),
        (Plain, "information sets", "no method swap_secrets(agent, rng)"),
        (Plain, "legal actions", "no legal actions are listed"),
        (Plain, "reasoning", "no other agent that could read it"),
    ],
)
def test_check_without_a_subject_is_skipped_with_the_reason(env, check, reason):
    (finding,) = check_env(env, checks=(check,)).findings
    assert finding.skipped and finding.message == reason


@pytest.mark.parametrize("returned", ["number", [""], [7], None])
def test_secrets_that_are_no_list_of_texts_are_named(returned):
    class Odd(Good):
        def secrets(self, agent):
            return returned

    result = failures(Odd, "leak")["leak"]
    assert result.message == f"secrets('a') returned {returned!r}"
    assert result.fix.startswith("return a list of nonempty texts")


def test_the_global_generators_are_left_as_they_were():
    before = random.getstate(), str(np.random.get_state())  # noqa: NPY002  # the global one is what is looked at
    assert check_env(Good, checks=("global randomness", "ends", "determinism")).ok
    assert (random.getstate(), str(np.random.get_state())) == before  # noqa: NPY002


def test_nothing_is_printed(capsys):
    check_env("forge/KuhnPoker-v0", episodes=1)
    assert capsys.readouterr().out == ""


def test_mistakes_of_the_caller_raise_themselves():
    raises(UnknownIdError, "forge/Relay-v0", check_env, "forge/Rely-v0")
    raises(TypeError, "max_nmber", check_env, "forge/Relay-v0", max_nmber=3)
    raises(TypeError, "function making an environment", check_env, Good())
    raises(TypeError, r"<lambda> made a NoneType, .* PettingZoo environment\. .*fa\.wrap", check_env, lambda: None)
    raises(ValueError, "episodes", check_env, Good, episodes=0)
    raises(ValueError, r"no check 'leaks' at level 'full'", check_env, Good, checks=("leaks",))
    raises(ValueError, "level='half'", check_env, Good, level="half")
