"""Rows with fewer verifiers earn neither more nor less."""

import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_verifiers import Assessment, Cascade, Composable, SoftMinimum

from .simulated import auroc, played  # noqa: TID252 (tests are no installed package)

COMBINERS = ["mean", "majority", "dawid-skene", "weaver", "default"]


class Strict(Composable):
    """Rejects most answers, right or wrong, and may be down."""

    name, family = "strict", None

    def __init__(self, cost="cheap"):
        self.cost, self.down = cost, False

    def score(self, trajectories):
        if self.down:
            raise ConnectionError("down")
        return np.array([t.info["truth"] and t.info["luck"] < 0.4 for t in trajectories], np.float32)


def lenient(k):
    """Says yes to most."""
    return Rule(lambda t: max(t.info["votes"][k], float(t.info["luck"] * 7 * (k + 1) % 1 < 0.4)), name=f"lenient{k}")


def taught(combine, others=4, **kwargs):
    strict = Strict(kwargs.pop("cost", "cheap"))
    ensemble = Ensemble([*(lenient(k) for k in range(others)), strict], combine, **kwargs)
    for call in range(8):
        ensemble.score(played(call))
    ensemble.learning = False
    return ensemble, strict


ROWS = [t for call in range(20) for t in played(50 + call)]


@pytest.mark.parametrize("combine", COMBINERS)
@pytest.mark.parametrize("others", [1, 4])
def test_leaving_out_a_strict_verifier_does_not_move_the_mean(combine, others):
    ensemble, strict = taught(combine, others)
    whole = ensemble.score(ROWS)
    strict.down = True
    part = ensemble.score(ROWS)
    assert part.mean() == pytest.approx(whole.mean(), abs=0.03)
    assert auroc(part, ROWS) > 0.55


@pytest.mark.parametrize("combine", COMBINERS)
def test_soft_minimum_ignores_the_strictness_of_missing_verifiers(combine):
    """Its mean over sources, which is what a large beta gives, is that of the whole panel."""
    plain, _ = taught(combine)
    careful, _ = taught(combine, lower_bound=SoftMinimum(beta=1e4))
    assert careful.score(ROWS).mean() == pytest.approx(plain.score(ROWS).mean(), abs=0.03)


@pytest.mark.parametrize("combine", COMBINERS)
def test_cascade_rewards_equal_those_of_all_verifiers(combine):
    cascade = Cascade(warm_up_rows=1, verified_share=0.5, undecided=(0.3, 0.6))
    plain, _ = taught(combine, cost="model")
    spared, _ = taught(combine, cost="model", cascade=cascade)
    rewards = spared.score(ROWS)
    skipped = spared.report().verifiers[-1].skipped
    assert skipped > 200
    assert rewards.mean() == pytest.approx(plain.score(ROWS).mean(), abs=0.06)


def test_empty_and_complete_rows_are_not_shifted():
    ensemble, strict = taught("mean")
    before = ensemble.score(ROWS)
    assert before.tobytes() == taught("mean")[0].score(ROWS).tobytes()
    values = ensemble._combiner.predict_proba(ensemble.scores(ROWS))
    np.testing.assert_array_equal(before, values.astype(np.float32))
    strict.down = True
    one, other = ensemble.score(ROWS), ensemble.score(ROWS[::-1])[::-1]
    np.testing.assert_array_equal(one, other)


def test_failed_term_of_a_sum_earns_nothing():
    """Equal episodes of a group, of which one makes the strict term fail."""

    class Late(Strict):
        def assess(self, trajectories):
            scores = np.where(np.arange(len(trajectories)) == 3, np.float32(np.nan), np.float32(0.25))
            return Assessment(scores=scores, failed={3: "late"})

    rows = ROWS[:8]
    lenient = Rule(lambda t: 0.75, name="lenient")
    assert (0.5 * Late() + 0.5 * lenient).score(rows).tolist() == [0.5] * 8
    silent = Rule(lambda t: None, name="silent")
    alone = (0.5 * Late() + 0.5 * silent).assess(rows)
    assert np.flatnonzero(np.isnan(alone.scores)).tolist() == [3] and list(alone.failed) == [3]
