"""Recorded requests and chats in the forms of OpenAI's and Anthropic's APIs, parsed as the gateway parses requests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forge_agents.envs.reasoning import join_recorded, split_reasoning
from forge_agents.http_body import bounded_json
from forge_agents.programs.calls import ChatMessage, RefusedError
from forge_agents.programs.protocols import anthropic, chat, responses
from forge_agents.programs.protocols.common import REASONING_KEYS, Json, as_object, read_request, text_of
from forge_agents.row_keys import marks_of

CONTENT_KEYS = ("role", "content", "tool_calls", "tool_call_id", "function_call", "name", "refusal", *REASONING_KEYS)
"""Keys of a message that are read."""
_ITEMS = ("reasoning", "function_call", "function_call_output")
"""Types of items that only OpenAI's responses have."""
_ITEM_KEYS = (
    "type", "id", "status", "role", "content", "summary", "encrypted_content", "call_id", "name", "arguments", "output",
)  # fmt: skip
"""Keys of these items."""
_ANTHROPIC_BLOCKS = ("tool_use", "tool_result", "redacted_thinking")
"""Types of content parts that only Anthropic's messages have."""
_MAX_WRAPPED = 4
"""Levels of ``body`` around a request or a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A request with its answers, in the form of any API."""

    request: Json
    """The request. Messages and model are read from the other fields."""
    messages: Any
    answers: list[tuple[list[Any], Any]] = field(default_factory=list)
    """Messages, or items of OpenAI's responses, of each answer with its finish reason. Empty if the request failed."""
    models: frozenset[str] = frozenset()
    """Names of the model in the request and in the response."""


def parse_log(row: Json) -> RecordedCall | None:
    """Return the request and the response of a row, or None if the row is not a logged request.

    Args:
        row: A mapping with ``request`` and ``response`` (or ``request_body`` and ``response_body``, or ``input`` and
            ``output``), objects or JSON texts, with or without ``body`` around them; or with ``messages`` and
            ``response`` or ``choices``. A request may also be a list of messages or a plain text, a response a plain
            text.

    Raises:
        RefusedError: A request or a response has an unsupported form.
    """
    logged = next((row[key] for key in ("request", "request_body") if row.get(key) is not None), None)
    answer = next((row[key] for key in ("response", "response_body") if row.get(key) is not None), None)
    if logged is None and isinstance(row.get("input"), list | dict) and row.get("output") is not None:
        logged, answer = row["input"], row["output"]
    if logged is None and isinstance(row.get("messages"), list) and (answer is not None or row.get("choices")):
        logged, answer = row, row if answer is None else answer
    if logged is None or (answer is None and row.get("error") is None):
        return None
    request = _body(logged, "request")
    if isinstance(request, str) or (isinstance(request, list) and request):
        request = {"messages": [{"role": "user", "content": request}] if isinstance(request, str) else request}
    if not isinstance(request, Mapping):
        raise RefusedError(f"the request is {str(request)[:100]!r}. Expected an object with messages")
    for name in ("functions", "function_call", "previous_response_id"):
        if request.get(name):
            raise RefusedError(f"the request has {name}, which is not supported. Leave the row out")
    parts = [part for part in (row, answer) if isinstance(part, Mapping)]
    statuses = [part.get(key) for part in parts for key in ("status", "status_code")]
    failed = row.get("error") is not None or any(isinstance(status, int) and status >= 400 for status in statuses)
    response = None if failed else _body(answer, "response")
    if isinstance(response, Mapping) and response.get("error"):
        response = None
    messages = _messages(request)
    last = messages[-1] if isinstance(messages, list) and messages else None
    is_prefilled = isinstance(last, Mapping) and last.get("role") == "assistant"
    if is_prefilled and isinstance(response, Mapping) and response.get("type") == "message":
        raise RefusedError(
            "the request ends with the beginning of the answer, which Anthropic's models continue. Write both as one "
            "answer"
        )
    names = (part.get("model") for part in (row, request, response) if isinstance(part, Mapping))
    return RecordedCall(
        request=request,
        messages=messages,
        answers=[] if response is None else _answers(response),
        models=frozenset(str(name) for name in names if name),
    )


