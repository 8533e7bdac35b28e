"""Tool calls in a text: found in what anybody said, whatever form they have, and shown for a model to write.

In: any text; tools, calls, results. Out: calls in order, one that cannot be read with an `error` for the model; text.
Waits for nothing.

The forms: ``hermes`` ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen); ``llama``
``{"name": ..., "parameters": {...}}`` as the whole text or after ``<|python_tag|>`` (Llama 3); ``mistral``
``[TOOL_CALLS][{"name": ..., "arguments": {...}}]`` or ``[TOOL_CALLS]name{...}``; ``plain``
``CALL name(key=value, ...)`` or ``CALL name {...}``, for models that were trained on none of them.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from forge_agents.errors import did_you_mean
from forge_agents.files import is_shallow
from forge_agents.tools.arguments import argument_schemas, referred
from forge_agents.tools.definition import Tool, ToolResult
from forge_agents.types import ToolCall

ToolFormat: TypeAlias = Literal["hermes", "llama", "mistral", "plain"]
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama", "mistral", "plain")
MAX_CALLS = 16
"""Calls beyond these are not read."""


def parse_tool_calls(
    text: str,
    format: ToolFormat | Literal["auto"] = "auto",  # noqa: A002  # the word everybody uses
    tools: Iterable[Tool | Mapping[str, Any]] = (),
) -> list[ToolCall]:
    """The calls in a text, in order. Never raises on any text.

    Args:
        text: What was said, special tokens included.
        format: One of `FORMATS`; "auto" takes the format whose mark comes first.
        tools: Those on offer, or their schemas. In ``plain`` they let arguments stand without their names, and text
            without quotes.
    """
    return [call for _, call in _found(text, format, tools)]


def before_calls(text: str, tools: Iterable[Tool | Mapping[str, Any]] = ()) -> str:
    """What is said before the first call that can be read; all of it where there is none."""
    return text[: next((at for at, call in _found(text, "auto", tools) if call.error is None), None)]


def _found(
    text: str, format: ToolFormat | Literal["auto"], tools: Iterable[Tool | Mapping[str, Any]]  # noqa: A002
) -> list[tuple[int, ToolCall]]:
    """The calls, and where the mark of each begins."""
    if format == "auto":
        found = {name: mark.search(text) for name, mark in _MARKS.items()}
        first = min(((match.start(), name) for name, match in found.items() if match), default=None)
        return [] if first is None else _found(text, first[1], tools)
    if format not in FORMATS:
        raise ValueError(f"format={format!r}; known are auto, {', '.join(FORMATS)}.{did_you_mean(format, FORMATS)}")
    offered = [(t.schema if isinstance(t, Tool) else t)["function"] for t in tools]
    known = {each["name"]: argument_schemas(each["parameters"]) for each in offered}
    return list(itertools.islice(_read(text, format, known), MAX_CALLS))


def read_call(content: Any, form: str = '{"name": ..., "arguments": {...}}') -> ToolCall:
    """The call that a JSON value says; `form` is how it should look, for the error of one that says none."""
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return ToolCall(name="", error=f'the tool call needs a "name"; write {form}')
    if isinstance(content.get("error"), str):  # one that could not be read, in the form of `str(call)`
        return ToolCall(name=content["name"], error=content["error"])
    arguments = content.get("arguments", content.get("parameters", {}))
    try:  # some models, and every server, write the arguments as JSON within a string
        arguments, _ = _json_at(arguments if isinstance(arguments, str) else json.dumps(arguments), 0)
    except ValueError:
        arguments = {} if arguments == "" else None
    if not isinstance(arguments, dict):
        return ToolCall(name=content["name"], error=f"the arguments must be a JSON object; write {form}")
    return ToolCall(name=content["name"], arguments=arguments)


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
    if not is_shallow(value):
        raise ValueError("nested too deeply")
    return value, end


# ---- reading: a mark, perhaps a name, and JSON; or arguments as Python writes them


_MARKS: dict[ToolFormat, re.Pattern[str]] = {
    "hermes": re.compile(r"<tool_call>"),
    "llama": re.compile(r'<\|python_tag\|>|\A\s*(?=\{\s*"(?:name|type)"\s*:)'),
    "mistral": re.compile(r"\[ ?TOOL_CALLS\]"),
    "plain": re.compile(r"\bCALL\s{1,9}(?=[\w.-]{1,99}\s{0,9}:?\s{0,9}[({])", re.ASCII),
}
_FORMS: dict[ToolFormat, str] = {
    "hermes": '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    "llama": '{"name": ..., "parameters": {...}}',
    "mistral": '[TOOL_CALLS][{"name": ..., "arguments": {...}}]',
    "plain": 'CALL NAME {"key": value}',
}
_NAME = re.compile(r"\s{0,9}([\w.-]{1,99})\s{0,9}(?:\[ARGS\]|:)?\s{0,9}(?=[({])", re.ASCII)
_MORE = re.compile(r"[\s;,]*(?=\{)")
_HERMES_END = re.compile(r"\s*(?:</?tool_call>|\Z)")  # cut off at the closing mark, a call is still whole


def _read(text: str, form: ToolFormat, known: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[int, ToolCall]]:
    """The calls behind the marks of one format, and where these are; `known` holds what each tool's arguments are."""
    position = 0
    while match := _MARKS[form].search(text, position):
        marked = bool(match[0].strip())  # else the whole text is JSON, which may be an answer
        named = _NAME.match(text, match.end()) if form in ("mistral", "plain") else None
        name, position = (named[1], named.end()) if named else ("", match.end())
        if form == "plain" and text[position] == "(":
            parts, position = _split_arguments(text, position + 1)
            yield match.start(), _plain_call(name, parts, known.get(name, {}))
            continue
        more: re.Match[str] | None = match
        while more:
            try:
                content, end = _json_at(text, position)
                if form == "hermes" and not _HERMES_END.match(text, end):
                    raise ValueError("more than one value")
            except ValueError:
                if marked or '"parameters"' in text or '"arguments"' in text:
                    shown = _FORMS[form].replace("NAME", name)
                    fault = f"the tool call is {_fault(text, position, form)}; write {shown}"
                    yield match.start(), ToolCall(name=name, error=fault)
                break
            if not marked and not (isinstance(content, dict) and {"parameters", "arguments"} & content.keys()):
                break
            position = end
            for item in content if form == "mistral" and isinstance(content, list) else [content]:
                yield match.start(), ToolCall(name=name, arguments=item) if name else read_call(item, _FORMS[form])
            more = _MORE.match(text, position) if form == "llama" else None
            position = more.end() if more else position
        if not marked:
            return


