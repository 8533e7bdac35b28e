"""The combiner interface, and functions on score matrices that all combiners share.

Axes: n responses, m verifiers, s rows of a matrix of sources.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forge_agents.errors import ForgeError

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]
Parameters = dict[str, NDArray[Any]]

_CLUSTER_RATIO, _MIN_CLUSTER_CORRELATION = 1.4, 0.3
"""Two clusters need a correlation within each of at least 0.3, and 1.4 times the correlation between them."""


class NotFittedError(ForgeError, RuntimeError):
    """A combiner was asked for probabilities before `fit` or `load_state_dict`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinerReport:
    """Estimates of a fitted combiner about its verifiers."""

    combiner: str
    """Registered name of the combiner."""
    tpr: Floats
    """[m] P(verifier says yes | correct). "Yes" is a score above the verifier's most informative threshold. NaN where
    not estimated."""
    fpr: Floats
    """[m] P(verifier says yes | wrong) at the same threshold. ``tpr < fpr`` marks an inverted verifier."""
    tpr_error: Floats
    """[m] standard error of `tpr`, NaN where not estimated. The error covers how well the scores separate right from
    wrong responses, and contradictions between hypotheses about copies."""
    fpr_error: Floats
    """[m] standard error of `fpr`."""
    weight: Floats
    """[m] fraction of the verifier's own evidence that counts (1 = in full, 0 = ignored)."""
    weight_error: Floats
    """[m] standard error of `weight`, or NaN where not estimated."""
    class_balance: float
    """Estimated fraction of correct responses, in [0, 1]."""
    effective_number: float
    """Number of independent verifiers with the same information. At most the number of verifiers that vary."""
    clusters: Ints
    """[m] 1 or 2 if the verifiers form two clusters that correlate much more within than between, as reward models
    and judges may. Otherwise 0. No statistic can tell which cluster is right."""

    @property
    def side(self) -> Ints:
        """[m] 1 if TPR exceeds FPR by two standard errors, -1 if FPR exceeds TPR by as much, 0 if undetermined."""
        difference = self.tpr - self.fpr
        significant = np.abs(difference) > 2.0 * np.sqrt(self.tpr_error**2 + self.fpr_error**2)  # False for NaN
        return np.where(significant, np.sign(np.nan_to_num(difference)), 0).astype(np.intp)

    def notes(self, names: Sequence[str], *, has_reference: bool = False) -> list[str]:
        """Findings that the numbers do not show. With `has_reference`, labels or anchors tell what is correct."""
        sides = [[name for name, cluster in zip(names, self.clusters, strict=True) if cluster == k] for k in (1, 2)]
        if not all(sides):
            return []
        clusters = " and ".join(", ".join(side) for side in sides)
        decision = "only an anchor or labels can decide which is right"
        if has_reference:
            decision = "labels or anchors decide between them"
        return [f"two clusters disagree, {clusters}; {decision}"]


def sigmoid(logits: Floats) -> Floats:
    """Logistic function, stable for any finite input."""
    return np.asarray(1.0 / (1.0 + np.exp(-np.minimum(np.maximum(logits, -40.0), 40.0))))


def logit(p: ArrayLike) -> Floats:
    """Log-odds of probabilities, clipped to [1e-6, 1 - 1e-6]."""
    clipped = np.minimum(np.maximum(np.asarray(p, np.float64), 1e-6), 1.0 - 1e-6)
    return np.asarray(np.log(clipped / (1.0 - clipped)))


def offset_to(mean: float, log_odds: Floats) -> float:
    """The offset in [-30, 30] that gives `log_odds` [n] + offset this mean probability."""
    low, high = -30.0, 30.0
    for _ in range(40):  # bisection
        middle = (low + high) / 2
        low, high = (middle, high) if sigmoid(log_odds + middle).mean() < mean else (low, middle)
    return (low + high) / 2


def check_scores(scores: ArrayLike, *, num_verifiers: int | None = None) -> Floats:
    """A score matrix as float64 [n, m]. Any finite range is valid, because combiners normalize each verifier.

    Raises:
        ValueError: Not two-dimensional, no verifier, an infinite score, or not `num_verifiers` columns.
    """
    try:
        matrix = np.asarray(scores, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"scores must be numbers, NaN where a verifier abstains: {error}") from error
    if matrix.ndim != 2:
        raise ValueError(f"scores arrived with shape {matrix.shape}. Pass [n responses, m verifiers]")
    if matrix.shape[1] == 0:
        raise ValueError("scores have no verifier column. Pass at least one")
    if num_verifiers is not None and matrix.shape[1] != num_verifiers:
        raise ValueError(f"scores have {matrix.shape[1]} verifiers, fitted were {num_verifiers}. Keep the columns")
    if np.isinf(matrix).any():
        column = int(np.flatnonzero(np.isinf(matrix).any(axis=0))[0])
        raise ValueError(f"verifier {column} gave an infinite score. Pass finite scores, NaN to abstain")
    return matrix


