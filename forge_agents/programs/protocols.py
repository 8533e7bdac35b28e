"""Three protocols in which programs ask: OpenAI's chat completions and responses, Anthropic's messages.

In: the JSON of a request. Out: a `Call`; of a `Reply`, the JSON of a response, or the events of a stream, which tells
the whole answer at once, because a turn is one decision. Waits for nothing.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from forge_agents.envs.env import writable
from forge_agents.programs.calls import (
    SAMPLING,
    AskedCall,
    Call,
    RefusedError,
    Reply,
    Said,
    form_of,
    in_order,
    offered,
    shown,
    tool_of,
)
from forge_agents.tools import Tool

_NEVER = -9999.0
"""OpenAI's word for minus infinity, which JSON lacks."""
_KNOWN = frozenset((
    *SAMPLING, "model", "messages", "input", "instructions", "system", "tools", "tool_choice", "parallel_tool_calls",
    "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "max_output_tokens", "stop",
    "stop_sequences", "response_format", "text", "output_config", "output_format", "logprobs", "top_logprobs",
    "metadata", "user", "store", "service_tier", "include", "truncation", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "client_metadata", "modalities", "betas", "anthropic_version", "anthropic_beta",
    "cache_control", "context_management", "speed", "inference_geo", "reasoning", "reasoning_effort", "verbosity",
    "thinking", "thread",
))  # fmt: skip
"""Fields of a request that are read, or that change nothing which the policy would not decide."""
_MOST_TOLD = 4
"""Of such fields of one request."""
_TEXTS = (None, "text", "input_text", "output_text", "refusal")
"""Types of a message's parts that are text."""
_MESSAGE = frozenset((
    "role", "content", "name", "refusal", "tool_calls", "tool_call_id", "function_call", "audio", "annotations",
    "parsed", "reasoning", "reasoning_content", "reasoning_details", "thinking", "cache_control", "id", "index",
    "type", "weight", "finish_reason",
))  # fmt: skip
"""Fields of a chat message that are read or refused, or that say nothing to the model: a model reads its own reasoning
as it was sampled."""
_MAX_NAME = 256
"""Characters of a model's name: a longer one is nobody's, and would be compared with those that are known."""
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Code on which Anthropic's clients send the whole conversation again."""
Json: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a program asks, and how it is answered."""

    read: Callable[[Any], Call]
    """The call of a request's JSON. Raises RefusedError."""
    written: Callable[[Call, Reply, int], dict[str, Any]]
    """The body of an answer; the number is the time, in Unix seconds."""
    events: Callable[[Call, Reply, int], Iterator[tuple[str, Any]]]
    """The same as a stream: names, empty where the protocol has none, and what each carries, JSON or text."""


# ---- what all of them read


def _call(body: Any, said: Callable[[Json], Iterable[Said]], tools: Callable[[Json], Json | None], **more: Any) -> Call:
    """The part of a call that all protocols say alike.

    Args:
        body: The request.
        said: Its messages.
        tools: Name, description and parameters of one of its tools; None where that is no function of the program's.
        **more: Fields of `Call`, and ``form``, what the answer should look like.
    """
    if not isinstance(model := body.get("model"), str) or len(model) > _MAX_NAME:
        raise RefusedError(f"model is {shown(model)}; name a seat")
    have = [(_tool(tools, tool), tool.get("type")) for tool in _list(body, "tools")]
    left_out = [kind for known, kind in have if known is None]
    parallel = more.pop("parallel") if "parallel" in more else _flag(body, "parallel_tool_calls")
    chosen, several, told = offered(
        [known for known, _ in have if known is not None], body.get("tool_choice"), parallel, left_out
    )
    _warn_of_unknown(body, _KNOWN)
    messages = tuple(in_order(said(body)))
    if not messages:
        raise RefusedError("there is no message; send at least one")
    return Call(
        model=model,
        said=messages,
        tools=chosen,
        several=several,
        told=writable("\n\n".join(filter(None, [told, form_of(more.pop("form", None))]))),
        asked=_wishes(body),
        stream=bool(_flag(body, "stream")),
        **more,
    )


def _warn_of_unknown(given: Json, known: frozenset[str], where: str = "") -> None:
    """Warn of fields that are not followed. Only their names are told: each text is a warning that Python keeps."""
    unknown = sorted(name for name in given.keys() - known if given[name] not in (None, False, "", [], {}))
    for name in unknown[:_MOST_TOLD]:
        warnings.warn(
            f"a program sends {shown(name)[1:-1]}{where}, which is not known here and not followed",
            RuntimeWarning,
            stacklevel=3,
        )


