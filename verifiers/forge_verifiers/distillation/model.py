"""A logistic regression on hashed n-grams and text measures, fitted on the posteriors of an ensemble."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forge_agents.files import apply_umask, check_dense
from forge_agents.types import Trajectory
from forge_verifiers.combiners import NotFittedError
from forge_verifiers.core.verifier import (
    Composable,
    Cost,
    Scores,
    State,
    Verifier,
    check_unit_range,
    checked_scores,
    group_ids,
)
from forge_verifiers.ensemble.ensemble import Ensemble
from forge_verifiers.rules.answers import final_answer, last_action

Floats = NDArray[np.float64]

FORMAT = "hashed-text-2"
"""Version of the features. Weights are valid for one version only."""
NUM_HASHED = 1 << 16
MEASURES = (
    "log characters",
    "log words",
    "log turns",
    "distinct words",
    "digits",
    "capitals",
    "punctuation",
    "not ASCII",
    "lines",
    "words of the observation",
    "numbers of the observation",
    "cut off",
)
"""Dense features: fractions in [0, 1], except for the logarithms and the lines per 100 characters."""

_MAX_CHARS = 8_000
_MAX_WORDS = 2_000
_WORD = re.compile(r"\w+|[^\w\s]")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))
_CHUNK = 512
_SHAPES = {
    "hashed": (NUM_HASHED,),
    "measured": (len(MEASURES),),
    "bias": (),
    "center": (len(MEASURES),),
    "scale": (len(MEASURES),),
}
_L2_STRENGTHS = (1e-4, 1e-3, 1e-2)
_MIN_GROUPS = 5
_MEASURE_SCALE = math.sqrt(10.0)
"""Factor that reduces the L2 penalty of the measures to a tenth, because a dozen measures overfit less than n-grams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Comparison of a distilled verifier with its ensemble on held-out groups."""

    auroc: float
    """AUROC for the ensemble's decision (posterior above 0.5), or NaN if all decisions are the same."""
    correlation: float
    """Pearson correlation with the posterior, or NaN if either is constant."""
    calibration_error: float
    """Mean difference from the posterior over up to ten bins of equal size, in [0, 1]."""
    fitted: int
    """Number of trajectories in the fit."""
    held_out: int
    """Number of trajectories in the comparison."""
    per_s: float
    """Trajectories per second on one core."""
    ensemble_per_s: float
    """Trajectories per second of the ensemble, or NaN if posteriors were given."""

    @property
    def speedup(self) -> float:
        """Speed relative to the ensemble, or NaN if unknown."""
        return self.per_s / self.ensemble_per_s


