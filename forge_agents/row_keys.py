"""Keys of recorded rows and messages: keys that say what is learned, keys that may change it, and metadata.

Used by every reader of training data, so that the same key never means different things.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

LEARN_KEYS = (
    "weight", "loss", "train", "training", "trainable", "learn", "loss_mask", "step_loss_mask", "loss_weight",
)  # fmt: skip
"""Keys with which OpenAI, ms-swift, axolotl and slime mark a message or a row as learned (1) or not (0)."""
_CHANGES = frozenset((
    "loss", "losses", "train", "trained", "training", "trainable", "untrained", "learn", "learned", "learning",
    "learnable", "mask", "masks", "masked", "masking", "weight", "weights", "weighted", "weighting", "ignore",
    "ignored", "skip", "skipped", "exclude", "excluded", "include", "included", "keep", "drop", "dropped", "enabled",
    "disabled", "active", "grad", "gradient", "backprop", "optimize", "supervise", "supervised", "supervision",
    "target", "targets", "label", "labels", "system", "developer", "tool", "tools", "function", "functions", "image",
    "images", "video", "videos", "audio", "audios", "document", "documents", "context", "contexts", "history",
    "instruction", "instructions", "template", "kwargs", "prefix", "suffix", "partial", "eos", "eot", "bos", "end",
    "ids", "advantage", "advantages", "input", "output", "response", "completion", "call", "calls",
))  # fmt: skip
"""A key that contains one of these words may change what is learned."""
_METADATA = frozenset((
    "id", "uuid", "source", "sources", "dataset", "origin", "meta", "metadata", "info", "timestamp", "time", "date",
    "created", "updated", "url", "lang", "language", "license", "category", "topic", "topics", "task", "type", "kind",
    "difficulty", "level", "split", "subset", "domain", "author", "model", "score", "scores", "rating", "ratings",
    "hash", "index", "idx", "row", "num", "number", "count", "length", "tokens", "turn", "turns", "version", "tag",
    "tags", "truncated", "quality", "cost", "latency", "usage", "seed", "title", "finish", "reason", "name",
))  # fmt: skip
"""A key that contains one of these words, and none of the others, says something about a row and changes nothing."""
_MEASURES = frozenset((
    "id", "uuid", "count", "hash", "source", "type", "version", "time", "date", "timestamp", "score", "name", "length",
    "language", "lang", "model", "rating",
))  # fmt: skip
"""A key that ends with one of these words, such as ``tool_call_id``, changes nothing."""
_COUNTS = ("num", "n", "has")
"""A key that begins with one of these words changes nothing."""
_CUT = frozenset((
    "length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded", "incomplete",
    "content_filter", "safety", "refusal", "pause_turn", "error", "failed", "cancelled", "in_progress",
))  # fmt: skip
"""Finish reasons of answers that are not complete, in the APIs of OpenAI, Anthropic, Mistral and Google."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")


def is_learned(source: str, thing: Mapping[str, Any], unread: set[str], read_keys: Collection[str]) -> bool:
    """Return whether a row or a message is to be learned. The default is True.

    Args:
        source: Place of the row or message, for errors.
        thing: The row or the message.
        unread: Set to which ignored keys are added, except common metadata.
        read_keys: Keys that the caller reads.

    Raises:
        ValueError: A key may change what is learned and is not followed, or has a value other than 0 and 1.
    """
    marks: dict[str, bool] = {}
    for key, value in thing.items():
        if key in read_keys or value is None or (isinstance(value, str | Sequence | Mapping) and not len(value)):
            continue
        words = [word.lower() for word in _WORD.findall(str(key))]
        is_number = isinstance(value, int | float | np.number)
        if key in LEARN_KEYS:
            if isinstance(value, str) or np.ndim(value) or value not in (0, 1):
                raise ValueError(f"{source} has {key}={value!r:.80}. Expected 0 or 1 (false or true)")
            marks[key] = bool(value)
        elif words and (words[-1] in _MEASURES or words[0] in _COUNTS or (words[-1] == "tokens" and is_number)):
            continue
        elif _CHANGES.intersection(words):
            raise ValueError(refusal(source, key))
        elif not _METADATA.intersection(words):
            unread.add(str(key))
    if len(set(marks.values())) > 1:
        raise ValueError(f"{source} has the contradictory marks {marks}. Keep one of them")
    return all(marks.values())


def is_cut(thing: Mapping[str, Any]) -> bool:
    """Return whether a row or a message says that its answer is not complete."""
    reasons = (thing.get("finish_reason"), thing.get("stop_reason"))
    marks = (thing.get("truncated"), thing.get("is_truncated"))
    return any(map(is_cut_reason, reasons)) or any(isinstance(mark, bool | np.bool_) and mark for mark in marks)


def is_cut_reason(reason: Any) -> bool:
    """Return whether a finish reason is of an incomplete answer. Google's look like ``FinishReason.MAX_TOKENS``."""
    return str(reason).rpartition(".")[2].lower() in _CUT


def marks_of(thing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a row or a message that mark it as learned or not, with their values."""
    return {key: thing[key] for key in LEARN_KEYS if key in thing}


def refusal(source: str, key: Any) -> str:
    """Return the error message for a key that is refused."""
    how = {
        "tools": "`forge-agents import` writes tools and calls into the messages",
        "functions": "`forge-agents import` writes tools and calls into the messages",
        "name": "write the speaker's name into the content",
        "label": "make pairs with 'chosen' and 'rejected' of labeled answers",
    }.get(str(key), "follow it when the file is made")
    named = f"{source} has the key {str(key)!r:.80}"
    return f"{named}, which is not read and may change what is learned; {how}, or remove it"