def _object(value: Any, where: str = "the body") -> Json:
    if not isinstance(value, Mapping):
        raise RefusedError(f"{where} is a JSON {type(value).__name__}; send an object")
    return value


def _list(body: Json, name: str) -> list[Any]:
    found = body.get(name) or []
    if not isinstance(found, list):
        raise RefusedError(f"{name} is a JSON {type(found).__name__}; send a list")
    return found


def _tool(read: Callable[[Json], Json | None], tool: Any) -> Tool | None:
    """The tool, or None where the program cannot run it."""
    known = read(_object(tool, "a tool"))
    if known is not None:
        return tool_of(known.get("name"), known.get("description"), known.get("parameters"))
    warnings.warn(
        f"a program offers a tool of type {shown(tool.get('type'))}; it is left out: models here hear of functions "
        "only, which the program runs itself",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _refuse(body: Json, *names: str) -> None:
    for name in names:
        if body.get(name):
            raise RefusedError(f"{name} is not supported here; leave it out")


def _limit(body: Json, *names: str) -> int | None:
    for name in names:
        if (limit := _number(body.get(name))) is not None:
            if type(limit) is not int or limit < 1:
                raise RefusedError(f"{name}={shown(limit)}; send a whole number, at least 1")
            return limit
    return None


def _flag(body: Json, name: str) -> bool | None:
    """True or false, as it is or as text; None where nothing is said."""
    value = body.get(name)
    told = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if told is None and value is None:
        return None
    if told not in (True, False):
        raise RefusedError(f"{name}={shown(value)}; send true or false")
    return bool(told)


def _wishes(body: Json) -> dict[str, Any]:
    """About sampling."""
    wishes = {name: _number(body[name]) for name in SAMPLING if body.get(name) is not None}
    if wishes.get("logit_bias") in ([], {}):
        del wishes["logit_bias"]
    for name, value in wishes.items():
        if isinstance(value, bool) or not isinstance(value, dict if name == "logit_bias" else int | float):
            kind = "an object" if name == "logit_bias" else "a number"
            raise RefusedError(f"{name}={shown(value)}; send {kind}")
    for name in wishes.keys() & {"top_k", "seed"}:
        if isinstance(value := wishes[name], float):
            raise RefusedError(f"{name}={shown(value)}; send a whole number")
    if wishes.get("top_k") == -1:  # vLLM's and others' word for all
        wishes["top_k"] = 0
    return wishes


def _number(value: Any) -> Any:
    """A number, also one that came as text, as settings of a program's do, an int where it is whole; else `value`."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if not all(isinstance(text, str) and text for text in texts):
        raise RefusedError(f"stop={shown(stop)}; send a text, or a list of texts")
    return tuple(map(writable, texts))


def text_of(content: Any, where: str) -> str:
    """The text of a message's content, which is a string, nothing, or a list of parts."""
    if content is None or isinstance(content, str):
        return writable(content or "")
    if not isinstance(content, list):
        raise RefusedError(f"{where}: content is a JSON {type(content).__name__}; send text")
    parts = []
    for part in content:
        told = {"text": part} if isinstance(part, str) else _object(part, f"{where}: a part")
        text = told.get("refusal") if told.get("type") == "refusal" else told.get("text")
        if told.get("type") not in _TEXTS or not isinstance(text, str):
            raise RefusedError(f"{where}: a part of type {shown(told.get('type'))}; the models here read text only")
        parts.append(text)
    return writable("\n".join(parts))


def _asked(id_: Any, name: Any, arguments: Any, where: str) -> AskedCall:
    if not isinstance(name, str):
        raise RefusedError(f"{where}: a tool call without a name")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return AskedCall(id=str(id_ or ""), name=writable(name), arguments=writable(written))


def _role(role: Any, where: str, *known: str) -> str:
    if role not in known:
        raise RefusedError(f"{where}: role {shown(role)}; known are {', '.join(known)}")
    return "system" if role == "developer" else str(role)


# ---- chat completions


def _read_chat(body: Any) -> Call:
    body = _object(body)
    _refuse(body, "functions", "function_call", "audio", "prediction", "web_search_options", "continue_final_message")
    if body.get("n") not in (None, 1):
        raise RefusedError(f"n={shown(body['n'])}: one answer a call; call again for another")
    if body.get("top_logprobs"):
        raise RefusedError("top_logprobs is not supported here; logprobs=true gives those of the sampled tokens")
    return _call(
        body,
        lambda body: (_chat_message(message, place) for place, message in enumerate(_list(body, "messages"))),
        lambda tool: _object(tool.get("function"), "function of a tool") if tool.get("type") == "function" else None,
        form=body.get("response_format"),
        max_tokens=_limit(body, "max_completion_tokens", "max_tokens"),
        stop=_stop(body.get("stop")),
        logprobs=bool(_flag(body, "logprobs")),
        usage=bool(_flag(_object(body.get("stream_options") or {}, "stream_options"), "include_usage")),
    )


def _chat_message(message: Any, place: int) -> Said:
    where = f"messages[{place}]"
    message = _object(message, where)
    role = _role(message.get("role"), where, "system", "developer", "user", "assistant", "tool")
    if message.get("function_call"):  # OpenAI's first form; without it another answer would have been given
        raise RefusedError(f"{where}: function_call is not supported here; send tool_calls, and results as tool")
    if role != "assistant" and message.get("tool_calls"):
        raise RefusedError(f"{where}: tool_calls in a message of the role {role}; only those of assistant are read")
    _warn_of_unknown(message, _MESSAGE, " in a message")
    calls = []
    for call in _list(message, "tool_calls"):
        function = _object(_object(call, where).get("function"), f"{where}: function of a tool call")
        calls.append(_asked(call.get("id"), function.get("name"), function.get("arguments"), where))
    answers = str(message.get("tool_call_id") or "") if role == "tool" else ""
    text = text_of(message.get("content") or message.get("refusal"), where)
    return Said(role=role, text=_with_name(text, message.get("name"), role, where), calls=tuple(calls), answers=answers)


def _with_name(text: str, name: Any, role: str, where: str) -> str:
    """The text of a message that may name its author: chat templates have no place for names.

    A tool's result is named by the call that it answers.
    """
    if not isinstance(name, str | None) or len(name or "") > _MAX_NAME:
        raise RefusedError(f"{where}: name is {shown(name)}; send a text of at most {_MAX_NAME} characters")
    if not name or role in ("tool", name):
        return text
    if role == "assistant":
        warnings.warn(
            "a program names the author of an assistant message; models here do not read the name, because the message "
            "may be their own",
            RuntimeWarning,
            stacklevel=2,
        )
        return text
    return f"{writable(name)}: {text}"


def _write_chat(call: Call, reply: Reply, created: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    if reply.calls:
        message["tool_calls"] = [_chat_call(each) for each in reply.calls]
    choice = {"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": _logprobs(reply)}
    return _chat_head(call, reply, created, "chat.completion") | {"choices": [choice], "usage": _chat_usage(reply)}


def _chat_events(call: Call, reply: Reply, created: int) -> Iterator[tuple[str, Any]]:
    head = _chat_head(call, reply, created, "chat.completion.chunk")

    def chunk(delta: Json, finish: str | None = None, **more: Any) -> tuple[str, Any]:
        return "", head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]}

    yield chunk({"role": "assistant", "content": ""})
    if reply.text:
        yield chunk({"content": reply.text}, logprobs=_logprobs(reply))
    for at, each in enumerate(reply.calls):
        yield chunk({"tool_calls": [{"index": at, **_chat_call(each)}]})
    yield chunk({}, _finish(reply), **({} if reply.text else {"logprobs": _logprobs(reply)}))
    if call.usage:
        yield "", head | {"choices": [], "usage": _chat_usage(reply)}
    yield "", "[DONE]"


