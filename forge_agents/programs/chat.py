"""OpenAI's chat completions: what a program asks, read and checked, and what it is answered.

In: the JSON of a request. Out: a `Call`; of a `Reply`, the JSON of a response or of a stream. Waits for nothing.

A conversation reaches the model as plain text of three roles, whatever its chat template knows: tools are described in
the system prompt, calls and results stand in the form that Qwen's and Hermes' templates give them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_agents.envs.env import writable
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

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias",
)
"""Wishes about sampling that the policy in the seat does not follow: it samples as it is trained."""
_NOT_HERE = ("functions", "function_call", "audio", "prediction", "web_search_options")
"""Fields without which an answer would be another one than was asked for."""
_BEFORE_CALLS = re.compile(r"<tool_call>|\[ ?TOOL_CALLS\]|<\|python_tag\|>|\bCALL\s|\A\s*\{")
_MAX_TOOLS = 256
_NEVER = -9999.0
"""OpenAI's word for minus infinity, which JSON lacks."""


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

    def as_json(self) -> dict[str, Any]:
        """As the API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


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
        calls = [(call.id, call.name, _compact(call.arguments)) for call in self.calls]
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
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: tuple[tuple[int, float], ...] | None = None
    """Id and log-probability of each sampled token, thoughts included; None where nobody asked or no model sampled."""

    @property
    def said(self) -> Said:
        """As a message of the conversation that goes on."""
        return Said(role="assistant", text=self.text, calls=self.calls)


# ---- requests


def read(body: Any) -> Call:
    """The call of a request to ``/chat/completions``.

    Args:
        body: Its JSON.

    Raises:
        RefusedError: It is none, or asks for what is not here.
    """
    if not isinstance(body, dict):
        raise RefusedError(f"the body is a JSON {type(body).__name__}; send an object")
    for name in _NOT_HERE:
        if body.get(name):
            raise RefusedError(f"{name} is not supported here; leave it out")
    if body.get("n") not in (None, 1):
        raise RefusedError(f"n={body['n']!r}: one answer a call; call again for another")
    if body.get("top_logprobs"):
        raise RefusedError("top_logprobs is not supported here; logprobs=true gives those of the sampled tokens")
    if not isinstance(model := body.get("model"), str):
        raise RefusedError(f"model is {model!r}; name a seat")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError("messages is no list of messages; send at least one")
    have = [_of_function(tool) for tool in _a_list(body, "tools")]
    tools, several, told = offered(have, body.get("tool_choice"), body.get("parallel_tool_calls"))
    return Call(
        model=model,
        said=tuple(_message(message, place) for place, message in enumerate(messages)),
        tools=tools,
        several=several,
        told="\n\n".join(filter(None, [told, form_of(body.get("response_format"))])),
        max_tokens=limit_of(body, "max_completion_tokens", "max_tokens"),
        stop=_stop(body.get("stop")),
        asked={name: body[name] for name in SAMPLING if body.get(name) is not None},
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def offered(tools: Sequence[Tool], choice: Any, parallel: Any) -> tuple[tuple[Tool, ...], bool, str]:
    """The tools that an answer may call, whether several at once, and what the system prompt says of them.

    Args:
        tools: All that the program has.
        choice: "auto", "none", "required", or the name of one in the manner of some protocol.
        parallel: Whether the program runs several; None: yes.
    """
    if len(tools) > _MAX_TOOLS:
        raise RefusedError(f"{len(tools)} tools arrived; send at most {_MAX_TOOLS}")
    if choice == "none" or not tools:
        return (), True, ""
    several = parallel is not False
    lines = [describe_tools(tools)]
    named = choice if isinstance(choice, Mapping) else {}
    name = named.get("name") or (named.get("function") or {}).get("name")
    if name is not None:
        tools = [tool for tool in tools if tool.name == name]
        if not tools:
            raise RefusedError(f"tool_choice names {name!r}, which is not among the tools")
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
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind in (None, "text"):
        return ""
    if kind == "json_object":
        return "Answer with one JSON object and nothing else."
    if kind != "json_schema":
        raise RefusedError(f"response_format of type {kind!r}; text, json_object and json_schema are known")
    schema = json.dumps((wanted.get("json_schema") or wanted).get("schema") or {}, ensure_ascii=False)
    return f"Answer with one JSON value and nothing else. It fits this schema:\n{schema}"


def limit_of(body: Mapping[str, Any], *names: str) -> int | None:
    """The limit of tokens that a request names, if any."""
    for name in names:
        if (limit := body.get(name)) is not None:
            if type(limit) is not int or limit < 1:
                raise RefusedError(f"{name}={limit!r}; send a whole number, at least 1")
            return limit
    return None


def tool_of(name: Any, description: Any, parameters: Any) -> Tool:
    """A tool that the program has."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,128}", name, re.ASCII):
        raise RefusedError(f"a tool is called {name!r}; names are letters, digits, _ and -")
    schema = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return Tool(name=name, description=str(description or ""), parameters=schema, fn=_theirs)


