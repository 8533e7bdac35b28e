"""Calls in the grammar that a family of models was trained on, read by its control tokens.

In: a tokenizer, the tokens of an answer, the schemas of the tools on offer. Out: the text beside the calls, and the
calls. Waits for nothing.

The parsers are those of the `renderers` package. Families that write JSON behind a mark (Qwen3, Hermes, Llama, Mistral)
need none: `formats` reads them, whoever wrote them, and forgives more.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from forge_agents.errors import MissingExtraError
from forge_agents.files import is_shallow
from forge_agents.models.families import chat_format_of
from forge_agents.tools.formats import MAX_CALLS
from forge_agents.types import ToolCall

_log = logging.getLogger(__name__)
_NONE = -1
"""No token: thoughts are cut off before, and what the parser does not look at."""

CallReader: TypeAlias = Callable[[Sequence[int], Sequence[Mapping[str, Any]]], "tuple[str, tuple[ToolCall, ...]]"]
"""From the tokens of an answer, its thought cut off, and the schemas of the tools: the text beside, and the calls."""

_LIBRARY = {"minimax": "minimax-m2", "kimi": "kimi-k2", "deepseek": "deepseek-v3", "glm": "glm-4.5"}
"""Grammars that are read by the library's renderer of a family, by `Dialect.calls`."""
_PARSERS = {
    # the library's renderer of this family would download its tokens
    "harmony": (
        "parse_gpt_oss",
        {f"{name}_id": f"<|{name}|>" for name in ("return", "call", "start", "end", "channel", "message")},
    ),
    # and this one wants tokens for pictures, which not all who write the grammar have
    "xml": ("parse_qwen35", {"tool_call_id": "<tool_call>", "tool_call_end_id": "</tool_call>"}),
}
"""Grammars that are read by the library's parser alone: its name, and the control tokens that it is told."""


def reader_for(tokenizer: Any) -> CallReader | None:
    """Reads the calls of a tokenizer's family; None where its chat template shows no grammar beside JSON.

    A tokenizer without the control tokens of the grammar has none either, and a warning says so.

    Raises:
        MissingExtraError: The package that knows the grammar is missing.
    """
    dialect = chat_format_of(str(tokenizer.chat_template))
    grammar = dialect.calls if dialect else ""
    if grammar not in _LIBRARY and grammar not in _PARSERS:
        return None
    try:
        parse = _parser(tokenizer, grammar)
    except ImportError as error:
        raise MissingExtraError(
            f"tool calls in the grammar {grammar!r} are read by the package renderers; "
            "pip install 'forge-agents-rl[calls]'"
        ) from error
    except AssertionError as error:
        _log.warning("calls of %s are read as text only: %s", tokenizer.name_or_path or "the model", error)
        return None

    def read(ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...]]:
        try:
            found = parse(list(ids), list(tools))
        except Exception as error:  # noqa: BLE001  # another's parser on whatever a model wrote
            return "", (ToolCall(name="", error=f"the tool call cannot be read ({type(error).__name__})"),)
        return found.content, tuple(map(_call, found.tool_calls[:MAX_CALLS]))

    return read


def _parser(tokenizer: Any, grammar: str) -> Callable[[list[int], list[Any]], Any]:
    if grammar in _LIBRARY:
        from renderers import config_from_name, create_renderer  # type: ignore[import-untyped]

        renderer = create_renderer(tokenizer, config_from_name(_LIBRARY[grammar]))
        return lambda said, tools: renderer.parse_response(said, tools=tools)
    from renderers import parsing

    name, tokens = _PARSERS[grammar]
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens.items()}
    missing = [tokens[key] for key, found in ids.items() if found in (None, tokenizer.unk_token_id)]
    assert not missing, f"the tokenizer has no {', '.join(missing)}"
    parse = getattr(parsing, name)
    if grammar == "xml":
        return lambda said, tools: parse(
            tokenizer, said, **ids, tools=tools, stop_ids=set(), think_id=_NONE, think_end_id=_NONE
        )
    header = [ids["start_id"], *tokenizer.encode("assistant", add_special_tokens=False)]  # the prompt ends with it
    return lambda said, tools: parse(tokenizer, header + said, **ids, constrain_id=_NONE)


def _call(found: Any) -> ToolCall:
    """A call as the library found it. Arguments of wrong types are left to the tool, whose error says more."""
    name, arguments = found.name or "", found.arguments
    if not (name and isinstance(arguments, Mapping)):
        return ToolCall(name=name, error=f"the tool call cannot be read ({found.status.replace('_', ' ')})")
    try:
        json.dumps(dict(arguments), allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return ToolCall(name=name, error=f"the arguments cannot be read ({type(error).__name__})")
    if not is_shallow(dict(arguments)):
        return ToolCall(name=name, error="the arguments cannot be read (nested too deeply)")
    return ToolCall(name=name, arguments=arguments)
