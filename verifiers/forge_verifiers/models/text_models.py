"""Verifiers on Hugging Face models that score texts in one forward pass: reward models and embeddings."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import numpy as np

from forge_agents.envs.reasoning import TAGS
from forge_agents.models import resolve as models
from forge_agents.models.chat_templates import render
from forge_agents.models.control_tokens import defused
from forge_agents.models.sizes import check_count, check_described
from forge_agents.rollout.tokenizing import tokenize
from forge_agents.runtime.machine import has_fast_bfloat16
from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import Composable, Cost, Scores, group_ids
from forge_verifiers.rules.answers import gold_answers, last_action

if TYPE_CHECKING:
    import torch

Text: TypeAlias = str | tuple[str, str]
"""A text, or a pair of texts for the tokenizer to join."""
_HEAD = 4
"""A text that is too long keeps the first quarter of the limit and fills the rest with its end."""
_LONG_CHARS = 1 << 16
"""Length from which a text loses characters of its middle before it is tokenized, which takes up to 6 us for each."""
_NO_LIMIT = 1_000_000
"""Tokenizers without a limit report a number far beyond this."""


@dataclass(slots=True, kw_only=True)
class TextModelUsage:
    """Counters of a model."""

    texts: int = 0
    """Texts, without repetitions in one call."""
    truncated: int = 0
    """Texts that lost their middle because of the limit."""
    batches: int = 0


class _Limits(TypedDict):
    max_tokens: int
    batch_tokens: int
    threads: int | None
    device: str


class TextModel:
    """A model in this process, loaded at first use by a class of transformers, from safetensors only.

    The other arguments are those of `RewardModel`. The model's own token limit also applies.
    """

    def __init__(
        self,
        auto_class: Literal["AutoModel", "AutoModelForSequenceClassification"],
        model: str | Path,
        *,
        max_tokens: int,
        batch_tokens: int,
        threads: int | None,
        device: str,
        name: str = "model",
    ) -> None:
        if max_tokens < 8 or batch_tokens < 1 or (threads is not None and threads < 1):
            raise ValueError(
                f"max_tokens={max_tokens}, batch_tokens={batch_tokens}, threads={threads}. Give at least 8, 1 and 1"
            )
        self.name, self.model, self.device, self.batch_tokens = name, str(model), str(device), batch_tokens
        self._auto_class, self._max_tokens, self._threads = auto_class, max_tokens, threads
        self._loaded: tuple[Any, Any] | None = None
        self._pad_id: int | None = None
        self._lock = threading.Lock()
        self.usage = TextModelUsage()

    def load(self) -> tuple[Any, Any]:
        """Tokenizer and model, loaded at the first call. Raises ModelNotFoundError, or ValueError without weights."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def rows(
        self, texts: Sequence[Text], read: Callable[[Any, torch.Tensor], torch.Tensor], *, special_tokens: bool = True
    ) -> torch.Tensor:
        """One row per text, float32 [n, width] on the CPU. Width 0 for no texts.

        `read` maps the model's output and the attention mask, int64 [B, T], to [B, width]. Texts from a chat template
        need no `special_tokens`.
        """
        import torch

        tokenizer, model = self.load()
        unique = list(dict.fromkeys(texts))
        if not unique:
            return torch.empty(0, 0)
        encoded, truncated = self._encode(tokenizer, model, unique, special_tokens)
        results: dict[Text, torch.Tensor] = {}
        with self._lock, _threads(self._threads), torch.no_grad():
            for batch in _batches([len(ids["input_ids"]) for ids in encoded], self.batch_tokens):
                padded = self._padded(model, [encoded[k] for k in batch])
                inputs = {name: torch.tensor(column, device=self.device) for name, column in padded.items()}
                rows = read(model(**inputs), inputs["attention_mask"]).float().cpu()
                results |= {unique[k]: row for k, row in zip(batch, rows, strict=True)}
                self.usage.batches += 1
        self.usage.texts += len(unique)
        self.usage.truncated += truncated
        return torch.stack([results[text] for text in texts])

    def _load(self) -> tuple[Any, Any]:
        import torch
        import transformers

        folder = models.resolve(self.model)
        check_described(folder)
        slow = self.device == "cpu" and models.dtype_of(folder) == "bfloat16" and not has_fast_bfloat16()
        dtype = "float32" if slow else "auto"
        tokenizer = models.load_tokenizer(folder)
        with models.no_remote_code(folder) as arguments:
            config = transformers.AutoConfig.from_pretrained(folder, **arguments)
            with torch.device("meta"):  # without memory
                described = getattr(transformers, self._auto_class).from_config(config, trust_remote_code=False)
            check_count(folder, sum(part.numel() for part in (*described.parameters(), *described.buffers())))
            model, loading = getattr(transformers, self._auto_class).from_pretrained(
                folder, use_safetensors=True, dtype=dtype, output_loading_info=True, **arguments
            )
        is_encoder = self._auto_class == "AutoModel"  # nothing reads an encoder's pooler
        missing = sorted(name for name in loading["missing_keys"] if not (is_encoder and "pooler" in name))
        if missing:
            raise ValueError(
                f"{self.model} lacks {', '.join(missing[:3])}, which transformers would fill with random numbers. It "
                f"is no trained {'encoder' if is_encoder else 'SequenceClassification'}"
            )
        self._pad_id = model.config.get_text_config().pad_token_id
        return tokenizer, model.eval().to(self.device)

    def _padded(self, model: Any, encoded: Sequence[Mapping[str, list[int]]]) -> dict[str, list[list[int]]]:
        """Pad the rows at the end to equal length."""
        pad_id = self._pad_id
        if pad_id is None:
            # A decoder reads its score at the last token that is not its padding token. With the end-of-turn token, it
            # would be read one token too early. A token that occurs in none of the rows takes its place.
            settings = model.config.get_text_config()
            tokens = {token for row in encoded for token in row["input_ids"]}
            pad_id = settings.pad_token_id = next(token for token in range(settings.vocab_size) if token not in tokens)
        longest = max(len(row["input_ids"]) for row in encoded)
        return {
            name: [row[name] + [pad_id if name == "input_ids" else 0] * (longest - len(row[name])) for row in encoded]
            for name in encoded[0]
        }

    def _encode(
        self, tokenizer: Any, model: Any, texts: Sequence[Text], special_tokens: bool
    ) -> tuple[list[dict[str, list[int]]], int]:
        """Token ids and masks of each text, and the number of shortened texts."""
        limit = min(self._max_tokens, tokenizer.model_max_length)
        if tokenizer.model_max_length > _NO_LIMIT:
            limit = min(limit, getattr(model.config, "max_position_embeddings", limit))

        def encode(text: Text) -> dict[str, list[int]]:
            parts: tuple[str, ...] = (text,) if isinstance(text, str) else text
            if max(map(len, parts)) > _LONG_CHARS:  # characters of tokens that are left out below
                room = limit * max(map(len, tokenizer.get_vocab()))
                parts = tuple(part if len(part) <= 2 * room else part[:room] + part[-room:] for part in parts)
            return dict(tokenize(tokenizer, *parts, add_special_tokens=special_tokens, verbose=False))

        encoded = [encode(text) for text in texts]
        long = [k for k, ids in enumerate(encoded) if len(ids["input_ids"]) > limit]
        head = limit // _HEAD
        for k in long:  # the task is at the beginning and the conclusion at the end
            encoded[k] = {key: [*row[:head], *row[head - limit :]] for key, row in encoded[k].items()}
        return encoded, len(long)


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of texts by batch, longest first, so that a padded batch has at most `batch_tokens` tokens."""
    order = sorted(range(len(lengths)), key=lambda k: -lengths[k])
    while order:
        size = max(1, batch_tokens // max(1, lengths[order[0]]))
        yield order[:size]
        order = order[size:]


class _TextVerifier(Composable):
    """Base class of verifiers with a text model."""

    cost: Cost = "model"
    _model: TextModel

    @property
    def own_model(self) -> TextModel:
        """The model in this process, whose GPU memory a run counts."""
        return self._model

    @property
    def usage(self) -> TextModelUsage:
        """Counters since the verifier was created."""
        return self._model.usage


class RewardModel(_TextVerifier):
    """A Hugging Face sequence classifier that scores conversations, such as a reward model.

    A model with one label gives a logit, a model with several labels the log-odds of `positive` against all others. The
    score is sigmoid(scale * (logit - offset)): with scale 1 and offset 0, the softmax probability of `positive`. Reward
    models are trained on differences (Bradley-Terry), so their logits have no fixed zero. Choose `offset` and `scale`
    so that scores do not saturate. The default combiner uses quantiles and needs no more.

    With a chat template, the model reads a conversation, otherwise the task and the answer as a pair of texts. Control
    tokens and tags of reasoning in the texts are broken up.

    Args:
        model: A local folder, a built-in name or a hub id. Safetensors only. Code from the hub is never run.
        positive: Label that means "good". Required with three labels or more. 1 by default for two.
        scale: Positive steepness.
        offset: The logit that scores 0.5.
        view: ``"trajectory"``, the whole conversation, or ``"answer"``, its last turn.
        max_tokens: Maximum number of tokens. Longer conversations lose their middle. `usage` counts them.
        batch_tokens: Maximum number of tokens of a forward pass, padding included.
        threads: Number of CPU threads during a forward pass. By default torch's setting.
        device: Device in torch's notation.
        name: Name in reports.
        family: Label of verifiers that share a cause of error.

    Raises:
        ValueError: A number is out of range. At the first score: the classifier's head is not in the files, or there
            is no label `positive`.
        ModelNotFoundError: At the first score: there is no such model.
    """

    default_family = "reward models"

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
            raise ValueError(f"scale={scale}, offset={offset}. Scale must be positive, both finite")
        if view not in {"answer", "trajectory"}:
            raise ValueError(f"view={view!r}. Choose 'answer' or 'trajectory'")
        self.name, self.family = name, family
        self._positive, self._scale, self._offset, self._view = positive, scale, offset, view
        limits: _Limits = {"max_tokens": max_tokens, "batch_tokens": batch_tokens, "threads": threads, "device": device}
        self._model = TextModel("AutoModelForSequenceClassification", model, name=name, **limits)

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Scores, float32 [n], or NaN for a trajectory without turns."""
        scores = np.full(len(trajectories), math.nan, np.float32)
        rows = [row for row, trajectory in enumerate(trajectories) if trajectory.turns]
        if rows:
            scores[rows] = self._scores([trajectories[row] for row in rows])
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
            raise ValueError(f"{self.name!r} has {labels} labels. Name the good one with positive=")
        positive = labels - 1 if self._positive is None else self._positive
        if not 0 <= positive < labels:
            raise ValueError(f"{self.name!r} has labels 0 to {labels - 1}, not positive={positive}")
        return positive

    def _text(self, trajectory: Trajectory, tokenizer: Any) -> Text:
        turns = trajectory.turns if self._view == "trajectory" else trajectory.turns[-1:]
        pairs = [(turn.observation, turn.action) for turn in turns]
        if trajectory.instructions:
            pairs[0] = (f"{trajectory.instructions}\n\n{pairs[0][0]}", pairs[0][1])
        # all_special_tokens omits tokens without a role, such as those that open a message
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        # templates drop the text before a closing tag of reasoning, so that an answer could hide its beginning
        tokens = sorted({*tokenizer.all_special_tokens, *special, *TAGS})
        safe = [tuple(defused(text, tokens) for text in pair) for pair in pairs]
        if not getattr(tokenizer, "chat_template", None):
            before = [text for pair in safe[:-1] for text in pair]
            return "\n".join([*before, safe[-1][0]]), safe[-1][1]
        roles = ("user", "assistant")
        messages = [{"role": role, "content": text} for pair in safe for role, text in zip(roles, pair, strict=True)]
        return render(tokenizer, messages)


