"""Bounds on how much a model's tokenizer may lengthen a text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_agents.errors import ModelNotFoundError

_MAX_GROWTH = 64
"""Maximum number of letters that may replace one letter. Unicode's compatibility forms have up to 18."""


def check_growth(file: Path, settings: Mapping[str, Any]) -> None:
    """Check that the normalizers and decoders of a ``tokenizer.json`` do not multiply the length of a text.

    Args:
        file: The file, for the message.
        settings: Its content.

    Raises:
        ModelNotFoundError: One letter may become more than 64, which may make the library abort the process for lack of
            memory, or a decoder has a regular expression, which would be searched for in every answer.
    """
    for name in ("normalizer", "decoder"):
        steps = list(parts(settings.get(name)))
        patterns = (step["pattern"] for step in steps if isinstance(step.get("pattern"), Mapping))
        if name == "decoder" and any("Regex" in pattern for pattern in patterns):
            raise ModelNotFoundError(
                f"{file}: its decoder searches for a regular expression, which may take endless time. Expected texts. "
                "Download the model again, from a source that you trust"
            )
        growth = math.prod(map(_growth, steps))
        if growth > _MAX_GROWTH:
            raise ModelNotFoundError(
                f"{file}: its {name} can turn one letter into {growth:g}. Expected at most {_MAX_GROWTH} letters. "
                "Download the model again, from a source that you trust"
            )


def parts(settings: object) -> Iterator[Mapping[str, Any]]:
    """Yield the normalizers or decoders of a sequence, which may contain sequences."""
    pending = [settings]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            inner = part.get("normalizers") or part.get("decoders")
            pending.extend(inner if isinstance(inner, list) else ())
            if part.get("type") != "Sequence":
                yield part


def _growth(part: Mapping[str, Any]) -> int:
    """Return the largest number of letters that replace one letter."""
    if part.get("type") != "Replace":
        return 1
    pattern, content = part.get("pattern"), str(part.get("content"))
    replaced = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(replaced, str) and replaced:
        return max(1, math.ceil(len(content) / len(replaced)))
    return 1 + len(content)  # an expression can match nothing, before each letter
