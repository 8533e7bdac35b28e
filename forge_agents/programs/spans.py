"""What exporters write of a call, as messages of OpenAI's chats.

In: exports and spans of OpenTelemetry, read from JSON, whose attributes are of its own conventions, of OpenInference or
of OpenLLMetry. Out: what was asked and answered, the tools, how it ended, a score. Waits for nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from forge_agents.programs.calls import RefusedError
from forge_agents.programs.protocols import result_text

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message under which a thought may stand."""
_NAMES = (
    "gen_ai.agent.name", "gen_ai.request.model", "gen_ai.response.model", "llm.model_name", "embedding.model_name",
)  # fmt: skip
_NO_CALLS = ("invoke_agent", "create_agent", "execute_tool", "embeddings", "invoke_workflow", "retrieval")
"""What ``gen_ai.operation.name`` says of spans around calls, whose messages the calls' own spans hold, too."""
_DETAILS = "gen_ai.client.inference.operation.details"
"""The event that holds a call's messages where its span does not."""
_CUT = (
    "length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded", "incomplete",
    "content_filter", "safety", "error",
)  # fmt: skip
"""Ends of answers that are not whole."""
_MOST_PARTS = 12
"""Of an attribute's name between dots: those of messages have fewer."""
_ANTHROPICS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
_BLOCKS = (*_ANTHROPICS, "text", "refusal", "image", "image_url", "document", "input_audio", "file")
"""Types of a message's parts, in OpenAI's chats and in Anthropic's messages."""

Found: TypeAlias = tuple[list[dict[str, Any]], list[dict[str, Any]], list[Any]]
"""What was asked, what was answered, the tools; each message as OpenAI's chat completions have it."""


def exported(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]] | None:
    """The spans of an export, and the records beside them that may hold their content; None of what is no export."""
    exports = _either(value, "resourceSpans", "resource_spans")
    logs = _either(value, "resourceLogs", "resource_logs")
    if exports is None and logs is None:
        return None
    scopes = (each for export in exports or () for each in _either(export, "scopeSpans", "scope_spans") or ())
    beside = (each for export in logs or () for each in _either(export, "scopeLogs", "scope_logs") or ())
    records = (record for scope in beside for record in _either(scope, "logRecords", "log_records") or ())
    spans = (span for scope in scopes for span in scope.get("spans") or ())
    return itertools.chain(spans, ({"attributes": [], **record} for record in records))


def attributes(thing: Mapping[str, Any]) -> dict[str, Any] | None:
    """Those of a span, by name; None of what is no span."""
    given = thing.get("attributes")
    if given is None:
        if not any(name in thing for name in ("spanId", "span_id", "traceId")):
            return None
        given = {}
    known = _by_name(given)
    if "gen_ai.input.messages" not in known:  # content may be recorded in an event of the span
        for event in thing.get("events") or ():
            if event.get("name") == _DETAILS:
                known |= _by_name(event.get("attributes") or {})
    return known


def names_in(known: Mapping[str, Any]) -> set[str]:
    """Names of the model that was called, and of the agent that called it."""
    return {str(known[name]) for name in _NAMES if known.get(name)}


def is_around_calls(known: Mapping[str, Any]) -> bool:
    """Whether a span holds other spans, and with them their messages."""
    return known.get("gen_ai.operation.name") in _NO_CALLS


def messages_in(known: Mapping[str, Any]) -> Found | None:
    """A call by the attributes of its span; None where they hold no messages."""
    return _of_conventions(known) or _of_openinference(known) or _of_openllmetry(known)


def ends_in(known: Mapping[str, Any]) -> list[Any]:
    """How a call ended: by OpenInference, then by the conventions, of each answer."""
    return [known.get("llm.finish_reason"), *some(known.get("gen_ai.response.finish_reasons"))]


def _by_name(attributes: Any) -> dict[str, Any]:
    if isinstance(attributes, Mapping):
        return dict(attributes)
    return {str(each["key"]): _plain(each.get("value")) for each in attributes}