def _chat_head(call: Call, reply: Reply, created: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.number}", "object": kind, "created": created, "model": call.model}


def _chat_call(call: AskedCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_usage(reply: Reply) -> dict[str, Any]:
    read, wrote = reply.prompt_tokens, reply.completion_tokens
    details = {"reasoning_tokens": reply.reasoning_tokens}
    counts = {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}
    return counts | {"completion_tokens_details": details}


def _finish(reply: Reply) -> str:
    return "length" if reply.cut else "tool_calls" if reply.calls else "stop"


def _logprobs(reply: Reply) -> dict[str, Any] | None:
    """Tokens are named by their ids, as vLLM does on request: half a character is no text."""
    if reply.logprobs is None:
        return None
    tokens: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": max(_NEVER, logprob), "bytes": None, "top_logprobs": []}  # NaN, too
        for token, logprob in reply.logprobs
    ]
    return {"content": tokens, "refusal": None}


# ---- responses


def _read_responses(body: Any) -> Call:
    body = _object(body)
    _refuse(body, "previous_response_id", "conversation", "prompt", "background")
    return _call(
        body,
        _responses_messages,
        lambda tool: tool if tool.get("type") == "function" else None,
        form=_object(body.get("text") or {}, "text").get("format"),
        max_tokens=_limit(body, "max_output_tokens"),
    )


