"""Bounds on how much a model's tokenizer may lengthen a text, and on the time that its regular expressions take."""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_agents.errors import ForgeError, ModelNotFoundError
from forge_agents.runtime.threads import begin_in_thread

_DEADLINE_S, _DEADLINE_S_PER_CHAR = 30.0, 1e-4
"""Time limit of one call, in addition to that of its text. A usual call takes up to 6 us per character."""
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX, _REST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QUICK = frozenset((
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    "|".join((
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}*{_CASED[1]}+{_SUFFIX}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}+{_CASED[1]}*{_SUFFIX}?",
        rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
    )),
))  # fmt: skip
"""Expressions of Qwen 2 and 3, Llama 3 and gpt-oss. They take linear time, so their texts need no thread."""
_late: weakref.WeakSet[Any] = weakref.WeakSet()
"""Tokenizers with a call that did not end in time. It goes on in its thread, so no other call is made."""
_MAX_GROWTH = 64
"""Maximum number of letters that may replace one letter. Unicode's compatibility forms have up to 18."""


class TokenizerLimitError(ForgeError, RuntimeError):
    """A regular expression of a tokenizer took too long for a text."""


def has_slow_patterns(tokenizer: Any) -> bool:
    """Return whether a Hugging Face tokenizer has regular expressions that may take longer than linear time."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = () if backend is None else (backend.normalizer, backend.pre_tokenizer)
    patterns: set[Any] = set()

    def note(part: dict[str, Any]) -> dict[str, Any]:
        patterns.add(part.get("Regex"))
        return part

    for step in steps:
        if step is not None:
            json.loads(step.__getstate__(), object_hook=note)
    return not patterns <= {None, *_QUICK}


def tokenize(tokenizer: Any, *texts: str, **options: Any) -> Any:
    """Call a Hugging Face tokenizer whose file may contain any regular expression, with a time limit.

    Raises:
        TokenizerLimitError: The call did not end in time, or the library ended a search after ten million steps. After
            a call that did not end, all others are refused.
    """
    size = sum(map(len, texts))
    limit_s, problem = _DEADLINE_S + _DEADLINE_S_PER_CHAR * size, "did not end in time for an earlier text"
    if tokenizer not in _late:
        call = functools.partial(tokenizer, *texts, **options)
        try:
            return begin_in_thread(call, name="tokenizer").result(limit_s)
        except TimeoutError:
            _late.add(tokenizer)
            problem = f"did not end within {limit_s:.0f} s for a text of {size} characters"
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of the library, which cannot be imported
                raise
            problem = f"failed for a text of {size} characters ({error})"
    raise TokenizerLimitError(
        f"the tokenizer of {getattr(tokenizer, 'name_or_path', '')!r} {problem}. Its tokenizer.json has a regular "
        "expression that takes too long. Download the model again, from a source that you trust, or use another one"
    )


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
