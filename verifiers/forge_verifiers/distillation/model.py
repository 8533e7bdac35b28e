"""A small text model that stands in for an ensemble: hashed n-grams and a dozen measures in, a logistic regression out.

In: trajectories with the ensemble's posteriors. Out: a cheap verifier, and how well it agrees on prompts it did not
see. Waits for the ensemble, where it must be asked.
"""

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
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
"""Raised whenever the features change: weights belong to one format."""
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
"""What the dense columns measure; shares in [0, 1] but for the logarithms and the lines per 100 characters."""

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
    "centre": (len(MEASURES),),
    "scale": (len(MEASURES),),
}
_STRENGTHS = (1e-4, 1e-3, 1e-2)
_LEAST_GROUPS = 5
_EASE = math.sqrt(10.0)
"""Measures are fitted this many times as large, that is at a tenth of the L2 penalty: a dozen of them overfit less than
thousands of n-grams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How a distilled verifier compares with its ensemble, on groups that it was not fitted on."""

    auroc: float
    """How well it ranks trajectories that the ensemble holds to be correct (posterior above 0.5) before the others;
    NaN where the ensemble holds all to be the same."""
    correlation: float
    """Pearson correlation with the posterior; NaN where either is constant."""
    calibration_error: float
    """Mean gap to the posterior over up to ten bins of equal size, in [0, 1]."""
    fitted: int
    """Trajectories it was fitted on."""
    held_out: int
    """Trajectories it was compared on."""
    per_s: float
    """Trajectories that it scores in a second, on one core."""
    ensemble_per_s: float
    """Trajectories that the ensemble scores in a second; NaN where posteriors were given."""

    @property
    def speedup(self) -> float:
        """How much faster than the ensemble it is; NaN where that is unknown."""
        return self.per_s / self.ensemble_per_s


