"""Tool calls in the formats that models are trained to write: found in what a model wrote, and written for it to read.

In: any text; tools, calls, results. Out: calls in order, one that cannot be read with an `error` for the model; text.
Waits for nothing.

The formats: ``hermes`` ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen); ``llama``
``{"name": ..., "parameters": {...}}`` as the whole text or after ``<|python_tag|>`` (Llama 3); ``mistral``
``[TOOL_CALLS][{"name": ..., "arguments": {...}}]`` or ``[TOOL_CALLS]name{...}``; ``plain``
``CALL name(key=value, ...)`` or ``CALL name {...}``, for models that were trained on none of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from forge_agents.errors import did_you_mean
from forge_agents.tools.definition import Tool, ToolCall, ToolResult

ToolFormat: TypeAlias = Literal["hermes", "llama", "mistral", "plain"]
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama", "mistral", "plain")
MAX_CALLS = 16
"""Calls beyond these are not read."""


def parse_tool_calls(
    text: str, format: ToolFormat | Literal["auto"] = "auto", tools: Iterable[Tool] = ()  # noqa: A002  # the word
) -> list[ToolCall]:
    """The calls in a model's text, in order. Never raises on any text.

    Args:
        text: What the model wrote, its special tokens included.
        format: One of `FORMATS`; "auto" takes the format whose mark comes first.
        tools: Those on offer. In ``plain`` they let arguments stand without their names, and text without quotes.
    """
    if format == "auto":
        found = {name: mark.search(text) for name, mark in _MARKS.items()}
        first = min(((match.start(), name) for name, match in found.items() if match), default=None)
        return [] if first is None else parse_tool_calls(text, first[1], tools)
    if format not in _READERS:
        raise ValueError(f"format={format!r}; known are auto, {', '.join(FORMATS)}.{did_you_mean(format, FORMATS)}")
    return [call for call, _ in zip(_READERS[format](text, tuple(tools)), range(MAX_CALLS), strict=False)]


_MARKS: dict[ToolFormat, re.Pattern[str]] = {
    "hermes": re.compile(r"<tool_call>"),
    "llama": re.compile(r'<\|python_tag\|>|\A\s*\{\s*"(?:name|type)"\s*:'),
    "mistral": re.compile(r"\[ ?TOOL_CALLS\]"),
    "plain": re.compile(r"\bCALL\s{1,9}([\w.-]{1,99})\s{0,9}:?\s{0,9}(?=[({])", re.ASCII),
}


# ---- JSON


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


_JSON = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)  # models break lines in strings
_NOT_BLANK = re.compile(r"[^\s;,]|\Z")


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, blanks skipped, and where it ends.

    Raises:
        ValueError: There is none, or it holds what cannot be written.
    """
    match = _NOT_BLANK.search(text, start)
    try:
        value, end = _JSON.raw_decode(text, match.start() if match else start)
        json.dumps(value, ensure_ascii=False).encode()  # lone surrogates, from \ud800 escapes
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value, end


def _call_of(content: Any, form: str) -> ToolCall:
    """The call that a JSON value says; `form` is how it should look."""
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return ToolCall(name="", error=f'the tool call needs a "name"; write {form}')
    arguments = content.get("arguments", content.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON within a string
        try:
            arguments, _ = _json_at(arguments, 0)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name=content["name"], error=f"the arguments must be a JSON object; write {form}")
    return ToolCall(name=content["name"], arguments=arguments)


# ---- the formats


_HERMES = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
_HERMES_END = re.compile(r"\s*(?:</?tool_call>|\Z)")  # cut off at the closing mark, a call is still whole
_LLAMA = '{"name": ..., "parameters": {...}}'
_MISTRAL = '[TOOL_CALLS][{"name": ..., "arguments": {...}}]'


