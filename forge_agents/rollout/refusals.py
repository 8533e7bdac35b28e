"""Refusals of model servers: the request field that they name, and errors that arrive with status 200."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

LIMITS = ("max_tokens", "max_completion_tokens")
"""Names of the response limit: the usual name, and the name that OpenAI's reasoning models require."""
_TOO_LONG = (
    r"context_length_exceeded|maximum context length|longer than the (?:maximum model length|model's context length)"
    r"|exceed_context_size|available context size|context length of only|prompt is too long"
    r"|exceeds the maximum number of tokens|max_new_tokens. must be <="
)
"""How OpenAI, vLLM, SGLang, llama.cpp, LM Studio, Anthropic, Gemini and TGI refuse a conversation that does not fit."""
_UNSUPPORTED = re.compile(
    r"unsupported|(?:not|n't) support|recogni[sz]e|unknown|not (?:permitted|allowed)|unexpected|extra|instead",
    re.IGNORECASE,
)
"""Words of a refusal that concerns a field itself, as opposed to its value."""
_BAD_GATEWAY = 502
_MAX_CHARS = 10_000
"""Length of the part of an error that is searched for words, and maximum length of an event with an error."""
_MAX_EVENTS = 100
"""Maximum number of events that are searched for an error."""
_PERMANENT = tuple(
    (status, re.compile(words, re.IGNORECASE))
    for status, words in (
        (
            401,
            r"(?:invalid|incorrect|missing|wrong|no)[\s_-]{1,9}(?:x-)?(?:api|access|auth)?[\s_-]{,9}(?:key|token)\b",
        ),
        (401, r"invalid_api_key|unauthori[sz]ed|authentication"),
        (402, r"insufficient[\s_](?:quota|balance|credit|funds)|billing"),
        (403, r"forbidden|permission|access denied"),
        (404, r"(?:model|deployment)\b.{0,80}(?:not[\s_]found|(?:not|n't) exist|unknown|not a valid)|model_not_found"),
        (404, r"(?:no such|unknown|invalid) model"),
        (400, rf"invalid_request|unsupported_(?:parameter|value)|{_TOO_LONG}"),
    )
)
"""Errors that a retry would meet again, by the status that they should have had."""


def is_too_long(refusal: str) -> bool:
    """Whether a refusal says that the conversation does not fit the model's context."""
    return re.search(_TOO_LONG, refusal[:_MAX_CHARS], re.IGNORECASE) is not None


def named_field(body: str, sent: Mapping[str, Iterable[str]]) -> str | None:
    """The first entry of `sent` that the body of a refusal names, or None. `sent` has the names of fields by entry.

    Many refusals of a long conversation name the token limit, and "stop" is an ordinary word. Such fields count only if
    the refusal says that the field itself is not accepted.
    """
    if is_too_long(body):
        return None
    error = _error_of(_object(body))
    param = str(error.get("param")) if isinstance(error, dict) else None
    body = body[:_MAX_CHARS]
    unsupported = _UNSUPPORTED.search(body)
    entries = {name: {name, *fields} for name, fields in sent.items()}
    for name in sorted(entries, key=lambda name: param not in entries[name]):
        if name in (*LIMITS, "stop") and not unsupported:
            continue
        word = "|".join(map(re.escape, sorted(entries[name])))
        quoted = r"""["'`\\]stop["'`\\]""" if name == "stop" else rf"\b(?:{word})\b"
        if param in entries[name] or re.search(quoted, body):
            return name
    return None


def status_of(body: str, reply: Any) -> int | None:
    """The status that an error in a body of status 200 should have had, or None if the body holds no error.

    `reply` is the parsed body, or None if it is not JSON.

    An error without a kind, a completion without a choice and an empty body count as 502.
    """
    if not body.strip():
        return _BAD_GATEWAY
    if body.lstrip().startswith(("data:", "event:")):  # a stream that was not requested
        lines = (line for line in body.splitlines() if line.startswith("data:") and len(line) <= _MAX_CHARS)
        events = (_object(line.removeprefix("data:")) for line in islice(lines, _MAX_EVENTS))
        error = next(filter(None, map(_error_of, events)), None)
    else:
        reply = reply if isinstance(reply, dict) else {}
        error = _error_of(reply)
        if error is None:
            return _BAD_GATEWAY if reply and not reply.get("choices") else None
    return None if error is None else _status(error)


def has_error(body: str) -> bool:
    """Whether a body holds an error message."""
    return _error_of(_object(body)) is not None or body.lstrip().startswith(("data:", "event:"))


def _status(error: Any) -> int:
    for name in ("code", "status", "status_code"):
        code = error.get(name) if isinstance(error, dict) else None
        if isinstance(code, int | str) and re.fullmatch(r"[45]\d\d", str(code)):
            return int(code)
    text = json.dumps(error)[:_MAX_CHARS]
    return next((status for status, words in _PERMANENT if words.search(text)), _BAD_GATEWAY)


def parsed(body: str) -> Any:
    """The value of a JSON text, or None if it is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _object(text: str) -> Mapping[str, Any]:
    value = parsed(text)
    return value if isinstance(value, dict) else {}


def _error_of(reply: Mapping[str, Any]) -> Any:
    """The error in a reply, or None, in the forms of OpenAI, vLLM, Anthropic, FastAPI and OpenRouter (in a choice)."""
    if reply.get("error"):
        return reply["error"]
    if reply.get("object") == "error" or reply.get("type") == "error":
        return reply
    choices = reply.get("choices")
    if not choices:
        return reply if any(reply.get(name) for name in ("detail", "errors", "message", "msg")) else None
    choice = choices[0] if isinstance(choices, list) else None
    failed = isinstance(choice, dict) and (choice.get("error") or choice.get("finish_reason") == "error")
    return (choice.get("error") or choice) if failed and isinstance(choice, dict) else None
