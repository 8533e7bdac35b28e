"""Anthropic's messages: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from forge_agents.envs.env import writable
from forge_agents.programs.calls import ChatMessage, ChatRequest, ChatResponse, RefusedError
from forge_agents.programs.protocols import common
from forge_agents.programs.protocols.common import Events, Json, Protocol

THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Error code at which Anthropic's clients send the whole conversation again."""


def _read(body: Any) -> ChatRequest:
    body = common.as_object(body)
    if common.get_object(body, "thread").get("type") == "continue":  # the request contains only the new messages
        raise RefusedError(
            "thread of type 'continue' is not supported here. Send the whole conversation without thread",
            code=THREAD_UNSUPPORTED,
        )
    choice = common.get_object(body, "tool_choice")
    kind = choice.get("type")
    return common.read_request(
        {**body, "tool_choice": choice if kind == "tool" else kind},
        _read_messages,
        lambda tool: {**tool, "parameters": tool.get("input_schema")} if tool.get("type") in (None, "custom") else None,
        parallel=not common.get_flag(choice, "disable_parallel_tool_use"),
        response_format=common.get_object(body, "output_config").get("format") or body.get("output_format"),
        max_tokens=common.get_limit(body, "max_tokens"),
        stop=common.get_stop(body.get("stop_sequences")),
    )


def _read_messages(body: Json) -> Iterator[ChatMessage]:
    """Yield messages. Tool results in a user's message come before its text."""
    if system := body.get("system"):
        yield ChatMessage(role="system", text=common.text_of(system, "system"))
    messages = common.get_list(body, "messages")
    for index, entry in enumerate(messages):
        message = list(read_message(entry, f"messages[{index}]"))
        if not common.is_reasoning(entry.get("content")):
            yield from message
    if messages and messages[-1].get("role") == "assistant":
        common.warn(
            "the last message of a request is the model's own. Models here do not continue it, but answer with a new "
            "message"
        )


def read_message(message: Any, where: str) -> Iterator[ChatMessage]:
    """Yield the tool results of a message, and then the message itself. `where` is its place, for errors."""
    message = common.as_object(message, where)
    role = common.get_role(message.get("role"), where, "system", "user", "assistant")
    content = message.get("content")
    parts, reasoning = common.split_reasoning(message, "" if content == [] else content, where)
    texts, calls = [] if isinstance(parts, list) else [parts], []
    for part in parts if isinstance(parts, list) else ():
        block = common.as_object(part, where)
        kind = block.get("type")
        if kind == "tool_use" and role == "assistant":
            calls.append(common.function_call(block.get("id"), block.get("name"), block.get("input"), where))
        elif kind == "tool_result" and role == "user":
            call_id = str(block.get("tool_use_id") or "")
            yield ChatMessage(role="tool", text=_result_text(block, where), call_id=call_id)
        else:
            texts.append(_block_text(block, where))
    if texts or calls or reasoning:
        text = common.text_of([text for text in texts if text], where)
        yield ChatMessage(role=role, text=text, calls=tuple(calls), reasoning=reasoning)


def _result_text(block: Json, where: str) -> str:
    """Return the text of a tool result. The text begins with "Error" if the tool failed, as in a `ToolEnv`."""
    content = block.get("content")
    if isinstance(content, list):
        content = [_block_text(common.as_object(part, where), where) for part in content]
    text = common.text_of(content, where)
    failed = common.get_flag(block, "is_error") and not text.lower().startswith("error")
    return f"Error: {text or 'the tool failed'}" if failed else text


def _block_text(block: Json, where: str) -> str:
    """Return the text of a text block, a search result, or a document whose source is text."""
    kind, source = block.get("type"), block.get("source")
    if kind == "document" and isinstance(source, Mapping) and source.get("type") in ("text", "content"):
        content = source.get("data") if source["type"] == "text" else source.get("content")
    elif kind == "search_result":
        content = block.get("content")
    else:
        return common.text_of([block], where)
    if common.as_object(block.get("citations") or {}, where).get("enabled"):
        common.warn("a program asks for citations, which models here do not give")
    heads = [head for head in (block.get("title"), block.get("context"), source) if head and isinstance(head, str)]
    return "\n".join([*map(writable, heads), common.text_of(content, where)])


def _write(request: ChatRequest, response: ChatResponse, created: int) -> dict[str, Any]:
    has_text = response.text or not response.calls
    blocks: list[dict[str, Any]] = [{"type": "text", "text": response.text}] if has_text else []
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in response.calls
    ]
    reason = "tool_use" if response.calls else "stop_sequence" if response.stop_text else "end_turn"
    if response.truncated:
        reason = "max_tokens"
    return {
        "id": f"msg_{response.number}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": response.stop_text if reason == "stop_sequence" else None,
        "usage": {"input_tokens": response.prompt_tokens, "output_tokens": response.completion_tokens},
    }


def _events(request: ChatRequest, response: ChatResponse, created: int) -> Events:
    body = _write(request, response, created)

    def event(kind: str, **more: Any) -> tuple[str, Any]:
        return kind, {"type": kind, **more}

    yield event("message_start", message={**body, "content": [], "stop_reason": None, "stop_sequence": None})
    for index, block in enumerate(body["content"]):
        is_text = block["type"] == "text"
        empty: dict[str, Any] = {"text": ""} if is_text else {"input": {}}
        yield event("content_block_start", index=index, content_block=block | empty)
        delta = {"type": "text_delta", "text": block["text"]} if is_text else {
            "type": "input_json_delta", "partial_json": json.dumps(block["input"])
        }  # fmt: skip
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    end = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield event("message_delta", delta=end, usage={"output_tokens": response.completion_tokens})
    yield event("message_stop")


PROTOCOL = Protocol(_read, _write, _events)
