"""Hugging Face models that read texts in batches: the common part of reward models and encoders.

In: texts. Out: one row of numbers for each. Waits for the model's files, once, and for its forward passes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

Text: TypeAlias = str | tuple[str, str]
"""A text, or two that the tokenizer joins its own way."""
_HEAD = 4
"""A text that is too long keeps the first quarter of the limit, and of its end the rest."""
_NO_LIMIT = 1_000_000
"""Tokenizers without a limit of their own say a number far beyond this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModelUsage:
    """What a model has read so far."""

    texts: int = 0
    """Read; equal texts of one call are read once."""
    truncated: int = 0
    """Of these, longer than the limit: their middle was left out."""
    batches: int = 0


class TextModel:
    """A model on the processor or an accelerator of this process; loaded when first used, from safetensors only.

    Args:
        auto_class: Class of transformers that loads it.
        model: A local folder, a built-in name or a hub id.
        max_tokens: Longer texts lose their middle; the model's own limit holds, too.
        batch_tokens: Tokens of a batch, padding included; texts of like length share a batch.
        threads: CPU threads of this process while the model reads; None leaves torch's number.
        device: Where the model lives, in torch's words.

    Raises:
        ValueError: A number is out of range.
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
    ) -> None:
        if max_tokens < 8 or batch_tokens < 1 or (threads is not None and threads < 1):
            raise ValueError(
                f"max_tokens={max_tokens}, batch_tokens={batch_tokens}, threads={threads}; give at least 8, 1 and 1"
            )
        self._auto_class, self._name, self._device = auto_class, model, device
        self._max_tokens, self._batch_tokens, self._threads = max_tokens, batch_tokens, threads
        self._loaded: tuple[Any, Any] | None = None
        self._lock = threading.Lock()
        self.usage = TextModelUsage()

    def load(self) -> tuple[Any, Any]:
        """Tokenizer and model. Twice is no error.

        Raises:
            ModelNotFoundError: There is no such model, or it has no safetensors.
            ValueError: Weights that the model needs are not in its files.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def rows(
        self, texts: Sequence[Text], read: Callable[[Any, torch.Tensor], torch.Tensor], *, special_tokens: bool = True
    ) -> torch.Tensor:
        """What `read` makes of the model's output for each text.

        Args:
            texts: Any number.
            read: Takes the model's output and the mask, int64 [B, T], 1 where a token is no padding; returns
                [B, width].
            special_tokens: Whether the tokenizer adds its own; not to texts that a chat template has written.

        Returns:
            float32 [n, width], on the processor; width 0 for no texts.
        """
        import torch

        tokenizer, model = self.load()
        unique = list(dict.fromkeys(texts))
        if not unique:
            return torch.empty(0, 0)
        encoded, truncated = self._encode(tokenizer, model, unique, special_tokens)
        found: dict[Text, torch.Tensor] = {}
        batches = 0
        with self._lock, _threads(self._threads), torch.no_grad():
            for batch in _batches([len(ids["input_ids"]) for ids in encoded], self._batch_tokens):
                inputs = tokenizer.pad([encoded[at] for at in batch], return_tensors="pt").to(self._device)
                rows = read(model(**inputs), inputs["attention_mask"]).float().cpu()
                found |= {unique[at]: row for at, row in zip(batch, rows, strict=True)}
                batches += 1
        before = self.usage
        self.usage = TextModelUsage(
            texts=before.texts + len(unique),
            truncated=before.truncated + truncated,
            batches=before.batches + batches,
        )
        return torch.stack([found[text] for text in texts])

    def _load(self) -> tuple[Any, Any]:
        import transformers

        from forge_agents.models import resolve as models

        folder = models.resolve(self._name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokenizer.padding_side = "right"
        model, loading = getattr(transformers, self._auto_class).from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype="auto", output_loading_info=True
        )
        missing = sorted(name for name in loading["missing_keys"] if "pooler" not in name)  # nothing reads the pooler
        if self._auto_class == "AutoModelForSequenceClassification":
            missing = sorted(loading["missing_keys"])
        if missing:
            raise ValueError(
                f"{self._name} lacks {', '.join(missing[:3])}, which transformers would fill with random numbers; it "
                f"is no trained {self._auto_class.removeprefix('AutoModelFor').removeprefix('AutoModel') or 'encoder'}"
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if getattr(model.config, "pad_token_id", None) is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        return tokenizer, model.eval().to(self._device)

    def _encode(
        self, tokenizer: Any, model: Any, texts: Sequence[Text], special_tokens: bool
    ) -> tuple[list[dict[str, list[int]]], int]:
        """Token ids and what goes with them, for each text; and how many were too long."""
        limit = min(self._max_tokens, tokenizer.model_max_length)
        if tokenizer.model_max_length > _NO_LIMIT:
            limit = min(limit, getattr(model.config, "max_position_embeddings", limit))

        def encode(text: Text) -> dict[str, list[int]]:
            both = (text,) if isinstance(text, str) else text
            return dict(tokenizer(*both, add_special_tokens=special_tokens, verbose=False))

        encoded = [encode(text) for text in texts]
        long = [at for at, ids in enumerate(encoded) if len(ids["input_ids"]) > limit]
        head = limit // _HEAD
        for at in long:  # the task stands at the beginning and the conclusion at the end
            encoded[at] = {key: [*row[:head], *row[head - limit :]] for key, row in encoded[at].items()}
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
    """Places of texts, longest first, so that a batch's tokens, padded to its longest, are at most `batch_tokens`."""
    order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
    while order:
        size = max(1, batch_tokens // max(1, lengths[order[0]]))
        yield order[:size]
        order = order[size:]
