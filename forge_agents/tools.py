"""Tools that agents call in text: functions with a JSON schema, and calls parsed from what a model wrote.

In: typed functions; model text with `<tool_call>` blocks. Out: tools, calls, results. Every failure is text that the
model can read, never an exception. Waits for the tool's function.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from forge_agents.errors import did_you_mean

MAX_RESULT_CHARS = 4000
"""Longer results are cut, with a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that an agent may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    fn: Callable[..., Any]

    @property
    def schema(self) -> dict[str, Any]:
        """The form that chat templates and OpenAI-compatible servers take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's own result; errors pass through. `run_tool` is the safe way."""
        return self.fn(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """What a model asked for."""

    name: str
    """Empty where it could not be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why the call could not be read, for the model; None if it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the model gets back."""

    name: str
    content: str
    ok: bool


def tool(fn: Callable[..., Any]) -> Tool:
    """Make a tool of a function: its name, type hints and Google-style docstring become the schema.

    Args:
        fn: Parameters are hinted str, int, float, bool, list[...], dict[str, ...], Literal[...], or any of them | None.

    Raises:
        TypeError: A parameter without a hint, with one that JSON cannot express, or variadic.
        ValueError: No docstring: a model could not know what the tool does.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    doc = inspect.getdoc(fn)
    if not doc:
        raise ValueError(f"tool {name} has no docstring; say in one what it does")
    hints = typing.get_type_hints(fn)
    described = _described_arguments(doc)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {name}: parameter {parameter.name!r} is variadic; name each argument")
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: parameter {parameter.name!r} has no type hint; add one, e.g. `: str`")
        properties[parameter.name] = _json_type(hints[parameter.name], f"tool {name}: parameter {parameter.name!r}")
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(name=name, description=doc.split("\n\n")[0].replace("\n", " "), parameters=parameters, fn=fn)


_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a model's text, in order: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    This is the form of the Hermes and Qwen chat templates. A block that cannot be read becomes a call with an `error`.
    """
    return [_parse_call(block.strip(), closed=bool(end)) for block, end in _BLOCK.findall(text)]


def run_tool(tools: Iterable[Tool], call: ToolCall) -> ToolResult:
    """Run one call. Unreadable calls, unknown names, wrong arguments and the tool's own errors become text."""
    if call.error is not None:
        return ToolResult(name=call.name, content=f"Error: {call.error}", ok=False)
    by_name = {t.name: t for t in tools}
    chosen = by_name.get(call.name)
    if chosen is None:
        known = ", ".join(by_name) or "none"
        text = f"Error: no tool is called {call.name!r}; tools: {known}.{did_you_mean(call.name, by_name)}"
        return ToolResult(name=call.name, content=text[:MAX_RESULT_CHARS], ok=False)
    wrong = _wrong_arguments(chosen, call.arguments)
    if wrong:
        return ToolResult(name=call.name, content=f"Error: {wrong}"[:MAX_RESULT_CHARS], ok=False)
    try:
        result = chosen.fn(**call.arguments)
        text = result if isinstance(result, str) else json.dumps(result, default=str)
    except Exception as error:  # noqa: BLE001  # tools are user code: what goes wrong is for the model to read
        kind = "" if isinstance(error, ValueError | ArithmeticError) and str(error) else f"{type(error).__name__}: "
        message = f"Error: {kind}{error}"
        return ToolResult(name=call.name, content=message[:MAX_RESULT_CHARS], ok=False)
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}... ({len(text) - MAX_RESULT_CHARS} characters cut)"
    return ToolResult(name=call.name, content=text, ok=True)


def _parse_call(block: str, *, closed: bool) -> ToolCall:
    try:
        content = json.loads(block)
    except (ValueError, RecursionError):
        why = "not valid JSON" if closed else "not closed by </tool_call>"
        return ToolCall(name="", error=f'the tool call is {why}; write {{"name": ..., "arguments": {{...}}}}')
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return ToolCall(name="", error='the tool call needs a "name"; write {"name": ..., "arguments": {...}}')
    arguments = content.get("arguments", content.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON within a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name=content["name"], error='"arguments" must be a JSON object')
    return ToolCall(name=content["name"], arguments=arguments)