def _read_hermes(text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    position = 0
    while match := _MARKS["hermes"].search(text, position):
        position = match.end()
        try:
            content, end = _json_at(text, position)
            if not _HERMES_END.match(text, end):
                raise ValueError("more than one value")
        except ValueError:
            following = text.find("<tool_call>", position)
            closed = "</tool_call>" in text[position : following if following >= 0 else None]
            why = "not valid JSON" if closed else "not closed by </tool_call>"
            yield ToolCall(name="", error=f"the tool call is {why}; write {_HERMES}")
        else:
            position = end
            yield _call_of(content, _HERMES)


def _read_llama(text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    tag = "<|python_tag|>"
    tagged = tag in text
    start = position = text.index(tag) + len(tag) if tagged else 0
    while (at := _NOT_BLANK.search(text, position)) and (position == start or text.startswith("{", at.start())):
        try:
            content, position = _json_at(text, at.start())
        except ValueError:
            if tagged or '"parameters"' in text or '"arguments"' in text:
                yield ToolCall(name="", error=f"the tool call is not valid JSON; write {_LLAMA}")
            return
        if not tagged and not (isinstance(content, dict) and {"parameters", "arguments"} & content.keys()):
            return  # an answer in JSON
        yield _call_of(content, _LLAMA)


def _read_mistral(text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    for part in _MARKS["mistral"].split(text)[1:]:
        named = re.match(r"\s*([\w.-]{1,99})\s*(?:\[ARGS\])?\s*(?=\{)", part, re.ASCII)
        try:
            content, _ = _json_at(part, named.end() if named else 0)
        except ValueError:
            yield ToolCall(name=named[1] if named else "", error=f"the tool call is not valid JSON; write {_MISTRAL}")
            continue
        if named:
            yield ToolCall(name=named[1], arguments=content)
            continue
        for item in content if isinstance(content, list) else [content]:
            yield _call_of(item, _MISTRAL)


def _read_plain(text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    position = 0
    while match := _MARKS["plain"].search(text, position):
        name, position = match[1], match.end()
        if text[position] == "{":
            try:
                arguments, position = _json_at(text, position)
            except ValueError:
                yield ToolCall(name=name, error=f'the arguments are not valid JSON; write CALL {name} {{"key": value}}')
            else:
                yield ToolCall(name=name, arguments=arguments)
            continue
        parts, position = _split_arguments(text, position + 1)
        if parts is None:
            yield ToolCall(name=name, error=f"the call is not closed; write CALL {name}(key=value)")
        else:
            yield _plain_call(name, parts, next((t for t in tools if t.name == name), None))


_READERS: dict[ToolFormat, Callable[[str, Sequence[Tool]], Iterator[ToolCall]]] = {
    "hermes": _read_hermes,
    "llama": _read_llama,
    "mistral": _read_mistral,
    "plain": _read_plain,
}


# ---- plain arguments


_OPEN, _CLOSE = "([{", ")]}"


def _split_arguments(text: str, start: int) -> tuple[list[str] | None, int]:
    """The arguments between the parenthesis before `start` and its partner, and where that ends; None without one."""
    parts, depth, quote, begin, before = [], 0, "", start, "("
    for position in range(start, min(len(text), start + 8192)):
        char = text[position]
        if quote:
            if char == quote and before != "\\":
                quote = ""
        elif char in "\"'" and before in "(=,:[{":  # elsewhere it is an apostrophe
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE and depth:
            depth -= 1
        elif char == ")" or (char == "," and not depth):
            parts.append(text[begin:position].strip())
            begin = position + 1
            if char == ")":
                return [part for part in parts if part], begin
        if not char.isspace() or quote:
            before = "" if quote and before == "\\" else char  # an escaped backslash escapes nothing
    return None, start


def _plain_call(name: str, parts: Sequence[str], known: Tool | None) -> ToolCall:
    properties: Mapping[str, Any] = known.parameters.get("properties", {}) if known else {}
    free = [key for key in properties if not any(re.match(rf"{re.escape(key)}\s*=", part) for part in parts)]
    arguments: dict[str, Any] = {}
    for part in parts:
        match = re.match(r"([A-Za-z_]\w{0,99})\s*=(?!=)\s*(.*)", part, re.ASCII | re.DOTALL)
        if match:
            key, value = match[1], match[2]
        elif free:
            key, value = free.pop(0), part
        else:
            form = ", ".join(f"{key}=..." for key in properties) or "key=value"
            return ToolCall(name=name, error=f"{part[:80]!r} belongs to no argument; write CALL {name}({form})")
        arguments[key] = _value(value, text=properties.get(key, {}).get("type") == "string")
    return ToolCall(name=name, arguments=arguments)


_WORDS = {"True": True, "False": False, "None": None}


def _value(written: str, *, text: bool) -> Any:
    """What a value stands for: JSON, Python's words for it, a string in single quotes, or else the text itself."""
    quoted = len(written) > 1 and written[0] == written[-1] and written[0] in "\"'"
    if quoted or not text:
        try:
            value, end = _json_at(written, 0)
            if end == len(written):
                return value
        except ValueError:
            pass
    if quoted:
        return re.sub(r"\\(['\"\\])", r"\1", written[1:-1])
    return written if text else _WORDS.get(written, written)


# ---- writing


def render_tool_call(call: ToolCall, format: ToolFormat = "hermes") -> str:  # noqa: A002  # the word everybody uses
    """`call` as a model would write it; `parse_tool_calls` reads it back."""
    if format == "plain":
        return f"CALL {call.name}({', '.join(f'{key}={_json(value)}' for key, value in call.arguments.items())})"
    content = {"name": call.name, "parameters" if format == "llama" else "arguments": dict(call.arguments)}
    if format == "llama":
        return _json(content)
    if format == "mistral":
        return f"[TOOL_CALLS]{_json([content])}"
    return f"<tool_call>\n{_json(content)}\n</tool_call>"


def describe_tools(tools: Iterable[Tool], format: ToolFormat = "hermes") -> str:  # noqa: A002  # the same
    """What a system prompt says of `tools`; empty without tools.

    ``hermes`` is what the chat templates of Qwen 2.5 and 3 write, ``llama`` what the one of Llama 3.1 writes.
    """
    offered = list(tools)
    if not offered:
        return ""
    if format == "hermes":
        schemas = "\n".join(_json(t.schema) for t in offered)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{schemas}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )
    if format == "plain":
        lines = [f"{t.name}({', '.join(t.parameters.get('properties', {}))}): {t.description}" for t in offered]
        examples = [render_tool_call(_example(t), "plain") for t in offered]
        return "Tools:\n" + "\n".join(lines) + "\nTo use a tool, write a line such as\n" + "\n".join(examples)
    schemas = "\n\n".join(json.dumps(t.schema, indent=4, ensure_ascii=False) for t in offered)
    form = {
        "llama": 'with JSON for a function call, in the format {"name": function name, "parameters": dictionary of '
        "argument name and its value}. Do not use variables.",
        "mistral": 'with [TOOL_CALLS] and a JSON list of calls, [{"name": ..., "arguments": {...}}].',
    }[format]
    return f"You have access to the following functions. To call a function, please respond {form}\n\n{schemas}"


def render_results(results: Sequence[ToolResult], format: ToolFormat = "hermes") -> str:  # noqa: A002  # the same
    """What the seat reads next. ``hermes`` is what the template of Qwen makes of tool messages; else lines of text."""
    if format == "hermes":
        return "\n".join(
            f"<tool_response>\n{result.content.replace('</tool_response>', '</ tool_response>')}\n</tool_response>"
            for result in results
        )
    if len(results) == 1:
        return results[0].content
    return "\n".join(f"{result.name or 'call'}: {result.content}" for result in results)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_EXAMPLES = {"string": "text", "integer": 2, "number": 2.5, "boolean": True, "array": []}


def _example(offered: Tool) -> ToolCall:
    """A call with all the arguments that `offered` needs, of the right types."""
    return ToolCall(name=offered.name, arguments=_example_value({"type": "object", **offered.parameters}, offered))


def _example_value(schema: Any, offered: Tool, depth: int = 3) -> Any:
    """A value of a part of `offered`'s schema. A stranger's may be wide and refer to itself: both have an end."""
    if isinstance(schema, dict) and "$ref" in schema:
        schema = offered.parameters.get("$defs", {}).get(str(schema["$ref"]).rpartition("/")[2])
    if not isinstance(schema, dict):
        return "text"
    if "const" in schema or schema.get("enum"):
        return schema["const"] if "const" in schema else schema["enum"][0]
    if depth and schema.get("anyOf"):
        return _example_value(schema["anyOf"][0], offered, depth - 1)
    if depth and "prefixItems" in schema:
        return [_example_value(item, offered, depth - 1) for item in schema["prefixItems"][:32]]
    kind, parts, needed = schema.get("type", "string"), schema.get("properties", {}), schema.get("required", [])
    if kind == "object":
        return {key: _example_value(parts.get(key, {}), offered, depth - 1) for key in needed[:32]} if depth else {}
    return _EXAMPLES.get(kind, "text") if isinstance(kind, str) else "text"
