"""Verifiers on Hugging Face models that score texts in one forward pass: reward models and embeddings."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import numpy as np

from forge_agents.display import printable
from forge_agents.envs.env import writable
from forge_agents.envs.reasoning import TAGS
from forge_agents.models import resolve as models
from forge_agents.models.chat_templates import render
from forge_agents.models.control_tokens import defused
from forge_agents.models.sizes import check_count, check_described
from forge_agents.rollout.tokenizing import tokenize
from forge_agents.runtime.machine import has_fast_bfloat16
from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import Assessment, Composable, Cost, Scores, group_ids, logged_scores
from forge_verifiers.rules.answers import gold_answers, last_action

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)

Text: TypeAlias = str | tuple[str, str]
"""A text, or a pair of texts for the tokenizer to join."""
_HEAD = 4
"""A text that is too long keeps the first quarter of the limit and fills the rest with its end."""
_LONG_CHARS = 1 << 16
"""Length from which a text loses characters of its middle before it is tokenized, which takes up to 6 us for each."""
_NO_LIMIT = 1_000_000
"""Tokenizers without a limit report a number far beyond this."""
_LOWEST = -1.0
"""Cosine of an empty answer."""


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
        self._num_positions = math.inf
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
        """A row per text, float32 [n, width] on the CPU. Width 0 for no texts.

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
            ids = [row["input_ids"] for row in encoded]
            for batch in _batches(list(map(len, ids)), self.batch_tokens, _batch_keys(model.config, ids)):
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
        settings = model.config.get_text_config()
        is_token = settings.pad_token_id is not None and 0 <= settings.pad_token_id < settings.vocab_size
        self._pad_id = settings.pad_token_id if is_token else None  # -1 in the files of some models
        self._num_positions = _num_positions(model)
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
        limit = int(min(self._max_tokens, tokenizer.model_max_length, self._num_positions))
        declared = getattr(model.config, "max_position_embeddings", None)
        if tokenizer.model_max_length > _NO_LIMIT and declared and declared > 0:  # -1 in XLNet's: no limit
            limit = min(limit, declared)

        def encode(text: Text) -> dict[str, list[int]]:
            parts = tuple(map(writable, (text,) if isinstance(text, str) else text))
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


def _num_positions(model: Any) -> float:
    """Number of tokens for which the model has learned positions, or infinity if it uses others.

    RoBERTa and MPNet number positions from the one after their padding token's, so their tables hold fewer tokens.
    """
    import torch

    tables = [
        part
        for name, part in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(part, torch.nn.Embedding)
    ]
    sizes = (part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1) for part in tables)
    return min(sizes, default=math.inf)


def _batch_keys(config: Any, rows: Sequence[Sequence[int]]) -> list[int]:
    """A number for each row of token ids. Only rows with equal numbers may share a batch.

    XLNet reads its score at the last position, padding included. BART and T5 read it at the last end-of-text token and
    refuse rows with different numbers of these. A text that lost its middle may have lost some.
    """
    if getattr(config, "summary_type", None) == "last":
        return [len(row) for row in rows]
    if getattr(config, "is_encoder_decoder", False):
        return [row.count(config.eos_token_id) for row in rows]
    return [0] * len(rows)