class Distilled(Composable):
    """A small text model that replaces an ensemble. Created by `distill` or `load`.

    Its features are the texts of the last turns, the final answer and the observation. The model scores style and
    wording, cannot check results, and repeats the errors of its ensemble, so it adds nothing to that ensemble. Distill
    again when the policy changes its style.

    Args:
        name: Name in reports.
        family: Label of verifiers that share a cause of error.
    """

    cost: Cost = "cheap"

    def __init__(self, *, name: str = "distilled", family: str | None = None) -> None:
        self.name, self.family = name, family
        self.agreement: Agreement | None = None
        """Result of the comparison in `distill`, or None if unknown."""
        self._weights: State = {}

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Estimated posteriors, float32 [n], or NaN without turns. Raises NotFittedError without weights."""
        if not self._weights:
            raise NotFittedError(f"verifier {self.name!r} has no weights yet. Create it by distill, or load them")
        scores = np.full(len(trajectories), math.nan, np.float32)
        nonempty = [row for row, trajectory in enumerate(trajectories) if trajectory.turns]
        for low in range(0, len(nonempty), _CHUNK):
            rows = nonempty[low : low + _CHUNK]
            hashed, measures = text_features([trajectories[row] for row in rows])
            w = self._weights
            logits = hashed @ w["hashed"] + _standard(measures, w["center"], w["scale"]) @ w["measured"] + w["bias"]
            scores[rows] = 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
        return scores

    def state_dict(self) -> State:
        """Weights and agreement, or empty without weights. Loading them gives bit-equal scores."""
        if not self._weights:
            return {}
        measured = [] if self.agreement is None else dataclasses.astuple(self.agreement)
        return {
            "format": np.array(FORMAT),
            "agreement": np.array(measured, np.float64),
            **{key: value.copy() for key, value in self._weights.items()},
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore `state_dict`. Raises ValueError for other features, and for missing or misshaped arrays."""
        if not state:
            self._weights, self.agreement = {}, None
            return
        version = str(state.get("format", np.array("unknown")))
        if version != FORMAT:
            raise ValueError(f"state of {version!r} features for {self.name!r}, expected {FORMAT!r}. Distill again")
        for key, shape in _SHAPES.items():
            if key not in state or np.shape(state[key]) != shape:
                value = np.shape(state[key]) if key in state else "nothing"
                raise ValueError(f"state of {self.name!r} has {value} under {key!r}, expected shape {shape}")
        self._weights = {key: np.array(state[key], np.float32) for key in _SHAPES}
        measured = np.asarray(state.get("agreement", ()), np.float64).tolist()
        names = [entry.name for entry in dataclasses.fields(Agreement)]
        self.agreement = None
        if len(measured) == len(names):
            values = dict(zip(names, measured, strict=True))
            counts = {name: int(values[name]) for name in ("fitted", "held_out")}
            self.agreement = Agreement(**values | counts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights, agreement, name and family to one safetensors file."""
        from safetensors.numpy import save_file

        state = self.state_dict()
        if not state:
            raise NotFittedError(f"verifier {self.name!r} has no weights yet. Create it by distill, or load them")
        metadata = {"format": str(state.pop("format")), "name": self.name, "family": self.family or ""}
        save_file(state, os.fspath(path), metadata)
        apply_umask(Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load the file that `save` wrote. Raises ValueError for any other file."""
        from safetensors import SafetensorError, safe_open

        check_dense(Path(path))
        try:
            with safe_open(os.fspath(path), framework="numpy") as file:
                metadata = file.metadata() or {}
                state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a mapping
        except SafetensorError as cause:
            raise ValueError(f"{path} is no safetensors file ({cause}). Pass a file of Distilled.save") from cause
        verifier = cls(name=metadata.get("name", "distilled"), family=metadata.get("family") or None)
        verifier.load_state_dict({**state, "format": np.array(metadata.get("format", "unknown"))})
        return verifier


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

    The posteriors are soft labels of a logistic regression, whose L2 strength is chosen on a fifth of the training
    groups. A fitted ensemble does not learn from the trajectories.

    Args:
        source: The ensemble (any verifier), or its posteriors [n] in [0, 1], NaN where it abstained. The new verifier
            has its scale: scores of an ensemble with ``scale="log_odds"`` are no probabilities.
        trajectories: Training data. At least a few hundred trajectories of many groups.
        held_out: Fraction of the groups for the comparison, which are not part of the training data, in (0, 1).
        seed: Random seed of the choice of these groups.
        name: Name of the new verifier in reports.
        family: Family of the new verifier.

    Raises:
        ValueError: Posteriors of a wrong shape or range, `held_out` out of range, or fewer than five usable groups.
        ScoreError: The source broke its contract.
    """
    from scipy.sparse import csr_matrix, hstack

    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out} must lie in (0, 1): the fraction of groups for the comparison")
    posteriors, ensemble_per_s = _posteriors(source, trajectories)
    usable = np.array([bool(t.turns) for t in trajectories], bool) & ~np.isnan(posteriors)
    chosen = [trajectories[row] for row in np.flatnonzero(usable)]
    groups, target = group_ids(chosen), posteriors[usable]
    num_groups = len(np.unique(groups))
    if num_groups < _MIN_GROUPS:
        raise ValueError(
            f"{len(trajectories)} trajectories have {num_groups} groups with turns and a posterior. Pass at least "
            f"{_MIN_GROUPS}, better hundreds"
        )
    rng = np.random.default_rng(seed)
    is_held_out = _some_groups(groups, held_out, rng)
    hashed, measures = text_features(chosen)
    center, scale = measures[~is_held_out].mean(axis=0), measures[~is_held_out].std(axis=0)
    x = hstack([hashed, csr_matrix(_standard(measures, center, scale) * _MEASURE_SCALE)], "csr")
    w, bias = _fit_best(x[~is_held_out], target[~is_held_out], _some_groups(groups[~is_held_out], 0.2, rng))
    weights = {"hashed": w[:NUM_HASHED], "measured": w[NUM_HASHED:] * _MEASURE_SCALE, "bias": np.array(bias)}
    verifier = Distilled(name=name, family=family)
    verifier.load_state_dict({"format": np.array(FORMAT), **weights, "center": center, "scale": scale})
    start = time.perf_counter()
    scores = verifier.score(chosen)
    per_s = len(chosen) / (time.perf_counter() - start)
    num_fitted = int((~is_held_out).sum())
    verifier.agreement = _agreement(scores[is_held_out], target[is_held_out], num_fitted, per_s, ensemble_per_s)
    return verifier


def _posteriors(source: Verifier | ArrayLike, trajectories: Sequence[Trajectory]) -> tuple[Floats, float]:
    """Posteriors [n] and their number per second, NaN if they were given."""
    if isinstance(source, Verifier):
        check_unit_range(source, "the source of distill")
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
    posteriors = np.asarray(source, np.float64)
    if posteriors.shape != (len(trajectories),):
        raise ValueError(f"{posteriors.shape} posteriors arrived for {len(trajectories)} trajectories. Pass one each")
    if (posteriors < 0).any() or (posteriors > 1).any():
        raise ValueError(f"posteriors lie in [{np.nanmin(posteriors)}, {np.nanmax(posteriors)}]. Pass probabilities")
    return posteriors, math.nan


def _some_groups(groups: NDArray[np.intp], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Mask [n] of a random fraction of the groups, with at least one group inside and one outside."""
    ids = rng.permutation(np.unique(groups))
    count = min(max(1, round(share * len(ids))), len(ids) - 1)
    return np.isin(groups, ids[:count])


def _fit_best(x: Any, target: Floats, validation: NDArray[np.bool_]) -> tuple[Floats, float]:
    """Weights and bias with the L2 strength that is best on the `validation` rows after a fit on the others."""
    if not validation.any():  # there is only one training group
        return _fit(x, target, _L2_STRENGTHS[1])
    losses = []
    for l2 in _L2_STRENGTHS:
        w, bias = _fit(x[~validation], target[~validation], l2)
        logits = x[validation] @ w + bias
        losses.append(float((np.logaddexp(0.0, logits) - target[validation] * logits).mean()))
    return _fit(x, target, _L2_STRENGTHS[int(np.argmin(losses))])


def _fit(x: Any, target: Floats, l2: float) -> tuple[Floats, float]:
    """Weights [features] and bias of a logistic regression with soft labels. The bias is not regularized."""
    from scipy.sparse import vstack
    from sklearn.linear_model import LogisticRegression

    used = np.flatnonzero(x.getnnz(axis=0))  # n-grams that never occur keep weight 0
    columns, n = x[:, used], len(target)
    # A soft label p is a row with weight p for class 1 and weight 1 - p for class 0:
    # -p log sigmoid(z) - (1 - p) log(1 - sigmoid(z)). scikit-learn uses 1 / (2 C) in a sum over rows, not a mean.
    model = LogisticRegression(C=1.0 / (l2 * n), max_iter=1000)
    model.fit(vstack([columns, columns]), np.repeat([1, 0], n), np.concatenate([target, 1.0 - target]))
    weights = np.zeros(x.shape[1])
    weights[used] = model.coef_[0]
    return weights, float(model.intercept_[0])


def _agreement(scores: Scores, target: Floats, fitted: int, per_s: float, ensemble_per_s: float) -> Agreement:
    from sklearn.metrics import roc_auc_score

    right = target > 0.5
    constant = np.ptp(scores) == 0 or np.ptp(target) == 0
    bins = np.array_split(np.argsort(scores, kind="stable"), max(1, min(10, len(scores) // 10)))
    return Agreement(
        auroc=float(roc_auc_score(right, scores)) if 0 < right.sum() < len(right) else math.nan,
        correlation=math.nan if constant else float(np.corrcoef(scores, target)[0, 1]),
        calibration_error=float(sum(abs((scores[b] - target[b]).sum()) for b in bins) / len(scores)),
        fitted=fitted,
        held_out=len(target),
        per_s=per_s,
        ensemble_per_s=ensemble_per_s,
    )


def text_features(trajectories: Sequence[Trajectory]) -> tuple[Any, NDArray[np.float32]]:
    """Features of trajectories with turns. The length of the texts is bounded.

    Returns:
        A scipy CSR matrix float32 [n, NUM_HASHED] of n-grams of characters, words, the final answer and the
        observation, and of the words that answer and observation share, each kind normalized to length 1, and the
        measures, float32 [n, len(MEASURES)].
    """
    from scipy.sparse import hstack
    from sklearn.preprocessing import normalize

    measures, texts = np.zeros((len(trajectories), len(MEASURES)), np.float32), []
    for row, trajectory in enumerate(trajectories):
        text, prompt = _encodable(last_action(trajectory) or ""), _encodable(trajectory.turns[-1].observation)
        words, prompt_words = _words(text), _words(prompt)
        earlier = _words(" ".join(_encodable(turn.action) for turn in trajectory.turns[-4:-1]))
        answer, common = _words(final_answer(text))[-20:], sorted({*words} & {*prompt_words})
        texts.append((f"\x02{text}\x03", earlier + words, answer, prompt_words, common))
        measures[row] = _measures(trajectory, text, words, prompt, prompt_words)
    parts = []
    for vectorizer, column in zip(_vectorizers(), zip(*texts, strict=True), strict=True):
        counts = vectorizer.transform(column)
        counts.data = np.log1p(counts.data)
        parts.append(normalize(counts, copy=False))
    return hstack(parts, "csr"), measures


@cache
def _vectorizers() -> tuple[Any, ...]:
    """One for each kind of n-grams, with `NUM_HASHED` columns in total."""
    from sklearn.feature_extraction.text import HashingVectorizer

    def of(share: int, ngrams: tuple[int, int], **options: Any) -> Any:
        return HashingVectorizer(
            n_features=NUM_HASHED * share // 32, ngram_range=ngrams, norm=None, alternate_sign=False, **options
        )

    def identity(words: Sequence[str]) -> Sequence[str]:
        return words

    words = {"tokenizer": identity, "preprocessor": identity, "token_pattern": None}
    return (
        of(16, (3, 5), analyzer="char", lowercase=False),
        of(8, (1, 2), **words),
        of(2, (1, 2), **words),
        of(4, (1, 1), **words),
        of(2, (1, 1), **words),
    )


def _encodable(text: str) -> str:
    """The end of a text, with lone surrogates replaced, because UTF-8 has no code for them."""
    return text[-_MAX_CHARS:].encode("utf-8", "replace").decode()


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())[-_MAX_WORDS:]


def _measures(trajectory: Trajectory, text: str, words: list[str], prompt: str, prompt_words: list[str]) -> list[float]:
    text = text or " "
    size = len(text)
    vocabulary, numbers = set(prompt_words), _NUMBER.findall(text)
    prompt_numbers = set(_NUMBER.findall(prompt))
    turns = trajectory.turns
    return [
        float(np.log1p(len(text))),
        float(np.log1p(len(words))),
        float(np.log1p(len(turns))),
        len(set(words)) / max(len(words), 1),
        sum(map(str.isdigit, text)) / size,
        sum(map(str.isupper, text)) / size,
        1 - len(text.translate(_PUNCTUATION)) / size,
        1 - len(text.encode("ascii", "ignore")) / size,
        text.count("\n") / size * 100,
        sum(word in vocabulary for word in words) / max(len(words), 1),
        sum(number in prompt_numbers for number in numbers) / max(len(numbers), 1),
        sum(turn.finish_reason == "length" for turn in turns) / len(turns),
    ]


def _standard(measures: NDArray[np.float32], center: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float32]:
    """Measures in standard deviations, clipped to [-5, 5]. 0 for constant measures."""
    varies = scale > 1e-6
    return np.asarray(np.clip((measures - center) / np.where(varies, scale, 1.0), -5, 5) * varies, np.float32)
