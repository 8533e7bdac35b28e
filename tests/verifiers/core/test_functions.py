import functools
import logging
import math
from typing import Optional

import numpy as np
import pytest

from forge_agents import Ensemble, Rule, check_verifier
from forge_agents.errors import ArgumentError
from forge_agents.types import Trajectory, Turn
from forge_trainers.rl.rewards import assess
from forge_verifiers import ForAgent, Gate, Numeric, PerTurn, ScoreError
from forge_verifiers.core.verifier import Composable, Sum, reward_of, verifier_of


def said(text, *, agent="a", **info):
    turn = Turn(agent=agent, index=0, observation="6 times 7?", action=text, reward=0.0)
    return Trajectory(agent=agent, policy="p", turns=(turn,), env_id="t", info=info)


ROWS = [said("It is 42", answer="42"), said("It is 41", answer="42")]
NOBODY = Trajectory(agent="a", policy="p", turns=(), env_id="t", info={"answer": "42"})


def rubric(completion, answer):
    return float(answer in completion)


def trl(completions, answer, **kwargs):
    assert kwargs == {"prompts": ["6 times 7?"] * len(completions)}
    return [None if c == "pass" else float(a in c) for c, a in zip(completions, answer, strict=True)]


def annotated(rows: "list[Trajectory]", scale=1.0):
    return [scale * ("42" in row.turns[-1].action) for row in rows]


def maybe(row: Optional[Trajectory]):  # noqa: UP045  # as many write it
    return row is not None and "42" in row.turns[-1].action


async def awaited(completion):
    return 1.0


class Weighted:
    def __call__(self, trajectory):
        return "42" in trajectory.turns[-1].action


TAKEN = [
    lambda t: "42" in t.turns[-1].action,
    lambda trajectories: np.array(["42" in t.turns[-1].action for t in trajectories]),
    lambda traj, /: "42" in traj.turns[-1].action,
    lambda trajectory, answer: answer in trajectory.turns[-1].action,
    lambda completion, prompt, info: info["answer"] in completion and prompt == "6 times 7?",
    lambda completion, answer="41": answer in completion,
    lambda prompts, completions, answer: [a in c for a, c in zip(answer, completions, strict=True)],
    rubric,
    trl,
    annotated,
    maybe,
    functools.partial(annotated, scale=1.0),
    Weighted(),
]


@pytest.mark.parametrize("function", TAKEN)
def test_parameters_decide_the_arguments_of_a_function(function):
    assert verifier_of(function).score(ROWS).tolist() == [1, 0]
    assert np.asarray(reward_of(function)(ROWS)).tolist() == [1, 0]


