"""A trained classifier of texts as a verifier.

In: trajectories. Out: scores [n] in [0, 1]. Waits for the model's forward passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import Composable, Cost, Scores
from forge_verifiers.judge.prompts import defused
from forge_verifiers.models.text_models import Text, TextModel, TextModelUsage

if TYPE_CHECKING:
    import torch


class RewardModel(Composable):
    """A Hugging Face sequence classifier that grades conversations, as reward models do.

    A model with one label gives a logit; with several, the log-odds of `positive` against all others. The score is
    sigmoid(scale * (logit - offset)): at scale 1 and offset 0 this is the softmax probability of `positive`. Reward
    models are trained on differences (Bradley-Terry) and their logits have no fixed zero: `offset` and `scale` put
    them on [0, 1] without saturating; combiners that use quantiles only need the latter.

    Where the tokenizer has a chat template the model reads a conversation in it; otherwise the task and the answers as
    a pair of texts. Control tokens in them are broken up.

    Args:
        model: A local folder, a built-in name or a hub id; safetensors only, code from the hub is never run.
        positive: Label that stands for "good"; needed with three labels or more, by default 1 of two.
        scale: Steepness; positive.
        offset: The logit that scores 0.5.
        view: ``"trajectory"``, the whole conversation, or ``"answer"``, its last turn.
        max_tokens: Longer conversations lose their middle; `usage` counts them.
        batch_tokens: Tokens of one forward pass, padding included.
        threads: CPU threads of this process while it reads; None leaves torch's number.
        device: Where the model lives, in torch's words.
        name: What reports call it.
        family: Verifiers of one family share a cause of error.

    Raises:
        ValueError: A number is out of range. At the first score: the classifier's head is not in the files, or there
            is no label `positive`.
        ModelNotFoundError: At the first score: there is no such model.
    """

    cost: Cost = "model"

    likeness = "reward models"

    def __init__(
        self,
        model: str | Path,
        *,
        positive: int | None = None,
        scale: float = 1.0,
        offset: float = 0.0,
        view: Literal["answer", "trajectory"] = "trajectory",
        max_tokens: int = 2048,
        batch_tokens: int = 8192,
        threads: int | None = None,
        device: str = "cpu",
        name: str = "reward_model",
        family: str | None = None,
    ) -> None:
        if not (0 < scale < math.inf and math.isfinite(offset)):
            raise ValueError(f"scale={scale}, offset={offset}; scale must be positive, both finite")
        if view not in {"answer", "trajectory"}:
            raise ValueError(f"view={view!r}; choose 'answer' or 'trajectory'")
        self.name, self.family = name, family
        self._positive, self._scale, self._offset, self._view = positive, scale, offset, view
        self._model = TextModel(
            "AutoModelForSequenceClassification",
            model,
            max_tokens=max_tokens,
            batch_tokens=batch_tokens,
            threads=threads,
            device=device,
        )

    @property
    def usage(self) -> TextModelUsage:
        """Counts since the verifier was made."""
        return self._model.usage

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Scores, float32 [n]; NaN for a trajectory without turns."""
        scores = np.full(len(trajectories), math.nan, np.float32)
        at = [number for number, trajectory in enumerate(trajectories) if trajectory.turns]
        if at:
            scores[at] = self._scores([trajectories[number] for number in at])
        return scores

    def _scores(self, trajectories: Sequence[Trajectory]) -> Scores:
        tokenizer, model = self._model.load()
        positive = self._label(int(model.config.num_labels))
        texts = [self._text(trajectory, tokenizer) for trajectory in trajectories]
        templated = bool(getattr(tokenizer, "chat_template", None))
        logits_NC = self._model.rows(texts, lambda output, mask: output.logits, special_tokens=not templated)
        logits_N = _log_odds(logits_NC, positive)
        scores: Scores = (self._scale * (logits_N - self._offset)).sigmoid().numpy().astype(np.float32)
        return scores

    def _label(self, labels: int) -> int:
        if labels > 2 and self._positive is None:
            raise ValueError(f"{self.name!r} has {labels} labels; say which means good with positive=")
        positive = labels - 1 if self._positive is None else self._positive
        if not 0 <= positive < labels:
            raise ValueError(f"{self.name!r} has labels 0 to {labels - 1}, not positive={positive}")
        return positive

    def _text(self, trajectory: Trajectory, tokenizer: Any) -> Text:
        turns = trajectory.turns if self._view == "trajectory" else trajectory.turns[-1:]
        said = [(turn.observation, turn.action) for turn in turns]
        if trajectory.instructions:
            said[0] = (f"{trajectory.instructions}\n\n{said[0][0]}", said[0][1])
        safe = [tuple(defused(text, tokenizer.all_special_tokens) for text in pair) for pair in said]
        if not getattr(tokenizer, "chat_template", None):
            before = [text for pair in safe[:-1] for text in pair]
            return "\n".join([*before, safe[-1][0]]), safe[-1][1]
        roles = ("user", "assistant")
        messages = [
            {"role": role, "content": text} for pair in safe for role, text in zip(roles, pair, strict=True)
        ]
        return str(tokenizer.apply_chat_template(messages, tokenize=False))


def _log_odds(logits_NC: torch.Tensor, positive: int) -> torch.Tensor:
    if logits_NC.shape[1] == 1:
        return logits_NC[:, 0]
    others = [label for label in range(logits_NC.shape[1]) if label != positive]
    return logits_NC[:, positive] - logits_NC[:, others].logsumexp(1)
