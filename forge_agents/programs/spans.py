"""Model calls in OpenTelemetry spans, as messages of OpenAI's chat completions.

The attributes of a span follow OpenTelemetry's own conventions, OpenInference or OpenLLMetry.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from forge_agents.http_body import bounded_json
from forge_agents.programs.calls import RefusedError
from forge_agents.programs.logs import RecordedCall, as_list
from forge_agents.programs.protocols.common import REASONING_KEYS

_NAMES = (
    "gen_ai.agent.name", "gen_ai.request.model", "gen_ai.response.model", "llm.model_name", "embedding.model_name",
)  # fmt: skip
_CONTAINER_OPERATIONS = ("invoke_agent", "create_agent", "execute_tool", "embeddings", "invoke_workflow", "retrieval")
"""Values of ``gen_ai.operation.name`` for spans around calls, whose messages are also in the spans of the calls."""
_MESSAGES_EVENT = "gen_ai.client.inference.operation.details"
"""Event with a call's messages, if its span does not contain them."""
_MAX_NAME_PARTS = 12
"""Maximum number of parts of an attribute's name. Names of messages have fewer."""
_PARTS = (
    "tool_use", "tool_result", "thinking", "redacted_thinking", "text", "refusal", "image", "image_url", "document",
    "input_audio", "file",
)  # fmt: skip
"""Types of content parts of OpenAI's chat completions and Anthropic's messages."""
_Messages: TypeAlias = tuple[list[dict[str, Any]], list[dict[str, Any]], list[Any]]
"""Messages of the request, answers, and tools, in the form of OpenAI's chat completions or Anthropic's messages."""


def exported(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]] | None:
    """Return the spans of an export, and the log records that may have their content. None for other values."""
    exports = _first_of(value, "resourceSpans", "resource_spans")
    logs = _first_of(value, "resourceLogs", "resource_logs")
    if exports is None and logs is None:
        return None
    scopes = (each for export in exports or () for each in _first_of(export, "scopeSpans", "scope_spans") or ())
    other = (each for export in logs or () for each in _first_of(export, "scopeLogs", "scope_logs") or ())
    records = (record for scope in other for record in _first_of(scope, "logRecords", "log_records") or ())
    spans = (span for scope in scopes for span in scope.get("spans") or ())
    return itertools.chain(spans, ({"attributes": [], **record} for record in records))