def text_of(content: Any, where: str) -> str:
    """The text of a message's content, which is a string, nothing, or a list of parts."""
    if content is None or isinstance(content, str):
        return writable(content or "")
    if not isinstance(content, list):
        raise RefusedError(f"{where}: content is a JSON {type(content).__name__}; send text")
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and part.get("type") == "refusal":
            text = part.get("refusal")
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RefusedError(f"{where}: a part of type {kind!r}; the models here read text only")
        parts.append(text)
    return writable("\n".join(parts))


def _message(message: Any, place: int) -> Said:
    where = f"messages[{place}]"
    if not isinstance(message, Mapping):
        raise RefusedError(f"{where} is a JSON {type(message).__name__}; send an object with role and content")
    role = {"developer": "system"}.get(str(message.get("role")), message.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise RefusedError(f"{where}: role {role!r}; system, developer, user, assistant and tool are known")
    calls = []
    for call in message.get("tool_calls") or () if role == "assistant" else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RefusedError(f"{where}: a tool call without function.name")
        arguments = function.get("arguments")
        written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        calls.append(AskedCall(id=str(call.get("id") or ""), name=function["name"], arguments=writable(written)))
    answers = str(message.get("tool_call_id") or "") if role == "tool" else ""
    return Said(role=role, text=text_of(message.get("content"), where), calls=tuple(calls), answers=answers)


def _of_function(tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise RefusedError("a tool that is no function; only functions are known")
    return tool_of(function.get("name"), function.get("description"), function.get("parameters"))


def _a_list(body: Mapping[str, Any], name: str) -> list[Any]:
    found = body.get(name) or []
    if not isinstance(found, list):
        raise RefusedError(f"{name} is a JSON {type(found).__name__}; send a list")
    return found


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else list(stop or ())
    if not all(isinstance(text, str) and text for text in texts):
        raise RefusedError(f"stop={stop!r}; send texts")
    return tuple(texts)


def _theirs(**_: Any) -> None:
    raise AssertionError("the program runs its tools itself")


def _compact(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


# ---- the conversation as the model reads it


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
    found = [each for each in parse_tool_calls(action, tools=call.tools) if each.error is None] if call.tools else []
    calls = tuple(
        AskedCall(id=f"call_{number}_{at}", name=each.name, arguments=json.dumps(dict(each.arguments)))
        for at, each in enumerate(found if call.several else found[:1])
    )
    ids, logprobs = about.get("token_ids") or (), about.get("logprobs") or ()
    return Reply(
        number=number,
        text=_BEFORE_CALLS.split(action, maxsplit=1)[0].strip() if calls else action,
        calls=calls,
        cut=about.get("finish_reason") in ("length", "context"),
        prompt_tokens=about.get("prompt_tokens") or 0,
        completion_tokens=about.get("completion_tokens") or 0,
        logprobs=tuple(zip(ids, logprobs, strict=True)) if call.logprobs and ids else None,
    )


def written(call: Call, reply: Reply, created: int) -> dict[str, Any]:
    """The body of a response that is no stream."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    if reply.calls:
        message["tool_calls"] = [each.as_json() for each in reply.calls]
    choice = {"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": _logprobs(reply)}
    return _head(call, reply, created, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def streamed(call: Call, reply: Reply, created: int) -> Iterator[str]:
    """The lines of a stream: the whole answer at once, for a turn is one decision."""
    head = _head(call, reply, created, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
        return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"

    yield chunk({"role": "assistant", "content": ""})
    if reply.text:
        yield chunk({"content": reply.text}, logprobs=_logprobs(reply))
    for at, each in enumerate(reply.calls):
        yield chunk({"tool_calls": [{"index": at, **each.as_json()}]})
    yield chunk({}, _finish(reply))
    if call.usage:
        yield f"data: {json.dumps(head | {'choices': [], 'usage': _usage(reply)})}\n\n"
    yield "data: [DONE]\n\n"


def _head(call: Call, reply: Reply, created: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.number}", "object": kind, "created": created, "model": call.model}


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.calls else "length" if reply.cut else "stop"


def _usage(reply: Reply) -> dict[str, int]:
    read_, wrote = reply.prompt_tokens, reply.completion_tokens
    return {"prompt_tokens": read_, "completion_tokens": wrote, "total_tokens": read_ + wrote}


def _logprobs(reply: Reply) -> dict[str, Any] | None:
    """Tokens are named by their ids, as vLLM does on request: half a character is no text."""
    if reply.logprobs is None:
        return None
    known = [(token, max(_NEVER, logprob)) for token, logprob in reply.logprobs]  # NaN, too
    tokens: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in known
    ]
    return {"content": tokens, "refusal": None}
