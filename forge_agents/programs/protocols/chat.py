"""OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import textwrap
from typing import Any

from forge_agents.envs.env import writable
from forge_agents.programs.calls import ChatMessage, ChatRequest, ChatResponse, FunctionCall, RefusedError, abbreviate
from forge_agents.programs.protocols import common
from forge_agents.programs.protocols.common import Events, Json, Protocol

_MIN_LOGPROB = -9999.0
"""OpenAI's value for minus infinity, because JSON has none."""
_MESSAGE_FIELDS = frozenset((
    "role", "content", "name", "refusal", "tool_calls", "tool_call_id", "function_call", "audio", "annotations",
    "parsed", "reasoning", "reasoning_content", "reasoning_details", "thinking", "cache_control", "id", "index",
    "type", "weight", "finish_reason",
))  # fmt: skip
"""Fields of a message that are read, rejected, or irrelevant to the model. Its own reasoning it reads as sampled."""


def _read(body: Any) -> ChatRequest:
    body = common.as_object(body)
    common.reject_fields(
        body, "functions", "function_call", "audio", "prediction", "web_search_options", "continue_final_message"
    )
    if body.get("n") not in (None, 1):
        raise RefusedError(f"n={abbreviate(body['n'])}: a call has one answer. Call again for another")
    if body.get("top_logprobs"):
        raise RefusedError("top_logprobs is not supported here. logprobs=true returns those of the sampled tokens")
    return common.read_request(
        body,
        lambda body: [
            message
            for index, entry in enumerate(common.get_list(body, "messages"))
            for message in read_message(entry, f"messages[{index}]")
        ],
        _read_tool,
        response_format=body.get("response_format"),
        max_tokens=common.get_limit(body, "max_completion_tokens", "max_tokens"),
        stop=common.get_stop(body.get("stop")),
        logprobs=bool(common.get_flag(body, "logprobs")),
        include_usage=bool(common.get_flag(common.get_object(body, "stream_options"), "include_usage")),
    )


def _read_tool(tool: Json) -> Json | None:
    return common.as_object(tool.get("function"), "function of a tool") if tool.get("type") == "function" else None


def read_message(message: Any, where: str) -> list[ChatMessage]:
    """Return a message. `where` is its place, for errors."""
    message = common.as_object(message, where)
    role = common.get_role(message.get("role"), where, "system", "developer", "user", "assistant", "tool")
    if message.get("function_call"):  # the API before tool_calls; ignoring it would change the conversation
        raise RefusedError(f"{where}: function_call is not supported here. Send tool_calls, and results as tool")
    if role != "assistant" and message.get("tool_calls"):
        raise RefusedError(f"{where}: tool_calls in a message of the role {role}. Only assistant may have them")
    common.warn_of_unknown(message, _MESSAGE_FIELDS, " in a message")
    calls = []
    for call in common.get_list(message, "tool_calls"):
        function = common.as_object(common.as_object(call, where).get("function"), f"{where}: function of a tool call")
        calls.append(common.function_call(call.get("id"), function.get("name"), function.get("arguments"), where))
    call_id = str(message.get("tool_call_id") or "") if role == "tool" else ""
    content, reasoning = message.get("content") or message.get("refusal"), ""
    if role == "assistant":
        content, reasoning = common.split_reasoning(message, content, where)
    text = _with_name(common.text_of(content, where), message.get("name"), role, where)
    return [ChatMessage(role=role, text=text, calls=tuple(calls), call_id=call_id, reasoning=reasoning)]


def _with_name(text: str, name: Any, role: str, where: str) -> str:
    """Return the text of a message, preceded by the name of its author, for which chat templates have no place.

    Its further lines are indented, so that no author can write a line as another one. The name of a tool is known from
    the call.
    """
    if not isinstance(name, str | None) or len(name or "") > common.MAX_NAME_CHARS:
        limit = f"a text of at most {common.MAX_NAME_CHARS} characters"
        raise RefusedError(f"{where}: name is {abbreviate(name)}. Send {limit}")
    if not name or role in ("tool", name):
        return text
    if role == "assistant":
        common.warn(
            "a program names the author of an assistant message. The name is not shown to models, because the message "
            "may be their own"
        )
        return text
    first, *others = text.splitlines(keepends=True) or [""]
    return f"{writable(name)}: {first}{textwrap.indent(''.join(others), '    ')}"


def _write(request: ChatRequest, response: ChatResponse, created: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": response.text or (None if response.calls else "")}
    if response.calls:
        message["tool_calls"] = [_write_call(call) for call in response.calls]
    choice = {"index": 0, "message": message, "finish_reason": _finish(response), "logprobs": _logprobs(response)}
    return _head(request, response, created, "chat.completion") | {"choices": [choice], "usage": _usage(response)}


def _events(request: ChatRequest, response: ChatResponse, created: int) -> Events:
    head = _head(request, response, created, "chat.completion.chunk")

    def chunk(delta: Json, finish: str | None = None, **more: Any) -> tuple[str, Any]:
        return "", head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]}

    yield chunk({"role": "assistant", "content": ""})
    if response.text:
        yield chunk({"content": response.text}, logprobs=_logprobs(response))
    for index, call in enumerate(response.calls):
        yield chunk({"tool_calls": [{"index": index, **_write_call(call)}]})
    yield chunk({}, _finish(response), **({} if response.text else {"logprobs": _logprobs(response)}))
    if request.include_usage:
        yield "", head | {"choices": [], "usage": _usage(response)}
    yield "", "[DONE]"


def _head(request: ChatRequest, response: ChatResponse, created: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{response.number}", "object": kind, "created": created, "model": request.model}


def _write_call(call: FunctionCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(response: ChatResponse) -> dict[str, Any]:
    return {
        "prompt_tokens": response.prompt_tokens,
        "completion_tokens": response.completion_tokens,
        "total_tokens": response.prompt_tokens + response.completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": response.reasoning_tokens},
    }


def _finish(response: ChatResponse) -> str:
    return "length" if response.truncated else "tool_calls" if response.calls else "stop"


def _logprobs(response: ChatResponse) -> dict[str, Any] | None:
    """Return log-probabilities by token id, as vLLM does on request: part of a character is not valid text."""
    if response.logprobs is None:
        return None
    tokens: list[dict[str, Any]] = [
        # max also replaces NaN
        {"token": f"token_id:{token}", "logprob": max(_MIN_LOGPROB, logprob), "bytes": None, "top_logprobs": []}
        for token, logprob in response.logprobs
    ]
    return {"content": tokens, "refusal": None}


PROTOCOL = Protocol(_read, _write, _events)