class Distilled(Composable):
    """A small text model in place of an ensemble; made by `distill`, or from what one has saved.

    It reads the last turns of a trajectory: what was written, the final answer, the observation. It judges style and
    wording and cannot work anything out, and it makes the errors of the ensemble that it was fitted on: beside the
    ensemble's own verifiers it adds nothing. It does not follow a policy that learns to write differently; distil anew.

    Args:
        name: What reports call it.
        family: Verifiers of one family share a cause of error.
    """

    cost: Cost = "cheap"

    def __init__(self, *, name: str = "distilled", family: str | None = None) -> None:
        self.name, self.family = name, family
        self.agreement: Agreement | None = None
        """What `distill` measured; None before."""
        self._weights: State = {}

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Its guess of the ensemble's posterior, float32 [n]; NaN for an agent that never decided.

        Raises:
            NotFittedError: nothing was loaded.
        """
        if not self._weights:
            raise NotFittedError(f"verifier {self.name!r} has no weights yet; make it with distill, or load them")
        scores = np.full(len(trajectories), math.nan, np.float32)
        decided = [at for at, trajectory in enumerate(trajectories) if trajectory.turns]
        for low in range(0, len(decided), _CHUNK):
            rows = decided[low : low + _CHUNK]
            hashed, measures = text_features([trajectories[at] for at in rows])
            w = self._weights
            logits = hashed @ w["hashed"] + _standard(measures, w["centre"], w["scale"]) @ w["measured"] + w["bias"]
            scores[rows] = 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
        return scores

    def state_dict(self) -> State:
        """Weights and agreement; loading them gives bit-equal scores. Empty before `distill`."""
        if not self._weights:
            return {}
        measured = [] if self.agreement is None else dataclasses.astuple(self.agreement)
        return {
            "format": np.array(FORMAT),
            "agreement": np.array(measured, np.float64),
            **{key: value.copy() for key, value in self._weights.items()},
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: the state is of other features, incomplete, or has arrays of wrong shapes.
        """
        if not state:
            self._weights, self.agreement = {}, None
            return
        found = str(state.get("format", np.array("unknown")))
        if found != FORMAT:
            raise ValueError(f"state of {found!r} features arrived at {self.name!r}, expected {FORMAT!r}; distil again")
        for key, shape in _SHAPES.items():
            if key not in state or np.shape(state[key]) != shape:
                shown = np.shape(state[key]) if key in state else "nothing"
                raise ValueError(f"state of {self.name!r} has {shown} under {key!r}, expected shape {shape}")
        self._weights = {key: np.array(state[key], np.float32) for key in _SHAPES}
        measured = np.asarray(state.get("agreement", ()), np.float64).tolist()
        names = [entry.name for entry in dataclasses.fields(Agreement)]
        self.agreement = None
        if len(measured) == len(names):
            known = dict(zip(names, measured, strict=True))
            counts = {name: int(known[name]) for name in ("fitted", "held_out")}
            self.agreement = Agreement(**known | counts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights, the agreement, name and family to one safetensors file."""
        from safetensors.numpy import save_file

        state = self.state_dict()
        if not state:
            raise NotFittedError(f"verifier {self.name!r} has no weights yet; make it with distill, or load them")
        metadata = {"format": str(state.pop("format")), "name": self.name, "family": self.family or ""}
        save_file(state, os.fspath(path), metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The verifier that `save` wrote.

        Raises:
            ValueError: the file is not one of these.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="numpy") as file:
                metadata = file.metadata() or {}
                state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no mapping
        except SafetensorError as cause:
            raise ValueError(f"{path} is no safetensors file ({cause}); give what Distilled.save wrote") from cause
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
    from scipy.sparse import csr_matrix, hstack

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
    x = hstack([hashed, csr_matrix(_standard(measures, centre, scale) * _EASE)], "csr")
    w, bias = _fit_best(x[~apart], target[~apart], _some_groups(groups[~apart], 0.2, rng))
    weights = {"hashed": w[:NUM_HASHED], "measured": w[NUM_HASHED:] * _EASE, "bias": np.array(bias)}
    verifier = Distilled(name=name, family=family)
    verifier.load_state_dict({"format": np.array(FORMAT), **weights, "centre": centre, "scale": scale})
    start = time.perf_counter()
    guess = verifier.score(chosen)
    per_s = len(chosen) / (time.perf_counter() - start)
    verifier.agreement = _agreement(guess[apart], target[apart], int((~apart).sum()), per_s, ensemble_per_s)
    return verifier


def _posteriors(source: Verifier | ArrayLike, trajectories: Sequence[Trajectory]) -> tuple[Floats, float]:
    """Posteriors [n], and how many of them come in a second where they had to be asked for."""
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


def _fit_best(x: Any, target: Floats, tried: NDArray[np.bool_]) -> tuple[Floats, float]:
    """Weights and bias at the L2 strength that does best on the rows `tried` when fitted on the others."""
    if not tried.any():  # of the only group that is left to fit on
        return _fit(x, target, _STRENGTHS[1])
    losses = []
    for l2 in _STRENGTHS:
        w, bias = _fit(x[~tried], target[~tried], l2)
        logits = x[tried] @ w + bias
        losses.append(float((np.logaddexp(0.0, logits) - target[tried] * logits).mean()))
    return _fit(x, target, _STRENGTHS[int(np.argmin(losses))])


def _fit(x: Any, target: Floats, l2: float) -> tuple[Floats, float]:
    """Weights [features] and bias of the logistic regression with soft labels; the bias is not shrunk."""
    from scipy.sparse import vstack
    from sklearn.linear_model import LogisticRegression

    used = np.flatnonzero(x.getnnz(axis=0))  # the weights of n-grams that never occur stay 0
    columns, n = x[:, used], len(target)
    # A soft label p is a row seen p times as right and 1 - p times as wrong:
    # -p log sigmoid(z) - (1 - p) log(1 - sigmoid(z)). scikit-learn shrinks by 1 / (2 C) in a sum over rows, not a mean.
    model = LogisticRegression(C=1.0 / (l2 * n), max_iter=1000)
    model.fit(vstack([columns, columns]), np.repeat([1, 0], n), np.concatenate([target, 1.0 - target]))
    weights = np.zeros(x.shape[1])
    weights[used] = model.coef_[0]
    return weights, float(model.intercept_[0])


def _agreement(guess: Scores, target: Floats, fitted: int, per_s: float, ensemble_per_s: float) -> Agreement:
    from sklearn.metrics import roc_auc_score

    right = target > 0.5
    constant = np.ptp(guess) == 0 or np.ptp(target) == 0
    bins = np.array_split(np.argsort(guess, kind="stable"), max(1, min(10, len(guess) // 10)))
    return Agreement(
        auroc=float(roc_auc_score(right, guess)) if 0 < right.sum() < len(right) else math.nan,
        correlation=math.nan if constant else float(np.corrcoef(guess, target)[0, 1]),
        calibration_error=float(sum(abs((guess[b] - target[b]).sum()) for b in bins) / len(guess)),
        fitted=fitted,
        held_out=len(target),
        per_s=per_s,
        ensemble_per_s=ensemble_per_s,
    )


def text_features(trajectories: Sequence[Trajectory]) -> tuple[Any, NDArray[np.float32]]:
    """Features of trajectories that have a last action; work is bounded, however long the text.

    Returns:
        A scipy CSR matrix float32 [n, NUM_HASHED] of five kinds of n-grams: of characters, of words, of the final
        answer, of the observation, and the words that answer and observation share. Each kind has length 1. And the
        measures, float32 [n, len(MEASURES)].
    """
    from scipy.sparse import hstack
    from sklearn.preprocessing import normalize

    measures, texts = np.zeros((len(trajectories), len(MEASURES)), np.float32), []
    for at, trajectory in enumerate(trajectories):
        said, read = _encodable(last_action(trajectory) or ""), _encodable(trajectory.turns[-1].observation)
        words, seen = _words(said), _words(read)
        earlier = _words(" ".join(_encodable(turn.action) for turn in trajectory.turns[-4:-1]))
        answer, both = _words(final_answer(said))[-20:], sorted({*words} & {*seen})
        texts.append((f"\x02{said}\x03", earlier + words, answer, seen, both))
        measures[at] = _measures(trajectory, said, words, read, seen)
    parts = []
    for vectorizer, column in zip(_vectorizers(), zip(*texts, strict=True), strict=True):
        counts = vectorizer.transform(column)
        counts.data = np.log1p(counts.data)
        parts.append(normalize(counts, copy=False))
    return hstack(parts, "csr"), measures


@cache
def _vectorizers() -> tuple[Any, ...]:
    """One for each kind of n-grams; together `NUM_HASHED` columns, as many as each kind can fill."""
    from sklearn.feature_extraction.text import HashingVectorizer

    def of(share: int, ngrams: tuple[int, int], **how: Any) -> Any:
        return HashingVectorizer(
            n_features=NUM_HASHED * share // 32, ngram_range=ngrams, norm=None, alternate_sign=False, **how
        )

    def as_they_are(words: Sequence[str]) -> Sequence[str]:
        return words

    words = {"tokenizer": as_they_are, "preprocessor": as_they_are, "token_pattern": None}
    return (
        of(16, (3, 5), analyzer="char", lowercase=False),
        of(8, (1, 2), **words),
        of(2, (1, 2), **words),
        of(4, (1, 1), **words),
        of(2, (1, 1), **words),
    )


def _encodable(text: str) -> str:
    """The end of a text without lone surrogates, which no hash of UTF-8 takes."""
    return text[-_MAX_CHARS:].encode("utf-8", "replace").decode()


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())[-_MAX_WORDS:]


def _measures(trajectory: Trajectory, said: str, words: list[str], read: str, seen: list[str]) -> list[float]:
    said = said or " "
    size = len(said)
    known, numbers = set(seen), _NUMBER.findall(said)
    given = set(_NUMBER.findall(read))
    turns = trajectory.turns
    return [
        float(np.log1p(len(said))),
        float(np.log1p(len(words))),
        float(np.log1p(len(turns))),
        len(set(words)) / max(len(words), 1),
        sum(map(str.isdigit, said)) / size,
        sum(map(str.isupper, said)) / size,
        1 - len(said.translate(_PUNCTUATION)) / size,
        1 - len(said.encode("ascii", "ignore")) / size,
        said.count("\n") / size * 100,
        sum(word in known for word in words) / max(len(words), 1),
        sum(number in given for number in numbers) / max(len(numbers), 1),
        sum(turn.finish_reason == "length" for turn in turns) / len(turns),
    ]


def _standard(measures: NDArray[np.float32], centre: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float32]:
    """Measures in standard deviations, at most five either way; 0 where nothing ever varied."""
    varies = scale > 1e-6
    return np.asarray(np.clip((measures - centre) / np.where(varies, scale, 1.0), -5, 5) * varies, np.float32)