def _fault(text: str, position: int, form: ToolFormat) -> str:
    if form == "hermes":
        following = text.find("<tool_call>", position)
        if "</tool_call>" not in text[position : following if following >= 0 else None]:
            return "not closed by </tool_call>"
    return "not valid JSON"


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


def _plain_call(name: str, parts: Sequence[str] | None, properties: Mapping[str, Any]) -> ToolCall:
    if parts is None:
        return ToolCall(name=name, error=f"the call is not closed; write CALL {name}(key=value)")
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
    """`call`, which was read, as a model would write it; `parse_tool_calls` reads it back."""
    if format == "plain":
        return f"CALL {call.name}({', '.join(f'{key}={_json(value)}' for key, value in call.arguments.items())})"
    content = {"name": call.name, "parameters" if format == "llama" else "arguments": dict(call.arguments)}
    if format == "llama":
        return _json(content)
    if format == "mistral":
        return f"[TOOL_CALLS]{_json([content])}"
    return str(call)


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
        lines = [f"{t.name}({', '.join(argument_schemas(t.parameters))}): {t.description}" for t in offered]
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
    known = argument_schemas(offered.parameters)
    shape = _example_value({"type": "object", **offered.parameters}, offered)
    names = shape if isinstance(shape, dict) else ()
    arguments = {name: _example_value(known[name], offered) if name in known else shape[name] for name in names}
    return ToolCall(name=offered.name, arguments=arguments)


def _example_value(schema: Any, offered: Tool, depth: int = 3) -> Any:
    """A value of a part of `offered`'s schema. A stranger's may be wide and refer to itself: both have an end."""
    if isinstance(schema, dict) and "$ref" in schema:
        schema = {**schema, "allOf": [*_listed(schema.get("allOf")), referred(offered.parameters, schema)]}
    if not isinstance(schema, dict):
        return "text"
    if "const" in schema or _listed(schema.get("enum")):
        return schema["const"] if "const" in schema else schema["enum"][0]
    if depth and "prefixItems" in schema:
        return [_example_value(item, offered, depth - 1) for item in _listed(schema["prefixItems"])[:32]]
    every, either, just_one = (_listed(schema.get(keyword)) for keyword in ("allOf", "anyOf", "oneOf"))
    branches = [*every[:32], *either[:1], *just_one[:1]]
    values = [_example_value(branch, offered, depth - 1) for branch in branches] if depth else []
    kind, needed = schema.get("type"), _listed(schema.get("required"))
    parts = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
    if kind == "object" or (kind is None and "required" in schema):
        merged = {key: value for each in values if isinstance(each, dict) for key, value in each.items()}
        own = {key: _example_value(parts.get(key, {}), offered, depth - 1) for key in needed[:32]} if depth else {}
        return {**merged, **own}
    if values:
        return values[0]
    return _EXAMPLES.get(kind, "text") if isinstance(kind, str) else "text"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
