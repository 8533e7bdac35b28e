"""Synthetic score matrices with known truth: scores [n, m], groups [n] and truth [n] from a seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Case = tuple[Floats, NDArray[np.intp], NDArray[np.intp]]


def votes(seed: int, *, n: int = 2000, m: int = 12, pi: float = 0.5) -> Case:
    """Conditionally independent yes/no verifiers of mixed quality."""
    rng = np.random.default_rng([1, seed])
    y = (rng.random(n) < pi).astype(np.intp)
    tpr, tnr = rng.uniform(0.58, 0.85, m), rng.uniform(0.58, 0.85, m)
    u = rng.random((n, m))
    return np.where(y[:, None] == 1, u < tpr, u < 1 - tnr).astype(float), np.arange(n) // 8, y


def clones(seed: int, *, n: int = 2000) -> Case:
    """Five weak near-copies, three near-copies, four better independent verifiers."""
    rng = np.random.default_rng([2, seed])
    y = (rng.random(n) < 0.5).astype(np.intp)

    def cluster(size: int, accuracy: float, copied: float) -> Floats:
        lead = np.where(rng.random(n) < accuracy, y, 1 - y)
        own = np.where(rng.random((n, size)) < accuracy, y[:, None], 1 - y[:, None])
        return np.where(rng.random((n, size)) < copied, lead[:, None], own).astype(float)

    good = [np.where(rng.random(n) < a, y, 1 - y).astype(float) for a in (0.72, 0.75, 0.78, 0.80)]
    return np.column_stack([cluster(5, 0.62, 0.9), cluster(3, 0.66, 0.85), *good]), np.arange(n) // 8, y


def graded(
    seed: int, *, prompts: int = 250, k: int = 16, quirk: float = 0.6, base: tuple[float, float] = (0.7, 0.9)
) -> Case:
    """Logits, probabilities, Likert, skewed, yes/no scores, prompt bias. Half share a preference, 10 % abstain."""
    rng = np.random.default_rng([3, seed])
    n, m = prompts * k, 14
    g = np.repeat(np.arange(prompts), k)
    rate = rng.beta(*base, prompts)
    y = (rng.random(n) < rate[g]).astype(np.intp)
    hard = (rng.standard_normal(prompts) - 1.2 * (rate - rate.mean()))[g]
    liking = rng.standard_normal(n)[:, None] * np.where(np.arange(m) < 7, quirk, 0.0)
    z = rng.uniform(0.5, 1.6, m) * (y[:, None] - 0.5) - rng.uniform(0.1, 0.5, m) * hard[:, None] + liking
    z += rng.standard_normal((n, m))
    shapes = (
        lambda x: 4 * x - 2,
        lambda x: 1 / (1 + np.exp(-2.5 * x - 1)),
        lambda x: np.clip(np.round(3 + 1.4 * x), 1, 5),
        lambda x: np.exp(1.2 * x),
        lambda x: (x > 0.15).astype(float),
    )
    s = np.column_stack([shapes[j % 5](z[:, j]) for j in range(m)])
    s[rng.random(s.shape) < 0.10] = np.nan
    return s, g, y


def outvoted(seed: int) -> Case:
    """Five correlated reward models against one better judge."""
    rng = np.random.default_rng([4, seed])
    n = 2000
    g = np.arange(n) // 8
    y = (rng.random(n) < rng.beta(1, 1, n // 8)[g]).astype(np.intp)
    shared = rng.standard_normal(n)
    models = [0.7 * (y - 0.5) + shared + 0.5 * rng.standard_normal(n) for _ in range(5)]
    judge = np.round(1.5 * (1.8 * (y - 0.5) + rng.standard_normal(n)))
    return np.column_stack([*models, judge]), g, y


def silent_truth(seed: int) -> Case:
    """Verifiers abstain three times as often on wrong responses."""
    s, g, y = votes(seed)
    rng = np.random.default_rng([5, seed])
    s[rng.random(s.shape) < np.where(y[:, None] == 1, 0.15, 0.45)] = np.nan
    return s, g, y


def cascade(seed: int) -> Case:
    """The last four of eight verifiers are asked only where the first two disagree."""
    s, g, y = votes(seed, m=8)
    s[s[:, 0] == s[:, 1], 4:] = np.nan
    return s, g, y


def crowd_kit(s: Floats) -> Floats:
    """The answers [n] of Dawid and Skene's EM in crowd-kit to complete votes [n, m]."""
    from crowdkit.aggregation import DawidSkene
    from pandas import DataFrame

    rows = [(i, k, int(s[i, k])) for i in range(len(s)) for k in range(s.shape[1])]
    answers = DawidSkene(n_iter=100).fit_predict(DataFrame(rows, columns=["task", "worker", "label"]))
    return np.asarray(answers.sort_index().to_numpy(float))


def auroc(y: NDArray[np.intp], p: Floats) -> float:
    """Area under the ROC curve, ties counted half."""
    order = np.unique(p, return_inverse=True, return_counts=True)
    rank = (np.cumsum(order[2]) - (order[2] - 1) / 2)[order[1]]
    right, wrong = int(y.sum()), int((1 - y).sum())
    return float((rank[y == 1].sum() - right * (right + 1) / 2) / (right * wrong))


def accuracy(y: NDArray[np.intp], p: Floats) -> float:
    """Share of rows on the right side of one half."""
    return float(((p > 0.5) == (y == 1)).mean())


def calibration_error(y: NDArray[np.intp], p: Floats, bins: int = 15) -> float:
    """Expected calibration error over equal-width bins."""
    b = np.minimum((p * bins).astype(int), bins - 1)
    return float(np.abs(np.bincount(b, y, bins) - np.bincount(b, p, bins)).sum() / len(y))


def best_of(y: NDArray[np.intp], p: Floats, g: NDArray[np.intp]) -> float:
    """Accuracy of the top response per prompt, over prompts that hold both kinds."""
    picked = [y[g == i][np.argmax(p[g == i])] for i in np.unique(g) if 0 < y[g == i].mean() < 1]
    return float(np.mean(picked))


def undecided(seed: int, *, share: float, middle: float = 0.5) -> Case:
    """Five graded verifiers, and a share of wrong responses to which all give a middling score. Truth 2 marks these."""
    rng = np.random.default_rng([9, seed])
    n, rates = 768, (0.85, 0.8, 0.75, 0.7, 0.6)
    is_right, is_middling = rng.random(n) < 0.4, rng.random(n) < share
    says_yes = (rng.random((n, 5)) < rates) == is_right[:, None]
    s = np.where(says_yes, rng.beta(9, 1.5, (n, 5)), rng.beta(1.5, 9, (n, 5)))
    s[is_middling] = np.clip(rng.normal(middle, 0.05, (int(is_middling.sum()), 5)), 0, 1)
    return s, np.arange(n) // 8, np.where(is_middling, 2, is_right.astype(np.intp))