def _body(value: Any, name: str) -> Any:
    """Return the innermost ``body``, parsed if it is JSON text. A response may be plain text."""
    for _ in range(_MAX_WRAPPED):
        if isinstance(value, str) and value.lstrip().startswith(("{", "[", "data:")):
            try:
                value = bounded_json(value)
            except (ValueError, RecursionError) as cause:
                raise RefusedError(f"the {name} is a text that is not JSON ({cause}). Log the whole body") from None
        if not (isinstance(value, Mapping) and value.get("body") is not None):
            break
        value = value["body"]
    return value


def _messages(request: Json) -> Any:
    if isinstance(request.get("messages"), list):
        messages, system = list(request["messages"]), request.get("system")
    elif (value := request.get("input")) is not None:
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        instructions = request.get("instructions")  # may come before other system messages
        head = [{"role": "system", "content": instructions}] if instructions else []
        return [*head, *messages] if isinstance(messages, list) else messages
    else:
        keys = ", ".join(map(repr, list(request)[:12]))
        raise RefusedError(f"the request has the keys {keys}. Expected messages, or the input of OpenAI's responses")
    return with_system(messages, system)


def _answers(response: Any) -> list[tuple[list[Any], Any]]:
    if isinstance(response, str):
        return [([{"role": "assistant", "content": response}], None)]
    if not isinstance(response, Mapping):
        raise RefusedError("the response is a list, as streams are logged. Log the whole body")
    if isinstance(response.get("choices"), list):
        return [_choice(choice) for choice in response["choices"]]
    if isinstance(items := response.get("output"), list):
        return [(items, response.get("status"))] if items else []
    if response.get("role") == "assistant" and "content" in response:  # Anthropic's, or a message alone
        return [([response], response.get("stop_reason") or response.get("finish_reason"))]
    keys = ", ".join(map(repr, list(response)[:12]))
    raise RefusedError(f"the response has the keys {keys}. Expected choices, output, or role and content")


def _choice(choice: Any) -> tuple[list[Any], Any]:
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(message, Mapping):
        kind = "a part of a stream" if isinstance(choice, Mapping) and "delta" in choice else "not a chat's"
        raise RefusedError(f"a choice of the response has no message ({kind}). Log the whole body of chat completions")
    return [{**message, "role": "assistant"}], choice.get("finish_reason")


# ---- messages


def with_system(messages: Any, system: Any) -> Any:
    """Return messages that begin with a system prompt that is recorded separately.

    Raises:
        RefusedError: The messages begin with another system prompt.
    """
    if not system or not isinstance(messages, list):
        return messages
    first = messages[0] if messages else None
    if isinstance(first, Mapping) and first.get("role") == "system":
        if text_of(system, "system").split() != text_of(first.get("content"), "messages[0]").split():
            raise RefusedError("it has 'system' and a system message, and they differ. Keep one of them")
        return messages
    return [{"role": "system", "content": system}, *messages]


def read_messages(entries: Any) -> Iterator[tuple[Json, list[ChatMessage]]]:
    """Yield each recorded message with the messages that it stands for, with reasoning before an answer's text.

    Messages may have the form of any API. Items of OpenAI's responses are yielded together, with their unread keys.
    """
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise RefusedError(f"the messages are {str(entries)[:100]!r}. Expected a list of objects")
    is_answer = all(entry.get("type") == "message" and _has_parts(entry, "output_text", "refusal") for entry in entries)
    if is_answer or any(entry.get("type") in _ITEMS for entry in entries):
        more = {key: value for entry in entries for key, value in entry.items() if key not in _ITEM_KEYS}
        if marks_of(more):
            raise RefusedError("items of OpenAI's responses are marked as learned or not. Write them as messages")
        yield more, _joined(responses.read_items(entries, "items"))
        return
    for place, entry in enumerate(entries):
        read = anthropic.read_message if _has_parts(entry, *_ANTHROPIC_BLOCKS) else chat.read_message
        message = {key: entry[key] for key in CONTENT_KEYS if key in entry}
        if read is anthropic.read_message and message.get("role") == "tool":
            message["role"] = "user"  # as Anthropic's API has it
        yield entry, [_with_reasoning(parsed) for parsed in read(message, f"messages[{place}]")]