def _plain(value: Any) -> Any:
    """A value as OTLP writes it: ``{"stringValue": ...}``."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    ((kind, inner),) = value.items()
    kind = kind.replace("_v", "V")
    if kind == "arrayValue":
        return [_plain(each) for each in inner.get("values") or ()]
    if kind == "kvlistValue":
        return {str(each["key"]): _plain(each.get("value")) for each in inner.get("values") or ()}
    return int(inner) if kind == "intValue" else inner


def is_cut(reason: Any) -> bool:
    """Whether an answer is not whole; Gemini's say ``FinishReason.MAX_TOKENS``."""
    return str(reason).rpartition(".")[2].lower() in _CUT


def score_in(span: Mapping[str, Any], known: Mapping[str, Any], name: str) -> Any:
    """What a span or its evaluations say of a call under this name; None where nothing does."""
    if name in known:
        return known[name]
    for event in span.get("events") or ():
        if event.get("name") == "gen_ai.evaluation.result":
            told = _by_name(event.get("attributes") or {})
            if told.get("gen_ai.evaluation.name") == name:
                return told.get("gen_ai.evaluation.score.value")
    return None


def some(value: Any) -> list[Any]:
    """A list that may be written as JSON within a text."""
    found = json.loads(value) if isinstance(value, str) else value
    return [] if found is None else found if isinstance(found, list) else [found]


def _of_conventions(known: Mapping[str, Any]) -> Found | None:
    if "gen_ai.input.messages" not in known:
        return None
    asked = some(known["gen_ai.input.messages"])
    if system := some(known.get("gen_ai.system_instructions")):
        asked = [{"role": "system", "parts": system}, *asked]
    answers = []
    for message in some(known.get("gen_ai.output.messages")):
        (said,) = _of_parts({"role": "assistant", **message})
        answers.append({**said, "finish_reason": message.get("finish_reason")})
    return [one for each in asked for one in _of_parts(each)], answers, some(known.get("gen_ai.tool.definitions"))


def _of_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages of OpenAI's of one whose content is in parts: results of tools are messages of their own there."""
    texts, thoughts, calls, results = [], [], [], []
    given = message.get("parts", message.get("content"))
    for part in [{"type": "text", "content": given}] if isinstance(given, str) else given or ():
        kind = part.get("type")
        if kind == "text":
            texts.append(part["content"])
        elif kind in ("reasoning", "thinking"):
            thoughts.append(part["content"])
        elif kind == "tool_call":
            calls.append(_called(part.get("id"), part.get("name"), part.get("arguments")))
        elif kind == "tool_call_response":
            result = _either(part, "response", "result")
            text = result if isinstance(result, str) else json.dumps(result)
            results.append({"role": "tool", "tool_call_id": part.get("id"), "content": text})
        else:
            raise RefusedError(f"a part of type {kind!r}; the models here read text only")
    if not (texts or thoughts or calls) and results:
        return results
    said = {"role": message.get("role"), "content": "\n".join(texts), "reasoning": "\n".join(thoughts)}
    return [*results, {**said, "tool_calls": calls}]


