"""What a tool is, the JSON schema that its type hints and docstring say, and how a model's call of it is run.

In: typed functions or methods, calls. Out: `Tool`, `ToolResult`: whatever goes wrong in a call is text for the model.
Waits for the function, with the tool's deadline where it has one.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, overload

from forge_agents.errors import did_you_mean
from forge_agents.runtime.threads import begin_in_thread
from forge_agents.tools.arguments import wrong_arguments
from forge_agents.types import ToolCall

MAX_RESULT_CHARS = 4000
"""Longer results are cut, with a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that an agent may call. In the body of a class it binds to the instance, as a method does."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    fn: Callable[..., Any]
    timeout_s: float | None = None
    """Deadline of a call in seconds; it runs in a thread of its own then. None: runs at once, for quick functions."""
    method: bool = False
    """Whether `fn` takes an instance first, and waits for one."""
    convert: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """Makes what `fn` is hinted to take of JSON values that fit `parameters`; a function, which deep copies share."""

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"tool {self.name}: timeout_s={self.timeout_s} must be above 0, or None for no deadline")

    @property
    def schema(self) -> dict[str, Any]:
        """The form that chat templates and OpenAI-compatible servers take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def __get__(self, instance: object, owner: type | None = None) -> Tool:
        if instance is None or not self.method:
            return self
        return replace(self, fn=types.MethodType(self.fn, instance), method=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's own result; errors pass through. `run_tool` is the safe way."""
        return self.fn(*args, **kwargs)


@overload
def tool(fn: Callable[..., Any]) -> Tool: ...
@overload
def tool(*, timeout_s: float | None = None) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    fn: Callable[..., Any] | None = None, *, timeout_s: float | None = None
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function: its name, type hints and Google-style docstring become the schema.

    A decorator, with or without arguments, of functions and of methods (whose first parameter is called `self`).

    Args:
        fn: Parameters are hinted what pydantic can make of JSON: str, int, float, bool, list[...], dict[str, ...],
            Literal[...], dataclasses and the like, or any of them | None.
        timeout_s: Deadline of a call in seconds, for functions that wait; None is for those that do not.

    Raises:
        TypeError: A parameter without a hint, with one that JSON cannot express, or variadic.
        ValueError: No docstring: a model could not know what the tool does.
    """
    if fn is None:
        return lambda fn: _tool_of(fn, timeout_s)
    return _tool_of(fn, timeout_s)


def _tool_of(fn: Callable[..., Any], timeout_s: float | None) -> Tool:
    from pydantic import PydanticUserError, TypeAdapter  # takes longer to load than all the rest of this package

    name = getattr(fn, "__name__", type(fn).__name__)
    doc = inspect.getdoc(fn)
    if not doc:
        raise ValueError(f"tool {name} has no docstring; say in one what it does")
    parameters = dict(inspect.signature(fn).parameters)
    method = next(iter(parameters), "") == "self"
    if method:
        del parameters["self"]
    hints = typing.get_type_hints(fn, include_extras=True)  # Annotated[int, Field(ge=0)] keeps its bounds
    adapters: dict[str, TypeAdapter[Any]] = {}
    for parameter in parameters.values():
        where = f"tool {name}: parameter {parameter.name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where} is variadic; name each argument")
        if parameter.name not in hints:
            raise TypeError(f"{where} has no type hint; add one, e.g. `: str`")
        try:
            adapters[parameter.name] = TypeAdapter(hints[parameter.name])
            adapters[parameter.name].json_schema()
        except PydanticUserError as error:
            raise TypeError(
                f"{where} is hinted {hints[parameter.name]}, which JSON cannot express; use str, int, float, bool, "
                "list[...], dict[str, ...], Literal[...] or a union of them"
            ) from error
    # once more, together: parameters may share definitions
    found, shared = TypeAdapter.json_schemas([(key, "validation", adapter) for key, adapter in adapters.items()])
    properties = {key: found[key, "validation"] for key in adapters}
    for key, description in _described_arguments(doc).items():
        if key in properties:
            properties[key]["description"] = description
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    return Tool(
        name=name,
        description=doc.split("\n\n")[0].replace("\n", " "),
        parameters={"type": "object", "properties": properties, "required": required, **shared},
        fn=fn,
        timeout_s=timeout_s,
        method=method,
        convert=lambda arguments: {key: adapters[key].validate_python(value) for key, value in arguments.items()},
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the model gets back."""

    name: str
    content: str
    ok: bool


def run_tool(tools: Iterable[Tool], call: ToolCall) -> ToolResult:
    """Run one call. Unreadable calls, unknown names, wrong arguments and the tool's own errors become text."""
    by_name = {t.name: t for t in tools}
    chosen = by_name.get(call.name)
    if call.error is not None and (chosen is not None or not call.name):
        wrong = call.error
    elif chosen is None:
        known = ", ".join(by_name) or "none"
        wrong = f"no tool is called {call.name!r}; tools: {known}.{did_you_mean(call.name, by_name)}"
    else:
        wrong = wrong_arguments(chosen.name, chosen.parameters, call.arguments)
    if wrong or chosen is None:
        return _failed(call, wrong)
    try:
        result = _call(chosen, call.arguments)
        text = result if isinstance(result, str) else json.dumps(result, default=str)
    except Exception as error:  # noqa: BLE001  # tools are user code: what goes wrong is for the model to read
        kind = "" if isinstance(error, ValueError | ArithmeticError) and str(error) else f"{type(error).__name__}: "
        return _failed(call, f"{kind}{error}")
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}... ({len(text) - MAX_RESULT_CHARS} characters cut)"
    return ToolResult(name=call.name, content=text, ok=True)


def _failed(call: ToolCall, why: str) -> ToolResult:
    return ToolResult(name=call.name, content=f"Error: {why}"[:MAX_RESULT_CHARS], ok=False)


def _call(chosen: Tool, arguments: Mapping[str, Any]) -> Any:
    """The function's result; with a deadline, from a thread that is left behind when it is late."""
    given = chosen.convert(arguments)
    if chosen.timeout_s is None:
        return chosen.fn(**given)
    answer = begin_in_thread(functools.partial(chosen.fn, **given), name=f"tool {chosen.name}")
    try:
        return answer.result(chosen.timeout_s)
    except TimeoutError as late:
        if answer.done():  # the tool's own
            raise
        raise ValueError(f"{chosen.name} gave no result within {chosen.timeout_s:g} s") from late
