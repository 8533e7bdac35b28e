"""What every combiner shares: checked score matrices, fitted parameters, state.

In: scores float [n, m], NaN = the verifier abstained. Out: P(correct) float64 [n]. Waits for nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forge_agents.errors import ForgeError

# Axes: n responses, m verifiers, G groups (prompts), S symbols of all verifiers together.
Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]

_CAMP, _CAMP_AGREES = 1.4, 0.3
"""How much more, and at least how much, verifiers of one camp correlate."""


class NotFittedError(ForgeError, RuntimeError):
    """A combiner was asked for probabilities before `fit` or `load_state_dict`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinerReport:
    """What a fitted combiner believes about its verifiers."""

    combiner: str
    """Registered name of the combiner."""
    tpr: Floats
    """[m] P(says yes | correct); "yes" is above the verifier's most telling cut. NaN where not estimated."""
    fpr: Floats
    """[m] P(says yes | wrong), same cut. ``tpr < fpr`` marks an inverted verifier."""
    tpr_error: Floats
    """[m] standard error of `tpr`. It covers how well the scores tell right responses from wrong ones, and hypotheses
    about copies that contradict each other. NaN where not estimated."""
    fpr_error: Floats
    """[m] standard error of `fpr`."""
    weight: Floats
    """[m] share of the verifier's own evidence that counts; 1 = counted in full, 0 = ignored."""
    weight_error: Floats
    """[m] standard error of `weight`; NaN where not estimated."""
    class_balance: float
    """Estimated share of correct responses, in [0, 1]."""
    effective_number: float
    """How many independent verifiers the ensemble is worth, at most the number that vary."""
    camps: Ints
    """[m] 1 or 2 where verifiers form two camps that agree within much more than with each other, as correlated reward
    models and a judge may; all 0 where they do not. No statistic tells which camp is right."""

    @property
    def side(self) -> Ints:
        """[m] 1 where TPR exceeds FPR by two standard errors, -1 where FPR exceeds TPR by as much, else 0.

        0 means that the data do not tell whether the verifier is better or worse than chance.
        """
        edge = self.tpr - self.fpr
        sure = np.abs(edge) > 2.0 * np.sqrt(self.tpr_error**2 + self.fpr_error**2)  # NaN compares as False
        return np.where(sure, np.sign(np.nan_to_num(edge)), 0).astype(np.intp)

    def table(self, names: Sequence[str] | None = None) -> str:
        """The report as fixed-width text, one verifier per line, with standard errors of the rates."""
        labels = list(names) if names is not None else [str(k) for k in range(len(self.weight))]
        if len(labels) != len(self.weight):
            raise ValueError(f"{len(labels)} names arrived for {len(self.weight)} verifiers; send one per verifier")
        width = max([len("verifier"), *(len(name) for name in labels)])
        lines = [f"{'verifier':<{width}}  TPR          FPR          weight"]
        rows = zip(labels, self.tpr, self.tpr_error, self.fpr, self.fpr_error, self.weight, strict=True)
        for name, tpr, tpr_error, fpr, fpr_error, weight in rows:
            lines.append(f"{name:<{width}}  {tpr:.2f} +- {tpr_error:.2f}  {fpr:.2f} +- {fpr_error:.2f}  {weight:.3f}")
        lines.append(f"class balance {self.class_balance:.3f}, effective number {self.effective_number:.2f}")
        lines += self.notes(labels)
        return "\n".join(lines)

    def notes(self, names: Sequence[str], *, settled: bool = False) -> list[str]:
        """What a reader must know besides the numbers, in sentences.

        Args:
            names: [m].
            settled: Whether labels or anchors say which responses are correct.
        """
        sides = [[name for name, camp in zip(names, self.camps, strict=True) if camp == k] for k in (1, 2)]
        if not all(sides):
            return []
        camps = " and ".join(", ".join(side) for side in sides)
        rest = "which is right, only an anchor or labels can tell"
        if settled:
            rest = "labels or anchors decide between them"
        return [f"two camps disagree, {camps}; {rest}"]