def check_groups(groups: ArrayLike | None, n: int) -> Ints | None:
    """Group index [n] from 0, from ids of any sortable type."""
    if groups is None:
        return None
    ids = np.asarray(groups)
    if ids.shape != (n,):
        raise ValueError(f"groups arrived with shape {ids.shape} for {n} responses. Pass one id per response")
    return np.asarray(np.unique(ids, return_inverse=True)[1], np.intp).reshape(n)


def check_labels(labels: ArrayLike | None, n: int) -> Floats | None:
    """Labels float64 [n] of 0, 1 and NaN (unknown), or None if no row is labeled."""
    if labels is None:
        return None
    values = np.asarray(labels, np.float64)
    if values.shape != (n,):
        raise ValueError(f"labels arrived with shape {values.shape} for {n} responses. Pass one each, NaN = unknown")
    labeled = values[~np.isnan(values)]
    if not np.isin(labeled, (0.0, 1.0)).all():
        raise ValueError(f"labels must be 0, 1 or NaN. Got {labeled[~np.isin(labeled, (0.0, 1.0))][0]}")
    return values if len(labeled) else None


def check_queried(queried: ArrayLike | None, scores: Floats) -> Bools:
    """The mask of queried verifiers, bool [n, m]. All True for None."""
    if queried is None:
        return np.ones(scores.shape, bool)
    mask = np.asarray(queried)
    if mask.dtype != bool or mask.shape != scores.shape:
        raise ValueError(f"queried arrived as {mask.dtype} {mask.shape}. Pass bool {scores.shape}, the shape of scores")
    return mask


def family_index(families: Sequence[Hashable | None] | Mapping[int, Hashable] | None, m: int) -> Ints | None:
    """Family number [m]. A verifier without a label is a family by itself. None if no labels are given."""
    if families is None:
        return None
    if isinstance(families, Mapping):
        if unknown := [k for k in families if k not in range(m)]:
            raise ValueError(f"families name verifier {unknown[0]!r}. Expected column numbers 0 to {m - 1}")
        families = [families.get(k) for k in range(m)]
    labels = list(families)
    if len(labels) != m:
        raise ValueError(f"{len(labels)} families arrived for {m} verifiers. Pass one per verifier, None for no family")
    numbers: dict[Hashable, int] = {}
    keys = [("single", k) if label is None else ("named", label) for k, label in enumerate(labels)]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.intp)


def anchor_mask(anchors: Sequence[int] | None, m: int) -> Bools:
    """Mask bool [m] of the anchors."""
    mask = np.zeros(m, bool)
    for anchor in anchors if anchors is not None else ():
        if anchor not in range(m):
            raise ValueError(f"anchor {anchor!r} is no verifier. Expected column numbers 0 to {m - 1}")
        mask[int(anchor)] = True
    return mask


def score_range(scores: Floats) -> tuple[Floats, Floats]:
    """Lowest and highest score of each verifier, each [m]. 0 and 0 for a verifier that always abstained."""
    low = np.where(np.isnan(scores), np.inf, scores).min(axis=0)
    high = np.where(np.isnan(scores), -np.inf, scores).max(axis=0)
    empty = np.isinf(low)
    return np.where(empty, 0.0, low), np.where(empty, 0.0, high)


def min_max(scores: Floats, low: Floats, high: Floats) -> Floats:
    """Scores [n, m] scaled to [0, 1] by the fitted range and clipped. 0.5 for constant verifiers, NaN stays NaN."""
    span = np.where(high > low, high - low, 1.0)
    scaled = np.clip((scores - low) / span, 0.0, 1.0)
    return np.where((high > low) | np.isnan(scores), scaled, 0.5)


def correlations(x: Floats, observed: NDArray[np.floating]) -> Floats:
    """Correlations [s, s] of centered `x` [s, n] over the c columns observed in both rows, shrunk by c / (c + 5)."""
    common, power = (observed @ observed.T).astype(np.float64), (x * x) @ observed.T.astype(np.float64)
    return np.asarray(x @ x.T / np.sqrt(np.maximum(power * power.T, 1e-9)) * common / (common + 5.0))