def _called(id_: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": id_, "function": {"name": name, "arguments": arguments}}


def of_blocks(role: Any, blocks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of OpenAI's of one whose content is in blocks of Anthropic's."""
    return _of_parts({"role": role, "parts": list(map(_in_parts, blocks))})


def _of_openinference(known: Mapping[str, Any]) -> Found | None:
    told = _nested(known, "llm.")
    if "input_messages" not in told:
        return None

    def messages(numbered: Mapping[str, Any]) -> list[dict[str, Any]]:
        said = numbered["message"]
        parts = [part["message_content"] for part in _listed(said.get("contents"))]
        thoughts = [part.get("text") or "" for part in parts if part.get("type") == "reasoning"]
        beside = ("reasoning", "tool_use")  # the calls stand in tool_calls, too
        parts = [part for part in parts if part.get("type") not in beside and part != {"type": "text"}]
        role, answers, content = said.get("role"), said.get("tool_call_id"), said.get("content")
        if role == "user" and answers:  # Anthropic's: the result of a tool, and what is said beside it
            result = {"role": "tool", "tool_call_id": answers, "content": _blocks(content) or content}
            return [result, *([{"role": "user", "content": parts}] if parts else [])]
        calls = [call["tool_call"] for call in _listed(said.get("tool_calls"))]
        called = [(call.get("id"), call["function"].get("name"), call["function"].get("arguments")) for call in calls]
        return [
            {
                "role": role,
                "content": content or parts,
                "reasoning": "\n".join(thoughts),
                "tool_call_id": answers,
                "tool_calls": [_called(*call) for call in called],
            }
        ]

    tools = [json.loads(each["tool"]["json_schema"]) for each in _listed(told.get("tools"))]
    asked, answers = (
        [one for each in _listed(told.get(f"{way}_messages")) for one in messages(each)] for way in ("input", "output")
    )
    return asked, answers, tools


def _of_openllmetry(known: Mapping[str, Any]) -> Found | None:
    told = _nested(known, "gen_ai.")
    if not isinstance(told.get("prompt"), dict):
        return None

    def message(said: Mapping[str, Any], content: Any) -> dict[str, Any]:
        calls = [_called(c.get("id"), c.get("name"), c.get("arguments")) for c in _listed(said.get("tool_calls"))]
        more = {name: said[name] for name in ("tool_call_id", "finish_reason", *THOUGHTS) if said.get(name)}
        return {"role": said.get("role") or "assistant", "content": content, "tool_calls": calls, **more}

    asked = []
    for said in _listed(told["prompt"]):
        blocks = _blocks(said.get("content"))
        if any(block["type"] in _ANTHROPICS for block in blocks):
            asked += of_blocks(said.get("role") or "assistant", blocks)
        else:
            asked.append(message(said, blocks or said.get("content")))
    answers, thought = [], {}
    for said in _listed(told.get("completion")):
        if said.get("role") == "thinking":  # Anthropic's: no answer, but what stands before the next
            thought = {"thinking": said.get("content"), "finish_reason": said.get("finish_reason")}
        else:
            answers.append(message({**thought, **said}, said.get("content")))
            thought = {}
    tools = []
    for each in _listed(_nested(known, "llm.request.").get("functions")):
        schema = each.get("parameters") or each.get("input_schema") or "{}"  # Anthropic's name of it
        tools.append({**each, "parameters": json.loads(schema)})
    return asked, answers, tools


def _blocks(content: Any) -> list[dict[str, Any]]:
    """The parts of a message that were written as JSON within a text; none where the text is what was said."""
    if not (isinstance(content, str) and content.startswith("[{")):
        return []
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return []
    return found if all(isinstance(each, dict) and each.get("type") in _BLOCKS for each in found) else []


def _in_parts(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """A block of Anthropic's as OpenTelemetry's conventions have it; what is no text stays what it is."""
    kind = block["type"]
    if kind == "tool_use":
        return {**block, "type": "tool_call", "arguments": block.get("input")}
    if kind == "tool_result":
        result = result_text(block, "the result of a tool")
        return {"type": "tool_call_response", "id": block.get("tool_use_id"), "response": result}
    if kind in _ANTHROPICS:
        return {"type": "thinking", "content": block.get("thinking") or ""}
    return {**block, "content": block["text"]} if kind == "text" else block


def _nested(known: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """``{"a": {"0": {"b": 1}}}`` of ``{"a.0.b": 1}``, of the names that begin with `prefix`."""
    tree: dict[str, Any] = {}
    for name, value in known.items():
        parts = name.removeprefix(prefix).split(".")
        if not name.startswith(prefix) or len(parts) > _MOST_PARTS:
            continue
        at = tree
        for part in parts[:-1]:
            inner = at.setdefault(part, {})
            at = inner if isinstance(inner, dict) else {}
        at[parts[-1]] = value
    return tree


def _listed(numbered: Any) -> list[Any]:
    """The values of ``{"0": ..., "1": ...}`` in the order of their numbers."""
    return [numbered[at] for at in sorted(numbered, key=int)] if numbered else []


def _either(value: Mapping[str, Any], *names: str) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)
