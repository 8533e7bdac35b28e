"""Copies do not elect themselves, whether the copied verifier is good, weak or adversarial."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from forge_verifiers import combiners

from .copies import NEAR, Cell, areas, grid  # noqa: TID252 (tests are no installed package)
from .regimes import Case, auroc  # noqa: TID252


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


@pytest.mark.parametrize(
    ("cell", "least"),  # quality of the copied verifier, copies, noise, accuracies of the others, rows
    [
        ((0.6, 4, 0.015, (0.9, 0.9), 2000), 0.93),
        ((0.25, 2, 0.03, (0.8, 0.65, 0.6), 600), 0.85),
        ((0.2, 4, 0.03, (0.9, 0.82, 0.96), 2000), 0.97),
        ((0.5, 6, 0.05, (0.9, 0.85, 0.7), 600), 0.93),
        ((0.95, 3, 0.02, (0.6, 0.65), 600), 0.93),
        ((0.95, 6, 0.0, (0.9, 0.85, 0.8, 0.75), 2000), 0.98),
    ],
)
def test_copies_count_once(cell: tuple, least: float) -> None:
    assert np.mean([default(Cell(*cell, seed)) for seed in range(3)]) > least


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


def criteria(
    noise: float,
    copies: int,
    good: int,
    *,
    opposed: bool = False,
    graded: bool = False,
    rows: int = 1000,
    seed: int = 0,
) -> Case:
    """`good` verifiers that are right in 75 % of the rows, and `copies` of another criterion with this noise."""
    rng = np.random.default_rng([33, seed])
    y = rng.integers(0, 2, rows)
    criterion = np.where(rng.random(rows) < (0.25 if opposed else 0.5), y, 1 - y)
    followed = np.column_stack([*[y] * good, *[criterion] * copies])
    accuracy = np.array([0.75] * good + [1 - noise] * copies)
    if graded:
        r = 2 * accuracy - 1
        z = r * (2 * followed - 1) + np.sqrt(1 - r**2) * rng.standard_normal(followed.shape)
        return 1 / (1 + np.exp(-z)), np.arange(rows) // 8, y
    right = rng.random(followed.shape) < accuracy
    return np.where(right, followed, 1 - followed).astype(float), np.arange(rows) // 8, y


def correlation(p: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(p, y)[0, 1])


CASES = [(0.25, 5, 3), (0.2, 7, 2), (0.2, 6, 4), (0.2, 4, 5), (0.3, 4, 2), (0.3, 7, 5)]
"""Noise, number of copies and of good verifiers."""


@pytest.mark.parametrize(
    ("case", "opposed", "graded"),  # each case with both values of both, and both values with each other
    [(case, opposed, opposed ^ number % 2 == 1) for number, case in enumerate(CASES) for opposed in (False, True)],
)
def test_unrelated_criterion_keeps_the_mean_and_labels_or_an_anchor_decide(
    case: tuple[float, int, int], opposed: bool, graded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    noise, copies, good = case
    s, g, y = criteria(noise, copies, good, opposed=opposed, graded=graded)
    mean = correlation(combiners.get("mean").fit_predict(s, g), y)
    with caplog.at_level(logging.WARNING):
        p = combiners.get("default").fit_predict(s, g)
    assert correlation(p, y) > mean - 0.05
    (warned,) = [record.getMessage() for record in caplog.records if "copies" in record.getMessage()]
    groups = [", ".join(f"column {k}" for k in group) for group in (range(good), range(good, good + copies))]
    assert all(f"[{group}]" in warned for group in groups) and "twenty" in warned
    labels = np.full(len(y), np.nan)
    labels[::10] = y[::10]
    known = correlation(combiners.get("mean").fit_predict(s[:, :good], g), y)
    assert correlation(combiners.get("default").fit_predict(s, g, labels), y) > known - 0.07
    assert correlation(combiners.get("default", anchors=[0]).fit_predict(s, g), y) > known - 0.07


@pytest.mark.parametrize("rows", [200, 5000])
@pytest.mark.parametrize("noise", [0.15, 0.25])
def test_unrelated_criterion_does_not_win_with_few_or_many_rows(rows: int, noise: float) -> None:
    """Two hundred rows show the two criteria in most samples, but not in all."""
    lost = []
    for seed in range(4):
        s, g, y = criteria(noise, 5, 4, rows=rows, seed=seed)
        default, mean = (correlation(combiners.get(name).fit_predict(s, g), y) for name in ("default", "mean"))
        lost.append(mean - default)
    assert np.median(lost) < 0.05


def test_few_rows_need_less_evidence_of_a_second_criterion_to_stay_with_the_mean() -> None:
    """Two correct verifiers against seven: with the full cost of the choice, 19 of these 24 cases lost."""
    lost = 0
    for noise in (0.15, 0.2, 0.25, 0.3):
        for seed in range(6):
            s, g, y = criteria(noise, 7, 2, opposed=True, rows=200, seed=seed)
            default, mean = (correlation(combiners.get(name).fit_predict(s, g), y) for name in ("default", "mean"))
            lost += default < mean - 0.05
    assert lost < 12


def test_noise_among_good_verifiers_is_no_second_criterion(caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(6):
        s, g, y = criteria(0.5, 4, 4, seed=seed)
        with caplog.at_level(logging.WARNING):
            p = combiners.get("default").fit_predict(s, g)
        assert correlation(p, y) > correlation(s[:, :4].mean(axis=1), y) - 0.03, seed
    assert not [record for record in caplog.records if "copies" in record.getMessage()]
