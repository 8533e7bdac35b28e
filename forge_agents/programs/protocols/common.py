"""Parts that all API adapters share: validation of a request's JSON."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from forge_agents.envs.env import writable
from forge_agents.programs.calls import (
    SAMPLING,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    FunctionCall,
    RefusedError,
    abbreviate,
    format_instructions,
    make_tool,
    order_results,
    select_tools,
)
from forge_agents.tools import Tool

_KNOWN_FIELDS = frozenset((
    *SAMPLING, "model", "messages", "input", "instructions", "system", "tools", "tool_choice", "parallel_tool_calls",
    "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "max_output_tokens", "stop",
    "stop_sequences", "response_format", "text", "output_config", "output_format", "logprobs", "top_logprobs",
    "metadata", "user", "store", "service_tier", "include", "truncation", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "client_metadata", "modalities", "betas", "anthropic_version", "anthropic_beta",
    "cache_control", "context_management", "speed", "inference_geo", "reasoning", "reasoning_effort", "verbosity",
    "thinking", "thread",
))  # fmt: skip
"""Fields of a request that are read, or that change nothing except decisions of the policy."""
_MAX_UNKNOWN = 4
"""Maximum number of unknown fields of one object that are reported."""
_MAX_WARNINGS, _MAX_REPEATS = 200, 100
"""Maximum number of different warnings in this process, and how often each is passed to Python's filter."""
_MAX_TOOLS = 256
_MAX_STOP_TEXTS, _MAX_STOP_CHARS = 64, 1024
"""Maximum number of stop texts and length of each. The engine compares each with every new token."""
_TEXT_TYPES = (None, "text", "input_text", "output_text", "refusal")
"""Types of content parts that are text."""
_REASONING_TYPES = ("reasoning", "thinking", "redacted_thinking")
"""Types of content parts of an answer that are its reasoning."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that may contain reasoning."""
MAX_NAME_CHARS = 256
"""Maximum length of a name. Comparing a model name with the known ones takes time for long texts."""
_warned = Counter[str]()
Json: TypeAlias = Mapping[str, Any]
Events: TypeAlias = Iterator[tuple[str, Any]]
"""Server-sent events: a name, empty if the API has none, and data as JSON value or text."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """Adapter of one API."""

    read: Callable[[Any], ChatRequest]
    """Parses the JSON of a request. Raises RefusedError."""
    write: Callable[[ChatRequest, ChatResponse, int], dict[str, Any]]
    """Returns the body of a response. The number is the Unix time in seconds."""
    events: Callable[[ChatRequest, ChatResponse, int], Events]
    """Returns the response as a stream."""


def read_request(
    body: Json,
    read_messages: Callable[[Json], Iterable[ChatMessage]],
    read_tool: Callable[[Json], Json | None],
    *,
    parallel: bool | None = None,
    response_format: Any = None,
    **fields: Any,
) -> ChatRequest:
    """Read the parts of a request that all APIs have.

    Args:
        body: The request.
        read_messages: Returns the messages of the request.
        read_tool: Returns name, description and parameters of a tool, or None if the program does not run it.
        parallel: Whether an answer may contain several calls. None: as ``parallel_tool_calls`` says.
        response_format: Format of the answer.
        **fields: Other fields of `ChatRequest`.
    """
    if not isinstance(model := body.get("model"), str) or len(model) > MAX_NAME_CHARS:
        raise RefusedError(f"model is {abbreviate(model)}. Name an agent")
    offered = get_list(body, "tools")
    if len(offered) > _MAX_TOOLS:
        raise RefusedError(f"{len(offered)} tools arrived. Send at most {_MAX_TOOLS}")
    tools = [(_parse_tool(read_tool, tool), tool.get("type")) for tool in offered]
    omitted = [kind for tool, kind in tools if tool is None]
    if parallel is None:
        parallel = get_flag(body, "parallel_tool_calls")
    available, parallel, instructions = select_tools(
        [tool for tool, _ in tools if tool is not None], body.get("tool_choice"), parallel, omitted
    )
    warn_of_unknown(body, _KNOWN_FIELDS)
    messages = tuple(order_results(read_messages(body)))
    if not messages:
        raise RefusedError("there is no message. Send at least one")
    return ChatRequest(
        model=model,
        messages=messages,
        tools=available,
        parallel_calls=parallel,
        instructions=writable("\n\n".join(filter(None, [instructions, format_instructions(response_format)]))),
        sampling=_get_sampling(body),
        stream=bool(get_flag(body, "stream")),
        **fields,
    )


def _parse_tool(read: Callable[[Json], Json | None], tool: Any) -> Tool | None:
    definition = read(as_object(tool, "a tool"))
    if definition is not None:
        return make_tool(definition.get("name"), definition.get("description"), definition.get("parameters"))
    warn(
        f"a program offers a tool of type {abbreviate(tool.get('type'))}, which is ignored: models are offered only "
        "functions, which the program runs itself"
    )
    return None


def warn(text: str) -> None:
    """Warn of a request. A process prints and keeps a bounded number of warnings, because programs choose the texts."""
    if text not in _warned and len(_warned) >= _MAX_WARNINGS:
        text = "programs caused many warnings. Further ones are not shown"
    _warned[text] += 1
    if _warned[text] <= _MAX_REPEATS:
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def warn_of_unknown(value: Json, known: frozenset[str], where: str = "") -> None:
    """Warn of unknown fields. Only names are reported, because Python stores the text of each warning."""
    if len(_warned) > _MAX_WARNINGS:
        return
    unknown = sorted(name for name in value.keys() - known if value[name] not in (None, False, "", [], {}))
    for name in unknown[:_MAX_UNKNOWN]:
        warn(f"a program sends {abbreviate(name)[1:-1]}{where}, an unknown field, which is ignored")


def as_object(value: Any, where: str = "the body") -> Json:
    """Return a JSON object."""
    if not isinstance(value, Mapping):
        raise RefusedError(f"{where} is a JSON {type(value).__name__}. Send an object")
    return value


def get_object(body: Json, name: str) -> Json:
    """Return an object, empty if it is missing."""
    return as_object(body.get(name) or {}, name)


def get_list(body: Json, name: str) -> list[Any]:
    """Return a list, empty if it is missing."""
    value = body.get(name) or []
    if not isinstance(value, list):
        raise RefusedError(f"{name} is a JSON {type(value).__name__}. Send a list")
    return value


def reject_fields(body: Json, *names: str) -> None:
    """Raise RefusedError for fields that change the meaning of a request and are not supported."""
    for name in names:
        if body.get(name):
            raise RefusedError(f"{name} is not supported here. Leave it out")


def get_limit(body: Json, *names: str) -> int | None:
    """Return the first limit that is set."""
    for name in names:
        if (limit := _number(body.get(name))) is not None:
            if type(limit) is not int or limit < 1:
                raise RefusedError(f"{name}={abbreviate(limit)}. Send a whole number, at least 1")
            return limit
    return None


def get_flag(body: Json, name: str) -> bool | None:
    """Return a truth value that may be given as text. None if it is missing."""
    value = body.get(name)
    flag = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if value is None:
        return None
    if flag not in (True, False):
        raise RefusedError(f"{name}={abbreviate(value)}. Send true or false")
    return bool(flag)


def get_stop(stop: Any) -> tuple[str, ...]:
    """Return stop texts: one text, a list of texts, or None."""
    texts = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if not all(isinstance(text, str) and text for text in texts):
        raise RefusedError(f"stop={abbreviate(stop)}. Send a text, or a list of texts")
    if len(texts) > _MAX_STOP_TEXTS or max(map(len, texts), default=0) > _MAX_STOP_CHARS:
        raise RefusedError(
            f"{len(texts)} stop texts arrived, the longest of {max(map(len, texts))} characters. Send at most "
            f"{_MAX_STOP_TEXTS} of {_MAX_STOP_CHARS}"
        )
    return tuple(map(writable, texts))


def _get_sampling(body: Json) -> dict[str, Any]:
    sampling = {name: _number(body[name]) for name in SAMPLING if body.get(name) is not None}
    if sampling.get("logit_bias") in ([], {}):
        del sampling["logit_bias"]
    for name, value in sampling.items():
        if isinstance(value, bool) or not isinstance(value, dict if name == "logit_bias" else int | float):
            kind = "an object" if name == "logit_bias" else "a number"
            raise RefusedError(f"{name}={abbreviate(value)}. Send {kind}")
    for name in sampling.keys() & {"top_k", "seed"}:
        if isinstance(value := sampling[name], float):
            raise RefusedError(f"{name}={abbreviate(value)}. Send a whole number")
    if sampling.get("top_k") == -1:  # vLLM's and others' value for all tokens
        sampling["top_k"] = 0
    return sampling


def _number(value: Any) -> Any:
    """Return a number that may be given as text, as an int if it is whole. Return other values unchanged."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return int(number) if isinstance(number, float) and number.is_integer() else number


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, None, or a list of text parts."""
    if content is None or isinstance(content, str):
        return writable(content or "")
    if not isinstance(content, list):
        raise RefusedError(f"{where}: content is a JSON {type(content).__name__}. Send text")
    texts = []
    for item in content:
        part = {"text": item} if isinstance(item, str) else as_object(item, f"{where}: a part")
        text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
        if part.get("type") not in _TEXT_TYPES or not isinstance(text, str):
            kind = abbreviate(part.get("type"))
            raise RefusedError(f"{where}: a part of type {kind}. The models here read text only")
        texts.append(text)
    return writable("\n".join(texts))


def is_reasoning(content: Any) -> bool:
    """Return whether a content has parts, and all of them are reasoning."""
    parts = content if isinstance(content, list) else []
    return bool(parts) and all(isinstance(part, Mapping) and part.get("type") in _REASONING_TYPES for part in parts)


def split_reasoning(message: Json, content: Any, where: str) -> tuple[Any, str]:
    """Return the content of an answer without parts that are reasoning, and the reasoning of its keys or parts."""
    rest, thoughts = content, []
    if isinstance(content, list):
        rest = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _REASONING_TYPES:
                thoughts.append(text_of(part.get(kind) or part.get("text"), f"{where}: a part of type {kind!r}"))
            else:
                rest.append(part)
    written = [*(message.get(key) for key in REASONING_KEYS), "\n".join(filter(None, thoughts))]
    return rest, next((text for text in written if text and isinstance(text, str)), "")


def function_call(call_id: Any, name: Any, arguments: Any, where: str) -> FunctionCall:
    """Return a tool call of an earlier answer, as the program sent it back."""
    if not isinstance(name, str):
        raise RefusedError(f"{where}: a tool call without a name")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return FunctionCall(id=str(call_id or ""), name=writable(name), arguments=writable(text))


def get_role(role: Any, where: str, *allowed: str) -> str:
    """Return a role. "developer" is the system prompt of newer APIs."""
    if role not in allowed:
        raise RefusedError(f"{where}: role {abbreviate(role)}. Send one of {', '.join(allowed)}")
    return "system" if role == "developer" else str(role)