def _log_odds(logits_NC: torch.Tensor, positive: int) -> torch.Tensor:
    if logits_NC.shape[1] == 1:
        return logits_NC[:, 0]
    others = [label for label in range(logits_NC.shape[1]) if label != positive]
    return logits_NC[:, positive] - logits_NC[:, others].logsumexp(1)


class EmbeddingSimilarity(_TextVerifier):
    """Cosine similarity of the answer's embedding, which is the mean of the encoder's last hidden states.

    ``against="reference"`` compares with the most similar reference in `Trajectory.info`. ``against="group"`` compares
    with the mean of the unit embeddings of the group's other answers, so that answers with the group's common meaning
    score high, while `SelfConsistency` needs equal answers. The score is (cosine - floor) / (1 - floor), clipped to
    [0, 1].

    Args:
        model: Encoder: a local folder, a built-in name or a hub id. Safetensors only.
        against: See above.
        answer_key: Key of the reference in `Trajectory.info`: a text, or a list of alternatives.
        extract: Returns the text to compare, or None to abstain. By default the whole last action.
        floor: Cosine that scores 0, in [-1, 1). Encoders rarely give different texts less than 0.2 to 0.7.
        max_tokens: Maximum number of tokens. Longer texts lose their middle. `usage` counts them.
        batch_tokens: Maximum number of tokens of a forward pass, padding included.
        threads: Number of CPU threads during a forward pass. By default torch's setting.
        device: Device in torch's notation.
        name: Name in reports.
        family: Label of verifiers that share a cause of error.

    Raises:
        ValueError: A number is out of range.
        ModelNotFoundError: At the first score: there is no such model.
    """

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
            raise ValueError(f"against={against!r}. Choose 'reference' or 'group'")
        if not -1 <= floor < 1:
            raise ValueError(f"floor={floor} must be a cosine in [-1, 1)")
        self.name, self.family = name, family
        self.sees_groups = against == "group"
        self._against, self._answer_key, self._extract, self._floor = against, answer_key, extract, floor
        limits: _Limits = {"max_tokens": max_tokens, "batch_tokens": batch_tokens, "threads": threads, "device": device}
        self._model = TextModel("AutoModel", model, name=name, **limits)

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Similarities, float32 [n], or NaN without turns, a reference, or another answer in the group.

        An empty answer scores 0: a policy could otherwise avoid low scores by empty answers.
        """
        answers = [self._extract(trajectory) for trajectory in trajectories]
        if self._against == "reference":
            references = [gold_answers(trajectory, self._answer_key) or () for trajectory in trajectories]
            vectors = self._vectors([*answers, *(text for texts in references for text in texts)])
            cosines = [_nearest(vectors, answer, texts) for answer, texts in zip(answers, references, strict=True)]
        else:
            cosines = _to_group(self._vectors(answers), answers, group_ids(trajectories).tolist())
        scores = (np.array(cosines, np.float64) - self._floor) / (1 - self._floor)
        return np.clip(scores, 0.0, 1.0).astype(np.float32)

    def _vectors(self, texts: Sequence[str | None]) -> dict[str, np.ndarray]:
        """Unit vectors, float64, by text."""
        unique = list(dict.fromkeys(text for text in texts if text and text.strip()))
        if not unique:
            return {}
        rows = self._model.rows(unique, _mean_over_tokens).numpy().astype(np.float64)
        return dict(zip(unique, rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12), strict=True))


def _mean_over_tokens(output: Any, mask: torch.Tensor) -> torch.Tensor:
    hidden_BTH, mask_BT1 = output.last_hidden_state.float(), mask[:, :, None]
    mean: torch.Tensor = (hidden_BTH * mask_BT1).sum(1) / mask_BT1.sum(1)
    return mean


def _nearest(vectors: Mapping[str, np.ndarray], answer: str | None, references: Sequence[str]) -> float:
    others = [vectors[text] for text in references if text in vectors]
    if answer is None or not others:
        return math.nan
    return max(float(vectors[answer] @ other) for other in others) if answer in vectors else _LOWEST


def _to_group(vectors: Mapping[str, np.ndarray], answers: Sequence[str | None], groups: Sequence[int]) -> list[float]:
    members: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    for answer, group in zip(answers, groups, strict=True):
        if answer is not None and answer in vectors:
            members[group].append(vectors[answer])
    sums = {group: np.sum(rows, axis=0) for group, rows in members.items()}
    cosines = []
    for answer, group in zip(answers, groups, strict=True):
        vector = None if answer is None else vectors.get(answer)
        if answer is None or len(members[group]) < (1 if vector is None else 2):
            cosines.append(math.nan)
        elif vector is None:
            cosines.append(_LOWEST)
        else:
            others = sums[group] - vector
            cosines.append(float(vector @ others / max(float(np.linalg.norm(others)), 1e-12)))
    return cosines


_LOWEST = -1.0
"""Cosine of an empty answer."""
