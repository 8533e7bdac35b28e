"""Bounds on the time that the regular expressions of a model's tokenizer take."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable
from typing import Any

from forge_agents.errors import ForgeError
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
"""Expressions of Qwen 2 and 3, Llama 3 and gpt-oss that take linear time, so their texts need no thread."""
_late: weakref.WeakSet[Any] = weakref.WeakSet()
"""Tokenizers with a call that did not end in time. The call goes on in its thread, so no other call is made."""


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
    return _within_limit(tokenizer, functools.partial(tokenizer, *texts, **options), sum(map(len, texts)))


def encode(tokenizer: Any, text: str, *, may_be_slow: bool) -> tuple[int, ...]:
    """Return the ids of a text without special tokens around it, with the time limit of `tokenize` if it may be slow.

    The tokenizer must have encoded a text before, which sets its options. Transformers would also make the masks of the
    tokens and drop their texts, for which all threads wait 0.2 s per million tokens.

    Raises:
        TokenizerLimitError: As in `tokenize`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)

    def ids() -> Any:
        if backend is None:
            return tokenizer.encode(text, add_special_tokens=False)
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    return tuple(_within_limit(tokenizer, ids, len(text)) if may_be_slow else ids())


def _within_limit(tokenizer: Any, call: Callable[[], Any], size: int) -> Any:
    limit_s, problem = _DEADLINE_S + _DEADLINE_S_PER_CHAR * size, "did not end in time for an earlier text"
    if tokenizer not in _late:
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
