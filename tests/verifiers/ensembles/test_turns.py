import dataclasses
import math

import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_agents.types import Trajectory, Turn
from forge_verifiers import Assessment, Composable, ForAgent, Gate, PerTurn, ScoreError, SelfConsistency
from forge_verifiers.core.verifier import assessed, checked_scores


def spoke(*actions, seed=0, agent="a"):
    turns = tuple(Turn(agent=agent, index=i, observation="", action=text, reward=0.0) for i, text in enumerate(actions))
    return Trajectory(agent=agent, policy="p", turns=turns, env_id="t", seed=seed)


def polite(**kwargs):
    return Rule(lambda t: None if t.turns[-1].action == "..." else "please" in t.turns[-1].action, **kwargs)


ROWS = [spoke("give", "please", "..."), spoke(), spoke("please")]


def values(arrays):
    return [[None if math.isnan(x) else x for x in array.tolist()] for array in arrays]


def test_each_turn_is_scored_with_its_history():
    result = PerTurn(polite(name="polite")).assess(ROWS)
    assert values(result.turns) == [[0, 1, None], [], [1]]
    assert values([result.scores]) == [[0.5, None, 1]]
    shown = []
    PerTurn(Rule(lambda t: shown.append([turn.action for turn in t.turns]) or 0.5, name="eye")).score(ROWS[:1])
    assert shown == [["give"], ["give", "please"], ["give", "please", "..."]]


def test_turns_at_the_same_index_form_a_group():
    rows = [spoke("4", "9"), spoke("4", "9"), spoke("9", "4")]
    result = PerTurn(SelfConsistency()).assess(rows)
    assert values(result.turns) == [[1, 1], [1, 1], [0, 0]]


def test_turn_scores_pass_through_sums_gates_and_for_agent():
    per_turn = PerTurn(polite(name="polite"))
    rows = [spoke("give", "please"), spoke("please", "please")]
    outcome = Rule(lambda t: float(t.turns[0].action == "please"), name="outcome")
    assert values((0.5 * per_turn + 0.5 * outcome).assess(rows).turns) == [[0, 0.5], [1, 1]]
    assert values(Gate(outcome, per_turn).assess(rows).turns) == [[0, 0], [1, 1]]
    other = dataclasses.replace(rows[0], agent="b")
    assert values(ForAgent("b", per_turn).assess([rows[1], other]).turns) == [[None, None], [0, 1]]
    assert (0.5 * outcome).assess(rows).turns is None


def test_ensemble_scores_turns_and_keeps_its_state():
    rng = np.random.default_rng(0)

    def noisy(k):
        rng = np.random.default_rng(k)
        return Rule(lambda t: float(("please" in t.turns[-1].action) == (rng.random() < 0.8)), name=f"noisy{k}")

    rows = [spoke(*rng.choice(["please", "give"], 4).tolist(), seed=at // 8) for at in range(64)]
    judge = PerTurn(Ensemble([noisy(k) for k in range(5)]))
    result = judge.assess(rows)
    good = np.array([turn.action == "please" for row in rows for turn in row.turns])
    scores = np.concatenate(result.turns)
    assert scores[good].mean() - scores[~good].mean() > 0.6
    assert judge.state_dict()["verifier/window/scores"].shape == (256, 5)


def test_turns_of_the_wrong_number_are_refused():
    class Odd(Composable):
        name, family, cost = "odd", None, "cheap"

        def score(self, trajectories):
            return self.assess(trajectories).scores

        def assess(self, trajectories):
            n = len(trajectories)
            return Assessment(scores=np.zeros(n, np.float32), turns=[np.zeros(1, np.float32)] * n)

    with pytest.raises(ScoreError, match="'odd' scored a wrong number of turns"):
        assessed(Odd(), ROWS)
    assert checked_scores(Odd(), ROWS).tolist() == [0, 0, 0]


def test_turn_on_which_the_verifier_fails_costs_its_trajectory_the_score():
    def kind(trajectory):
        if trajectory.turns[-1].action == "rude":
            raise ValueError("refused")
        return 1.0

    result = PerTurn(Rule(kind)).assess([spoke("kind", "rude"), spoke("kind", "kind")])
    np.testing.assert_array_equal(result.scores, [np.nan, 1.0])
    assert list(result.failed) == [0] and "refused" in result.failed[0]


class Grades(Composable):
    """A judge that has no grade for an answer that is no number."""

    name, family, cost, grades_each_text = "judge", None, "model", True

    def score(self, trajectories):
        actions = [t.turns[-1].action.split()[-1] for t in trajectories]
        return np.array([float(a) if a[0].isdigit() else math.nan for a in actions], np.float32)


SILENT, HALF = Rule(lambda t: None, name="silent"), Rule(lambda t: 0.5, name="half")
CHECK = Rule(lambda t: None if t.turns[-1].action.startswith("skip") else 1.0, name="check")


@pytest.mark.parametrize(
    "nest",
    [
        lambda judge: judge,
        lambda judge: Gate(CHECK, judge),
        lambda judge: Gate(judge, HALF),
        lambda judge: ForAgent("a", judge),
        lambda judge: 0.5 * judge,
        lambda judge: 0.5 * Gate(CHECK, judge) + 0.5 * SILENT,
        lambda judge: Ensemble([judge], combine="mean"),
        lambda judge: Ensemble([SILENT, ForAgent("a", Gate(CHECK, judge))], combine="mean"),
    ],
)
def test_turn_that_confuses_a_judge_inside_a_verifier_costs_its_trajectory_the_score(nest):
    """A mean without the turn would be higher than with its grade. The last row repeats texts, which are cached."""
    rows = [spoke("0.9", "0.1"), spoke("0.9", "??"), spoke("0.9", "??")]
    result = PerTurn(nest(Grades())).assess(rows)
    assert np.isnan(result.scores).tolist() == [False, True, True]
    assert [np.isnan(turns).tolist() for turns in result.turns] == [[False, False], [False, True], [False, True]]


def test_turn_to_which_a_check_does_not_apply_is_left_out():
    result = PerTurn(Gate(CHECK, Grades())).assess([spoke("0.9", "skip"), spoke("skip")])
    assert values([result.scores]) == [[pytest.approx(0.9), None]]
