"""The default combiner: fits hypotheses about copied verifiers by EM and averages their probabilities.

Start at `Default`. `copies` lists the hypotheses, `model` fits one of them, and `em` is the EM algorithm.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np

from forge_verifiers.combiners.base import (
    Bools,
    Combiner,
    Floats,
    Ints,
    Parameters,
    anchor_mask,
    family_index,
    logit,
    rate_errors,
    sigmoid,
)
from forge_verifiers.combiners.copies import Hypothesis, expected_loadings, hypotheses
from forge_verifiers.combiners.em import NUM_SYMBOLS, Codes, count, normalize
from forge_verifiers.combiners.model import Model, Scale, SideInformation, Start

_LOG = logging.getLogger(__name__)

_MIN_GROUPS = 20
_MIN_PROBABILITY, _MAX_FITS = 0.05, 4
_EQUIVALENT, _CONTRADICTORY = 0.9, 0.5
"""Two hypotheses are equivalent above the first correlation of their P(correct), and contradict below the second."""
_UNDECIDED, _DECIDED = 1.5, 3.5
"""Log-odds in nats between contradictory hypotheses: up to the first, P(correct) is the plain mean of the scores. From
the second on, P(correct) is the average over the hypotheses."""
_MEAN_SLOPE = 0.8
"""Factor on the slope of this mean: flatter, so that many copies that agree do not count for more than in the mean."""
_YES = 0.5
"""Scores above it count as "yes" for a `Prior`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Prior knowledge about the accuracy of a verifier. A score above 0.5 counts as "yes"."""

    tpr: float
    """P(says yes | correct), in (0, 1)."""
    fpr: float
    """P(says yes | wrong), in (0, 1)."""
    strength: float
    """Weight in responses of each class, above 0. With the number of rows in the ensemble's window, the prior weighs as
    much as the data."""

    def __post_init__(self) -> None:
        for name in ("tpr", "fpr"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of a Prior must lie strictly between 0 and 1")
        if not 0 < self.strength < np.inf:
            raise ValueError(f"strength={self.strength} of a Prior must be positive and finite")

    @classmethod
    def of(cls, accuracy: float, *, strength: float) -> Self:
        """The prior of a verifier with the same accuracy on correct and wrong responses."""
        return cls(tpr=accuracy, fpr=1.0 - accuracy, strength=strength)


class _Fitted(NamedTuple):
    """A fitted hypothesis."""

    hypothesis: Hypothesis
    model: Model
    q: Floats  # [n] P(Y = 1)


class Default(Combiner):
    """Latent-class model of Dawid and Skene with graded scores, averaged over hypotheses about copied verifiers.

    1. Scores are quantized into up to six bins per verifier. Whether a verifier abstains is a separate source of
       evidence. A verifier that was not queried gives no evidence. The evidence of scores is monotone, so answers that
       only leave the verifiers undecided do not become the correct ones.
    2. Verifiers may agree because they are right, or because they are copies. `copies.hypotheses` lists the divisions
       of the verifiers into voices that the correlations allow, with their probabilities. A declared family is always
       one voice.
    3. EM (Dawid and Skene 1979) fits each probable hypothesis. The fit estimates and discounts the remaining error
       correlation between voices. Each prompt has its own rate of correct responses.
    4. P(correct) is the average over the hypotheses. If two hypotheses contradict each other and neither is much more
       probable, P(correct) is the mean of the scores, and a warning asks for a family, an anchor or labels.
    5. With fewer than three voices, or if no voice predicts another, accuracies cannot be estimated, and P(correct) is
       the mean of the voices. Priors count as rows. Labels are clamped, count as four rows each, and decide between
       hypotheses and between the two directions.
    6. Probabilities are moderated by the uncertainty of the counts (MacKay 1992, probit approximation).

    Constant verifiers are ignored. If all verifiers abstain, the result is the class balance.
    docs/decisions/verifiers.md explains the choices.
    """

    name: ClassVar[str] = "default"
    has_uncertainty: ClassVar[bool] = True
    takes_priors: ClassVar[bool] = True
    fills_abstentions: ClassVar[bool] = True

    def __init__(
        self,
        families: Sequence[Hashable | None] | Mapping[int, Hashable] | None = None,
        anchors: Sequence[int] | None = None,
        priors: Mapping[int, Prior] | None = None,
    ) -> None:
        super().__init__(families, anchors)
        self.priors = dict(priors or {})
        self._warned: set[str] = set()

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, queried: Bools) -> Parameters:
        scale, side_information = Scale.of(scores, queried), self._side_information(scores, groups, labels)
        codes = scale.codes(scores, queried)
        fitted = []
        for start in self._starts(scale, scores, queried, side_information, codes):
            model, q, label_likelihood = Model.fit(start, scale, scores, side_information)
            hypothesis = start.hypothesis._replace(score=start.hypothesis.score + label_likelihood)
            fitted.append(_Fitted(hypothesis, model, q))
        plain = min(fitted, key=lambda each: each.hypothesis.num_copies)
        fitted, probability, dispute = _select_hypotheses(fitted, plain)
        self._warn(fitted, dispute)
        state = {**scale._asdict(), "probability": probability, "dispute": np.array(dispute)}
        state |= {"plain_weight": np.abs(plain.model.mean_weight), "plain_slope": _MEAN_SLOPE * plain.model.mean_slope}
        for h, each in enumerate(fitted):
            state |= each.model.state(str(h))
        return {**state, **_estimates(fitted, probability, dispute, codes)}

    def _side_information(self, scores: Floats, groups: Ints | None, labels: Floats | None) -> SideInformation:
        n, m = scores.shape
        rates, rows = np.full((2, m), 0.5), np.zeros(m)
        for k, prior in self.priors.items():
            if k not in range(m):
                raise ValueError(f"priors name verifier {k!r}. Expected column numbers 0 to {m - 1}")
            rates[:, k], rows[k] = (prior.fpr, prior.tpr), prior.strength
        return SideInformation(
            groups=groups if groups is not None and _MIN_GROUPS <= groups.max() + 1 < n else None,
            labels=np.full(n, np.nan) if labels is None else labels,
            anchors=anchor_mask(self.anchors, m),
            monotone=self._monotone,
            prior_rates=rates,
            prior_rows=rows,
            yes_votes=np.where(np.isnan(scores), np.nan, scores > _YES),
        )

    def _starts(
        self, scale: Scale, scores: Floats, queried: Bools, side_information: SideInformation, codes: Codes
    ) -> list[Start]:
        """The probable hypotheses, most probable first, and always the one without undeclared copies."""
        m, info = scores.shape[1], side_information
        family = np.arange(m) if (declared := family_index(self.families, m)) is None else declared
        expected, spread = expected_loadings(info.anchors, info.prior_rates[1] - info.prior_rates[0], info.prior_rows)
        observed = (codes % NUM_SYMBOLS > 0).astype(np.float64)
        candidates = hypotheses(scale.rank.ravel()[codes], observed, family, expected, spread)
        fewest_copies = min(each.num_copies for each in candidates)
        # Labels may raise the score of another hypothesis later, by at most 3 nats each.
        num_labels = int((~np.isnan(info.labels)).sum())
        min_score = candidates[0].score + np.log(_MIN_PROBABILITY) - 3.0 * num_labels
        return [
            Start.of(each, scale, scores, queried, info)
            for k, each in enumerate(candidates)
            if each.num_copies == fewest_copies or (k < _MAX_FITS and each.score > min_score)
        ]

    def _warn(self, fitted: Sequence[_Fitted], dispute: float) -> None:
        """Warn once about each reason that keeps P(correct) near the mean."""
        if dispute > 0.25 and "copies" not in self._warned:
            self._warned.add("copies")
            voices = [each.hypothesis.voice for each in fitted]
            groups = {tuple(np.flatnonzero(voice == k).tolist()) for voice in voices for k in range(voice.max() + 1)}
            names = dict(enumerate(self.names))
            copies = [[names.get(k, f"column {k}") for k in group] for group in sorted(groups) if len(group) > 1]
            _LOG.warning(
                "the scores do not tell whether the verifiers %s agree because they are right or because they are "
                "copies. P(correct) stays near the mean. Declare a family or an anchor, or give five labels where "
                "the groups differ, or about twenty of random responses",
                " or ".join(f"[{', '.join(group)}]" for group in copies),
            )
        num_voices = max(len(each.hypothesis.loading) for each in fitted)
        if num_voices > 2 and min(float(each.model.mean_share) for each in fitted) > 0.9 and "mean" not in self._warned:
            self._warned.add("mean")
            _LOG.warning(
                "Verifier scores are uncorrelated. Using their mean until there is enough evidence to weight them."
            )

    def _predict(self, scores: Floats, groups: Ints | None, queried: Bools) -> Floats:
        return self._predict_both(scores, groups, queried)[0]

    def _predict_both(self, scores: Floats, groups: Ints | None, queried: Bools) -> tuple[Floats, Floats]:
        """P(correct) and its standard deviation, both [n].

        The variance has two parts: the uncertainty of the counted rates within each hypothesis, and the differences
        between the hypotheses and the plain mean.
        """
        state = self._parameters()
        scale = Scale(*(state[key] for key in Scale._fields))
        probability, dispute = state["probability"], float(state["dispute"])
        models = [Model.from_state(state, str(h)) for h in range(len(probability))]
        predictions = [model.predict(scale, scores, groups, queried) for model in models]
        q, variance = (np.stack(values) for values in zip(*predictions, strict=True))
        plain = float(state["plain_slope"]) * scale.mean(scores, state["plain_weight"])
        components = np.vstack([q, sigmoid(plain + logit(float(state["class_balance"])))])
        weight = np.append((1 - dispute) * probability, dispute)
        mean = weight @ components
        return mean, np.sqrt(weight @ (components - mean) ** 2 + weight[:-1] @ variance)


def _select_hypotheses(fitted: Sequence[_Fitted], plain: _Fitted) -> tuple[list[_Fitted], Floats, float]:
    """The hypotheses that P(correct) averages over, and their probabilities.

    Of hypotheses with an equivalent ranking of the responses, only the most probable remains. The hypothesis without
    undeclared copies remains alone if no other contradicts, and the average gives the same ranking and is not more
    certain: this hypothesis uses the evidence of each verifier, and copies do no harm if all agree on which responses
    are right. The last value is that of `_dispute`.
    """
    distinct: list[_Fitted] = []
    for each in sorted(fitted, key=lambda each: -each.hypothesis.score):
        if not any(_similarity(each.q, other.q) > _EQUIVALENT for other in distinct):
            distinct.append(each)
    score = np.array([each.hypothesis.score for each in distinct])
    probability = normalize(np.exp(score - score.max()))
    probable = probability > _MIN_PROBABILITY
    distinct = [each for each, is_probable in zip(distinct, probable, strict=True) if is_probable]
    probability = normalize(probability[probable])
    average = probability @ np.stack([each.q for each in distinct])
    dispute = _dispute(distinct, probability)
    if dispute == 0 and _similarity(average, plain.q) > _EQUIVALENT and plain.q.std() >= average.std():
        return [plain], np.ones(1), 0.0
    return distinct, probability, dispute


def _dispute(fitted: Sequence[_Fitted], probability: Floats) -> float:
    """Weight in [0, 1] of the plain mean in P(correct) because probable hypotheses contradict each other."""
    confidence = probability * np.array([1.0 - float(each.model.mean_share) for each in fitted])
    best = int(confidence.argmax())
    contradictory = [_similarity(each.q, fitted[best].q) < _CONTRADICTORY for each in fitted]
    against = float((confidence * contradictory).max())
    nats = float(np.log(max(confidence[best], 1e-9) / max(against, 1e-9)))
    return float(np.clip((_DECIDED - nats) / (_DECIDED - _UNDECIDED), 0.0, 1.0)) if against > 0 else 0.0


def _similarity(first: Floats, second: Floats) -> float:
    """Correlation of two posteriors [n]. 1 if one of them does not vary."""
    if min(float(first.std()), float(second.std())) < 1e-6:
        return 1.0
    return float(np.corrcoef(first, second)[0, 1])


def _estimates(fitted: Sequence[_Fitted], probability: Floats, dispute: float, codes: Codes) -> Parameters:
    """Estimates about each verifier [m] for the report, averaged over the hypotheses, with standard errors."""
    counts = count(codes)
    rates = []
    for each in fitted:
        right = count(codes, np.broadcast_to(each.q, codes.shape))
        smooth = 2.0 * normalize(counts)
        rates.append(np.stack([normalize(np.maximum(counts - right, 0.0) + smooth), normalize(right + smooth)]))
    # "Yes" is a score above the bin edge that separates the classes best.
    above = 1.0 - np.cumsum(np.stack(rates)[..., 1:], axis=3)
    mean = np.tensordot(probability, above, 1)
    cut = np.abs(mean[1] - mean[0]).argmax(axis=1)
    each_rate = np.clip(above[:, :, np.arange(len(cut)), cut], 0.0, 1.0)  # [h, 2, m]
    rate = np.tensordot(probability, each_rate, 1)
    between = np.tensordot(probability, (each_rate - rate) ** 2, 1)
    q = np.asarray(probability @ np.stack([each.q for each in fitted]), np.float64)
    learned = (1.0 - dispute) * float(probability @ [1.0 - float(each.model.mean_share) for each in fitted])
    error = np.sqrt(rate_errors(np.asarray(rate, np.float64), q, codes.T % NUM_SYMBOLS > 0, learned) ** 2 + between)
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
