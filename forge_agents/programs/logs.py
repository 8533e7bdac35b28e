"""Logged requests and their responses, as messages of OpenAI's chats.

Proxies and clients log the bodies of OpenAI's chat completions and responses and of Anthropic's messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_agents.programs.calls import RefusedError
from forge_agents.programs.protocols.common import text_of
from forge_agents.programs.spans import REASONING_KEYS
from forge_agents.row_keys import marks_of

_ANSWER_KEYS = ("content", "tool_calls", "function_call", "refusal", *REASONING_KEYS)
_MOST_WRAPPED = 4
"""Levels of ``body`` around a request or a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One logged request with its answers."""

    request: Mapping[str, Any]
    messages: list[Any]
    """Messages of the request, in OpenAI's or Anthropic's form."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Assistant messages, each with its ``finish_reason``; empty if the request failed."""
    models: frozenset[str] = frozenset()
    """Names of the model in the request and in the response."""

    @property
    def asks(self) -> dict[str, Any]:
        """Fields of the request under the names of OpenAI's chat completions."""
        asks, choice = dict(self.request), self.request.get("tool_choice")
        if isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use"):
            asks["parallel_tool_calls"] = False
        for name in ("text", "output_config"):
            if isinstance(settings := asks.get(name), Mapping) and settings.get("format"):
                asks["response_format"] = settings["format"]
        return asks


def parse_exchange(row: Mapping[str, Any]) -> Exchange | None:
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
        raise RefusedError(f"the request is {str(request)[:100]!r}; expected an object with messages")
    if request.get("previous_response_id"):
        raise RefusedError("the request names a previous_response_id, and the messages before are not in it")
    messages = _messages(request)
    failed = row.get("error") is not None or _has_failed(answer)
    response = None if failed else _body(answer, "response")
    if isinstance(response, Mapping) and response.get("error"):
        response = None
    answers = [] if response is None else _answers(response)
    if isinstance(response, Mapping) and response.get("type") == "message" and _ends_with_answer(messages):
        raise RefusedError(
            "the request ends with the beginning of the answer, which Anthropic's models continue; write both as one "
            "answer"
        )
    names = (part.get("model") for part in (row, request, response) if isinstance(part, Mapping))
    models = frozenset(str(name) for name in names if name)
    return Exchange(request=request, messages=messages, answers=answers, models=models)


def _ends_with_answer(messages: list[Any]) -> bool:
    last = messages[-1] if messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def _body(value: Any, name: str) -> Any:
    """Return the innermost ``body``, parsed if it is JSON text. A response may be plain text."""
    for _ in range(_MOST_WRAPPED):
        if isinstance(value, str) and value.lstrip().startswith(("{", "[", "data:")):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as cause:
                raise RefusedError(f"the {name} is a text that is not JSON ({cause}); log the whole body") from None
        if not (isinstance(value, Mapping) and value.get("body") is not None):
            break
        value = value["body"]
    return value


def _has_failed(response: Any) -> bool:
    """Return whether the status of a response, next to its body, says that the request failed."""
    statuses = [response.get(key) for key in ("status", "status_code")] if isinstance(response, Mapping) else []
    return any(isinstance(status, int) and status >= 400 for status in statuses)


def _messages(request: Mapping[str, Any]) -> list[Any]:
    if isinstance(request.get("messages"), list):
        return list(request["messages"])
    if request.get("input") is None:
        keys = ", ".join(map(repr, list(request)[:12]))
        raise RefusedError(f"the request has the keys {keys}; expected messages, or the input of OpenAI's responses")
    value = request["input"]
    items = [{"role": "user", "content": value}] if isinstance(value, str) else _of_items(value)
    instructions = request.get("instructions")
    return [*([{"role": "system", "content": instructions}] if instructions else []), *items]


def _answers(response: Any) -> list[dict[str, Any]]:
    if isinstance(response, str):
        return [{"role": "assistant", "content": response}]
    if not isinstance(response, Mapping):
        raise RefusedError("the response is a list, as streams are logged; log the whole body")
    if isinstance(response.get("choices"), list):
        return [_of_choice(choice) for choice in response["choices"]]
    if isinstance(response.get("output"), list):
        ended = "incomplete" if response.get("status") == "incomplete" else "stop"
        return [{**message, "finish_reason": ended} for message in _joined(_of_items(response["output"]))]
    if response.get("role") == "assistant" and "content" in response:  # Anthropic's, or a message alone
        reason = response.get("stop_reason") or response.get("finish_reason")
        return [{**_message(response), "finish_reason": reason}]
    keys = ", ".join(map(repr, list(response)[:12]))
    raise RefusedError(f"the response has the keys {keys}; expected choices, output, or role and content")


def _of_choice(choice: Any) -> dict[str, Any]:
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(message, Mapping):
        kind = "a part of a stream" if isinstance(choice, Mapping) and "delta" in choice else "not a chat's"
        raise RefusedError(f"a choice of the response has no message ({kind}); log the whole body of chat completions")
    return {**_message(message), "finish_reason": choice.get("finish_reason")}


def _message(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return an assistant message without metadata of its protocol."""
    answer = {key: response[key] for key in _ANSWER_KEYS if key in response}
    return {**answer, **marks_of(response), "role": "assistant"}


def _joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the assistant messages of a response into one answer."""
    parts = list(messages)
    if not parts:
        return []
    texts = [part["content"] for part in parts if part["content"]]
    reasoning = [part["reasoning"] for part in parts if part.get("reasoning")]
    calls = [call for part in parts for call in part.get("tool_calls", ())]
    joined = {"role": "assistant", "content": "\n".join(texts), "reasoning": "\n".join(reasoning)}
    return [{**joined, "tool_calls": calls}]


def _of_items(items: Any) -> list[dict[str, Any]]:
    """Return messages of the items of OpenAI's responses. Several items of an assistant are one message."""
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise RefusedError(f"the items are {str(items)[:100]!r}; expected a list of objects")
    messages: list[dict[str, Any]] = []
    answer_parts: list[dict[str, Any]] = []
    for message in map(_of_item, items):
        if message["role"] == "assistant":
            answer_parts.append(message)
            continue
        messages += [*_joined(answer_parts), message]
        answer_parts = []
    return [*messages, *_joined(answer_parts)]


def _of_item(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind == "message":
        return {"role": item.get("role"), "content": text_of(item.get("content"), "a message")}
    if kind == "reasoning":
        reasoning = "\n".join(_texts(item.get("content"))) or "\n".join(_texts(item.get("summary")))
        return {"role": "assistant", "content": "", "reasoning": reasoning}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
    if kind == "function_call_output":
        text = text_of(item.get("output"), "the result of a tool")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
    raise RefusedError(f"an item of type {str(kind)[:100]!r} is not supported; leave the row out")


def _texts(parts: Any) -> Iterator[str]:
    for part in parts or ():
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield part["text"]