def _batches(lengths: Sequence[int], batch_tokens: int, keys: Sequence[int]) -> Iterator[list[int]]:
    """Indices of texts by batch, longest first. A batch has one key and, padded, at most `batch_tokens` tokens."""
    order = sorted(range(len(lengths)), key=lambda k: (keys[k], -lengths[k]))
    while order:
        size = max(1, batch_tokens // max(1, lengths[order[0]]))
        batch = [k for k in order[:size] if keys[k] == keys[order[0]]]
        yield batch
        order = order[len(batch) :]


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

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """The scores of `assess`, float32 [n]. Failures are logged."""
        return logged_scores(self, trajectories)

    def _failures(self, is_failed: Sequence[bool], num_texts: int) -> dict[int, str]:
        """Failures of the rows for which the model gave NaN or infinity. Raises ValueError if it did for all texts."""
        failed = dict.fromkeys(np.flatnonzero(is_failed).tolist(), f"{self._model.model} gave NaN or infinity")
        if failed and len(failed) == num_texts:
            raise ValueError(
                f"{self._model.model} gave NaN or infinity for all {num_texts} texts. Its activations may exceed the "
                "range of its float16 weights: convert them to float32 or bfloat16"
            )
        return failed


class RewardModel(_TextVerifier):
    """A Hugging Face sequence classifier that scores conversations, such as a reward model.

    A model with one label gives a logit, a model with several labels the log-odds of `positive` against all others, or
    its logit if the model's ``problem_type`` says that labels are independent (multi-label or regression). The score is
    sigmoid(scale * (logit - offset)): with scale 1 and offset 0, the probability of `positive`. Reward models are
    trained on differences (Bradley-Terry), so their logits have no fixed zero. Choose `offset` and `scale` so that
    scores do not saturate. The default combiner uses quantiles and needs no more.

    With a chat template, the model reads a conversation, otherwise the task and the answer as a pair of texts. Control
    tokens and tags of reasoning in the texts are broken up.

    Args:
        model: A local folder, a built-in name or a hub id. Safetensors only. Code from the hub is never run.
        positive: Label that means "good". Required with three labels or more, and with two independent ones. 1 by
            default for two, with a warning that names the label.
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

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """Scores, or NaN for a trajectory without turns. A logit of NaN or infinity is a failure."""
        scores, failed = np.full(len(trajectories), math.nan, np.float32), np.zeros(len(trajectories), bool)
        rows = [row for row, trajectory in enumerate(trajectories) if trajectory.turns]
        if rows:
            logits_N = self._logits([trajectories[row] for row in rows])
            values = (self._scale * (logits_N - self._offset)).sigmoid().numpy().astype(np.float32)
            failed[rows] = ~np.isfinite(logits_N.numpy())
            scores[rows] = np.where(failed[rows], np.float32(math.nan), values)
        return Assessment(scores=scores, failed=self._failures(failed.tolist(), len(rows)))

    def _logits(self, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        tokenizer, model = self._model.load()
        independent = model.config.problem_type in {"multi_label_classification", "regression"}
        positive = self._label(int(model.config.num_labels), independent=independent)
        self._warn_of_default_label(model.config)
        texts = [self._text(trajectory, tokenizer) for trajectory in trajectories]
        templated = bool(getattr(tokenizer, "chat_template", None))
        logits_NC = self._model.rows(texts, lambda output, mask: output.logits, special_tokens=not templated)
        return logits_NC[:, positive] if independent else _log_odds(logits_NC, positive)

    def _label(self, labels: int, *, independent: bool) -> int:
        if labels > (1 if independent else 2) and self._positive is None:
            raise ValueError(f"{self.name!r} has {labels} labels. Name the good one with positive=")
        positive = labels - 1 if self._positive is None else self._positive
        if not 0 <= positive < labels:
            raise ValueError(f"{self.name!r} has labels 0 to {labels - 1}, not positive={positive}")
        return positive

    def _warn_of_default_label(self, config: Any) -> None:
        """Warn once if a label with a name counts as good by default: it may be "toxic" or "not_entailment"."""
        label = str(config.id2label.get(1, ""))
        if config.num_labels == 2 and self._positive is None and label not in {"", "LABEL_1"}:
            self._positive = 1
            _LOG.warning(
                "%s scores the probability of label 1, %s. Set positive=1 if this label means good, else positive=0",
                self.name,
                printable(repr(label), 60),
            )

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

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """Similarities, or NaN without turns, a reference, or another answer in the group.

        An empty answer scores 0: a policy could otherwise avoid low scores by empty answers. An embedding with NaN or
        infinity is a failure and is compared with no other.
        """
        answers = [self._extract(trajectory) for trajectory in trajectories]
        is_reference = self._against == "reference"
        references = [gold_answers(t, self._answer_key) or () if is_reference else () for t in trajectories]
        vectors = self._vectors([*answers, *(text for texts in references for text in texts)])
        finite = {text: vector for text, vector in vectors.items() if np.isfinite(vector).all()}
        failed = [answer in vectors and answer not in finite for answer in answers]
        failures = self._failures(failed, len(answers))
        answers = [None if is_failed else answer for answer, is_failed in zip(answers, failed, strict=True)]
        if is_reference:
            cosines = [_nearest(finite, answer, texts) for answer, texts in zip(answers, references, strict=True)]
        else:
            cosines = _to_group(finite, answers, group_ids(trajectories).tolist())
        scores = (np.array(cosines, np.float64) - self._floor) / (1 - self._floor)
        return Assessment(scores=np.clip(scores, 0.0, 1.0).astype(np.float32), failed=failures)

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
