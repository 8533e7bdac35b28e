import math

import numpy as np
import pytest

from forge_agents.types import Trajectory, Turn
from forge_verifiers import Composable, Ensemble, Gate, Rule, ScoreError, Seat, Sum, checked_scores


def told(value, agent="a", seed=0):
    turn = Turn(agent=agent, index=0, observation="", action=str(value), reward=0.0)
    return Trajectory(agent=agent, policy="p", turns=(turn,), env_id="t", seed=seed)


def reads(name="reads", **kwargs):
    return Rule(lambda t: float(t.turns[0].action), name=name, **kwargs)


def always(value, name="always"):
    return Rule(lambda t: value, name=name)


ROWS = [told(0.0), told(0.5), told(1.0)]


def test_sums_and_weights():
    assert (0.5 * reads() + 0.5 * always(1.0))(ROWS).tolist() == [0.5, 0.75, 1.0]
    assert (0.5 * reads()).score(ROWS).tolist() == [0, 0.25, 0.5]
    assert (reads() + always(1.0)).score(ROWS).tolist() == [0.5, 0.75, 1.0]
    three = 0.5 * (reads() + always(0.0)) + always(1.0) * 0.25
    assert [w for w, _ in three.terms] == [0.5, 0.5, 0.25]
    assert three.name == "0.5*reads + 0.5*always + 0.25*always"
    assert sum([reads(), always(1.0)]).score(ROWS).tolist() == [0.5, 0.75, 1.0]


def test_a_term_that_abstains_leaves_its_weight_to_the_others():
    assert (0.25 * always(None) + 0.75 * reads()).score(ROWS).tolist() == [0, 0.5, 1]
    assert np.isnan((always(None) + always(None)).score(ROWS)).all()


@pytest.mark.parametrize("weight", [0, -1, math.inf, math.nan])
def test_weights_must_be_positive(weight):
    with pytest.raises(ValueError, match="reads"):
        weight * reads()


def test_a_gate_zeroes_what_fails_and_spares_the_rest_the_question():
    asked = []
    judge = Rule(lambda t: asked.append(t) or 0.7, name="judge", cost="expensive")
    gate = Gate(reads("check"), judge)
    assert gate.score(ROWS).tolist() == pytest.approx([0, 0.7, 0.7])
    assert asked == ROWS[1:] and gate.cost == "expensive"
    assert np.isnan(Gate(always(None), judge).score(ROWS)).all()


def test_seats_are_judged_by_their_own_verifier():
    both = [told(0.25, "asker"), told(0.5, "answerer")]
    seat = Seat("answerer", reads())
    assert seat.name == "answerer:reads"
    assert seat.score(both).tolist() == pytest.approx([math.nan, 0.5], nan_ok=True)
    assert (seat + Seat("asker", always(1.0))).score(both).tolist() == [1.0, 0.5]


class Odd(Composable):
    name, family, cost = "odd", None, "cheap"

    def __init__(self, returns):
        self.returns = returns

    def score(self, trajectories):
        return self.returns


@pytest.mark.parametrize("returns", [[0.1], [0, 1, 2], [0, 0, -0.5], [0, 0, math.inf], "abc", [[0], [0], [0]], None])
def test_scores_against_the_contract_name_the_verifier(returns):
    for verifier in (Odd(returns), 0.5 * Odd(returns), Gate(always(True), Odd(returns)), Ensemble([Odd(returns)])):
        with pytest.raises(ScoreError, match="'odd'"):
            checked_scores(verifier, ROWS)


def test_state_is_nested():
    def build():
        return Gate(always(True), 0.5 * Ensemble([reads(), always(0.5)]) + 0.5 * Seat("a", Ensemble([reads()])))

    one, other = build(), build()
    one.score(ROWS)
    other.load_state_dict(one.state_dict())
    assert "then/0/version" in one.state_dict() and "then/1/verifier/version" in one.state_dict()
    assert one.score(ROWS).tobytes() == other.score(ROWS).tobytes()
    with pytest.raises(ValueError, match="no part"):
        other.load_state_dict({"elsewhere/x": np.array(1)})


def test_a_sum_needs_terms():
    with pytest.raises(ValueError, match="no terms"):
        Sum([])