def sigmoid(logits: Floats) -> Floats:
    """Logistic function, safe for any finite input."""
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(logits, -40.0, 40.0))))


def logit(p: ArrayLike) -> Floats:
    """Log-odds; probabilities are kept 1e-6 away from 0 and 1."""
    kept = np.clip(np.asarray(p, np.float64), 1e-6, 1.0 - 1e-6)
    return np.asarray(np.log(kept / (1.0 - kept)))


def offset_to(mean: float, log_odds: Floats) -> float:
    """What added to `log_odds` [n] gives probabilities of this mean, within 30 either way."""
    low, high = -30.0, 30.0
    for _ in range(40):  # bisection
        middle = (low + high) / 2
        low, high = (middle, high) if sigmoid(log_odds + middle).mean() < mean else (low, middle)
    return (low + high) / 2


def check_scores(scores: ArrayLike, *, num_verifiers: int | None = None) -> Floats:
    """A score matrix as float64 [n, m].

    Any finite range is taken: every combiner normalises per verifier with what it saw in `fit`.

    Raises:
        ValueError: not two-dimensional, no verifier, an infinite score, or not `num_verifiers` columns.
    """
    try:
        matrix = np.asarray(scores, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"scores must be numbers, NaN where a verifier abstains: {error}") from error
    if matrix.ndim != 2:
        raise ValueError(f"scores arrived with shape {matrix.shape}; send [n responses, m verifiers]")
    if matrix.shape[1] == 0:
        raise ValueError("scores have no verifier column; send at least one")
    if num_verifiers is not None and matrix.shape[1] != num_verifiers:
        raise ValueError(f"scores have {matrix.shape[1]} verifiers, fitted were {num_verifiers}; keep the columns")
    if np.isinf(matrix).any():
        column = int(np.flatnonzero(np.isinf(matrix).any(axis=0))[0])
        raise ValueError(f"verifier {column} gave an infinite score; send finite scores, NaN to abstain")
    return matrix


def check_groups(groups: ArrayLike | None, n: int) -> Ints | None:
    """Group index [n] from 0 to G - 1, from ids of any sortable type."""
    if groups is None:
        return None
    ids = np.asarray(groups)
    if ids.shape != (n,):
        raise ValueError(f"groups arrived with shape {ids.shape} for {n} responses; send one id per response")
    return np.asarray(np.unique(ids, return_inverse=True)[1], np.intp).reshape(n)


def check_labels(labels: ArrayLike | None, n: int) -> Floats | None:
    """Labels float64 [n] of 0, 1 and NaN (unknown); None where no row is labelled."""
    if labels is None:
        return None
    values = np.asarray(labels, np.float64)
    if values.shape != (n,):
        raise ValueError(f"labels arrived with shape {values.shape} for {n} responses; send one each, NaN = unknown")
    known = values[~np.isnan(values)]
    if not np.isin(known, (0.0, 1.0)).all():
        raise ValueError(f"labels must be 0, 1 or NaN; got {known[~np.isin(known, (0.0, 1.0))][0]}")
    return values if len(known) else None


def check_asked(asked: ArrayLike | None, scores: Floats) -> Bools:
    """Who was asked, bool [n, m]; everybody where nothing is said."""
    if asked is None:
        return np.ones(scores.shape, bool)
    mask = np.asarray(asked)
    if mask.dtype != bool or mask.shape != scores.shape:
        raise ValueError(f"asked arrived as {mask.dtype} {mask.shape}; send bool {scores.shape}, as the scores are")
    return mask


def family_index(families: Sequence[Hashable | None] | Mapping[int, Hashable] | None, m: int) -> Ints | None:
    """Family number per verifier [m]; an undeclared verifier is a family of its own. None where nothing is declared."""
    if families is None:
        return None
    if isinstance(families, Mapping):
        if strangers := [k for k in families if k not in range(m)]:
            raise ValueError(f"families name verifier {strangers[0]!r}; expected column numbers 0 to {m - 1}")
        families = [families.get(k) for k in range(m)]
    named = list(families)
    if len(named) != m:
        raise ValueError(f"{len(named)} families arrived for {m} verifiers; send one per verifier, None = its own")
    numbers: dict[Hashable, int] = {}
    keys = [("own", k) if name is None else ("named", name) for k, name in enumerate(named)]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.intp)