def _has_parts(message: Json, *types: str) -> bool:
    parts = message.get("content")
    return isinstance(parts, list) and any(isinstance(part, Mapping) and part.get("type") in types for part in parts)


def _joined(messages: Iterator[ChatMessage]) -> list[ChatMessage]:
    """Join consecutive items of an assistant to one message."""
    joined: list[ChatMessage] = []
    for role, run in itertools.groupby(messages, lambda message: message.role):
        parts = list(run)
        if role == "assistant":
            text = "\n".join(part.text for part in parts if part.text)
            reasoning = "\n".join(part.reasoning for part in parts if part.reasoning)
            calls = tuple(call for part in parts for call in part.calls)
            parts = [_with_reasoning(ChatMessage(role=role, text=text, reasoning=reasoning, calls=calls))]
        joined += parts
    return joined


def _with_reasoning(message: ChatMessage) -> ChatMessage:
    if message.role != "assistant" or not message.reasoning:
        return message
    try:
        return replace(message, text=join_recorded(message.reasoning, message.text), reasoning="")
    except ValueError as cause:
        raise RefusedError(str(cause)) from None


def parse_conversation(messages: Sequence[ChatMessage], request: Json) -> tuple[tuple[ChatMessage, ...], str]:
    """Return a conversation and the description of its tools, as they are for a request to the gateway.

    Args:
        messages: The messages.
        request: Other fields of the request or row, such as ``tools``, in the form of any API.
    """
    tools = [each for tool in as_list(request.get("tools")) if (each := _function(tool)) is not None]
    choice = request.get("tool_choice")
    is_serial = isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use")
    settings = [part for key in ("text", "output_config") if isinstance(part := request.get(key), Mapping)]
    response_format = next((part["format"] for part in settings if part.get("format")), request.get("response_format"))
    parsed = read_request(
        {"model": "", "tools": tools, "tool_choice": choice, "parallel_tool_calls": request.get("parallel_tool_calls")},
        lambda _: messages,
        lambda tool: tool,
        parallel=False if is_serial else None,
        response_format=response_format,
    )
    for place, message in enumerate(parsed.messages):
        if message.role == "assistant" and not (split_reasoning(message.text)[1].strip() or message.calls):
            raise RefusedError(f"messages[{place}]: the answer is empty")
    return tuple(_with_arguments(message, place) for place, message in enumerate(parsed.messages)), parsed.instructions


def _function(tool: Json) -> Json | None:
    """Return name, description and parameters of a tool. None if it is not a function that the program runs."""
    if "function" in tool:
        return as_object(tool["function"], "function of a tool")
    if tool.get("type") not in (None, "function", *(("custom",) if "input_schema" in tool else ())):
        return None
    return {**tool, "parameters": tool.get("parameters", tool.get("input_schema"))}


def _with_arguments(message: ChatMessage, place: int) -> ChatMessage:
    """Return a message with valid arguments in its calls. An empty text stands for no arguments.

    Raises:
        RefusedError: The arguments of a call are not a JSON object. Such arguments would be learned as they are.
    """
    calls = []
    for call in message.calls:
        written = call.arguments.strip() or "{}"
        try:
            arguments = json.loads(written, parse_constant=_reject_constant)
        except (ValueError, RecursionError) as cause:
            raise RefusedError(f"messages[{place}]: the arguments of {call.name!r} are not JSON ({cause})") from None
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise RefusedError(f"messages[{place}]: the arguments of {call.name!r} are a JSON {kind}, not an object")
        calls.append(replace(call, arguments=written))
    return replace(message, calls=tuple(calls)) if calls else message


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def as_list(value: Any) -> list[Any]:
    """Return a list that is given as such or as JSON text."""
    parsed = bounded_json(value) if isinstance(value, str) else value
    return [] if parsed is None else parsed if isinstance(parsed, list) else [parsed]
