"""Parsing of calls in the grammar of a model family, by its control tokens.

The parsers are those of the `renderers` package. Families that write JSON after a marker (Qwen3, Hermes, Llama,
Mistral) need none: `formats` parses their text, and is more tolerant.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from forge_agents.errors import MissingExtraError
from forge_agents.files import is_shallow
from forge_agents.models.families import chat_format_of
from forge_agents.tools.formats import MAX_CALLS
from forge_agents.types import ToolCall

_log = logging.getLogger(__name__)
_NO_TOKEN = -1
"""Id that matches no token, for tokens of reasoning, which is removed before."""

CallReader: TypeAlias = Callable[[Sequence[int], Sequence[Mapping[str, Any]]], "tuple[str, tuple[ToolCall, ...]]"]
"""Parses the tokens of an answer without its reasoning, given the schemas of the tools. Returns text and calls."""

_LIBRARY = {"minimax": "minimax-m2", "kimi": "kimi-k2", "deepseek": "deepseek-v3", "glm": "glm-4.5"}
"""Grammars, by `ChatFormat.calls`, that the library's renderer of a family parses."""
_PARSERS = {
    # the library's renderer of this family would download a tokenizer
    "harmony": (
        "parse_gpt_oss",
        {f"{name}_id": f"<|{name}|>" for name in ("return", "call", "start", "end", "channel", "message")},
    ),
    # this one requires image tokens, which not all models with this grammar have
    "xml": ("parse_qwen35", {"tool_call_id": "<tool_call>", "tool_call_end_id": "</tool_call>"}),
}
"""Grammars that a function of the library parses: its name, and the control tokens that it needs."""
_SEPARATORS = {
    "xml": "</tool_call>",
    "minimax": "</minimax:tool_call>",
    "deepseek": "<\uff5ctool\u2581call\u2581end\uff5c>",
    "harmony": "<|start|>",
}
"""Token between calls in the grammars whose parsers do not take linear time for every answer."""
_MAX_UNFINISHED, _MAX_STEPS, _MAX_MESSAGES = 16, 10**7, 4 * MAX_CALLS
"""Maximum number of parts of a call without an end, of steps of the pattern that looks for a fence, and of Harmony's
messages. The library reads the rest of the answer for each of them and holds the GIL meanwhile."""


_JSON_CALL = re.compile(r"[^<]*(?:<(?!tool_call>)[^<]*)*<tool_call>\s*\{")
"""Matches an answer whose first call is JSON in the tags of Qwen3.5 and GLM, as instructions of `ToolEnv` show it."""


def reader_for(tokenizer: Any) -> CallReader | None:
    """Return the parser of a tokenizer's family. None if its chat template uses only JSON.

    The parser leaves answers with JSON in ``<tool_call>`` to `formats`.

    None with a warning if the tokenizer lacks the grammar's control tokens.

    Raises:
        MissingExtraError: The package with the parsers is missing.
    """
    chat_format = chat_format_of(str(tokenizer.chat_template))
    grammar = chat_format.calls if chat_format else ""
    if grammar not in _LIBRARY and grammar not in _PARSERS:
        return None
    try:
        parse = _parser(tokenizer, grammar)
        separator = tokenizer.convert_tokens_to_ids(_SEPARATORS[grammar]) if grammar in _SEPARATORS else None
    except ImportError as error:
        raise MissingExtraError(
            f"tool calls in the grammar {grammar!r} are read by the package renderers. "
            "Run: pip install 'forge-agents-rl[calls]'"
        ) from error
    except AssertionError as error:
        _log.warning("calls of %s are read as text only: %s", tokenizer.name_or_path or "the model", error)
        return None

    def read(ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...]]:
        if _JSON_CALL.match(str(tokenizer.decode(list(ids)))):
            return "", ()
        try:
            if separator is not None and _is_slow(tokenizer, _split(ids, separator), grammar):
                return "", (ToolCall(name="", error="the tool call cannot be read (too many unfinished parts)"),)
            parsed = parse(list(ids), list(tools))
        except Exception as error:  # noqa: BLE001  # a third-party parser on arbitrary tokens
            return "", (ToolCall(name="", error=f"the tool call cannot be read ({type(error).__name__})"),)
        return parsed.content, tuple(map(_call, parsed.tool_calls[:MAX_CALLS]))

    return read


