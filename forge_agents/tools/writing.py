"""Write what a model must read about tools: how to call them, calls, results; each in the formats of `parsing`.

In: tools, calls, results. Out: text. Waits for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from forge_agents.tools.definition import Tool
from forge_agents.tools.parsing import ToolCall, ToolFormat
from forge_agents.tools.running import ToolResult


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
        lines = [f"{_signature(t)}: {t.description}" for t in offered]
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


def _signature(offered: Tool) -> str:
    return f"{offered.name}({', '.join(offered.parameters.get('properties', {}))})"


_EXAMPLES = {"string": "text", "integer": 2, "number": 2.5, "boolean": True, "array": [], "object": {}}


def _example(offered: Tool) -> ToolCall:
    """A call with all the arguments that `offered` needs, of the right types."""
    properties = offered.parameters.get("properties", {})
    needed = offered.parameters.get("required", ())
    return ToolCall(name=offered.name, arguments={key: _example_value(properties.get(key, {})) for key in needed})


def _example_value(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _example_value(schema["anyOf"][0])
    kind = schema.get("type", "string")
    return _EXAMPLES.get(kind, "text") if isinstance(kind, str) else "text"
