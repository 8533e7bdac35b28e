"""Bounds on how much a model's tokenizer may lengthen a text."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_agents.errors import ModelNotFoundError

_MAX_GROWTH = 64
"""Maximum number of letters that may replace one letter. Unicode's compatibility forms have up to 18."""
_MAX_STEPS = 32
"""Maximum number of steps of a part, such as normalizers. Some steps add letters to each text."""


def check_growth(file: Path, settings: Mapping[str, Any]) -> None:
    """Check that the steps of a ``tokenizer.json`` do not multiply the length of a text.

    Args:
        file: The file, for the message.
        settings: Its content.

    Raises:
        ModelNotFoundError: A part has more than 32 steps, one letter may become more than 64, which may make the
            library abort the process for lack of memory, or a decoder has a regular expression, which would be
            searched for in every answer.
    """
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        steps = list(parts(settings.get(name)))
        if len(steps) > _MAX_STEPS:
            raise ModelNotFoundError(
                f"{file}: its {name} has {len(steps)} steps. Expected at most {_MAX_STEPS}. Download the model again, "
                "from a source that you trust"
            )
        patterns = (step["pattern"] for step in steps if isinstance(step.get("pattern"), Mapping))
        if name == "decoder" and any("Regex" in pattern for pattern in patterns):
            raise ModelNotFoundError(
                f"{file}: its decoder searches for a regular expression, which may take endless time. Expected texts. "
                "Download the model again, from a source that you trust"
            )
        growth = math.prod(float(_growth(step)) for step in steps)  # floats end at infinity
        if growth > _MAX_GROWTH:
            raise ModelNotFoundError(
                f"{file}: its {name} can turn one letter into {growth:g}. Expected at most {_MAX_GROWTH} letters. "
                "Download the model again, from a source that you trust"
            )


def parts(settings: object) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a sequence, which may contain sequences."""
    pending = [settings]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            for name in ("normalizers", "pretokenizers", "processors", "decoders"):
                inner = part.get(name)
                pending.extend(inner if isinstance(inner, list) else ())
            if part.get("type") != "Sequence":
                yield part


def _growth(part: Mapping[str, Any]) -> float:
    """Return the largest number of letters that replace one letter. Infinite if a template repeats the text."""
    match part.get("type"):
        case "Replace":
            pattern, content = part.get("pattern"), str(part.get("content"))
            replaced = pattern.get("String") if isinstance(pattern, Mapping) else None
            if isinstance(replaced, str) and replaced:
                return max(1, math.ceil(len(content) / len(replaced)))
            return 1 + len(content)  # an expression can match nothing, before each letter
        case "Prepend":
            return 1 + len(str(part.get("prepend")))
        case "ByteLevel":  # a letter has up to four bytes, and each becomes a letter of two bytes
            return 4
        case "CTC" | "BPEDecoder" | "WordPiece":  # an empty text is found before each letter
            names = ("pad_token", "word_delimiter_token", "suffix", "prefix")
            return 1 + sum(bool(part.get(name) == "") for name in names)
        case "Precompiled":
            return _longest_replacement(part.get("precompiled_charsmap"))
        case "TemplateProcessing":
            return math.inf if any(map(_repeats, (part.get("single"), part.get("pair")))) else 1
    return 1


def _longest_replacement(charsmap: object) -> int:
    """Return the length of the longest text in SentencePiece's map of characters: a table's size, the table, texts."""
    try:
        data = base64.b64decode(str(charsmap))
    except ValueError:
        return 1  # the library refuses it
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))


def _repeats(template: object) -> bool:
    pieces = template if isinstance(template, list) else []
    texts = [str(piece.get("Sequence")) for piece in pieces if isinstance(piece, Mapping) and "Sequence" in piece]
    return len(set(texts)) < len(texts) or len(pieces) > _MAX_GROWTH
