"""Tools for agents: typed functions with a JSON schema, parsed from and rendered as text.

A failed call has an error text as its result, never an exception. Start at `definition`. `formats` parses and renders
calls, `env` is an environment with tools, and `code`, `mcp` and `arithmetic` are tools.
"""

from __future__ import annotations

from forge_agents.tools.arithmetic import MAX_EXPRESSION_CHARS, calculator
from forge_agents.tools.definition import MAX_RESULT_CHARS, Tool, ToolResult, run_tool, tool
from forge_agents.tools.formats import (
    FORMATS,
    ToolFormat,
    describe_tools,
    parse_tool_calls,
    render_results,
    render_tool_call,
)
from forge_agents.types import ToolCall

__all__ = [
    "FORMATS", "MAX_EXPRESSION_CHARS", "MAX_RESULT_CHARS", "Tool", "ToolCall", "ToolFormat", "ToolResult", "calculator",
    "describe_tools", "parse_tool_calls", "render_results", "render_tool_call", "run_tool", "tool",
]  # fmt: skip
