"""What a program asks and what it is answered, whatever protocol it speaks.

In: messages, tools, what a seat answered. Out: a `Call`, a conversation in text, a `Reply`. Waits for nothing.

A conversation reaches the model as plain text of three roles, whatever its chat template knows: tools are described in
the system prompt, calls and results stand in the form that Qwen's and Hermes' templates give them.
"""

from __future__ import annotations

import itertools
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
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
)
"""Wishes about sampling that the policy in the seat does not follow: it samples as it is trained."""
_CHOICES = ("auto", "none", "required", "any")
_MAX_TOOLS = 256
_MAX_NAMED = 8
"""Calls that a refusal names."""
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
shown = _short.repr
"""What a stranger sent, for a message: messages are kept, and it may be megabytes."""


class RefusedError(ForgeError, ValueError):
    """A request that is not answered.

    Args:
        message: What arrived, what was expected, what to do.
        status: Of HTTP.
        code: A word for programs.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedCall:
    """A tool call of an answer, as the program hears it and sends it back."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it or as near as can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message of a conversation, reduced to what it says."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    text: str
    calls: tuple[AskedCall, ...] = ()
    answers: str = ""
    """Of a tool's result, the id of the call."""

    @property
    def key(self) -> bytes:
        """Equal for two messages that say the same, however their JSON was written."""
        return self._key(int, _number)

    @property
    def echo(self) -> bytes:
        """Equal, too, where a client in JavaScript wrote one of them: there all numbers are floats, and -0 is 0."""
        return self._key(_float, _float)

    def _key(self, whole: Callable[[str], Any], broken: Callable[[str], Any]) -> bytes:
        calls = [(call.id, call.name, _compact(call.arguments, whole, broken)) for call in self.calls]
        return json.dumps([self.role, self.text.strip(), calls, self.answers]).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a program asks a model, whatever protocol it asked in."""

    model: str
    said: tuple[Said, ...]
    """The conversation so far; at least one message."""
    tools: tuple[Tool, ...] = ()
    """What the answer may call; the program runs them."""
    several: bool = True
    """Whether one answer may hold several calls."""
    told: str = ""
    """What tools and the form of the answer add to the system prompt."""
    max_tokens: int | None = None
    """None: the policy's own limit."""
    stop: tuple[str, ...] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Wishes named in `SAMPLING`."""
    logprobs: bool = False
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with the counts of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer, as every protocol words it."""

    number: int
    """Of the call in its episode, from 0."""
    text: str
    """Without the tool calls; may be empty."""
    calls: tuple[AskedCall, ...] = ()
    cut: bool = False
    """Whether a limit of tokens ended it."""
    stopped_by: str = ""
    """The text of `Call.stop` that ended it; empty where none did, or nobody knows."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Among those of the completion."""
    logprobs: tuple[tuple[int, float], ...] | None = None
    """Id and log-probability of each token behind the thought; None where nobody asked or no model sampled."""

    @property
    def said(self) -> Said:
        """As a message of the conversation that goes on."""
        return Said(role="assistant", text=self.text, calls=self.calls)


# ---- tools and forms


def offered(
    tools: Sequence[Tool], choice: Any, parallel: Any, left_out: Sequence[Any] = ()
) -> tuple[tuple[Tool, ...], bool, str]:
    """The tools that an answer may call, whether several at once, and what the system prompt says of them.

    Args:
        tools: All that the program has.
        choice: "auto", "none", "required", as it is or as the type of an object, or the name of one in the manner of
            some protocol; nothing, or the type of what is left out, is "auto".
        parallel: Whether the program runs several; None: yes.
        left_out: Types of tools that the model does not hear of.
    """
    if len(tools) > _MAX_TOOLS:
        raise RefusedError(f"{len(tools)} tools arrived; send at most {_MAX_TOOLS}")
    name = None
    if isinstance(choice, Mapping):
        function, kind = choice.get("function"), choice.get("type")
        name = choice.get("name") or (function.get("name") if isinstance(function, Mapping) else None)
        if not choice or (kind and kind in left_out):
            name = choice = None
        elif not name and kind in _CHOICES:
            choice = kind
    if not (isinstance(name, str) or choice in (None, "", *_CHOICES)):
        raise RefusedError(f"tool_choice={shown(choice)}; send auto, none, required, or the name of one tool")
    if choice == "none" or not tools:
        return (), True, ""
    several = parallel is not False
    lines = [describe_tools(tools)]
    if name is not None:
        tools = [tool for tool in tools if tool.name == name]
        if not tools:
            raise RefusedError(f"tool_choice names {shown(name)}, which is not among the tools")
        lines = [describe_tools(tools), f"Call {name} now."]
    elif choice in ("required", "any"):
        lines.append("Answer with a function call.")
    lines += [] if several else ["Call one function at a time."]
    return tuple(tools), several, "\n\n".join(lines)


def form_of(wanted: Any) -> str:
    """What a ``response_format`` adds to the system prompt.

    The form is asked for and not enforced: what a grammar forbids the model would not be its own distribution, which is
    what is trained.
    """
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if kind in (None, "", "text"):
        return ""
    if kind == "json_object":
        return "Answer with one JSON object and nothing else."
    if kind != "json_schema":
        raise RefusedError(f"response_format of type {shown(kind)}; text, json_object and json_schema are known")
    named = wanted.get("json_schema") or wanted if isinstance(wanted, Mapping) else {}
    schema = named.get("schema") if isinstance(named, Mapping) else named
    if not isinstance(schema, dict | bool | None):
        raise RefusedError(f"response_format={shown(wanted)} holds no schema; send it as json_schema.schema, an object")
    told = "Answer with one JSON value and nothing else."
    return told if schema is None else f"{told} It fits this schema:\n{json.dumps(schema, ensure_ascii=False)}"


