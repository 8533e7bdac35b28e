"""The default combiner: EM over graded symbols that discounts dependence and knows prompts.

In: scores [n, m], NaN = abstained. Out: calibrated P(correct) [n], its uncertainty, a report. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forge_verifiers.combiners.base import (
    Bools,
    Combiner,
    Floats,
    Ints,
    anchor_mask,
    check_asked,
    check_groups,
    check_scores,
    family_index,
    logit,
    sigmoid,
)
from forge_verifiers.combiners.em import MIN_SOURCES, Evidence, evidence_em
from forge_verifiers.combiners.mean import Mean
from forge_verifiers.combiners.priors import Prior, told
from forge_verifiers.combiners.prompts import PromptPrior, PromptTaste, sibling_prior, without_taste
from forge_verifiers.combiners.symbols import NUM_SYMBOLS, encode, quantile_edges

_CHUNK = 16384
_PROMPT_ROUNDS = 4
_MEAN_SLOPE = 1.33
"""Log-odds per standard deviation of the mean score, as if it correlated 0.5 with the truth."""


class Symbolic(Combiner):
    """Dawid and Skene's latent class over quantile symbols, hardened against how verifiers really fail.

    * Graded scores keep up to six quantile bins each, so any range and any monotone scale is taken; NaN is a symbol
      of its own, judged apart from the score and discounted where verifiers fall silent together.
    * Start without labels: a robust rank-one fit of the correlations separates accuracy from dependence and finds
      inverted verifiers; third moments give the class balance.
    * Every round re-estimates P(symbol | Y) of a verifier from a posterior that leaves out the verifier and its kin in
      proportion to their error correlation, so that a block of copies cannot elect itself the truth; then weighs
      each verifier's evidence by how much of it is its own.
    * The share of correct responses varies by prompt; siblings inform each other's prior. A liking for the
      prompt that verifiers share is estimated as a random intercept, and half of it removed.
    * A `Prior` of a verifier joins its counts, and stands in for what correlations tell at the start.
    * Labels, where given, are clamped and count several times; they also decide the global sign.
    * Probabilities are moderated by the uncertainty of the counts (MacKay 1992, probit approximation).

    With fewer than three independent columns or families nothing can be learned about accuracies: the answer is then
    the min-max mean (`Mean`, equal weight per family) on the log-odds scale. Where families are declared, the mean
    keeps a share of the evidence that shrinks with their number. A constant verifier counts for nothing; where all
    abstain the answer is the prompt's prior.
    """

    name: ClassVar[str] = "default"

    def __init__(
        self,
        families: Sequence[Hashable | None] | Mapping[int, Hashable] | None = None,
        anchors: Sequence[int] | None = None,
        priors: Mapping[int, Prior] | None = None,
    ) -> None:
        super().__init__(families, anchors)
        self.priors = dict(priors or {})

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, asked: Bools) -> dict[str, NDArray[Any]]:
        m = scores.shape[1]
        strangers = [k for k in self.priors if k not in range(m)]
        if strangers:
            raise ValueError(f"priors name verifier {strangers[0]!r}; expected column numbers 0 to {m - 1}")
        edges = quantile_edges(scores)
        codes = encode(scores, edges)
        evidence: Evidence = evidence_em(
            codes,
            groups=groups,
            labels=labels,
            family=family_index(self.families, m),
            anchors=anchor_mask(self.anchors, m),
            known=told(self.priors, scores, codes),
        )
        simple = Mean(self.families, self.anchors).fit(scores)
        mean = simple.predict_proba(scores)
        return {
            **{f"mean_{key}": value for key, value in simple.state_dict().items()},
            "mean_centre": np.array(mean.mean()),
            "mean_slope": np.array(_MEAN_SLOPE / max(float(mean.std()), 1e-3)),
            "mean_share": np.array(self._mean_share(evidence.num_sources, labels)),
            "edges": edges,
            "evidence": evidence.table,
            "variance": evidence.variance,
            "weight": evidence.weight,
            "tpr": evidence.tpr,
            "fpr": evidence.fpr,
            "dependence": evidence.dependence,
            "class_balance": np.array(evidence.prior.mean),
            "prompt_strength": np.array(evidence.prior.strength),
            "prompt_bias": np.array(evidence.prior.bias),
            "prompt_taste": np.array([evidence.taste.right, evidence.taste.wrong, evidence.taste.share]),
            "effective_number": np.array(evidence.effective_number),
        }

    def _mean_share(self, num_sources: int, labels: Floats | None) -> float:
        if labels is not None or self.priors:
            return 0.0
        if num_sources < MIN_SOURCES:
            return 1.0
        return 1.0 / (num_sources - 1) if self.families is not None else 0.0

    def _predict(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats:
        log_odds, variance = self._log_odds(scores, groups, asked)
        return sigmoid(log_odds / np.sqrt(1.0 + np.pi / 8.0 * variance))

    def uncertainty(self, scores: ArrayLike, groups: ArrayLike | None = None, asked: ArrayLike | None = None) -> Floats:
        """Standard deviation [n] of `predict_proba`, from how few rows each symbol's rates were estimated on.

        It does not cover what no data can tell: that the latent class is not correctness.
        """
        fitted = self._parameters()
        matrix = check_scores(scores, num_verifiers=int(fitted["num_verifiers"]))
        index = check_groups(groups, len(matrix))
        if len(matrix) == 0:
            return np.zeros(0)
        log_odds, variance = self._log_odds(matrix, index, check_asked(asked, matrix))
        p = sigmoid(log_odds / np.sqrt(1.0 + np.pi / 8.0 * variance))
        return np.asarray(p * (1 - p) * np.sqrt(variance))

    def _log_odds(self, scores: Floats, groups: Ints | None, asked: Bools) -> tuple[Floats, Floats]:
        fitted = self._parameters()
        tables = np.stack([fitted["evidence"], fitted["variance"]])
        sums = np.zeros((2, len(scores)))
        everybody = bool(asked.all())
        for low in range(0, len(scores), _CHUNK):
            codes = encode(scores[low : low + _CHUNK], fitted["edges"])
            heard = None if everybody else asked[low : low + _CHUNK]
            for k, column in enumerate(codes):
                evidence = tables[:, k][:, column - k * NUM_SYMBOLS]
                sums[:, low : low + _CHUNK] += evidence if heard is None else evidence * heard[:, k]
        share = float(fitted["mean_share"])
        if share > 0:
            mean = Mean()
            mean.load_state_dict({key[5:]: fitted[key] for key in fitted if key.startswith("mean_")})
            centred = mean.predict_proba(scores) - float(fitted["mean_centre"])
            sums[0] = (1 - share) * sums[0] + share * float(fitted["mean_slope"]) * centred
        prior = PromptPrior(
            mean=float(fitted["class_balance"]),
            strength=float(fitted["prompt_strength"]),
            bias=float(fitted["prompt_bias"]),
        )
        if groups is None or prior.strength == 0:
            return sums[0] + logit(prior.mean), sums[1]
        right, wrong, liked = (float(x) for x in fitted["prompt_taste"])
        taste = PromptTaste(right=right, wrong=wrong, share=liked)
        return _with_prompts(sums[0], groups, prior, taste), sums[1]


def _with_prompts(evidence: Floats, groups: Ints, prior: PromptPrior, taste: PromptTaste) -> Floats:
    """Log-odds [n] from evidence, less the prompt's taste, plus the siblings' prior; a few rounds, as both need q."""
    log_odds = evidence + sibling_prior(evidence, groups, prior)[0]
    if taste.share == 0:
        return log_odds
    for _ in range(_PROMPT_ROUNDS):
        cleaned = without_taste(evidence, sigmoid(log_odds), groups, taste)
        log_odds = cleaned + sibling_prior(cleaned, groups, prior)[0]
    return np.asarray(log_odds)