def find_clusters(scores: Floats) -> Ints:
    """`CombinerReport.clusters` [m] of scores [n, m], by the sign of the second eigenvector of the correlations."""
    present = ~np.isnan(scores.T)
    x = np.where(present, scores.T, 0.0)
    x = np.where(present, x - (x.sum(axis=1) / np.maximum(present.sum(axis=1), 1))[:, None], 0.0)
    strength, clusters = np.abs(correlations(x, present.astype(np.float64))), np.zeros(len(x), np.intp)
    varying = np.flatnonzero(np.diag(strength) > 0.5)
    strength = strength[np.ix_(varying, varying)] * (1 - np.eye(len(varying)))
    if len(varying) < 4:
        return clusters
    second = np.linalg.eigh(strength)[1][:, -2] > 0
    sides = [np.flatnonzero(second), np.flatnonzero(~second)]
    if min(map(len, sides)) >= 2:
        within = [strength[np.ix_(k, k)].sum() / (len(k) * (len(k) - 1)) for k in sides]
        if min(within) > max(_CLUSTER_RATIO * strength[np.ix_(*sides)].mean(), _MIN_CLUSTER_CORRELATION):
            clusters[varying] = np.where(second == second[0], 1, 2)
    return clusters


def rate_errors(rates: Floats, q: Floats, observed: Bools, learned: float = 1.0) -> Floats:
    """Standard errors [2, m] of the rates P(says yes | Y) counted with a posterior, wrong class first.

    A row counts as far as its class is known: by the fraction of the variance of Y that the posterior `q` [n] explains,
    to the power 1.5. With this power, 95 % intervals covered the true rates of simulated verifiers in at least 92 % of
    the cases. `observed` [n, m] tells where a score was given, and `learned` how far `q` is based on learned rates.
    """
    mean = float(q.mean())
    explained = learned * float(q.var()) / max(mean * (1.0 - mean), 1e-9)
    rows = explained**1.5 * (np.stack([1.0 - q, q]) @ observed)
    return np.asarray(np.sqrt((rates * (1.0 - rates) + 1.0 / (rows + 4.0)) / (rows + 1.0)))


def abstention_values(scores: Floats, queried: Bools) -> Floats:
    """The score that an abstention of each verifier stands for [m], or NaN if it stands for nothing.

    A verifier that gives a single score or abstains, such as a rule that only accepts, votes by giving its score: for
    the response if the score is above 0.5, else against it. Its abstention is the opposite vote.
    """
    low, high = score_range(scores)
    votes = (low == high) & (np.isnan(scores) & queried).any(axis=0) & ~np.isnan(scores).all(axis=0)
    return np.where(votes, np.where(high > 0.5, high - 1.0, high + 1.0), np.nan)