def tool_of(name: Any, description: Any, parameters: Any) -> Tool:
    """A tool that the program has."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,128}", name, re.ASCII):
        raise RefusedError(f"a tool is called {shown(name)}; names are letters, digits, _ and -")
    schema = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return Tool(name=name, description=str(description or ""), parameters=schema, fn=_theirs)


def _theirs(**_: Any) -> None:
    raise AssertionError("the program runs its tools itself")


def _compact(arguments: str, whole: Callable[[str], Any], broken: Callable[[str], Any]) -> str:
    try:
        return json.dumps(json.loads(arguments, parse_int=whole, parse_float=broken), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> float:
    """2.0 as 2, rather than 2 as 2.0: a float would hold but the first 16 digits of a longer number."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _float(text: str) -> float:
    return float(text) + 0.0  # no -0.0


# ---- the conversation as the model reads it


def in_order(said: Iterable[Said]) -> list[Said]:
    """Messages with the results of an answer's calls in the order of the calls, which is all that names them there.

    Raises:
        RefusedError: A call has no result, or a result answers no call of the answer before it. The calls of the last
            message may lack their results.
    """
    ordered: list[Said] = []
    calls: tuple[AskedCall, ...] = ()
    for are_results, run in itertools.groupby(said, lambda message: message.role == "tool"):
        if are_results:
            ordered += _matched(calls, list(run))
            calls = ()
            continue
        for message in run:
            _matched(calls, [])
            ordered.append(message)
            calls = message.calls
    return ordered


def _matched(calls: Sequence[AskedCall], results: Sequence[Said]) -> list[Said]:
    """The results in the order of the calls, matched by id, or by their places where no result has an id."""
    if len(calls) == len(results) and not any(result.answers for result in results):
        return list(results)
    waiting: dict[str, list[Said]] = {}
    for result in results:
        waiting.setdefault(result.answers, []).append(result)
    matched, missing = [], []
    for call in calls:
        if waiting.get(call.id):
            matched.append(waiting[call.id].pop(0))
        else:
            missing.append(f"{call.name} ({shown(call.id)})")
    if missing:
        more = f", and {len(missing) - _MAX_NAMED} more" * (len(missing) > _MAX_NAMED)
        raise RefusedError(
            f"no result of the tool call {', '.join(missing[:_MAX_NAMED])}{more}; send one result for each call of an "
            "answer, with the call's id, before any other message"
        )
    if left := [id_ for id_, rest in waiting.items() if rest]:
        known = ", ".join(shown(call.id) for call in calls[:_MAX_NAMED]) or "none"
        twice = any(call.id == left[0] for call in calls)
        raise RefusedError(
            f"{'a second result of the tool call' if twice else 'a result of an unknown tool call,'} {shown(left[0])}; "
            f"the calls of the answer before it are {known}; send one result for each"
        )
    return matched


def as_text(said: Sequence[Said], told: str = "") -> list[dict[str, str]]:
    """Messages of the roles system, user and assistant.

    Args:
        told: Added to the system prompt; where that is empty nothing is, so that new messages of a conversation that
            began before are written in the same way.
    """
    messages: list[dict[str, str]] = []
    results: list[str] = []
    for message in (*said, None):
        if message is not None and message.role == "tool":
            results.append(message.text)
            continue
        if results:
            text = render_results([ToolResult(name="", content=result, ok=True) for result in results])
            messages.append({"role": "user", "content": text})
            results = []
        if message is not None:
            calls = [render_tool_call(_as_call(call)) for call in message.calls]
            messages.append({"role": message.role, "content": "\n".join(filter(None, [message.text, *calls]))})
    if told:
        first = messages[0]
        if first["role"] == "system":
            messages[0] = {"role": "system", "content": f"{first['content']}\n\n{told}".strip()}
        else:
            messages.insert(0, {"role": "system", "content": told})
    return messages


def _as_call(call: AskedCall) -> ToolCall:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    return ToolCall(name=call.name, arguments=arguments if isinstance(arguments, dict) else {"": call.arguments})


# ---- answers


def reply_to(call: Call, number: int, action: str, about: Mapping[str, Any]) -> Reply:
    """The answer to a call.

    Args:
        call: What was asked.
        number: Of the call in its episode.
        action: What the seat answered.
        about: What else is known of the answer, as the hook ``about_answer`` is told it.
    """
    read = about.get("tool_calls")  # absent where nobody played: the environment was stepped by hand
    every = parse_tool_calls(action, tools=call.tools) if read is None else [ToolCall(**each) for each in read]
    found = [each for each in every if each.error is None] if call.tools else []
    calls = tuple(
        AskedCall(id=f"call_{number}_{at}", name=each.name, arguments=json.dumps(dict(each.arguments)))
        for at, each in enumerate(found if call.several else found[:1])
    )
    ids, logprobs = about.get("token_ids") or (), about.get("logprobs") or ()
    return Reply(
        number=number,
        text=before_calls(action, call.tools).strip() if calls else action,
        calls=calls,
        cut=about.get("finish_reason") in ("length", "context"),
        stopped_by=stopped if (stopped := about.get("stopped_by")) in call.stop else "",
        prompt_tokens=about.get("prompt_tokens") or 0,
        completion_tokens=about.get("completion_tokens") or 0,
        reasoning_tokens=about.get("reasoning_tokens") or 0,
        logprobs=tuple(zip(ids, logprobs, strict=True)) if call.logprobs and ids else None,
    )