def _responses_messages(body: Json) -> Iterator[Said]:
    """Items as messages: what the model said in several items, text and calls, is one."""
    if instructions := body.get("instructions"):
        yield Said(role="system", text=text_of(instructions, "instructions"))
    given = body.get("input")
    if isinstance(given, str):
        yield Said(role="user", text=writable(given))
        return
    open_: Said | None = None
    for place, each in enumerate(_list(body, "input")):
        where = f"input[{place}]"
        item = _object(each, where)
        kind = item.get("type") or "message"
        if kind == "reasoning":
            continue
        if kind == "function_call":
            call = _asked(item.get("call_id"), item.get("name"), item.get("arguments"), where)
            open_ = open_ or Said(role="assistant", text="")
            open_ = replace(open_, calls=(*open_.calls, call))
            continue
        if kind == "function_call_output":
            said = Said(role="tool", text=text_of(item.get("output"), where), answers=str(item.get("call_id") or ""))
        elif kind == "message":
            role = _role(item.get("role"), where, "system", "developer", "user", "assistant")
            said = Said(role=role, text=text_of(item.get("content"), where))
        else:
            raise RefusedError(f"{where}: an item of type {shown(kind)} is not supported here; leave it out")
        if open_ is not None:
            yield open_
        open_ = said if said.role == "assistant" else None
        if open_ is None:
            yield said
    if open_ is not None:
        yield open_


def _write_responses(call: Call, reply: Reply, created: int) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        status = "incomplete" if reply.cut and not reply.calls else "completed"
        items.append({"id": f"msg_{reply.number}", "type": "message", "role": "assistant", "status": status,
                      "content": [part]})  # fmt: skip
    items += [
        {"id": f"fc_{each.id}", "type": "function_call", "call_id": each.id, "name": each.name,
         "arguments": each.arguments, "status": "completed"}
        for each in reply.calls
    ]  # fmt: skip
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    return {
        "id": f"resp_{reply.number}",
        "object": "response",
        "created_at": created,
        "model": call.model,
        "status": "incomplete" if reply.cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.cut else None,
        "output": items,
        "usage": usage,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": call.several,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _responses_events(call: Call, reply: Reply, created: int) -> Iterator[tuple[str, Any]]:
    whole = _write_responses(call, reply, created)
    sequence = 0

    def event(kind: str, **more: Any) -> tuple[str, Any]:
        nonlocal sequence
        sequence += 1
        return kind, {"type": kind, "sequence_number": sequence - 1, **more}

    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    for index, item in enumerate(whole["output"]):
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
            yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            yield event(
                "response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"]
            )
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.incomplete" if reply.cut else "response.completed", response=whole)


# ---- Anthropic's messages


def _read_messages(body: Any) -> Call:
    body = _object(body)
    if _object(body.get("thread") or {}, "thread").get("type") == "continue":  # only the new messages are in it
        raise RefusedError(
            "thread of type 'continue' is not supported here; send the whole conversation without thread",
            code=THREAD_UNSUPPORTED,
        )
    choice = _object(body.get("tool_choice") or {}, "tool_choice")
    kind = choice.get("type")
    return _call(
        {**body, "tool_choice": choice if kind == "tool" else kind},
        _anthropic_messages,
        lambda tool: {**tool, "parameters": tool.get("input_schema")} if tool.get("type") in (None, "custom") else None,
        parallel=not _flag(choice, "disable_parallel_tool_use"),
        form=_object(body.get("output_config") or {}, "output_config").get("format") or body.get("output_format"),
        max_tokens=_limit(body, "max_tokens"),
        stop=_stop(body.get("stop_sequences")),
    )