def anchor_mask(anchors: Sequence[int] | None, m: int) -> NDArray[np.bool_]:
    """Which verifiers are declared trustworthy, bool [m]."""
    mask = np.zeros(m, bool)
    for anchor in anchors if anchors is not None else ():
        if anchor not in range(m):
            raise ValueError(f"anchor {anchor!r} is no verifier; expected column numbers 0 to {m - 1}")
        mask[int(anchor)] = True
    return mask


def score_range(scores: Floats) -> tuple[Floats, Floats]:
    """Least and greatest score of each verifier, each [m]; 0 and 0 for one that always abstained."""
    low = np.where(np.isnan(scores), np.inf, scores).min(axis=0)
    high = np.where(np.isnan(scores), -np.inf, scores).max(axis=0)
    silent = np.isinf(low)
    return np.where(silent, 0.0, low), np.where(silent, 0.0, high)


def min_max(scores: Floats, low: Floats, high: Floats) -> Floats:
    """Scores [n, m] on [0, 1] by the fitted range; beyond it clipped, constant verifiers 0.5, NaN kept."""
    span = np.where(high > low, high - low, 1.0)
    scaled = np.clip((scores - low) / span, 0.0, 1.0)
    return np.where((high > low) | np.isnan(scores), scaled, 0.5)


def correlations(x: Floats, heard: NDArray[np.floating]) -> Floats:
    """Correlations [s, s] of centred `x` [s, n] over the c columns heard of both, shrunk by c / (c + 5)."""
    common, power = (heard @ heard.T).astype(np.float64), (x * x) @ heard.T.astype(np.float64)
    return np.asarray(x @ x.T / np.sqrt(np.maximum(power * power.T, 1e-9)) * common / (common + 5.0))


def camps(scores: Floats) -> Ints:
    """1 and 2 for the verifiers of two camps, 0 where there are none; see `CombinerReport.camps`."""
    present = ~np.isnan(scores.T)
    x = np.where(present, scores.T, 0.0)
    x = np.where(present, x - (x.sum(axis=1) / np.maximum(present.sum(axis=1), 1))[:, None], 0.0)
    strength, found = np.abs(correlations(x, present.astype(np.float64))), np.zeros(len(x), np.intp)
    alive = np.flatnonzero(np.diag(strength) > 0.5)
    strength = strength[np.ix_(alive, alive)] * (1 - np.eye(len(alive)))
    if len(alive) < 4:
        return found
    second = np.linalg.eigh(strength)[1][:, -2] > 0
    sides = [np.flatnonzero(second), np.flatnonzero(~second)]
    if min(map(len, sides)) >= 2:
        within = [strength[np.ix_(k, k)].sum() / (len(k) * (len(k) - 1)) for k in sides]
        if min(within) > max(_CAMP * strength[np.ix_(*sides)].mean(), _CAMP_AGREES):
            found[alive] = np.where(second == second[0], 1, 2)
    return found


def rate_errors(rates: Floats, q: Floats, heard: Bools, settled: float = 1.0) -> Floats:
    """Standard errors [2, m] of P(says yes | Y), wrong first, that were counted with a posterior.

    A row counts as far as its class is known: the share of the variance of Y that `q` explains, to the power 1.5, at
    which 95 % intervals of simulated verifiers covered the true rates in 92 % of the cases or more.

    Args:
        rates: [2, m].
        q: [n] P(Y = 1).
        heard: [n, m] whether a verifier gave a score.
        settled: Share of `q` that rests on the scores, in [0, 1].
    """
    mean = float(q.mean())
    known = settled * float(q.var()) / max(mean * (1.0 - mean), 1e-9)
    rows = known**1.5 * (np.stack([1.0 - q, q]) @ heard)
    return np.asarray(np.sqrt((rates * (1.0 - rates) + 1.0 / (rows + 4.0)) / (rows + 1.0)))