class Combiner(ABC):
    """Combines scores of weak verifiers into P(correct), with the interface of a scikit-learn estimator.

    Args:
        families: One label per verifier (None = unrelated to the others), or {column: label}. A family shares a cause
            of error and weighs about as much as one verifier.
        anchors: Columns of verifiers known to be better than the rest.
    """

    name: ClassVar[str]
    has_uncertainty: ClassVar[bool] = False
    """True if `predict` returns standard deviations. Subclasses define `_uncertainty` or `_predict_both`."""
    takes_priors: ClassVar[bool] = False
    """True if the constructor takes ``priors``."""
    fills_abstentions: ClassVar[bool] = False
    """True if abstentions of one-score verifiers are replaced before `_fit` and `_predict`, see `abstention_values`."""
    names: Sequence[str] = ()
    """Names of the verifiers [m] for warnings. Column numbers if empty."""

    def __init__(
        self,
        families: Sequence[Hashable | None] | Mapping[int, Hashable] | None = None,
        anchors: Sequence[int] | None = None,
    ) -> None:
        self.families = families
        self.anchors = anchors
        self._fitted: Parameters = {}
        self._monotone: Bools = np.zeros(0, bool)
        """[m] one-score verifiers of the current fit, whose vote for a response must never lower P(correct)."""

    def fit(
        self,
        scores: ArrayLike,
        groups: ArrayLike | None = None,
        labels: ArrayLike | None = None,
        queried: ArrayLike | None = None,
    ) -> Self:
        """Learn how far to trust each verifier.

        Args:
            scores: float [n, m] of any finite range, with NaN for abstentions.
            groups: Prompt id of each response [n]. Optional.
            labels: 0, 1 or NaN (unknown) [n]. Optional.
            queried: bool [n, m], False where a verifier was not called or failed, so that its missing score is no
                evidence. Optional.

        Raises:
            ValueError: Wrong shapes, no response, infinite scores, or labels other than 0, 1 and NaN.
        """
        matrix = check_scores(scores)
        n, m = matrix.shape
        if n == 0:
            raise ValueError("fit was given no response. Pass at least one row of scores")
        mask = check_queried(queried, matrix)
        matrix = np.where(mask, matrix, np.nan)
        opposite = abstention_values(matrix, mask) if self.fills_abstentions else np.full(m, np.nan)
        matrix = np.where(np.isnan(matrix) & mask, opposite, matrix)
        self._monotone = ~np.isnan(opposite)
        fitted = self._fit(matrix, check_groups(groups, n), check_labels(labels, n), mask)
        self._fitted = {**fitted, "num_verifiers": np.array(m), "opposite": opposite, "clusters": find_clusters(matrix)}
        return self

    def predict_proba(
        self, scores: ArrayLike, groups: ArrayLike | None = None, queried: ArrayLike | None = None
    ) -> Floats:
        """P(correct) of each response, float64 [n] in [0, 1]. Arguments as in `fit`.

        Raises:
            NotFittedError: Before `fit`.
            ValueError: Wrong shapes, another number of verifiers than in `fit`, or infinite scores.
        """
        rows = self._checked(scores, groups, queried)
        return self._predict(*rows) if len(rows[0]) else np.zeros(0)

    def predict(
        self, scores: ArrayLike, groups: ArrayLike | None = None, queried: ArrayLike | None = None
    ) -> tuple[Floats, Floats | None]:
        """`predict_proba` and its standard deviation [n], or None for combiners without `has_uncertainty`.

        The deviation does not cover the error that verifiers agree on something other than correctness, which no data
        can show. Arguments as in `fit`. Raises as `predict_proba`.
        """
        rows = self._checked(scores, groups, queried)
        if not len(rows[0]):
            return np.zeros(0), np.zeros(0) if self.has_uncertainty else None
        return self._predict_both(*rows) if self.has_uncertainty else (self._predict(*rows), None)

    def fit_predict(
        self,
        scores: ArrayLike,
        groups: ArrayLike | None = None,
        labels: ArrayLike | None = None,
        queried: ArrayLike | None = None,
    ) -> Floats:
        """`fit`, then `predict_proba` on the same responses."""
        return self.fit(scores, groups, labels, queried).predict_proba(scores, groups, queried)

    def report(self) -> CombinerReport:
        """Estimates about the verifiers. Raises NotFittedError before `fit`."""
        fitted = self._parameters()
        m = int(fitted["num_verifiers"])
        unknown = np.full(m, np.nan)
        weight = fitted.get("weight", np.ones(m)).copy()
        names = ("tpr", "fpr", "tpr_error", "fpr_error", "weight_error")
        rates: dict[str, Any] = {name: fitted.get(name, unknown).copy() for name in names}
        return CombinerReport(
            combiner=self.name,
            weight=weight,
            class_balance=float(fitted.get("class_balance", np.array(np.nan))),
            effective_number=float(fitted.get("effective_number", np.array(np.count_nonzero(weight)))),
            clusters=fitted.get("clusters", np.zeros(m, np.intp)).copy(),
            **rates,
        )

    def state_dict(self) -> Parameters:
        """The fitted parameters. Loading them gives bit-equal predictions."""
        return {"combiner": np.array(self.name), **{key: value.copy() for key, value in self._parameters().items()}}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore `state_dict`. Raises ValueError for the state of another combiner."""
        name = str(state["combiner"]) if "combiner" in state else "an unknown source"
        if name != self.name:
            raise ValueError(f"state of {name!r} arrived at a {self.name!r} combiner. Load it into the same kind")
        if missing := [key for key in ("num_verifiers", "opposite") if key not in state]:
            raise ValueError(f"state of {self.name!r} has no {missing[0]!r}. Pass the result of state_dict()")
        self._fitted = {key: np.array(value) for key, value in state.items() if key != "combiner"}

    def _checked(
        self, scores: ArrayLike, groups: ArrayLike | None, queried: ArrayLike | None
    ) -> tuple[Floats, Ints | None, Bools]:
        matrix = check_scores(scores, num_verifiers=int(self._parameters()["num_verifiers"]))
        mask = check_queried(queried, matrix)
        matrix = np.where(mask, matrix, np.nan)
        filled = np.where(np.isnan(matrix) & mask, self._parameters()["opposite"], matrix)
        return filled, check_groups(groups, len(matrix)), mask

    def _parameters(self) -> Parameters:
        if not self._fitted:
            raise NotFittedError(f"the {self.name!r} combiner has no parameters yet. Call fit or load_state_dict first")
        return self._fitted

    @abstractmethod
    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, queried: Bools) -> Parameters: ...

    @abstractmethod
    def _predict(self, scores: Floats, groups: Ints | None, queried: Bools) -> Floats: ...

    def _uncertainty(self, scores: Floats, groups: Ints | None, queried: Bools) -> Floats:
        raise NotImplementedError

    def _predict_both(self, scores: Floats, groups: Ints | None, queried: Bools) -> tuple[Floats, Floats]:
        return self._predict(scores, groups, queried), self._uncertainty(scores, groups, queried)
