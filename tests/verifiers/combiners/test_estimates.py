"""Estimates of the verifiers come with standard errors, and with a direction only where the data show it."""

from __future__ import annotations

import numpy as np
import pytest

from forge_verifiers import combiners

from .regimes import Floats, auroc  # noqa: TID252 (tests are no installed package)


def votes(seed: int, accuracies: tuple[float, ...], *, n: int = 600, abstain: float = 0.0) -> tuple[Floats, np.ndarray]:
    rng = np.random.default_rng([51, seed, n])
    y = rng.integers(0, 2, n)
    s = np.where(rng.random((n, len(accuracies))) < accuracies, y[:, None], 1 - y[:, None]).astype(float)
    s[rng.random(s.shape) < abstain] = np.nan
    return s, y


@pytest.mark.parametrize("accuracies", [(0.9, 0.8, 0.7, 0.6), (0.85, 0.8, 0.75), (0.8, 0.7, 0.65, 0.3)])
def test_sixty_percent_abstentions_still_beat_the_mean(accuracies: tuple[float, ...]) -> None:
    ours, mean, best = [], [], []
    for seed in range(4):
        s, y = votes(seed, accuracies, n=2000, abstain=0.6)
        ours.append(auroc(y, combiners.get("default").fit_predict(s)))
        mean.append(auroc(y, combiners.get("mean").fit_predict(s)))
        log_odds = np.log(np.array(accuracies) / (1 - np.array(accuracies)))
        best.append(auroc(y, np.nan_to_num(s - 0.5) @ log_odds))
    assert np.mean(ours) > np.mean(mean) + 0.01 and np.mean(ours) > np.mean(best) - 0.02


@pytest.mark.parametrize("name", ["default", "dawid-skene"])
@pytest.mark.parametrize("abstain", [0.0, 0.6])
def test_errors_cover_the_true_rates(name: str, abstain: float) -> None:
    inside, wrong = [], 0
    for seed in range(24):
        accuracies = np.random.default_rng([52, seed]).uniform(0.6, 0.9, 5)
        s, _ = votes(seed, tuple(accuracies), n=1000, abstain=abstain)
        report = combiners.get(name).fit(s).report()
        inside += (np.abs(report.tpr - accuracies) < 1.96 * report.tpr_error).tolist()
        inside += (np.abs(report.fpr - (1 - accuracies)) < 1.96 * report.fpr_error).tolist()
        wrong += int((report.side < 0).sum())
    assert np.mean(inside) > 0.9 and wrong == 0


def test_few_rows_and_many_abstentions_give_no_direction() -> None:
    for seed in range(10):
        s, _ = votes(seed, (0.7, 0.65, 0.6, 0.35), n=100, abstain=0.6)
        report = combiners.get("default").fit(s).report()
        assert (report.side == 0).all(), seed
        assert report.tpr_error.min() > 0.15


def test_many_rows_give_the_direction_of_every_verifier() -> None:
    s, _ = votes(0, (0.85, 0.8, 0.75, 0.7, 0.25), n=2000)
    s = np.column_stack([s, np.ones(len(s))])
    report = combiners.get("default").fit(s).report()
    assert report.side.tolist() == [1, 1, 1, 1, -1, 0]
    assert report.tpr_error[:5].max() < 0.05 and np.isnan(report.tpr_error[5])


def test_contradicting_hypotheses_widen_the_errors() -> None:
    rng = np.random.default_rng(3)
    sides = rng.integers(0, 2, (2, 1200))
    sides = [np.where(rng.random((1200, 3)) < 0.92, v[:, None], 1 - v[:, None]) for v in sides]
    s = np.column_stack(sides).astype(float)
    open_question = combiners.get("default").fit(s).report()
    decided = combiners.get("default", families=[None] * 3 + ["copies"] * 3).fit(s).report()
    assert open_question.tpr_error.min() > 3 * decided.tpr_error[:3].max()
    assert open_question.side.tolist() == [0] * 6 and decided.side[:3].tolist() == [1, 1, 1]
    assert open_question.weight_error.max() > 0.1 > decided.weight_error.max()


def test_combiners_without_estimates_report_nan() -> None:
    s, _ = votes(1, (0.8, 0.7, 0.6))
    for name in ("mean", "majority"):
        report = combiners.get(name).fit(s).report()
        assert np.isnan(report.tpr_error).all() and (report.side == 0).all()


@pytest.mark.parametrize("name", ["default", "dawid-skene", "weaver"])
def test_single_verifier_has_no_direction(name: str) -> None:
    s, y = votes(0, (0.7,))
    fitted = combiners.get(name)
    assert auroc(y, fitted.fit_predict(s)) == pytest.approx(auroc(y, s[:, 0]))
    assert fitted.report().side.tolist() == [0]