def _anthropic_messages(body: Json) -> Iterator[Said]:
    """Blocks as messages: results of tools come before the text beside them."""
    if system := body.get("system"):
        yield Said(role="system", text=text_of(system, "system"))
    for place, each in enumerate(_list(body, "messages")):
        where = f"messages[{place}]"
        message = _object(each, where)
        role = _role(message.get("role"), where, "system", "user", "assistant")
        content = message.get("content")
        blocks = [_object(block, where) for block in content] if isinstance(content, list) else []
        texts, calls = [] if blocks else [content], []
        for block in blocks:
            kind = block.get("type")
            if kind == "tool_use" and role == "assistant":
                calls.append(_asked(block.get("id"), block.get("name"), block.get("input"), where))
            elif kind == "tool_result" and role == "user":
                answers = str(block.get("tool_use_id") or "")
                yield Said(role="tool", text=result_text(block, where), answers=answers)
            elif kind not in ("thinking", "redacted_thinking"):
                texts.append(_block_text(block, where))
        if texts or calls:
            yield Said(role=role, text=text_of([text for text in texts if text], where), calls=tuple(calls))
        if role == "assistant" and each is body["messages"][-1]:
            warnings.warn(
                "the last message of a program's call is the model's own: models here go on after it with a new one, "
                "and not within it",
                RuntimeWarning,
                stacklevel=2,
            )


def result_text(block: Json, where: str) -> str:
    """The text of a block that holds a tool's result. It says when the tool has failed, as in a `ToolEnv`."""
    content = block.get("content")
    if isinstance(content, list):
        content = [_block_text(_object(each, where), where) for each in content]
    text = text_of(content, where)
    failed = _flag(block, "is_error") and not text.lower().startswith("error")
    return f"Error: {text or 'the tool failed'}" if failed else text


def _block_text(block: Json, where: str) -> str:
    """The text of a block: text, a search result, or a document whose source is text."""
    kind, source = block.get("type"), block.get("source")
    if kind == "document" and isinstance(source, Mapping) and source.get("type") in ("text", "content"):
        content = source.get("data") if source["type"] == "text" else source.get("content")
    elif kind == "search_result":
        content = block.get("content")
    else:
        return text_of([block], where)
    if _object(block.get("citations") or {}, where).get("enabled"):
        warnings.warn("a program asks for citations; models here give none", RuntimeWarning, stacklevel=2)
    heads = [block.get("title"), block.get("context"), source]
    return "\n".join([*(writable(head) for head in heads if head and isinstance(head, str)), text_of(content, where)])


def _write_messages(call: Call, reply: Reply, created: int) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    blocks += [
        {"type": "tool_use", "id": each.id, "name": each.name, "input": json.loads(each.arguments)}
        for each in reply.calls
    ]
    return {
        "id": f"msg_{reply.number}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": blocks,
        "stop_reason": _stop_reason(reply),
        "stop_sequence": _stop_sequence(reply),
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def _stop_reason(reply: Reply) -> str:
    if reply.cut:
        return "max_tokens"
    return "tool_use" if reply.calls else "stop_sequence" if reply.stopped_by else "end_turn"


def _stop_sequence(reply: Reply) -> str | None:
    return reply.stopped_by if _stop_reason(reply) == "stop_sequence" else None


def _message_events(call: Call, reply: Reply, created: int) -> Iterator[tuple[str, Any]]:
    whole = _write_messages(call, reply, created)

    def event(kind: str, **more: Any) -> tuple[str, Any]:
        return kind, {"type": kind, **more}

    yield event("message_start", message={**whole, "content": [], "stop_reason": None, "stop_sequence": None})
    for index, block in enumerate(whole["content"]):
        text = block["type"] == "text"
        empty: dict[str, Any] = {"text": ""} if text else {"input": {}}
        yield event("content_block_start", index=index, content_block=block | empty)
        delta = {"type": "text_delta", "text": block["text"]} if text else {
            "type": "input_json_delta", "partial_json": json.dumps(block["input"])
        }  # fmt: skip
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield event("message_delta", delta=end, usage={"output_tokens": reply.completion_tokens})
    yield event("message_stop")


PROTOCOLS = {
    "/v1/chat/completions": Protocol(_read_chat, _write_chat, _chat_events),
    "/v1/responses": Protocol(_read_responses, _write_responses, _responses_events),
    "/v1/messages": Protocol(_read_messages, _write_messages, _message_events),
}
"""By path."""
