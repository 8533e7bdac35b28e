"""Tools that agents call in text: functions with a JSON schema, calls read from what a model wrote, results as text.

In: typed functions, model text. Out: tools, calls, results. Every failure is text that the model can read, never an
exception. Waits for the tool's function, with the tool's deadline where it has one. Start at `definition`; `formats`
reads and writes calls as models do, `env` lets seats call tools, `code`, `mcp` and `arithmetic` are tools.
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
]
