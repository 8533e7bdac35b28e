"""Nearness in meaning to a reference, or to what the siblings say.

In: trajectories. Out: scores [n] in [0, 1]. Waits for the encoder's forward passes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import Composable, Cost, Scores, group_ids
from forge_verifiers.models.text_models import TextModel, TextModelUsage
from forge_verifiers.rules.answers import golds, last_action

if TYPE_CHECKING:
    import torch


class EmbeddingSimilarity(Composable):
    """Cosine similarity of the answer's embedding, the mean of the encoder's last hidden states over the text's tokens.

    ``against="reference"`` compares with the reference in `Trajectory.info`, the nearest where there are several;
    ``against="group"`` with the mean of the siblings' unit embeddings, its own left out: the answer that the group
    agrees on in meaning, where `SelfConsistency` needs equal words. The score is (cosine - floor) / (1 - floor), within
    [0, 1].

    Args:
        model: Encoder: a local folder, a built-in name or a hub id; safetensors only.
        against: See above.
        answer_key: Where the reference lies in `Trajectory.info`: a text, or a list of alternatives.
        extract: The text that is compared, or None to abstain; by default the whole last action.
        floor: Cosine that scores 0, in [-1, 1); encoders rarely give unlike texts less than 0.2 to 0.7.
        max_tokens: Longer texts lose their middle; `usage` counts them.
        batch_tokens: Tokens of one forward pass, padding included.
        threads: CPU threads of this process while it reads; None leaves torch's number.
        device: Where the model lives, in torch's words.
        name: What reports call it.
        family: Verifiers of one family share a cause of error.

    Raises:
        ValueError: A number is out of range.
        ModelNotFoundError: At the first score: there is no such model.
    """

    cost: Cost = "model"

    def __init__(
        self,
        model: str | Path,
        *,
        against: Literal["reference", "group"] = "reference",
        answer_key: str = "answer",
        extract: Callable[[Trajectory], str | None] = last_action,
        floor: float = 0.0,
        max_tokens: int = 512,
        batch_tokens: int = 8192,
        threads: int | None = None,
        device: str = "cpu",
        name: str = "embedding",
        family: str | None = None,
    ) -> None:
        if against not in {"reference", "group"}:
            raise ValueError(f"against={against!r}; choose 'reference' or 'group'")
        if not -1 <= floor < 1:
            raise ValueError(f"floor={floor} must be a cosine in [-1, 1)")
        self.name, self.family = name, family
        self.sees_groups = against == "group"
        self._against, self._answer_key, self._extract, self._floor = against, answer_key, extract, floor
        self._model = TextModel(
            "AutoModel", model, max_tokens=max_tokens, batch_tokens=batch_tokens, threads=threads, device=device
        )

    @property
    def usage(self) -> TextModelUsage:
        """Counts since the verifier was made."""
        return self._model.usage

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Similarities, float32 [n]; NaN without an answer, a reference or a sibling that answered."""
        answers = [self._extract(trajectory) or None for trajectory in trajectories]
        if self._against == "reference":
            references = [golds(trajectory, self._answer_key) or () for trajectory in trajectories]
            vectors = self._vectors([*answers, *(text for texts in references for text in texts)])
            cosines = [_nearest(vectors, answer, texts) for answer, texts in zip(answers, references, strict=True)]
        else:
            cosines = _to_siblings(self._vectors(answers), answers, group_ids(trajectories).tolist())
        scores = (np.array(cosines, np.float64) - self._floor) / (1 - self._floor)
        return np.clip(scores, 0.0, 1.0).astype(np.float32)

    def _vectors(self, texts: Sequence[str | None]) -> dict[str, np.ndarray]:
        """Unit vectors, float64, by text."""
        unique = list(dict.fromkeys(text for text in texts if text))
        if not unique:
            return {}
        rows = self._model.rows(unique, _mean_over_tokens).numpy().astype(np.float64)
        return dict(zip(unique, rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12), strict=True))


def _mean_over_tokens(output: Any, mask: torch.Tensor) -> torch.Tensor:
    hidden_BTH, mask_BT1 = output.last_hidden_state.float(), mask[:, :, None]
    mean: torch.Tensor = (hidden_BTH * mask_BT1).sum(1) / mask_BT1.sum(1)
    return mean


def _nearest(vectors: Mapping[str, np.ndarray], answer: str | None, references: Sequence[str]) -> float:
    cosines = [float(vectors[answer] @ vectors[text]) for text in references if text and answer is not None]
    return max(cosines, default=math.nan)


def _to_siblings(
    vectors: Mapping[str, np.ndarray], answers: Sequence[str | None], groups: Sequence[int]
) -> list[float]:
    members: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    for answer, group in zip(answers, groups, strict=True):
        if answer is not None:
            members[group].append(vectors[answer])
    sums = {group: np.sum(rows, axis=0) for group, rows in members.items()}
    cosines = []
    for answer, group in zip(answers, groups, strict=True):
        if answer is None or len(members[group]) < 2:
            cosines.append(math.nan)
            continue
        others = sums[group] - vectors[answer]
        cosines.append(float(vectors[answer] @ others / max(float(np.linalg.norm(others)), 1e-12)))
    return cosines