def _parser(tokenizer: Any, grammar: str) -> Callable[[list[int], list[Any]], Any]:
    if grammar in _LIBRARY:
        from renderers import config_from_name, create_renderer  # type: ignore[import-untyped]

        renderer = create_renderer(tokenizer, config_from_name(_LIBRARY[grammar]))
        return lambda tokens_read, tools: renderer.parse_response(tokens_read, tools=tools)
    from renderers import parsing

    name, tokens = _PARSERS[grammar]
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens.items()}
    missing = [tokens[key] for key, token_id in ids.items() if token_id in (None, tokenizer.unk_token_id)]
    assert not missing, f"the tokenizer has no {', '.join(missing)}"
    parse = getattr(parsing, name)
    if grammar == "xml":
        return lambda tokens_read, tools: parse(
            tokenizer, tokens_read, **ids, tools=tools, stop_ids=set(), think_id=_NO_TOKEN, think_end_id=_NO_TOKEN
        )
    # the prompt ends with this header
    header = [ids["start_id"], *tokenizer.encode("assistant", add_special_tokens=False)]
    return lambda tokens_read, tools: parse(tokenizer, header + tokens_read, **ids, constrain_id=_NO_TOKEN)


def _split(ids: Sequence[int], separator: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token_id in ids:
        if token_id == separator:
            parts.append([])
        else:
            parts[-1].append(token_id)
    return parts


def _is_slow(tokenizer: Any, calls: Sequence[list[int]], grammar: str) -> bool:
    """Whether the library takes more than linear time for the tokens of an answer's calls."""
    if grammar == "harmony":
        return len(calls) > _MAX_MESSAGES
    texts = [str(tokenizer.decode(call)) for call in calls]
    if grammar == "deepseek":
        return any(_steps_of_fence(text) > _MAX_STEPS for text in texts)
    if grammar == "xml":
        parts = [
            (text, *marks) for text in texts for marks in (("<function=", ">"), ("<parameter=", ">", "</parameter>"))
        ]
    else:
        parts = [(text, '<invoke name="', "</invoke>") for text in texts]
        parts += [(body, '<parameter name="', "</parameter>") for text in texts for body in text.split("</invoke>")]
    return any(_unfinished(*part) > _MAX_UNFINISHED for part in parts)


def _steps_of_fence(text: str) -> int:
    """Steps of the pattern that removes a fence: it divides the first blanks and all others in every way."""
    after_fence = max(map(len, re.findall(r"```(?:json)?(\s*)", text)), default=-1)
    return (after_fence + 1) * (len(text) + sum(len(blanks) ** 2 for blanks in re.findall(r"\s+", text)))


def _unfinished(text: str, beginning: str, *ends: str) -> int:
    """Number of beginnings after which `ends` do not follow in this order."""
    last = len(text)
    for mark in reversed(ends):
        last = max(0, text.rfind(mark, 0, last))
    return text.count(beginning, last)


def _call(parsed: Any) -> ToolCall:
    """Convert a call of the library. The types of arguments are checked by the tool, whose error is more precise."""
    name, arguments = parsed.name or "", parsed.arguments
    if not (name and isinstance(arguments, Mapping)):
        return ToolCall(name=name, error=f"the tool call cannot be read ({parsed.status.replace('_', ' ')})")
    try:
        json.dumps(dict(arguments), allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return ToolCall(name=name, error=f"the arguments cannot be read ({type(error).__name__})")
    if not is_shallow(dict(arguments)):
        return ToolCall(name=name, error="the arguments cannot be read (nested too deeply)")
    return ToolCall(name=name, arguments=arguments)
