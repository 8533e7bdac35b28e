"""Requests of programs to models and the responses, independent of the API that a program uses.

Models read plain text in three roles, whatever their chat template supports: the system prompt describes the tools, and
calls and results are written as Qwen's and Hermes' templates do.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_agents.errors import ForgeError
from forge_agents.tools import (
    Tool,
    ToolCall,
    ToolResult,
    describe_tools,
    parse_tool_calls,
    render_results,
    render_tool_call,
)
from forge_agents.tools.formats import before_calls

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed",
)  # fmt: skip
"""Sampling fields of a request. In episodes they are ignored: a policy samples as it is trained."""
_CHOICES = ("auto", "none", "required", "any")
_MAX_MESSAGE_CHARS = 2000
"""Maximum length of an error: sessions and records keep errors, and programs choose the names in them."""
_MAX_LISTED_CALLS = 8
"""Number of calls that an error message lists."""
_abbreviation = reprlib.Repr()
_abbreviation.maxstring = _abbreviation.maxother = 200
abbreviate = _abbreviation.repr
"""Shortens untrusted values for messages: messages are stored, and a value may have megabytes."""


class RefusedError(ForgeError, ValueError):
    """A request that is rejected, with an HTTP status and a machine-readable code."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message[:_MAX_MESSAGE_CHARS])
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A tool call in an answer, as programs receive it and send it back."""

    id: str
    name: str
    arguments: str
    """JSON text. Text of programs may be malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A message of a conversation, reduced to its content."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    text: str
    calls: tuple[FunctionCall, ...] = ()
    call_id: str = ""
    """For the result of a tool, the id of the call."""
    reasoning: str = ""
    """Reasoning that the program sent with an answer. Requests to our models ignore it. Imported answers keep it."""

    @property
    def key(self) -> bytes:
        """Equal for messages with the same content, independent of the formatting of their JSON."""
        return self._key(int, _shortest_number)

    @property
    def js_key(self) -> bytes:
        """As `key`, and also equal if a JavaScript client re-encoded one of them, where all numbers are floats."""
        return self._key(_js_number, _js_number)

    def _key(self, parse_int: Callable[[str], Any], parse_float: Callable[[str], Any]) -> bytes:
        calls = [(call.id, call.name, _canonical_json(call.arguments, parse_int, parse_float)) for call in self.calls]
        return json.dumps([self.role, self.text.strip(), calls, self.call_id]).encode()


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request of a program to a model.

    Texts and digests are computed once. The gateway does that where long requests take turns.
    """

    model: str
    messages: tuple[ChatMessage, ...]
    """The conversation, at least one message."""
    tools: tuple[Tool, ...] = ()
    """Tools that the answer may call. The program runs them."""
    parallel_calls: bool = True
    """Whether one answer may contain several calls."""
    instructions: str = ""
    """Description of the tools and of the response format, appended to the system prompt."""
    max_tokens: int | None = None
    """Token limit of the answer. None: the policy's own."""
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields named in `SAMPLING`."""
    session: str = ""
    """Name by which the program tells its conversations with one model apart."""
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with token counts."""

    @functools.cached_property
    def texts(self) -> tuple[tuple[int, str, str], ...]:
        """Role and text of each message as models read it, after the number of messages up to its end."""
        return tuple(_texts(self.messages))

    @functools.cached_property
    def digests(self) -> tuple[tuple[int, bytes], ...]:
        """Digest of the conversation up to each answer, after the number of messages, and last of all messages."""
        digest = hashlib.blake2b(self.instructions.encode()).digest()
        digests = []
        for position, message in enumerate(self.messages, 1):
            digest = continued_digest(digest, message)
            if message.role == "assistant" or position == len(self.messages):
                digests.append((position, digest))
        return tuple(digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponse:
    """An answer to a program."""

    number: int
    """Index of the request in its episode, from 0."""
    text: str
    """Text without tool calls. May be empty."""
    calls: tuple[FunctionCall, ...] = ()
    truncated: bool = False
    """Whether a token limit ended the answer."""
    stop_text: str = ""
    """The text of `ChatRequest.stop` that ended the answer. Empty if none did, or if that is unknown."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Part of `completion_tokens`."""
    logprobs: tuple[tuple[int, float], ...] | None = None
    """Id and log-probability of each token after the reasoning. None if not requested or not sampled."""

    @property
    def message(self) -> ChatMessage:
        """The answer as a message of the conversation."""
        return ChatMessage(role="assistant", text=self.text, calls=self.calls)


def continued_digest(digest: bytes, message: ChatMessage) -> bytes:
    """Return the digest of a conversation with one more message."""
    return hashlib.blake2b(digest + message.js_key).digest()


# ---- tools and response formats


def select_tools(
    tools: Sequence[Tool], choice: Any, parallel: Any, omitted_types: Sequence[Any] = ()
) -> tuple[tuple[Tool, ...], bool, str]:
    """Return the tools that an answer may call, whether in parallel, and their description for the system prompt.

    Args:
        tools: All tools of the program.
        choice: "auto", "none", "required", such a word as the type of an object, or the name of a tool in the form of
            any API. None and omitted types mean "auto".
        parallel: Whether the program accepts parallel calls. None: yes.
        omitted_types: Types of tools that the model is not offered.
    """
    name = None
    if isinstance(choice, Mapping):
        function, kind = choice.get("function"), choice.get("type")
        name = choice.get("name") or (function.get("name") if isinstance(function, Mapping) else None)
        if not choice or (kind and kind in omitted_types):
            name = choice = None
        elif not name and kind in _CHOICES:
            choice = kind
    if not (isinstance(name, str) or choice in (None, "", *_CHOICES)):
        raise RefusedError(f"tool_choice={abbreviate(choice)}. Send auto, none, required, or the name of one tool")
    if choice == "none" or not tools:
        return (), True, ""
    if name is not None:
        tools = [tool for tool in tools if tool.name == name]
        if not tools:
            raise RefusedError(f"tool_choice names {abbreviate(name)}, which is not one of the tools")
    lines = [describe_tools(tools)]
    if name is not None:
        lines.append(f"Call {name} now.")
    elif choice in ("required", "any"):
        lines.append("Answer with a function call.")
    if parallel is False:
        lines.append("Call one function at a time.")
    return tuple(tools), parallel is not False, "\n\n".join(lines)


def format_instructions(response_format: Any) -> str:
    """Return the text about a ``response_format`` for the system prompt.

    The format is not enforced: a grammar would change the distribution that is trained.
    """
    kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
    if kind in (None, "", "text"):
        return ""
    if kind == "json_object":
        return "Answer with one JSON object and nothing else."
    if kind != "json_schema":
        raise RefusedError(f"response_format of type {abbreviate(kind)}. Send text, json_object or json_schema")
    is_object = isinstance(response_format, Mapping)
    definition = response_format.get("json_schema") or response_format if is_object else {}
    schema = definition.get("schema") if isinstance(definition, Mapping) else definition
    if not isinstance(schema, dict | bool | None):
        raise RefusedError(
            f"response_format={abbreviate(response_format)} has no schema. Send an object as json_schema.schema"
        )
    text = "Answer with one JSON value and nothing else."
    return text if schema is None else f"{text} It fits this schema:\n{json.dumps(schema, ensure_ascii=False)}"


def make_tool(name: Any, description: Any, parameters: Any) -> Tool:
    """Return a tool of the program."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,128}", name, re.ASCII):
        raise RefusedError(f"a tool has the name {abbreviate(name)}. Use letters, digits, _ and -")
    schema = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return Tool(name=name, description=str(description or ""), parameters=schema, fn=_never_run)


def _never_run(**_: Any) -> None:
    raise AssertionError("the program runs its tools itself")


def _canonical_json(arguments: str, parse_int: Callable[[str], Any], parse_float: Callable[[str], Any]) -> str:
    try:
        return json.dumps(json.loads(arguments, parse_int=parse_int, parse_float=parse_float), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _shortest_number(text: str) -> float:
    """Return 2 for 2.0. The reverse would be lossy: a float has only 16 digits of a long integer.

    Larger numbers stay floats, because 1e308 has 309 digits.
    """
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def _js_number(text: str) -> float:
    return float(text) + 0.0  # -0.0 becomes 0.0


# ---- the conversation as text


def order_results(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with tool results in the order of their calls, since the text form has no call ids.

    Raises:
        RefusedError: A call has no result, except in the last message, or a result has no call in the answer before it.
    """
    ordered: list[ChatMessage] = []
    calls: tuple[FunctionCall, ...] = ()
    for are_results, run in itertools.groupby(messages, lambda message: message.role == "tool"):
        if are_results:
            ordered += _match_results(calls, list(run))
            calls = ()
            continue
        for message in run:
            _match_results(calls, [])
            ordered.append(message)
            calls = message.calls
    return ordered


def _match_results(calls: Sequence[FunctionCall], results: Sequence[ChatMessage]) -> list[ChatMessage]:
    if len(calls) == len(results) and not any(result.call_id for result in results):
        return list(results)
    waiting: dict[str, deque[ChatMessage]] = {}
    for result in results:
        waiting.setdefault(result.call_id, deque()).append(result)
    matched, missing = [], []
    for call in calls:
        if waiting.get(call.id):
            matched.append(waiting[call.id].popleft())
        else:
            missing.append(f"{abbreviate(call.name)[1:-1]} ({abbreviate(call.id)})")
    if missing:
        more = f", and {len(missing) - _MAX_LISTED_CALLS} more" * (len(missing) > _MAX_LISTED_CALLS)
        raise RefusedError(
            f"no result of the tool call {', '.join(missing[:_MAX_LISTED_CALLS])}{more}. Send one result for each call "
            "of an answer, with the call's id, before any other message"
        )
    if extra := [call_id for call_id, rest in waiting.items() if rest]:
        expected = ", ".join(abbreviate(call.id) for call in calls[:_MAX_LISTED_CALLS]) or "none"
        repeated = any(call.id == extra[0] for call in calls)
        problem = "a second result of the tool call" if repeated else "a result of an unknown tool call,"
        raise RefusedError(
            f"{problem} {abbreviate(extra[0])}. The calls of the answer before it are {expected}. Send one result for "
            "each"
        )
    return matched


def as_text(messages: Sequence[ChatMessage], instructions: str = "") -> list[dict[str, str]]:
    """Return messages of the roles system, user and assistant, with `instructions` at the end of the system prompt."""
    return instructed([{"role": role, "content": text} for _, role, text in _texts(messages)], instructions)


def instructed(texts: list[dict[str, str]], instructions: str) -> list[dict[str, str]]:
    """Append `instructions`, if there are any, to the system prompt of messages, and return the messages."""
    if instructions:
        if texts[0]["role"] == "system":
            texts[0] = {"role": "system", "content": f"{texts[0]['content']}\n\n{instructions}".strip()}
        else:
            texts.insert(0, {"role": "system", "content": instructions})
    return texts


def _texts(messages: Iterable[ChatMessage]) -> Iterator[tuple[int, str, str]]:
    end = 0
    for are_results, run in itertools.groupby(messages, lambda message: message.role == "tool"):
        if are_results:
            results = [ToolResult(name="", content=message.text, ok=True) for message in run]
            end += len(results)
            yield end, "user", render_results(results)
            continue
        for message in run:
            end += 1
            calls = [render_tool_call(_tool_call(call)) for call in message.calls]
            yield end, message.role, "\n".join(filter(None, [message.text, *calls]))


def _tool_call(call: FunctionCall) -> ToolCall:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    return ToolCall(name=call.name, arguments=arguments if isinstance(arguments, dict) else {"": call.arguments})


# ---- answers


def make_response(request: ChatRequest, number: int, action: str, details: Mapping[str, Any]) -> ChatResponse:
    """Return the response to a request. `details` are facts as the hook ``about_answer`` receives them."""
    parsed = details.get("tool_calls")  # absent if the environment was stepped by hand
    candidates = parse_tool_calls(action, tools=request.tools) if parsed is None else [ToolCall(**c) for c in parsed]
    valid = [call for call in candidates if call.error is None] if request.tools else []
    calls = tuple(
        FunctionCall(id=f"call_{number}_{index}", name=call.name, arguments=json.dumps(dict(call.arguments)))
        for index, call in enumerate(valid if request.parallel_calls else valid[:1])
    )
    ids, logprobs = details.get("token_ids") or (), details.get("logprobs") or ()
    stop_text = details.get("stopped_by")
    return ChatResponse(
        number=number,
        text=before_calls(action, request.tools).strip() if calls else action,
        calls=calls,
        truncated=details.get("finish_reason") in ("length", "context"),
        stop_text=stop_text if stop_text in request.stop else "",
        prompt_tokens=details.get("prompt_tokens") or 0,
        completion_tokens=details.get("completion_tokens") or 0,
        reasoning_tokens=details.get("reasoning_tokens") or 0,
        logprobs=tuple(zip(ids, logprobs, strict=True)) if request.logprobs and ids else None,
    )