def _described_arguments(doc: str) -> dict[str, str]:
    """Descriptions under ``Args:``, one line each plus continuations."""
    _, _, section = doc.partition("\nArgs:\n")
    described: dict[str, str] = {}
    current = ""
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        match = re.match(r" {2,4}(\w+)(?: \([^)]*\))?: (.*)", line)
        if match:
            current = match[1]
            described[current] = match[2].strip()
        elif current and line.strip():
            described[current] += " " + line.strip()
    return described


_JSON_NAMES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (types.NoneType,),
}


def _json_type(hint: Any, where: str) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in _JSON_NAMES:
        return {"type": _JSON_NAMES[hint]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _json_type(inner[0], where)}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _json_type(inner[1], where)}
    if origin in (Union, types.UnionType):
        options = [{"type": "null"} if option is types.NoneType else _json_type(option, where) for option in inner]
        return {"anyOf": options}
    raise TypeError(
        f"{where} is hinted {hint}, which JSON cannot express; use str, int, float, bool, list[...], dict[str, ...], "
        "Literal[...] or a union of them"
    )


def _wrong_arguments(chosen: Tool, arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments, or an empty string."""
    properties = chosen.parameters["properties"]
    for name in arguments:
        if name not in properties:
            known = ", ".join(properties) or "none"
            return f"{chosen.name} has no argument {name!r}; arguments: {known}.{did_you_mean(name, properties)}"
    for name in chosen.parameters["required"]:
        if name not in arguments:
            return f"{chosen.name} needs the argument {name!r}"
    for name, value in arguments.items():
        if not _fits(value, properties[name]):
            return f"argument {name!r} of {chosen.name} is {value!r}; expected {json.dumps(properties[name])}"
    return ""


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if isinstance(value, bool) and schema["type"] != "boolean":
        return False
    if not isinstance(value, _PYTHON_TYPES[schema["type"]]):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(_fits(item, schema["items"]) for item in value)
    if isinstance(value, dict) and "additionalProperties" in schema:
        return all(_fits(item, schema["additionalProperties"]) for item in value.values())
    return True


# ---- a calculator

MAX_EXPRESSION_CHARS = 200
_MAX_BITS = 512
_ALLOWED = re.compile(r"[0-9.+\-*/%() \t]*", re.ASCII)
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})  # noqa: RUF001  # people's signs, not ours
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression, such as (17 + 25) * 3.

    Args:
        expression: Numbers with + - * / // % ** and parentheses.
    """
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", expression.strip().rstrip("=? ").translate(_SPELLINGS), flags=re.ASCII)
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"expression has {len(text)} characters, at most {MAX_EXPRESSION_CHARS} are allowed")
    if not text or not _ALLOWED.fullmatch(text):
        raise ValueError("write only numbers, + - * / // % ** and parentheses")
    try:
        value = _evaluate(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise ValueError("that is not an arithmetic expression") from error
    except (OverflowError, RecursionError, MemoryError) as error:
        raise ArithmeticError("the numbers are too large") from error
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.12g}"


def _evaluate(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        raise ArithmeticError("only numbers and + - * / // % ** are understood")  # noqa: TRY004  # user's words
    left, right = _evaluate(node.left), _evaluate(node.right)
    if isinstance(node.op, ast.Pow):
        return _bounded(_power(left, right))
    if type(node.op) not in _BINARY:
        raise ArithmeticError("only + - * / // % ** are understood")
    return _bounded(_BINARY[type(node.op)](left, right))


def _power(base: float, exponent: float) -> Any:
    if abs(exponent) * math.log2(max(abs(base), 2)) > _MAX_BITS:  # before computing: 9**9**9 would never end
        raise ArithmeticError("the power is too large")
    return base**exponent


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex):
        raise ArithmeticError("the result is not a real number")  # noqa: TRY004  # user's words
    if isinstance(value, int) and value.bit_length() > 2 * _MAX_BITS:
        raise ArithmeticError("the result is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise ArithmeticError("the result is not finite")
    return value  # type: ignore[no-any-return]  # int or float by now
