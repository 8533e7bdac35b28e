"""Custom combiners."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_verifiers import LowerConfidenceBound, combiners

from .simulated import judges, played  # noqa: TID252 (tests are no installed package)


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> type[combiners.Combiner]:
    monkeypatch.setattr(combiners, "_KINDS", dict(combiners._KINDS))

    @combiners.register
    class Least(combiners.Combiner):
        """The least score, and how far the greatest is from it."""

        name: ClassVar[str] = "least"
        has_uncertainty: ClassVar[bool] = True

        def _fit(self, scores, groups, labels, asked):
            return {}

        def _predict(self, scores, groups, asked):
            return np.nanmin(scores, axis=1)

        def _uncertainty(self, scores, groups, asked):
            return np.nanmax(scores, axis=1) - np.nanmin(scores, axis=1)

    return Least


def test_a_registered_combiner_serves_an_ensemble_and_its_uncertainty_counts(least) -> None:
    assert "least" in combiners.names() and isinstance(combiners.get("least"), least)
    rows = played(0)
    votes = np.array([t.info["votes"] for t in rows])[:, : len(judges())]
    result = Ensemble(judges(), "least").assess(rows)
    np.testing.assert_allclose(result.scores, votes.min(axis=1))
    np.testing.assert_allclose(result.noise, votes.max(axis=1) - votes.min(axis=1))
    assert Ensemble(judges(), "least", lower_bound=LowerConfidenceBound()).score(rows).max() <= result.scores.max()


def test_a_name_is_taken_once_and_a_cell_may_run_twice(least) -> None:
    assert combiners.register(least) is least
    with pytest.raises(ValueError, match="Choose another name"):
        combiners.register(type("Mean", (combiners.Mean,), {}))
    with pytest.raises(ValueError, match="has no name"):
        combiners.register(type("Nameless", (combiners.Mean,), {"name": ""}))
    with pytest.raises(TypeError, match="derived from"):
        combiners.register(Rule)


def test_only_combiners_with_an_uncertainty_return_one() -> None:
    s = np.random.default_rng(0).random((40, 3))
    for name in combiners.names():
        model = combiners.get(name).fit(s, labels=np.arange(40) % 2)
        deviation = model.predict(s)[1]
        assert (deviation.shape == (40,)) if model.has_uncertainty else deviation is None