def opposites(scores: Floats, asked: Bools) -> Floats:
    """What the silence of each verifier stands for [m]; NaN for a verifier whose silence is only silence.

    A verifier that gives one score or abstains, as a rule that can only accept or only reject, votes by speaking: above
    0.5 for the response and else against it. Its silence is the other vote.
    """
    low, high = score_range(scores)
    votes = (low == high) & (np.isnan(scores) & asked).any(axis=0) & ~np.isnan(scores).all(axis=0)
    return np.where(votes, np.where(high > 0.5, high - 1.0, high + 1.0), np.nan)


class Combiner(ABC):
    """Turns the scores of weak verifiers into P(correct), with scikit-learn's habits.

    Args:
        families: one label per verifier (None = unrelated to the others), or {column: label}. Relatives share a cause
            of error, so together they weigh about as much as one.
        anchors: columns of verifiers known to be better than the rest.
    """

    name: ClassVar[str]
    has_uncertainty: ClassVar[bool] = False
    """Whether `uncertainty` answers."""
    takes_priors: ClassVar[bool] = False
    """Whether the constructor takes ``priors``."""
    fills_silence: ClassVar[bool] = False
    """Whether scores reach it with the silences of one-class verifiers filled in; see `opposites`."""
    names: Sequence[str] = ()
    """Names of the verifiers [m] for warnings; empty: their column numbers."""

    def __init__(
        self,
        families: Sequence[Hashable | None] | Mapping[int, Hashable] | None = None,
        anchors: Sequence[int] | None = None,
    ) -> None:
        self.families = families
        self.anchors = anchors
        self._fitted: dict[str, NDArray[Any]] = {}
        self._upright: Bools = np.zeros(0, bool)
        """[m] one-class verifiers of the present fit: a vote for a response must never lower P(correct)."""

    def fit(
        self,
        scores: ArrayLike,
        groups: ArrayLike | None = None,
        labels: ArrayLike | None = None,
        asked: ArrayLike | None = None,
    ) -> Self:
        """Learns how far to trust each verifier.

        Args:
            scores: float [n, m], any finite range, NaN = abstained.
            groups: id of each response's prompt [n]; optional.
            labels: 0, 1 or NaN (unknown) [n]; optional.
            asked: bool [n, m], False where a verifier was not asked or its call failed, which says nothing of the
                response; optional.

        Raises:
            ValueError: wrong shapes, no response, infinite scores, labels other than 0, 1 and NaN.
        """
        matrix = check_scores(scores)
        n, m = matrix.shape
        if n == 0:
            raise ValueError("fit was given no response; send at least one row of scores")
        mask = check_asked(asked, matrix)
        matrix = np.where(mask, matrix, np.nan)
        opposite = opposites(matrix, mask) if self.fills_silence else np.full(m, np.nan)
        matrix = np.where(np.isnan(matrix) & mask, opposite, matrix)
        self._upright = ~np.isnan(opposite)
        fitted = self._fit(matrix, check_groups(groups, n), check_labels(labels, n), mask)
        self._fitted = {**fitted, "num_verifiers": np.array(m), "opposite": opposite, "camps": camps(matrix)}
        return self

    def predict_proba(
        self, scores: ArrayLike, groups: ArrayLike | None = None, asked: ArrayLike | None = None
    ) -> Floats:
        """P(correct) of each response, float64 [n] in [0, 1].

        Args:
            scores: float [n, m] as in `fit`.
            groups: id of each response's prompt [n]; optional.
            asked: bool [n, m], False where a verifier was not asked or its call failed, which is no evidence, while
                an abstention may be some; optional.

        Raises:
            NotFittedError: before `fit`.
            ValueError: wrong shapes, another number of verifiers than in `fit`, infinite scores.
        """
        rows = self._checked(scores, groups, asked)
        return self._predict(*rows) if len(rows[0]) else np.zeros(0)

    def uncertainty(self, scores: ArrayLike, groups: ArrayLike | None = None, asked: ArrayLike | None = None) -> Floats:
        """Standard deviation [n] of `predict_proba`, of combiners whose `has_uncertainty` is True; arguments as there.

        It does not cover what no data can tell: that what verifiers agree on is not correctness.

        Raises:
            TypeError: this combiner does not know how sure it is.
            NotFittedError: before `fit`.
            ValueError: as `predict_proba`.
        """
        if not self.has_uncertainty:
            raise TypeError(f"the {self.name!r} combiner does not know how sure it is; take one whose has_uncertainty")
        rows = self._checked(scores, groups, asked)
        return self._uncertainty(*rows) if len(rows[0]) else np.zeros(0)

    def fit_predict(
        self,
        scores: ArrayLike,
        groups: ArrayLike | None = None,
        labels: ArrayLike | None = None,
        asked: ArrayLike | None = None,
    ) -> Floats:
        """`fit`, then `predict_proba` on the same responses."""
        return self.fit(scores, groups, labels, asked).predict_proba(scores, groups, asked)

    def report(self) -> CombinerReport:
        """What the fitted combiner believes of its verifiers. Raises NotFittedError before `fit`."""
        fitted = self._parameters()
        m = int(fitted["num_verifiers"])
        unknown = np.full(m, np.nan)
        weight = fitted.get("weight", np.ones(m)).copy()
        return CombinerReport(
            combiner=self.name,
            tpr=fitted.get("tpr", unknown).copy(),
            fpr=fitted.get("fpr", unknown).copy(),
            tpr_error=fitted.get("tpr_error", unknown).copy(),
            fpr_error=fitted.get("fpr_error", unknown).copy(),
            weight=weight,
            weight_error=fitted.get("weight_error", unknown).copy(),
            class_balance=float(fitted.get("class_balance", np.array(np.nan))),
            effective_number=float(fitted.get("effective_number", np.array(np.count_nonzero(weight)))),
            camps=fitted.get("camps", np.zeros(m, np.intp)).copy(),
        )

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Everything `predict_proba` depends on, as arrays; loading it gives bit-equal predictions."""
        return {"combiner": np.array(self.name), **{key: value.copy() for key, value in self._parameters().items()}}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `state_dict` returned. Raises ValueError for the state of another combiner."""
        name = str(state["combiner"]) if "combiner" in state else "an unknown source"
        if name != self.name:
            raise ValueError(f"state of {name!r} arrived at a {self.name!r} combiner; load it into the same kind")
        if missing := [key for key in ("num_verifiers", "opposite") if key not in state]:
            raise ValueError(f"state of {self.name!r} has no {missing[0]!r}; send what state_dict() returned")
        self._fitted = {key: np.array(value) for key, value in state.items() if key != "combiner"}

    def _checked(
        self, scores: ArrayLike, groups: ArrayLike | None, asked: ArrayLike | None
    ) -> tuple[Floats, Ints | None, Bools]:
        matrix = check_scores(scores, num_verifiers=int(self._parameters()["num_verifiers"]))
        mask = check_asked(asked, matrix)
        matrix = np.where(mask, matrix, np.nan)
        filled = np.where(np.isnan(matrix) & mask, self._parameters()["opposite"], matrix)
        return filled, check_groups(groups, len(matrix)), mask

    def _parameters(self) -> dict[str, NDArray[Any]]:
        if not self._fitted:
            raise NotFittedError(f"the {self.name!r} combiner has no parameters yet; call fit or load_state_dict first")
        return self._fitted

    @abstractmethod
    def _fit(
        self, scores: Floats, groups: Ints | None, labels: Floats | None, asked: Bools
    ) -> dict[str, NDArray[Any]]: ...

    @abstractmethod
    def _predict(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats: ...

    def _uncertainty(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats:
        raise NotImplementedError
