"""Rows with fewer queried verifiers are comparable, and failed or skipped calls are no evidence."""

from __future__ import annotations

import numpy as np
import pytest

from forge_verifiers import combiners

from .regimes import Case, accuracy, calibration_error  # noqa: TID252 (tests are no installed package)


def strict_first(lenient: int) -> Case:
    """A verifier that says yes to few right answers and to no wrong one, and lenient ones that say yes to most."""
    rng = np.random.default_rng([31, lenient])
    y = rng.integers(0, 2, 2000)
    u = rng.random((2000, 1 + lenient))
    yes = np.where(y[:, None] == 1, np.r_[0.5, np.full(lenient, 0.95)], np.r_[0.02, np.full(lenient, 0.45)])
    return (u < yes).astype(float), np.arange(2000) // 8, y.astype(np.intp)


def test_rows_without_queried_verifiers_get_the_usual_mean() -> None:
    s, g, _ = strict_first(3)
    model = combiners.get("mean").fit(s, g)
    nobody = np.zeros((1, 4), bool)
    np.testing.assert_allclose(model.predict_proba(s[:1], queried=nobody), model.predict_proba(s).mean(), atol=0.02)


def test_failures_are_no_evidence_but_abstentions_are() -> None:
    rng = np.random.default_rng(5)
    y = rng.integers(0, 2, 3000)
    s = np.where(rng.random((3000, 5)) < 0.8, y[:, None], 1 - y[:, None]).astype(float)
    quiet = rng.random(3000) < np.where(y == 1, 0.1, 0.6)
    s[quiet, 4] = np.nan
    spoken = np.where(np.isnan(s), 0.5, s)[:1]
    spoken[0, 4] = np.nan
    asked = ~np.isnan(s)
    told, failed = combiners.get("default").fit(s), combiners.get("default").fit(s, queried=asked)
    out = np.array([[True, True, True, True, False]])
    assert failed.predict_proba(spoken) == pytest.approx(failed.predict_proba(spoken, queried=out), abs=1e-6)
    assert told.predict_proba(spoken)[0] < told.predict_proba(spoken, queried=out)[0] - 0.1


def test_random_partial_scores_stay_calibrated() -> None:
    rng = np.random.default_rng(6)
    y = rng.integers(0, 2, 3000)
    right = rng.random((3000, 7)) < [0.9, 0.85, 0.8, 0.8, 0.75, 0.7, 0.7]
    s = np.where(right, y[:, None], 1 - y[:, None]).astype(float)
    p = combiners.get("default").fit_predict(s, queried=rng.random(s.shape) < 0.35)
    assert calibration_error(y, p, bins=10) < 0.04 and accuracy(y, p) > 0.82


@pytest.mark.parametrize("name", ["mean", "majority", "dawid-skene", "weaver", "default"])
def test_scores_of_unqueried_verifiers_are_ignored(name):
    rng = np.random.default_rng(0)
    right = rng.random(400) < 0.5
    votes = np.where(rng.random((400, 5)) < 0.75, right[:, None], ~right[:, None]).astype(float)
    asked = rng.random(votes.shape) < 0.8
    changed = np.where(asked, votes, 1 - votes)
    one, other = (combiners.get(name).fit(scores, queried=asked) for scores in (votes, changed))
    assert one.predict_proba(votes).tobytes() == other.predict_proba(votes).tobytes()
    with pytest.raises(ValueError, match="queried arrived as"):
        combiners.get(name).fit(votes, queried=asked[:, :4])
