"""The published combiners agree with independent implementations of their equations."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression

from forge_verifiers import combiners

from .regimes import accuracy, crowd_kit, graded, votes  # noqa: TID252 (tests are no installed package)


def weaver_by_gradient_descent(votes_nm: np.ndarray, pi: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Second-moment matching over TPR and FPR themselves (arXiv 2506.18203), all four cells of every pair."""
    n, m = votes_nm.shape
    both = np.stack([1 - votes_nm, votes_nm])  # [value, n, m]
    joint = np.einsum("ani,bnj->abij", both, both) / n
    off = ~np.eye(m, dtype=bool)
    rate = votes_nm.mean(axis=0)

    def loss(x: np.ndarray) -> float:
        p1, p0 = x[:m], x[m:]
        right, wrong = np.stack([1 - p1, p1]), np.stack([1 - p0, p0])
        model = (
            pi * right[:, None, :, None] * right[None, :, None, :]
            + (1 - pi) * wrong[:, None, :, None] * wrong[None, :, None, :]
        )
        marginal = pi * p1 + (1 - pi) * p0 - rate
        return float(((joint - model)[:, :, off] ** 2).sum() + 1e3 * (marginal**2).sum())

    result = minimize(
        loss,
        np.r_[np.clip(rate + 0.2, 0, 1), np.clip(rate - 0.2, 0, 1)],
        method="L-BFGS-B",
        options={"maxiter": 3000, "maxfun": 500_000, "ftol": 1e-15, "gtol": 1e-10},
    )
    tpr, fpr = np.clip(result.x[:m], 0.01, 0.99), np.clip(result.x[m:], 0.01, 0.99)
    evidence = votes_nm @ np.log(tpr / fpr) + (1 - votes_nm) @ np.log((1 - tpr) / (1 - fpr))
    return tpr, fpr, expit(logit(pi) + evidence)


def test_weaver_matches_gradient_descent_on_its_moments() -> None:
    s, _, y = votes(0, m=7)
    labels = y.astype(float)
    model = combiners.get("weaver").fit(s, labels=labels)
    report = model.report()
    assert (report.weight == 1).all()
    tpr, fpr, posterior = weaver_by_gradient_descent(s, report.class_balance)
    np.testing.assert_allclose(report.tpr, tpr, atol=0.01)
    np.testing.assert_allclose(report.fpr, fpr, atol=0.01)
    np.testing.assert_allclose(model.predict_proba(s), posterior, atol=0.02)


def test_weaver_reads_abstentions_as_incorrect() -> None:
    s, _, _ = votes(1)
    model = combiners.get("weaver").fit(s)
    silent = s.copy()
    silent[:, 2] = np.nan
    zero = s.copy()
    zero[:, 2] = 0.0
    np.testing.assert_array_equal(model.predict_proba(silent), model.predict_proba(zero))


def test_weaver_drops_verifiers_with_extreme_yes_rates() -> None:
    s, _, _ = votes(2)
    s = np.hstack([s, (np.random.default_rng(0).random((len(s), 1)) < 0.97).astype(float)])
    weight = combiners.get("weaver").fit(s).report().weight
    assert weight[-1] == 0
    assert weight[:-1].sum() >= 10


def test_weaver_tunes_its_threshold_on_labels() -> None:
    rng = np.random.default_rng(3)
    y = rng.integers(0, 2, 2000)
    s = np.exp(1.2 * (y[:, None] + rng.standard_normal((2000, 6))))  # min-max 0.5 says no to nearly all
    labels = np.where(np.arange(2000) < 200, y, np.nan)
    blind, told = combiners.get("weaver").fit_predict(s), combiners.get("weaver").fit_predict(s, labels=labels)
    assert accuracy(y, told) > accuracy(y, blind) + 0.02


def test_weaver_needs_no_labels_for_the_class_balance() -> None:
    for pi in (0.3, 0.7):
        s, _, y = votes(4, n=4000, pi=pi)
        assert abs(combiners.get("weaver").fit(s).report().class_balance - y.mean()) < 0.08


def test_dawid_skene_agrees_with_crowd_kit() -> None:
    s, _, y = votes(5, n=1000)
    ours, theirs = combiners.get("dawid-skene").fit_predict(s), crowd_kit(s)
    assert ((ours > 0.5) == (theirs > 0.5)).mean() > 0.99
    assert abs(accuracy(y, ours) - accuracy(y, theirs)) < 0.01


def test_logistic_agrees_with_scikit_learn() -> None:
    s, _, y = votes(6, n=400)
    labels = np.where(np.arange(400) < 200, y, np.nan)
    ours = combiners.get("logistic").fit_predict(s, labels=labels)
    theirs = LogisticRegression(C=1.0, tol=1e-8).fit(s[:200] - 0.5, y[:200]).predict_proba(s - 0.5)[:, 1]
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_mean_weighs_a_family_as_one_verifier() -> None:
    s = np.array([[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    np.testing.assert_allclose(combiners.get("mean").fit_predict(s), [0.25, 0.75])
    np.testing.assert_allclose(combiners.get("mean", families=["a", "a", "a", None]).fit_predict(s), [0.5, 0.5])
    np.testing.assert_allclose(combiners.get("mean", families={0: "a", 1: "a", 2: "a"}).fit_predict(s), [0.5, 0.5])
    np.testing.assert_allclose(combiners.get("mean", anchors=[3]).fit_predict(s), [0.5, 0.5])


def test_majority_counts_votes() -> None:
    s = np.array([[0.0, 0.4, 1.0], [1.0, 1.0, np.nan], [0.2, 0.0, 0.0]])
    np.testing.assert_allclose(combiners.get("majority").fit_predict(s), [1 / 3, 1.0, 0.0])


def test_every_combiner_takes_graded_scores_with_gaps() -> None:
    s, g, y = graded(6, prompts=40)
    labels = np.where(np.arange(len(y)) % 10 == 0, y, np.nan)
    for name in combiners.names():
        p = combiners.get(name).fit_predict(s, g, labels)
        assert accuracy(y, p) > 0.6, name