def attributes(thing: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the attributes of a span by name. None for other values."""
    raw = thing.get("attributes")
    if raw is None:
        if not any(name in thing for name in ("spanId", "span_id", "traceId")):
            return None
        raw = {}
    attrs = _by_name(raw)
    if "gen_ai.input.messages" not in attrs:  # content may be in an event of the span
        for event in thing.get("events") or ():
            if event.get("name") == _MESSAGES_EVENT:
                attrs |= _by_name(event.get("attributes") or {})
    return attrs


def model_names(attrs: Mapping[str, Any]) -> set[str]:
    """Return the names of the model, and of the agent that called it."""
    return {str(attrs[name]) for name in _NAMES if attrs.get(name)}


def parse_span(attrs: Mapping[str, Any]) -> RecordedCall | str:
    """Return the call of a span, or why the span has none."""
    if attrs.get("gen_ai.operation.name") in _CONTAINER_OPERATIONS:
        return "spans around calls"
    parts = _from_conventions(attrs) or _from_openinference(attrs) or _from_openllmetry(attrs)
    if parts is None:
        is_call = any(name.startswith(("gen_ai.", "llm.")) for name in attrs)
        return "calls without their messages" if is_call else "spans of other things"
    messages, answers, tools = parts
    if not answers:
        return "calls without an answer"
    reasons = as_list(attrs.get("gen_ai.response.finish_reasons"))  # by answer; OpenInference has one for all
    reasons += [attrs.get("llm.finish_reason")] * (len(answers) - len(reasons))
    ends = [answer.pop("finish_reason", None) or reason for answer, reason in zip(answers, reasons, strict=False)]
    recorded = [([answer], end) for answer, end in zip(answers, ends, strict=True)]
    return RecordedCall(request={"tools": tools}, messages=messages, answers=recorded)


def _by_name(attributes: Any) -> dict[str, Any]:
    if isinstance(attributes, Mapping):
        return dict(attributes)
    return {str(each["key"]): _plain_value(each.get("value")) for each in attributes}


def _plain_value(value: Any) -> Any:
    """Return the value of OTLP's form ``{"stringValue": ...}``."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    ((kind, inner),) = value.items()
    kind = kind.replace("_v", "V")
    if kind == "arrayValue":
        return [_plain_value(each) for each in inner.get("values") or ()]
    if kind == "kvlistValue":
        return {str(each["key"]): _plain_value(each.get("value")) for each in inner.get("values") or ()}
    return int(inner) if kind == "intValue" else inner


def find_score(span: Mapping[str, Any], attrs: Mapping[str, Any], name: str) -> Any:
    """Return the value of a score among a span's attributes and evaluations. None if there is none."""
    if name in attrs:
        return attrs[name]
    for event in span.get("events") or ():
        if event.get("name") == "gen_ai.evaluation.result":
            evaluation = _by_name(event.get("attributes") or {})
            if evaluation.get("gen_ai.evaluation.name") == name:
                return evaluation.get("gen_ai.evaluation.score.value")
    return None


def _from_conventions(attrs: Mapping[str, Any]) -> _Messages | None:
    if "gen_ai.input.messages" not in attrs:
        return None
    prompt = as_list(attrs["gen_ai.input.messages"])
    if system := as_list(attrs.get("gen_ai.system_instructions")):
        prompt = [{"role": "system", "parts": system}, *prompt]
    answers = []
    for message in as_list(attrs.get("gen_ai.output.messages")):
        (message_fields,) = _from_parts({"role": "assistant", **message})
        answers.append({**message_fields, "finish_reason": message.get("finish_reason")})
    messages = [part for message in prompt for part in _from_parts(message)]
    return messages, answers, as_list(attrs.get("gen_ai.tool.definitions"))


def _from_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert a message with parts to OpenAI's form, in which tool results are separate messages."""
    texts, reasoning, calls, results = [], [], [], []
    content = message.get("parts", message.get("content"))
    for part in [{"type": "text", "content": content}] if isinstance(content, str) else content or ():
        kind = part.get("type")
        if kind == "text":
            texts.append(part["content"])
        elif kind in ("reasoning", "thinking"):
            reasoning.append(part["content"])
        elif kind == "tool_call":
            calls.append(_make_call(part.get("id"), part.get("name"), part.get("arguments")))
        elif kind == "tool_call_response":
            result = _first_of(part, "response", "result")
            text = result if isinstance(result, str) else json.dumps(result)
            results.append({"role": "tool", "tool_call_id": part.get("id"), "content": text})
        else:
            raise RefusedError(f"a part of type {kind!r}. The models here read text only")
    if not (texts or reasoning or calls) and results:
        return results
    message_fields = {"role": message.get("role"), "content": "\n".join(texts), "reasoning": "\n".join(reasoning)}
    return [*results, {**message_fields, "tool_calls": calls}]


def _make_call(id_: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": id_, "function": {"name": name, "arguments": arguments}}


def _from_openinference(attrs: Mapping[str, Any]) -> _Messages | None:
    tree = _nested(attrs, "llm.")
    if "input_messages" not in tree:
        return None

    def messages(numbered: Mapping[str, Any]) -> list[dict[str, Any]]:
        fields = numbered["message"]
        parts = [part["message_content"] for part in _numbered_values(fields.get("contents"))]
        reasoning = [part.get("text") or "" for part in parts if part.get("type") == "reasoning"]
        other = ("reasoning", "tool_use")  # tool_calls contains the calls as well
        parts = [part for part in parts if part.get("type") not in other and part != {"type": "text"}]
        role, answers, content = fields.get("role"), fields.get("tool_call_id"), fields.get("content")
        if role == "user" and answers:  # Anthropic's: a tool result, and text
            result = {"role": "tool", "tool_call_id": answers, "content": _content_parts(content) or content}
            return [result, *([{"role": "user", "content": parts}] if parts else [])]
        calls = [call["tool_call"] for call in _numbered_values(fields.get("tool_calls"))]
        calls = [{"id": call.get("id"), "function": call["function"]} for call in calls]
        message = {"role": role, "content": content or parts, "tool_call_id": answers, "tool_calls": calls}
        return [{**message, "reasoning": "\n".join(reasoning)}]

    tools = [bounded_json(each["tool"]["json_schema"]) for each in _numbered_values(tree.get("tools"))]
    prompt, answers = (
        [message for entry in _numbered_values(tree.get(f"{way}_messages")) for message in messages(entry)]
        for way in ("input", "output")
    )
    return prompt, answers, tools


def _from_openllmetry(attrs: Mapping[str, Any]) -> _Messages | None:
    tree = _nested(attrs, "gen_ai.")
    if not isinstance(tree.get("prompt"), dict):
        return None

    def message(fields: Mapping[str, Any], content: Any) -> dict[str, Any]:
        calls = _numbered_values(fields.get("tool_calls"))
        calls = [_make_call(call.get("id"), call.get("name"), call.get("arguments")) for call in calls]
        more = {name: fields[name] for name in ("tool_call_id", "finish_reason", *REASONING_KEYS) if fields.get(name)}
        return {"role": fields.get("role") or "assistant", "content": content, "tool_calls": calls, **more}

    prompt = [
        message(fields, _content_parts(fields.get("content")) or fields.get("content"))
        for fields in _numbered_values(tree["prompt"])
    ]
    answers, reasoning = [], {}
    for fields in _numbered_values(tree.get("completion")):
        if fields.get("role") == "thinking":  # Anthropic's: reasoning before the next answer
            reasoning = {"thinking": fields.get("content"), "finish_reason": fields.get("finish_reason")}
        else:
            answers.append(message({**reasoning, **fields}, fields.get("content")))
            reasoning = {}
    tools = []
    for each in _numbered_values(_nested(attrs, "llm.request.").get("functions")):
        schema = each.get("parameters") or each.get("input_schema") or "{}"  # Anthropic's name
        tools.append({**each, "parameters": bounded_json(schema)})
    return prompt, answers, tools


def _content_parts(content: Any) -> list[dict[str, Any]]:
    if not (isinstance(content, str) and content.startswith("[{")):
        return []
    try:
        parsed = bounded_json(content)
    except (ValueError, RecursionError):
        return []
    return parsed if all(isinstance(each, dict) and each.get("type") in _PARTS for each in parsed) else []


def _nested(attrs: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return ``{"a": {"0": {"b": 1}}}`` for ``{"a.0.b": 1}``, for names with this prefix."""
    tree: dict[str, Any] = {}
    for name, value in attrs.items():
        parts = name.removeprefix(prefix).split(".")
        if not name.startswith(prefix) or len(parts) > _MAX_NAME_PARTS:
            continue
        at = tree
        for part in parts[:-1]:
            inner = at.setdefault(part, {})
            at = inner if isinstance(inner, dict) else {}
        at[parts[-1]] = value
    return tree


def _numbered_values(numbered: Any) -> list[Any]:
    return [numbered[at] for at in sorted(numbered, key=int)] if numbered else []


def _first_of(value: Mapping[str, Any], *names: str) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)
