"""The default combiner: averages over readings of which verifiers are copies, each fitted by EM.

Start at `Default`. `copies` lists the hypotheses, `model` fits one of them with the EM of `em`.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import (
    Bools,
    Combiner,
    Floats,
    Ints,
    anchor_mask,
    family_index,
    logit,
    rate_errors,
    sigmoid,
)
from forge_verifiers.combiners.copies import Hypothesis, expected_loadings, hypotheses
from forge_verifiers.combiners.em import NUM_SYMBOLS, Codes, count, normal
from forge_verifiers.combiners.model import Known, Model, Scale, Start

_LOG = logging.getLogger(__name__)

_MIN_GROUPS = 20
_LEAST_PROBABILITY, _MOST_FITS = 0.05, 4
_ALIKE, _CONTRARY = 0.9, 0.5
"""Correlation of P(correct) from which two hypotheses come to the same, and below which they contradict each other."""
_UNDECIDED, _DECIDED = 1.5, 3.5
"""Nats between contradicting hypotheses up to which P(correct) is the mean, and from which it is the likelier one's."""
_YES = 0.5  # a score above it says yes, where a prior speaks of that


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """How good one verifier is, known before it is heard. A score above 0.5 counts as "yes"."""

    tpr: float
    """P(says yes | correct), in (0, 1)."""
    fpr: float
    """P(says yes | wrong), in (0, 1)."""
    strength: float
    """Responses of each class that the rates count for, above 0. As many as the ensemble's window holds rows make the
    prior weigh as much as everything seen."""

    def __post_init__(self) -> None:
        for name in ("tpr", "fpr"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of a Prior must lie strictly between 0 and 1")
        if not 0 < self.strength < np.inf:
            raise ValueError(f"strength={self.strength} of a Prior must be positive and finite")

    @classmethod
    def of(cls, accuracy: float, *, strength: float) -> Self:
        """A verifier that is right with probability `accuracy` on correct and on wrong responses alike."""
        return cls(tpr=accuracy, fpr=1.0 - accuracy, strength=strength)


class _Fitted(NamedTuple):
    """A hypothesis after its fit."""

    hypothesis: Hypothesis
    model: Model
    q: Floats  # [n] P(Y = 1)


class Default(Combiner):
    """Dawid and Skene's latent class over graded symbols, averaged over hypotheses of which verifiers are copies.

    1. Graded scores keep up to six bins each. Whether a verifier abstains is a source of its own. A verifier that was
       not asked says nothing.
    2. Verifiers that agree may be right or may be copies. `copies.hypotheses` lists the divisions into voices that the
       correlations allow, and scores them. Declared families always share one voice.
    3. EM runs under each likely hypothesis (Dawid and Skene 1979). Remaining dependence between voices is estimated
       from their errors and discounted. Each prompt has its own share of correct responses.
    4. P(correct) is the average over the hypotheses, by their probability. Where two of them contradict each other and
       neither is much likelier, P(correct) is the mean of the scores, and a warning asks for a family, an anchor or
       five labels.
    5. With fewer than three voices, or where no voice predicts another, nothing tells the accuracies apart: P(correct)
       is then the mean of the voices. Priors count as rows. Labels are clamped, count four rows each, and decide
       between hypotheses and between the two signs.
    6. Probabilities are moderated by the uncertainty of the counts (MacKay 1992, probit approximation).

    A constant verifier counts for nothing. Where all verifiers abstain, the answer is the class balance.
    docs/decisions/verifiers.md says why.
    """

    name: ClassVar[str] = "default"
    has_uncertainty: ClassVar[bool] = True
    takes_priors: ClassVar[bool] = True
    fills_silence: ClassVar[bool] = True

    def __init__(
        self,
        families: Sequence[Hashable | None] | Mapping[int, Hashable] | None = None,
        anchors: Sequence[int] | None = None,
        priors: Mapping[int, Prior] | None = None,
    ) -> None:
        super().__init__(families, anchors)
        self.priors = dict(priors or {})
        self._warned: set[str] = set()

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, asked: Bools) -> dict[str, NDArray[Any]]:
        scale, known = Scale.of(scores, asked), self._known(scores, groups, labels)
        codes = scale.codes(scores, asked)
        starts = self._starts(scale, scores, asked, known, codes)
        fitted = []
        for start in starts:
            model, q, support = Model.fit(start, scale, scores, known)
            hypothesis = start.hypothesis._replace(score=start.hypothesis.score + support)
            fitted.append(_Fitted(hypothesis, model, q))
        plain = min(fitted, key=lambda each: each.hypothesis.num_copies)
        fitted, probability = _averaged(fitted, plain)
        dispute = _dispute(fitted, probability)
        self._warn(fitted, dispute)
        state = {**scale._asdict(), "probability": probability, "dispute": np.array(dispute)}
        state |= {"plain_weight": np.abs(plain.model.mean_weight), "plain_slope": plain.model.mean_slope}
        for h, each in enumerate(fitted):
            state |= each.model.state(str(h))
        return {**state, **_estimates(fitted, probability, dispute, codes)}

    def _known(self, scores: Floats, groups: Ints | None, labels: Floats | None) -> Known:
        n, m = scores.shape
        rates, rows = np.full((2, m), 0.5), np.zeros(m)
        for k, prior in self.priors.items():
            if k not in range(m):
                raise ValueError(f"priors name verifier {k!r}; expected column numbers 0 to {m - 1}")
            rates[:, k], rows[k] = (prior.fpr, prior.tpr), prior.strength
        return Known(
            groups=groups if groups is not None and _MIN_GROUPS <= groups.max() + 1 < n else None,
            labels=np.full(n, np.nan) if labels is None else labels,
            anchors=anchor_mask(self.anchors, m),
            upright=self._upright,
            prior_rates=rates,
            prior_rows=rows,
            yes_votes=np.where(np.isnan(scores), np.nan, scores > _YES),
        )

    def _starts(self, scale: Scale, scores: Floats, asked: Bools, known: Known, codes: Codes) -> list[Start]:
        """The likely hypotheses, the likeliest first, and always the one without undeclared copies."""
        m = scores.shape[1]
        family = np.arange(m) if (declared := family_index(self.families, m)) is None else declared
        expected, spread = expected_loadings(
            known.anchors, known.prior_rates[1] - known.prior_rates[0], known.prior_rows
        )
        heard = (codes % NUM_SYMBOLS > 0).astype(np.float64)
        every = hypotheses(scale.rank.ravel()[codes], heard, family, expected, spread)
        fewest = min(each.num_copies for each in every)
        num_labels = int((~np.isnan(known.labels)).sum())
        least = every[0].score + np.log(_LEAST_PROBABILITY) - 3.0 * num_labels  # as far as labels may lift the others
        return [
            Start.of(each, scale, scores, asked, known)
            for k, each in enumerate(every)
            if each.num_copies == fewest or (k < _MOST_FITS and each.score > least)
        ]

    def _warn(self, fitted: Sequence[_Fitted], dispute: float) -> None:
        """Says once what keeps P(correct) near the mean."""
        if dispute > 0.25 and "copies" not in self._warned:
            self._warned.add("copies")
            groups = {tuple(np.flatnonzero(each.hypothesis.voice == k).tolist()) for each in fitted for k in range(99)}
            names = dict(enumerate(self.names))
            copies = [[names.get(k, f"column {k}") for k in group] for group in sorted(groups) if len(group) > 1]
            named = " or ".join(f"[{', '.join(group)}]" for group in copies)
            _LOG.warning(
                "the scores do not tell whether the verifiers %s agree because they are right or because they are "
                "copies; P(correct) stays near the mean. Declare a family or an anchor, or give five labels",
                named,
            )
        voices = max(len(each.hypothesis.loading) for each in fitted)
        if voices > 2 and min(float(each.model.mean_share) for each in fitted) > 0.9 and "mean" not in self._warned:
            self._warned.add("mean")
            _LOG.warning("no verifier's scores predict another's; P(correct) is their mean until some do")

    def _predict(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats:
        return self._mixed(scores, groups, asked)[0]

    def _uncertainty(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats:
        """From the few rows that rates were counted on, and from how far the hypotheses and the mean differ."""
        return self._mixed(scores, groups, asked)[1]

    def _mixed(self, scores: Floats, groups: Ints | None, asked: Bools) -> tuple[Floats, Floats]:
        """P(correct) and its standard deviation, both [n]."""
        state = self._parameters()
        scale = Scale(*(state[key] for key in Scale._fields))
        probability, dispute = state["probability"], float(state["dispute"])
        models = [Model.from_state(state, str(h)) for h in range(len(probability))]
        each = [model.predict(scale, scores, groups, asked) for model in models]
        q, variance = (np.stack(values) for values in zip(*each, strict=True))
        plain = float(state["plain_slope"]) * scale.mean(scores, state["plain_weight"])
        every = np.vstack([q, sigmoid(plain + logit(float(state["class_balance"])))])
        weight = np.append((1 - dispute) * probability, dispute)
        mean = weight @ every
        return mean, np.sqrt(weight @ (every - mean) ** 2 + weight[:-1] @ variance)


def _averaged(fitted: Sequence[_Fitted], plain: _Fitted) -> tuple[list[_Fitted], Floats]:
    """The hypotheses that P(correct) averages over, with their probabilities.

    Of hypotheses that rank the responses alike, the likeliest stands for all. The one without undeclared copies stands
    alone if the average comes to the same ranking and is no surer: it uses the evidence of each verifier, and copies do
    no harm where all agree on who is right.
    """
    kept: list[_Fitted] = []
    for each in sorted(fitted, key=lambda each: -each.hypothesis.score):
        if not any(_alike(each.q, other.q) > _ALIKE for other in kept):
            kept.append(each)
    score = np.array([each.hypothesis.score for each in kept])
    probability = normal(np.exp(score - score.max()))
    likely = probability > _LEAST_PROBABILITY
    kept = [each for each, is_likely in zip(kept, likely, strict=True) if is_likely]
    probability = normal(probability[likely])
    whole = probability @ np.stack([each.q for each in kept])
    if _alike(whole, plain.q) > _ALIKE and plain.q.std() >= whole.std():
        return [plain], np.ones(1)
    return kept, probability


def _dispute(fitted: Sequence[_Fitted], probability: Floats) -> float:
    """Share in [0, 1] of the plain mean in P(correct) because likely hypotheses contradict each other."""
    sure = probability * np.array([1.0 - float(each.model.mean_share) for each in fitted])
    best = int(sure.argmax())
    contrary = [_alike(each.q, fitted[best].q) < _CONTRARY for each in fitted]
    against = float((sure * contrary).max())
    nats = float(np.log(max(sure[best], 1e-9) / max(against, 1e-9)))
    return float(np.clip((_DECIDED - nats) / (_DECIDED - _UNDECIDED), 0.0, 1.0)) if against > 0 else 0.0


def _alike(one: Floats, other: Floats) -> float:
    """Correlation of two posteriors [n]; 1 where one of them does not vary."""
    if min(float(one.std()), float(other.std())) < 1e-6:
        return 1.0
    return float(np.corrcoef(one, other)[0, 1])


def _estimates(
    fitted: Sequence[_Fitted], probability: Floats, dispute: float, codes: Codes
) -> dict[str, NDArray[Any]]:
    """What the report says of each verifier [m], averaged over the hypotheses, with standard errors."""
    counts = count(codes)
    rates = []
    for each in fitted:
        right = count(codes, np.broadcast_to(each.q, codes.shape))
        smooth = 2.0 * normal(counts)
        rates.append(np.stack([normal(np.maximum(counts - right, 0.0) + smooth), normal(right + smooth)]))
    # "Yes" is above the cut between two bins that tells the classes apart best.
    above = 1.0 - np.cumsum(np.stack(rates)[..., 1:], axis=3)
    mean = np.tensordot(probability, above, 1)
    cut = np.abs(mean[1] - mean[0]).argmax(axis=1)
    each_rate = np.clip(above[:, :, np.arange(len(cut)), cut], 0.0, 1.0)  # [h, 2, m]
    rate = np.tensordot(probability, each_rate, 1)
    between = np.tensordot(probability, (each_rate - rate) ** 2, 1)
    q = np.asarray(probability @ np.stack([each.q for each in fitted]), np.float64)
    settled = (1.0 - dispute) * float(probability @ [1.0 - float(each.model.mean_share) for each in fitted])
    error = np.sqrt(rate_errors(np.asarray(rate, np.float64), q, codes.T % NUM_SYMBOLS > 0, settled) ** 2 + between)
    constant = (counts > 0).sum(axis=1) < 2
    rate, error = (np.where(constant, np.nan, value) for value in (rate, error))
    shares = np.stack([each.model.shares() for each in fitted])
    share = probability @ shares
    return {
        "weight": share,
        "weight_error": np.sqrt(probability @ (shares - share) ** 2),
        "fpr": rate[0],
        "tpr": rate[1],
        "fpr_error": error[0],
        "tpr_error": error[1],
        "class_balance": np.array(float(probability @ [each.model.balance for each in fitted])),
        "effective_number": np.array(share.sum()),
    }
