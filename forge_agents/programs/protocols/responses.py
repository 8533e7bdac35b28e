"""OpenAI's responses: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from forge_agents.envs.env import writable
from forge_agents.programs.calls import ChatMessage, ChatRequest, ChatResponse, FunctionCall, RefusedError, abbreviate
from forge_agents.programs.protocols import common
from forge_agents.programs.protocols.common import Events, Json, Protocol


def _read(body: Any) -> ChatRequest:
    body = common.as_object(body)
    common.reject_fields(body, "previous_response_id", "conversation", "prompt", "background")
    return common.read_request(
        body,
        _read_messages,
        lambda tool: tool if tool.get("type") == "function" else None,
        response_format=common.get_object(body, "text").get("format"),
        max_tokens=common.get_limit(body, "max_output_tokens"),
    )


def _read_messages(body: Json) -> Iterator[ChatMessage]:
    if instructions := body.get("instructions"):
        yield ChatMessage(role="system", text=common.text_of(instructions, "instructions"))
    if isinstance(text := body.get("input"), str):
        yield ChatMessage(role="user", text=writable(text))
        return
    yield from read_items(common.get_list(body, "input"), "input")


def read_items(items: list[Any], name: str) -> Iterator[ChatMessage]:
    """Yield messages of a list called `name`. An assistant's text and the calls after it are one message."""
    answer: ChatMessage | None = None  # to which the next items may add calls
    calls: list[FunctionCall] = []
    thoughts: list[str] = []
    for index, entry in enumerate(items):
        where = f"{name}[{index}]"
        item = common.as_object(entry, where)
        kind = item.get("type") or "message"
        if kind == "reasoning":
            parts = next((item[key] for key in ("content", "summary") if item.get(key)), ())
            parts = parts if isinstance(parts, list) else ()  # of any form, because models here do not read it
            thoughts += [str(part.get("text") or "") for part in parts if isinstance(part, Mapping)]
            continue
        if kind == "function_call":
            calls.append(common.function_call(item.get("call_id"), item.get("name"), item.get("arguments"), where))
            answer = answer or ChatMessage(role="assistant", text="")
            continue
        message = _read_item(item, kind, where)
        if answer is not None:
            yield replace(answer, calls=tuple(calls), reasoning="\n".join(thoughts))
            calls, thoughts = [], []
        answer = message if message.role == "assistant" else None
        if answer is None:
            thoughts = []
            yield message
    if answer is not None:
        yield replace(answer, calls=tuple(calls), reasoning="\n".join(thoughts))


def _read_item(item: Json, kind: Any, where: str) -> ChatMessage:
    if kind == "function_call_output":
        text, call_id = common.text_of(item.get("output"), where), str(item.get("call_id") or "")
        return ChatMessage(role="tool", text=text, call_id=call_id)
    if kind == "message":
        role = common.get_role(item.get("role"), where, "system", "developer", "user", "assistant")
        return ChatMessage(role=role, text=common.text_of(item.get("content"), where))
    raise RefusedError(f"{where}: an item of type {abbreviate(kind)} is not supported here. Leave it out")


def _write(request: ChatRequest, response: ChatResponse, created: int) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    if response.text or not response.calls:
        part = {"type": "output_text", "text": response.text, "annotations": [], "logprobs": []}
        status = "incomplete" if response.truncated and not response.calls else "completed"
        items.append({"id": f"msg_{response.number}", "type": "message", "role": "assistant", "status": status,
                      "content": [part]})  # fmt: skip
    items += [
        {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": call.name,
         "arguments": call.arguments, "status": "completed"}
        for call in response.calls
    ]  # fmt: skip
    usage = {
        "input_tokens": response.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": response.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": response.reasoning_tokens},
        "total_tokens": response.prompt_tokens + response.completion_tokens,
    }
    return {
        "id": f"resp_{response.number}",
        "object": "response",
        "created_at": created,
        "model": request.model,
        "status": "incomplete" if response.truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if response.truncated else None,
        "output": items,
        "usage": usage,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": request.parallel_calls,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _events(request: ChatRequest, response: ChatResponse, created: int) -> Events:
    body = _write(request, response, created)
    sequence = 0

    def event(kind: str, **more: Any) -> tuple[str, Any]:
        nonlocal sequence
        sequence += 1
        return kind, {"type": kind, "sequence_number": sequence - 1, **more}

    yield event("response.created", response={**body, "status": "in_progress", "output": [], "usage": None})
    for index, item in enumerate(body["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield event("response.output_item.added", output_index=index, item={**item, **empty, "status": "in_progress"})
        if item["type"] == "message":
            part, at = item["content"][0], {**at, "content_index": 0}
            yield event("response.content_part.added", **at, part={**part, "text": ""})
            yield event("response.output_text.delta", **at, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, part=part)
        else:
            arguments = item["arguments"]
            yield event("response.function_call_arguments.delta", **at, delta=arguments)
            yield event("response.function_call_arguments.done", **at, name=item["name"], arguments=arguments)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.incomplete" if response.truncated else "response.completed", response=body)


PROTOCOL = Protocol(_read, _write, _events)
