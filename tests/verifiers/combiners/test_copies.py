"""Copies do not elect themselves, whether the copied verifier is good, weak or adversarial."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from forge_verifiers import combiners

from .copies import NEAR, Cell, areas, grid  # noqa: TID252 (tests are no installed package)
from .regimes import auroc  # noqa: TID252


def default(cell: Cell, **kwargs) -> float:
    s, g, y = cell.make()
    return auroc(y, combiners.get("default", **kwargs).fit_predict(s, g))


def test_default_is_near_the_best_peer_on_the_grid_of_copies() -> None:
    results = [areas(cell) for cell in grid(every=9)]
    best = [max(value for name, value in each.items() if name != "default") for each in results]
    near = [each["default"] >= top - NEAR for each, top in zip(results, best, strict=True)]
    assert np.mean(near) >= 0.95
    assert not [each for each in results if each["default"] < 0.5 <= each["mean"]]
    for peer, share in (("mean", 0.75), ("dawid-skene", 0.5), ("discounted EM", 0.8)):  # so the bound means something
        assert np.mean([each[peer] >= top - NEAR for each, top in zip(results, best, strict=True)]) < share, peer


@pytest.mark.parametrize("rows", [600, 2000])
@pytest.mark.parametrize(
    ("cell", "least"),  # quality of the copied verifier, copies, noise, accuracies of the others
    [
        ((0.6, 4, 0.015, (0.9, 0.9)), 0.93),
        ((0.25, 2, 0.03, (0.8, 0.65, 0.6)), 0.85),
        ((0.2, 4, 0.03, (0.9, 0.82, 0.96)), 0.97),
        ((0.5, 6, 0.05, (0.9, 0.85, 0.7)), 0.93),
        ((0.95, 3, 0.02, (0.6, 0.65)), 0.93),
        ((0.95, 6, 0.0, (0.9, 0.85, 0.8, 0.75)), 0.98),
    ],
)
def test_copies_count_once(cell: tuple, least: float, rows: int) -> None:
    assert np.mean([default(Cell(*cell, rows, seed)) for seed in range(3)]) > least


def test_copies_found_count_as_copies_declared() -> None:
    cell = Cell(0.25, 3, 0.03, (0.85, 0.75, 0.7), 1000, 1)
    assert abs(default(cell) - default(cell, families=[None] * 3 + ["copy"] * 3)) < 0.01


def test_two_equal_groups_warn_and_five_labels_or_a_family_decide(caplog: pytest.LogCaptureFixture) -> None:
    """Three verifiers follow one opinion and three another. Either may be right."""
    rng = np.random.default_rng(3)
    y, other = rng.integers(0, 2, (2, 1200))
    s = np.column_stack([np.where(rng.random((1200, 3)) < 0.92, v[:, None], 1 - v[:, None]) for v in (y, other)])
    model = combiners.get("default")
    with caplog.at_level(logging.WARNING):
        model.fit(s)
        model.fit(s)
    assert len([r for r in caplog.records if "five labels" in r.getMessage()]) == 1
    mean = combiners.get("mean").fit_predict(s)
    assert np.corrcoef(model.predict_proba(s), mean)[0, 1] > 0.95
    rows = np.flatnonzero(y != other)[:5]
    declared = [None] * 3 + ["copies"] * 3
    for truth, families in ((y, declared), (other, declared[::-1])):
        labels = np.full(1200, np.nan)
        labels[rows] = truth[rows]
        assert auroc(truth, combiners.get("default").fit_predict(s, labels=labels)) > 0.95
        assert auroc(truth, combiners.get("default", families=families).fit_predict(s)) > 0.95


def test_good_verifiers_that_agree_are_not_copies_when_nothing_contradicts_them() -> None:
    for accuracies in ((0.95,) * 5, (0.97, 0.9, 0.6), (0.99, 0.9, 0.8, 0.7, 0.6, 0.55)):
        rng = np.random.default_rng(4)
        y = rng.integers(0, 2, 1500)
        s = np.where(rng.random((1500, len(accuracies))) < accuracies, y[:, None], 1 - y[:, None]).astype(float)
        model = combiners.get("default").fit(s, np.arange(1500) // 8)
        assert model.report().weight.min() > 0.6, accuracies