REFUSED = [
    (lambda x: 0.5, r"parameters of unknown meaning \(x\); name its parameter `trajectory`.*or wrap it in fa\.Rule"),
    (lambda a, b: 0.5, r"parameters of unknown meaning \(a, b\)"),
    (lambda *args, **kwargs: 0.5, r"parameters of unknown meaning"),
    (lambda trajectory, completions: 0.5, r"takes both one trajectory and all of them"),
    (awaited, r"awaited\(completion\) at .*is async"),
    (Numeric, r"the class Numeric is not a verifier, but its objects are\. Write Numeric\(\.\.\.\)"),
    (dict, r"the class dict is not a verifier\. Pass a function"),
    ("rubric", r"str 'rubric' is not a verifier"),
    ([len], r"a list is not a verifier. To combine several, pass fa.Ensemble\(\[...\]\), fa.MultiReward"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED)
def test_unclear_parameters_are_refused(function, message):
    with pytest.raises(ArgumentError, match=message) as error:
        Ensemble([function])
    if callable(function) and function not in (Numeric, dict):
        assert f"at {__file__}:" in str(error.value)


@pytest.mark.parametrize("lacking", ["name", "family", "cost"])
def test_incomplete_verifier_is_not_wrapped_as_a_function(lacking):
    own = {"name": "slow", "family": None, "cost": "expensive", "score": lambda self, ts: np.ones(len(ts))}
    judge = type("Judge", (Composable,), {key: value for key, value in own.items() if key != lacking})()
    with pytest.raises(ArgumentError, match=f"verifier Judge has no {lacking}. Family may be None"):
        Ensemble([judge])


@pytest.mark.parametrize("take", [lambda judge: Ensemble([judge]), reward_of])
def test_a_cost_of_no_class_is_refused(take):
    judge = type("Judge", (Composable,), {"name": "slow", "family": None, "cost": "free", "score": len})()
    with pytest.raises(ArgumentError, match="cost='free' of verifier 'slow'. Choose one of cheap, model, expensive"):
        take(judge)


def test_rule_takes_any_parameter_for_one_trajectory_and_a_reward_for_all():
    assert Rule(lambda x: "42" in x.turns[-1].action).score(ROWS).tolist() == [1, 0]
    assert reward_of(lambda x: [7.0] * len(x))(ROWS) == [7.0, 7.0]
    given = reward_of(lambda *anything: anything[0])
    assert given(ROWS) is ROWS


def test_a_verifier_that_derives_from_nothing_is_a_reward():
    class Plain:
        name, family, cost, judged = "plain", None, "cheap", 0

        def score(self, trajectories):
            return np.array(["42" in each.turns[-1].action for each in trajectories], np.float32)

        def state_dict(self):
            return {"judged": np.array(self.judged)}

    reward = reward_of(Plain())
    assert np.asarray(reward(ROWS)).tolist() == [1, 0]
    assert (reward.name, reward.cost, list(reward.state_dict())) == ("plain", "cheap", ["0/judged"])


def test_a_reward_of_one_trajectory_may_have_any_range_and_abstain():
    reward = reward_of(lambda trajectory: -3.5 if "42" in trajectory.turns[-1].action else None)
    assert reward(ROWS).tolist() == pytest.approx([-3.5, math.nan], nan_ok=True)
    assert reward.name == "<lambda>"
    verifier = Numeric()
    assert reward_of(verifier) is verifier


def test_missing_argument_fails_only_its_row():
    rows = [*ROWS, said("It is 42"), NOBODY]
    for function in (rubric, trl):
        result = Rule(function).assess(rows)
        assert result.scores.tolist() == pytest.approx([1, 0, math.nan, math.nan], nan_ok=True)
        assert list(result.failed) == [2]  # who never moved wrote nothing: that is no failure
        assert f"trajectory.info has no 'answer', which {function.__name__}(completion" in result.failed[2]
    assert Rule(rubric).assess([NOBODY]).failed == {}


def test_a_text_of_a_model_in_an_exception_does_not_control_the_terminal(caplog):
    def number(t):
        raise ValueError(f"no number: {t.turns[-1].action}")

    rows = [said("1"), said("\x1b]52;c;cm0gLXJm\x07\u202e")]
    rule = Rule(lambda t: True if t is rows[0] else number(t), name="number")
    rule.score(rows)
    Ensemble([rule, rubric]).scores(rows)
    assert caplog.text.count("no number: ") == 2 and not {"\x1b", "\x07", "\u202e"} & set(caplog.text)


def test_exception_loses_only_its_row(caplog):
    rule = Rule(lambda t: t.turns[-1].action[6] == "4", name="seventh")
    rows = [*ROWS, said("")]
    assert rule.score(rows).tolist() == pytest.approx([1, 1, math.nan], nan_ok=True)
    message = "'seventh' fails on 1 of 3 trajectories: IndexError: string index out of range (test_functions.py:"
    assert message in caplog.text
    caplog.set_level(logging.ERROR)
    ensemble = Ensemble([rule, rubric])
    rows = [*ROWS, said("", answer="1")]
    assert ensemble.scores(rows)[:, 0].tolist() == pytest.approx([1, 1, math.nan], nan_ok=True)
    row = ensemble.report().verifiers[0]
    assert (row.scored, row.failed, row.errors) == (2, 1, 0)
    with pytest.raises(IndexError):  # on all of them: the mistake is the function's
        rule.score([said(""), said("a")])


def test_one_odd_answer_among_trajectories_without_a_turn_is_no_error_of_the_function():
    def value(completion):
        return float(completion) / 100

    def values(completions):
        return [value(completion) for completion in completions]

    for function in (value, values):
        result = reward_of(function).assess([NOBODY, said("x")])
        assert np.isnan(result.scores).all() and result.failed[1].startswith("ValueError") and len(result.failed) == 1
        with pytest.raises(ValueError, match="could not convert"):
            reward_of(function).assess([said("x"), said("y")])


def test_a_whole_number_beyond_floats_is_infinite():
    reward = reward_of(lambda completion: -abs(int(completion) - 42))
    assert reward.assess([said("40"), said("9" * 400), said("-" + "9" * 400)]).scores.tolist() == [
        -2,
        -math.inf,
        -math.inf,
    ]
    rows = [said("40"), said("9" * 400)]
    many = assess(lambda trajectories: [int(t.turns[-1].action) for t in trajectories], rows, "many")
    np.testing.assert_array_equal(many.scores, [40, np.nan])  # infinite rewards abstain
    with pytest.raises(ScoreError, match="scored trajectory 0 of 2 with inf. Scale"):
        Rule(lambda t: 10**400).score(ROWS)


def test_a_function_is_a_part_of_what_is_composed():
    for made in (
        Gate(lambda t: "answer" in t.info, then=rubric),
        ForAgent("a", rubric),
        PerTurn(rubric),
        Sum([(0.5, rubric), (0.5, trl)]),
        0.5 * (rubric + Rule(trl)),
        0.5 * (Rule(rubric) + trl),
    ):
        assert made.score(ROWS).tolist() == [1, 0], made.name
    assert (rubric + Rule(trl)).name == "rubric + trl"
    with pytest.raises(ArgumentError, match="int 3 is not a verifier"):
        Rule(rubric) + 3


def test_batch_function_must_return_one_number_each():
    with pytest.raises(ScoreError, match=r"'<lambda>' returned shape \(1,\) for 2 trajectories"):
        Rule(lambda trajectories: [1.0]).score(ROWS)
    with pytest.raises(ScoreError, match=r"graded trajectory 0 with list '\[1.0, 1.0\]'"):
        Rule(lambda trajectory: [1.0, 1.0]).score(ROWS)
    with pytest.raises(ValueError, match=r"received 2 of 3 trajectories.* returned \[1\.0\]. Return a number each"):
        reward_of(lambda completions: [1.0])([*ROWS, NOBODY])
    with pytest.raises(ValueError, match="returned 0.5"):
        reward_of(lambda completions: 0.5)([*ROWS, NOBODY])


def test_a_function_can_be_checked_and_what_fails_is_named():
    assert check_verifier(rubric, gold=ROWS[0], wrong=ROWS[1]).ok
    rule = Rule(lambda t: t.turns[-1].action[6] == "4", name="seventh")
    report = check_verifier(rule, gold=ROWS[0], wrong=said(""), raise_on_failure=False)
    failed = [finding.message for finding in report.failures]
    assert len(failed) == 4 and all(text.startswith("fails on trajectory 1: IndexError") for text in failed)
    assert str(report).count("IndexError") == 1 and "shape and range, repeatable, order, gold (4 checks)" in str(report)
