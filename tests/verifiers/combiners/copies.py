"""Cases in which some verifiers are copies of one, and a short published-style peer to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .regimes import Case, Floats, auroc  # noqa: TID252 (tests are no installed package)

QUALITIES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
NUMBERS = (2, 3, 4, 5, 6)
NOISES = (0.0, 0.03, 0.1)
NEAR = 0.03
"""AUC below the best peer that counts as equal."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One case of the grid."""

    quality: float
    """Accuracy of the verifier that is copied."""
    copies: int
    """Number of verifiers that share its answers, itself included."""
    noise: float
    """Share of a copy's answers that are flipped."""
    others: tuple[float, ...]
    """Accuracies of the independent verifiers."""
    rows: int
    seed: int

    def make(self) -> Case:
        """Scores [rows, others + copies], prompts of eight responses, and the truth."""
        rng = np.random.default_rng([31, self.seed])
        y = (rng.random(self.rows) < 0.5).astype(np.intp)
        lead = np.where(rng.random(self.rows) < self.quality, y, 1 - y)
        flipped = rng.random((self.rows, self.copies)) < self.noise * (np.arange(self.copies) > 0)
        copies = np.where(flipped, 1 - lead[:, None], lead[:, None])
        right = rng.random((self.rows, len(self.others))) < self.others
        others = np.where(right, y[:, None], 1 - y[:, None])
        return np.column_stack([others, copies]).astype(float), np.arange(self.rows) // 8, y


def grid(*, every: int = 1, seed: int = 0) -> Iterator[Cell]:
    """All 270 cells, or each `every`-th of them."""
    rng = np.random.default_rng([32, seed])
    number = 0
    for quality in QUALITIES:
        for copies in NUMBERS:
            for noise in NOISES:
                for rows in (600, 2000):
                    others = tuple(float(a) for a in rng.uniform(0.55, 0.98, rng.integers(2, 6)).round(2))
                    if number % every == 0:
                        yield Cell(quality, copies, noise, others, rows, seed * 1000 + number)
                    number += 1


def discounted(votes: Floats, *, rounds: int = 60) -> Floats:
    """P(correct) [n] of complete 0/1 votes [n, m]: Dawid and Skene's EM that discounts correlated errors.

    It starts from votes weighted by the inverse of their squared correlations and oriented by the main eigenvector.
    What correlated verifiers add to the log-odds is divided by the sum of their correlations given the present answer.
    """
    n, m = votes.shape
    centered = votes - votes.mean(axis=0)
    correlation = np.corrcoef(centered.T) if m > 1 else np.ones((1, 1))
    correlation = np.nan_to_num(correlation)
    weight = 1.0 / np.maximum((correlation**2).sum(axis=1), 1.0)
    shared = correlation * np.sqrt(np.outer(weight, weight)) * (1 - np.eye(m))
    main = np.linalg.eigh(shared)[1][:, -1]
    main = -main if main.sum() < 0 else main
    start = centered @ (weight * np.where(main < -0.1 * np.abs(main).max(), -1.0, 1.0))
    q = 1 / (1 + np.exp(-3 * start / max(start.std(), 1e-9)))
    for step in range(rounds):
        share = [(votes.T @ p + 1) / (p.sum() + 2) for p in (1 - q, q)]
        yes, no = np.log(share[1] / share[0]), np.log((1 - share[1]) / (1 - share[0]))
        evidence = votes * yes + (1 - votes) * no
        if step % 4 == 0:
            expected = np.outer(q, share[1]) + np.outer(1 - q, share[0])
            error = (votes - expected) * (yes - no)
            spread = np.sqrt((error**2).mean(axis=0)) + 1e-9
            related = np.clip(error.T @ error / n / np.outer(spread, spread), 0.0, 1.0)
            related = np.where(related < 0.05, 0.0, related)
            np.fill_diagonal(related, 1.0)
        balance = np.clip(q.mean(), 0.02, 0.98)
        log_odds = np.log(balance / (1 - balance)) + evidence @ (1.0 / related.sum(axis=1))
        q = 1 / (1 + np.exp(-np.clip(log_odds, -60, 60)))
    return q


def areas(cell: Cell) -> dict[str, float]:
    """AUC of the default combiner and its peers."""
    from forge_verifiers import combiners

    s, g, y = cell.make()
    answers = {name: combiners.get(name).fit_predict(s, g) for name in ("default", "mean", "dawid-skene")}
    return {name: auroc(y, p) for name, p in {**answers, "discounted EM": discounted(s)}.items()}
