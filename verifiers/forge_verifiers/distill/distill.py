"""Fits a small text model on an ensemble's posteriors.

In: posteriors, or an ensemble that gives them, and trajectories. Out: a cheap verifier, and how well it agrees on
prompts that it was not fitted on. Waits for the ensemble.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import Scores, Verifier, checked_scores, group_ids
from forge_verifiers.distill.distilled import Agreement, Distilled, standard
from forge_verifiers.distill.features import FORMAT, NUM_HASHED, text_features
from forge_verifiers.ensemble.ensemble import Ensemble

Floats = NDArray[np.float64]

_STRENGTHS = (1e-4, 1e-3, 1e-2)
_LEAST_GROUPS = 5


def distill(
    source: Verifier | ArrayLike,
    trajectories: Sequence[Trajectory],
    *,
    held_out: float = 0.2,
    seed: int = 0,
    name: str = "distilled",
    family: str | None = None,
) -> Distilled:
    """Fit a small model on an ensemble's posteriors.

    The posteriors are soft labels of a logistic regression; its L2 strength is chosen on a fifth of the groups it is
    fitted on. An ensemble that has learned something is asked without learning more.

    Args:
        source: The ensemble (any verifier), or its posteriors [n] in [0, 1], NaN where it abstained.
        trajectories: What to learn from; a few hundred at least, of many groups.
        held_out: Share of the groups that the model is compared on and not fitted on, in (0, 1).
        seed: Which groups these are.
        name: What reports call the new verifier.
        family: Its family.

    Raises:
        ValueError: posteriors of a wrong shape or range, `held_out` out of range, fewer than five usable groups.
        ScoreError: the source broke the contract of verifiers.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out} must lie in (0, 1): the share of groups kept for comparison")
    posteriors, ensemble_per_s = _posteriors(source, trajectories)
    usable = np.array([bool(t.turns) for t in trajectories], bool) & ~np.isnan(posteriors)
    chosen = [trajectories[at] for at in np.flatnonzero(usable)]
    groups, target = group_ids(chosen), posteriors[usable]
    num_groups = len(np.unique(groups))
    if num_groups < _LEAST_GROUPS:
        raise ValueError(
            f"{len(trajectories)} trajectories hold {num_groups} groups with a decision and a posterior; send at least "
            f"{_LEAST_GROUPS}, better hundreds"
        )
    rng = np.random.default_rng(seed)
    apart = _some_groups(groups, held_out, rng)
    hashed, measures = text_features(chosen)
    centre, scale = measures[~apart].mean(axis=0), measures[~apart].std(axis=0)
    x = _joined(hashed, standard(measures, centre, scale))
    w = _fit_best(x[~apart], target[~apart], _some_groups(groups[~apart], 0.2, rng))
    weights = {"hashed": w[:NUM_HASHED], "measured": w[NUM_HASHED:-1], "bias": w[-1], "centre": centre, "scale": scale}
    verifier = Distilled(name=name, family=family)
    verifier.load_state_dict({"format": np.array(FORMAT), **weights})
    start = time.perf_counter()
    guess = verifier.score(chosen)
    per_s = len(chosen) / (time.perf_counter() - start)
    verifier.agreement = _agreement(guess[apart], target[apart], int((~apart).sum()), per_s, ensemble_per_s)
    return verifier


def _posteriors(source: Verifier | ArrayLike, trajectories: Sequence[Trajectory]) -> tuple[Floats, float]:
    """Posteriors [n], and how many of them come in a second where they had to be asked for."""
    if isinstance(source, Verifier):
        ensemble = source if isinstance(source, Ensemble) and source.learning and source.version else None
        start = time.perf_counter()
        try:
            if ensemble is not None:
                ensemble.learning = False
            scores = checked_scores(source, trajectories).astype(np.float64)
        finally:
            if ensemble is not None:
                ensemble.learning = True
        return scores, len(trajectories) / max(time.perf_counter() - start, 1e-9)
    given = np.asarray(source, np.float64)
    if given.shape != (len(trajectories),):
        raise ValueError(f"{given.shape} posteriors arrived for {len(trajectories)} trajectories; send one each")
    if (given < 0).any() or (given > 1).any():
        raise ValueError(f"posteriors lie in [{np.nanmin(given)}, {np.nanmax(given)}]; send probabilities in [0, 1]")
    return given, math.nan


def _some_groups(groups: NDArray[np.intp], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which rows belong to a random share of the groups; at least one group is in and one is out."""
    ids = rng.permutation(np.unique(groups))
    count = min(max(1, round(share * len(ids))), len(ids) - 1)
    return np.isin(groups, ids[:count])


def _joined(hashed: Any, measures: NDArray[np.float32]) -> Any:
    """Hashed features, measures and a column of ones, as one CSR matrix float64."""
    from scipy.sparse import csr_matrix, hstack

    return hstack([hashed, csr_matrix(measures), csr_matrix(np.ones((len(measures), 1)))], "csr", np.float64)


def _fit_best(x: Any, target: Floats, tried: NDArray[np.bool_]) -> Floats:
    """Weights at the L2 strength that does best on the rows `tried` when fitted on the others."""
    losses = [_loss(x[tried], target[tried], _fit(x[~tried], target[~tried], l2)) for l2 in _STRENGTHS]
    return _fit(x, target, _STRENGTHS[int(np.argmin(losses))])


def _fit(x: Any, target: Floats, l2: float) -> Floats:
    """Weights [features] of the logistic regression with soft labels; the last, the bias, is not shrunk."""
    from scipy.optimize import minimize

    used = np.flatnonzero(x.getnnz(axis=0))  # the weights of n-grams that never occur stay 0
    columns = x[:, used]
    transposed = columns.T.tocsr()
    shrink = np.where(used < NUM_HASHED, l2, 0.1 * l2)  # a dozen measures overfit less than thousands of n-grams
    shrink[-1] = 0.0

    def objective(w: Floats) -> tuple[float, Floats]:
        logits = columns @ w
        loss = np.logaddexp(0.0, logits) - target * logits
        slope = transposed @ (1.0 / (1.0 + np.exp(-logits)) - target) / len(target)
        return float(loss.mean() + (shrink * w) @ w / 2), slope + shrink * w

    found = minimize(objective, np.zeros(len(used)), jac=True, method="L-BFGS-B", options={"maxiter": 200})
    weights = np.zeros(x.shape[1])
    weights[used] = found.x
    return weights


def _loss(x: Any, target: Floats, w: Floats) -> float:
    logits = x @ w
    return float((np.logaddexp(0.0, logits) - target * logits).mean())


def _agreement(guess: Scores, target: Floats, fitted: int, per_s: float, ensemble_per_s: float) -> Agreement:
    from scipy.stats import rankdata

    right = target > 0.5
    n1, n0 = int(right.sum()), int((~right).sum())
    ranks = rankdata(guess)
    constant = np.ptp(guess) == 0 or np.ptp(target) == 0
    bins = np.array_split(np.argsort(guess, kind="stable"), max(1, min(10, len(guess) // 10)))
    return Agreement(
        auroc=float((ranks[right].sum() - n1 * (n1 + 1) / 2) / (n1 * n0)) if n1 and n0 else math.nan,
        correlation=math.nan if constant else float(np.corrcoef(guess, target)[0, 1]),
        calibration_error=float(sum(abs((guess[b] - target[b]).sum()) for b in bins) / len(guess)),
        fitted=fitted,
        held_out=len(target),
        per_s=per_s,
        ensemble_per_s=ensemble_per_s,
    )
