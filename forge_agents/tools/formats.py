"""Parsing of tool calls in text, and rendering of tools, calls and results as text.

The formats: ``hermes`` ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen); ``llama``
``{"name": ..., "parameters": {...}}`` as the whole text or after ``<|python_tag|>`` (Llama 3); ``mistral``
``[TOOL_CALLS][{"name": ..., "arguments": {...}}]`` or ``[TOOL_CALLS]name{...}``; ``plain``
``CALL name(key=value, ...)`` or ``CALL name {...}``, for models without training in any of them.
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
from forge_agents.http_body import too_many_values
from forge_agents.tools.arguments import argument_schemas, required_names, resolve_reference
from forge_agents.tools.definition import Tool, ToolResult
from forge_agents.types import ToolCall

ToolFormat: TypeAlias = Literal["hermes", "llama", "mistral", "plain"]
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama", "mistral", "plain")
_CALL_KEYS = {
    *("name", "arguments", "parameters", "description", "strict"),
    *("id", "call_id", "tool_call_id", "index", "type", "thought_signature"),
}
"""Keys of a call. Other keys are arguments in the wrong place."""
MAX_CALLS = 16
"""Maximum number of calls that are read in a text."""


def parse_tool_calls(
    text: str,
    format: ToolFormat | Literal["auto"] = "auto",  # noqa: A002  # the usual name
    tools: Iterable[Tool | Mapping[str, Any]] = (),
) -> list[ToolCall]:
    """Return the calls in a text, in order. Never raises, whatever the text.

    Args:
        text: The text, special tokens included.
        format: One of `FORMATS`. "auto" selects the format whose mark comes first.
        tools: Available tools, or their schemas. With them, ``plain`` accepts arguments without names and texts
            without quotes.
    """
    return [call for _, call in _find_calls(text, format, tools)]


def before_calls(text: str, tools: Iterable[Tool | Mapping[str, Any]] = ()) -> str:
    """Return the text before the first valid call. The whole text if there is none."""
    return text[: next((at for at, call in _find_calls(text, "auto", tools) if call.error is None), None)]


def _find_calls(
    text: str,
    format: ToolFormat | Literal["auto"],  # noqa: A002
    tools: Iterable[Tool | Mapping[str, Any]],
) -> list[tuple[int, ToolCall]]:
    if format == "auto":
        matches = {name: mark.search(text) for name, mark in _MARKS.items()}
        first = min(((match.start(), name) for name, match in matches.items() if match), default=None)
        return [] if first is None else _find_calls(text, first[1], tools)
    if format not in FORMATS:
        hint = did_you_mean(format, FORMATS)
        raise ValueError(f"format={format!r} is unknown; choose from auto, {', '.join(FORMATS)}.{hint}")
    functions = [(t.schema if isinstance(t, Tool) else t)["function"] for t in tools]
    schemas = {function["name"]: argument_schemas(function.get("parameters") or {}) for function in functions}
    return list(itertools.islice(_read(text, format, schemas), MAX_CALLS))


def read_call(content: Any, form: str = '{"name": ..., "arguments": {...}}') -> ToolCall:
    """Return the call in a JSON value. `form` is the expected form for error messages."""
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return ToolCall(name="", error=f'the tool call needs a "name"; write {form}')
    if isinstance(content.get("error"), str):  # a malformed call in the form of `str(call)`
        return ToolCall(name=content["name"], error=content["error"])
    given = [content[key] for key in ("arguments", "parameters") if content.get(key) not in (None, "")]
    arguments = given[0] if given else {}
    try:  # some models, and all servers, write the arguments as a JSON string
        source = arguments if isinstance(arguments, str) else json.dumps(arguments)
        if too_many_values(source.encode(errors="surrogatepass"), _MAX_VALUES, _MAX_VALUES):
            raise ValueError
        arguments, end = _json_at(source, 0)
    except ValueError:
        arguments, source, end = None, "", 0
    if not isinstance(arguments, dict) or source[end:].strip():
        return ToolCall(name=content["name"], error=f"the arguments must be a JSON object; write {form}")
    if outside := content.keys() - _CALL_KEYS:
        names = ", ".join(map(repr, sorted(outside)[:8]))
        return ToolCall(name=content["name"], error=f"the call has {names} next to its name; write {form}")
    return ToolCall(name=content["name"], arguments=arguments)


# ---- JSON


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


_MAX_VALUES = 100_000
"""Maximum number of brackets, and of commas, in the arguments of a call."""
_JSON = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)  # models break lines in strings
_NOT_BLANK = re.compile(r"[^\s;,]|\Z")


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at `start`, after whitespace, and its end.

    Raises:
        ValueError: There is none, or it cannot be encoded.
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


# ---- parsing: a mark, optionally a name, and JSON or Python arguments


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
_NAME = re.compile(r"\s{0,9}([\w.-]{1,99})\s{0,9}(?:\[CALL_ID\]\w{1,99})?(?:\[ARGS\]|:)?\s{0,9}(?=[({])", re.ASCII)
_MORE = re.compile(r"[\s;,]*(?=\{)")
_HERMES_END = re.compile(r"\s*(?:</?tool_call>|\Z)")  # a call truncated at the closing mark is complete


def _read(text: str, form: ToolFormat, schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[int, ToolCall]]:
    """Yield the calls of one format with the positions of their marks. `schemas` are argument schemas by tool."""
    position = 0
    while match := _MARKS[form].search(text, position):
        has_mark = bool(match[0].strip())  # otherwise the whole text is JSON, which may be an answer
        name_match = _NAME.match(text, match.end()) if form in ("mistral", "plain") else None
        name, position = (name_match[1], name_match.end()) if name_match else ("", match.end())
        if form == "plain" and text[position] == "(":
            parts, position = _split_arguments(text, position + 1)
            yield match.start(), _plain_call(name, parts, schemas.get(name, {}))
            continue
        more: re.Match[str] | None = match
        while more:
            try:
                content, end = _json_at(text, position)
                if form == "hermes" and not _HERMES_END.match(text, end):
                    raise ValueError("more than one value")
            except ValueError:
                if has_mark or '"parameters"' in text or '"arguments"' in text:
                    example = _FORMS[form].replace("NAME", name)
                    error = f"the tool call is {_describe_error(text, position, form)}; write {example}"
                    yield match.start(), ToolCall(name=name, error=error)
                break
            if not has_mark and not (isinstance(content, dict) and {"parameters", "arguments"} & content.keys()):
                break
            position = end
            for item in content if form == "mistral" and isinstance(content, list) else [content]:
                yield match.start(), ToolCall(name=name, arguments=item) if name else read_call(item, _FORMS[form])
            more = _MORE.match(text, position) if form == "llama" else None
            position = more.end() if more else position
        if not has_mark:
            return


def _describe_error(text: str, position: int, form: ToolFormat) -> str:
    if form == "hermes":
        following = text.find("<tool_call>", position)
        if "</tool_call>" not in text[position : following if following >= 0 else None]:
            return "not closed by </tool_call>"
    return "not valid JSON"


# ---- plain arguments


_OPEN, _CLOSE = "([{", ")]}"
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\w.])", re.ASCII)
_NAMED_DIGITS = re.compile(r"\s*\w{1,99}\s*=\s*(?=[+\d-])", re.ASCII)


def _split_arguments(text: str, start: int) -> tuple[list[str] | None, int]:
    """Return the arguments from `start` to the closing parenthesis, and the end. None if it is missing."""
    parts, depth, quote, begin, before, skipped = [], 0, "", start, "(", start
    for position in range(start, min(len(text), start + 8192)):
        char = text[position]
        if position < skipped:  # the rest of three quotes, or of a number
            continue
        if position == begin and not depth and (named := _NAMED_DIGITS.match(text, begin)):
            number = _THOUSANDS.match(text, named.end())  # commas of 1,000 end no argument
            skipped = number.end() if number else skipped
        if quote:
            if text.startswith(quote, position) and before != "\\":
                skipped, quote = position + len(quote), ""
        elif char in "\"'" and before in "(=,:[{":  # otherwise an apostrophe
            quote = char * 3 if text.startswith(char * 3, position) else char
            skipped = position + len(quote)
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


_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}


def _value(source: str, *, text: bool) -> Any:
    """Parse a value: JSON, a Python constant, a string in single quotes, or plain text."""
    quoted = len(source) > 1 and source[0] == source[-1] and source[0] in "\"'"
    if quoted or not text:
        try:
            value, end = _json_at(source, 0)
            if end == len(source):
                return value
        except ValueError:
            pass
    if quoted:
        width = 3 if len(source) > 5 and source[:3] == source[-3:] == source[0] * 3 else 1
        return re.sub(r"\\(['\"\\])", r"\1", source[width:-width])
    if not text and _THOUSANDS.fullmatch(source):
        return _value(source.replace(",", ""), text=False)
    return source if text else _PYTHON_CONSTANTS.get(source, source)


# ---- rendering


def render_tool_call(call: ToolCall, format: ToolFormat = "hermes") -> str:  # noqa: A002  # the usual name
    """Render a call as a model would write it. `parse_tool_calls` is the inverse."""
    if format == "plain":
        return f"CALL {call.name}({', '.join(f'{key}={_json(value)}' for key, value in call.arguments.items())})"
    content = {"name": call.name, "parameters" if format == "llama" else "arguments": dict(call.arguments)}
    if format == "llama":
        return _json(content)
    if format == "mistral":
        return f"[TOOL_CALLS]{_json([content])}"
    return str(call)


def describe_tools(tools: Iterable[Tool], format: ToolFormat = "hermes") -> str:  # noqa: A002  # the usual name
    """Return the description of tools for a system prompt. Empty without tools.

    ``hermes`` is the text of the chat templates of Qwen 2.5 and 3, ``llama`` that of Llama 3.1.
    """
    tools = list(tools)
    if not tools:
        return ""
    if format == "hermes":
        schemas = "\n".join(_json(t.schema) for t in tools)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{schemas}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )
    if format == "plain":
        lines = [f"{t.name}({', '.join(argument_schemas(t.parameters))}): {t.description}" for t in tools]
        examples = [render_tool_call(_example(t), "plain") for t in tools]
        return "Tools:\n" + "\n".join(lines) + "\nTo use a tool, write a line such as\n" + "\n".join(examples)
    schemas = "\n\n".join(json.dumps(t.schema, indent=4, ensure_ascii=False) for t in tools)
    form = {
        "llama": 'with JSON for a function call, in the format {"name": function name, "parameters": dictionary of '
        "argument name and its value}. Do not use variables.",
        "mistral": 'with [TOOL_CALLS] and a JSON list of calls, [{"name": ..., "arguments": {...}}].',
    }[format]
    return f"You have access to the following functions. To call a function, please respond {form}\n\n{schemas}"


RESULT_TAGS = ("<tool_response>", "</tool_response>")
"""Tags around a result in the format ``hermes``."""


def without_results(text: str) -> str:
    """Return a text in which no part looks like a result in the format ``hermes``. Its length stays the same."""
    return text.replace(RESULT_TAGS[0], "<tool response>").replace(RESULT_TAGS[1], "</tool response>")


def render_results(results: Sequence[ToolResult], format: ToolFormat = "hermes") -> str:  # noqa: A002  # the usual name
    """Render results for the next observation: as in Qwen's template for ``hermes``, otherwise as plain lines.

    No part of a content looks like another result: tags are broken up, and of several plain results the further lines
    are indented.
    """
    contents = [without_results(result.content) for result in results]
    if format == "hermes":
        return "\n".join(f"{RESULT_TAGS[0]}\n{content}\n{RESULT_TAGS[1]}" for content in contents)
    if len(contents) == 1:
        return contents[0]
    lines = (content.replace("\n", "\n  ") for content in contents)
    return "\n".join(f"{result.name or 'call'}: {text}" for result, text in zip(results, lines, strict=True))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_EXAMPLES = {"string": "text", "integer": 2, "number": 2.5, "boolean": True, "array": []}


def _example(tool: Tool) -> ToolCall:
    schemas = argument_schemas(tool.parameters)
    shape = _example_value({"type": "object", **tool.parameters}, tool)
    names = shape if isinstance(shape, dict) else ()
    arguments = {name: _example_value(schemas[name], tool) if name in schemas else shape[name] for name in names}
    return ToolCall(name=tool.name, arguments=arguments)


def _example_value(schema: Any, tool: Tool, depth: int = 3) -> Any:
    """Return a value for a part of a tool's schema. Width and depth are bounded: the schema may be untrusted."""
    if isinstance(schema, dict) and "$ref" in schema:
        schema = {**schema, "allOf": [*_as_list(schema.get("allOf")), resolve_reference(tool.parameters, schema)]}
    if not isinstance(schema, dict):
        return "text"
    if "const" in schema or _as_list(schema.get("enum")):
        return schema["const"] if "const" in schema else schema["enum"][0]
    if depth and "prefixItems" in schema:
        return [_example_value(item, tool, depth - 1) for item in _as_list(schema["prefixItems"])[:32]]
    every, either, just_one = (_as_list(schema.get(keyword)) for keyword in ("allOf", "anyOf", "oneOf"))
    branches = [*every[:32], *either[:1], *just_one[:1]]
    values = [_example_value(branch, tool, depth - 1) for branch in branches] if depth else []
    kind, needed = schema.get("type"), required_names(schema)
    parts = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
    if kind == "object" or (kind is None and "required" in schema):
        merged = {key: value for each in values if isinstance(each, dict) for key, value in each.items()}
        required = {key: _example_value(parts.get(key, {}), tool, depth - 1) for key in needed[:32]} if depth else {}
        return {**merged, **required}
    if values:
        return values[0]
    return _EXAMPLES.get(kind, "text") if isinstance(kind, str) else "text"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
