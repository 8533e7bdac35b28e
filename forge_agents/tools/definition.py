"""Definition of tools by typed functions, and execution of calls. Errors of a call become text for the model."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, overload

from forge_agents.envs.env import json_default
from forge_agents.errors import USER_ERRORS, did_you_mean
from forge_agents.runtime.threads import begin_in_thread
from forge_agents.tools.arguments import check_arguments
from forge_agents.types import ToolCall

MAX_RESULT_CHARS = 4000
"""Maximum length of a result. Longer results are truncated, with a note."""


_GENERATORS = (inspect.isasyncgenfunction, inspect.isgeneratorfunction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function, also an async one, that an agent may call. In a class body it binds to the instance like a method."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, of type object."""
    fn: Callable[..., Any]
    timeout_s: float | None = None
    """Time limit of a call in seconds, which then runs in its own thread. None: the call runs directly."""
    waits: bool = False
    """Whether `fn` waits for another process or machine. A step with such a tool does not delay other episodes. Always
    true with `timeout_s` and for async functions."""
    method: bool = False
    """Whether `fn` is an unbound method."""
    convert: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """Converts JSON values to the types of `fn`'s hints. Deep copies share this function."""

    def __post_init__(self) -> None:
        if any(is_kind(self.fn) for is_kind in _GENERATORS):
            raise TypeError(f"tool {self.name} is a generator. Write a function that returns its whole result")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"tool {self.name}: timeout_s={self.timeout_s} must be above 0, or None for no time limit")
        waits = self.waits or self.timeout_s is not None or inspect.iscoroutinefunction(self.fn)
        object.__setattr__(self, "waits", waits)

    @property
    def schema(self) -> dict[str, Any]:
        """The schema in the form of chat templates and OpenAI-compatible servers."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def __get__(self, instance: object, owner: type | None = None) -> Tool:
        if instance is None or not self.method:
            return self
        return replace(self, fn=types.MethodType(self.fn, instance), method=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, as without the decorator. Exceptions are raised. `run_tool` converts them to results."""
        return self.fn(*args, **kwargs)


@overload
def tool(fn: Callable[..., Any]) -> Tool: ...
@overload
def tool(*, timeout_s: float | None = None, waits: bool = False) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    fn: Callable[..., Any] | None = None, *, timeout_s: float | None = None, waits: bool = False
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool from a function: its name, type hints and Google-style docstring become the schema.

    A decorator, with or without arguments, for functions and for methods (whose first parameter is called `self`).

    Args:
        fn: The function. Type hints may be any types that pydantic can create from JSON: str, int, float, bool,
            list[...], dict[str, ...], Literal[...], dataclasses, and unions of them.
        timeout_s: Time limit of a call in seconds, for functions that wait. None: no limit.
        waits: Value of `Tool.waits`.

    Raises:
        TypeError: A parameter is variadic, has no type hint, or has one that JSON cannot express.
        ValueError: The function has no docstring, so a model could not know its purpose.
    """
    if fn is None:
        return lambda fn: _make_tool(fn, timeout_s, waits)
    return _make_tool(fn, timeout_s, waits)


def _make_tool(fn: Callable[..., Any], timeout_s: float | None, waits: bool) -> Tool:
    from pydantic import PydanticUserError, TypeAdapter  # slow to import

    name = getattr(fn, "__name__", type(fn).__name__)
    doc = inspect.getdoc(fn)
    if not doc:
        raise ValueError(f"tool {name} has no docstring. Say in one what it does")
    parameters = dict(inspect.signature(fn).parameters)
    method = next(iter(parameters), "") == "self"
    if method:
        del parameters["self"]
    hints = typing.get_type_hints(fn, include_extras=True)  # Annotated[int, Field(ge=0)] keeps its bounds
    adapters: dict[str, TypeAdapter[Any]] = {}
    for parameter in parameters.values():
        where = f"tool {name}: parameter {parameter.name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where} is variadic. Name each argument")
        if parameter.name not in hints:
            raise TypeError(f"{where} has no type hint. Add one, e.g. `: str`")
        try:
            adapters[parameter.name] = TypeAdapter(hints[parameter.name])
            adapters[parameter.name].json_schema()
        except PydanticUserError as error:
            raise TypeError(
                f"{where} is hinted {hints[parameter.name]}, which JSON cannot express. Use str, int, float, bool, "
                "list[...], dict[str, ...], Literal[...] or a union of them"
            ) from error
    # generated together, because parameters may share definitions
    schemas, definitions = TypeAdapter.json_schemas([(key, "validation", adapter) for key, adapter in adapters.items()])
    properties = {key: schemas[key, "validation"] for key in adapters}
    for key, description in _argument_descriptions(doc).items():
        if key in properties:
            properties[key]["description"] = description
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    return Tool(
        name=name,
        description=doc.split("\n\n")[0].replace("\n", " "),
        parameters={"type": "object", "properties": properties, "required": required, **definitions},
        fn=fn,
        timeout_s=timeout_s,
        waits=waits,
        method=method,
        convert=lambda arguments: {key: adapters[key].validate_python(value) for key, value in arguments.items()},
    )


def _argument_descriptions(doc: str) -> dict[str, str]:
    _, _, section = doc.partition("\nArgs:\n")
    descriptions: dict[str, str] = {}
    current = ""
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        match = re.match(r" {2,4}(\w+)(?: \([^)]*\))?: (.*)", line)
        if match:
            current = match[1]
            descriptions[current] = match[2].strip()
        elif current and line.strip():
            descriptions[current] += " " + line.strip()
    return descriptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Result of a call, as text for the model."""

    name: str
    content: str
    ok: bool


def repeated_name(tools: Iterable[Any]) -> str:
    """Return a name that several tools have, so that a call cannot choose among them. Empty if there is none."""
    return next((name for name, count in Counter(tool.name for tool in tools).items() if count > 1), "")


def run_tool(tools: Iterable[Tool], call: ToolCall) -> ToolResult:
    """Run a call. Malformed calls, unknown names, invalid arguments and exceptions of the tool become error texts."""
    by_name = {t.name: t for t in tools}
    selected = by_name.get(call.name)
    if call.error is not None and (selected is not None or not call.name):
        error = call.error
    elif selected is None:
        names = ", ".join(by_name) or "none"
        error = f"no tool is called {call.name!r}; tools: {names}.{did_you_mean(call.name, by_name)}"
    else:
        error = check_arguments(selected.name, selected.parameters, call.arguments)
    if error or selected is None:
        return _error_result(call, error)
    try:
        result = _call(selected, call.arguments)
        text = result if isinstance(result, str) else json.dumps(result, default=json_default, ensure_ascii=False)
    except USER_ERRORS as cause:  # the model gets the error
        return _error_result(call, _describe(cause))
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}... ({len(text) - MAX_RESULT_CHARS} characters cut)"
    return ToolResult(name=call.name, content=text, ok=True)


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # code of the user as well
        text = ""
    return text if text and isinstance(error, ValueError | ArithmeticError) else f"{type(error).__name__}: {text}"


def _error_result(call: ToolCall, reason: str) -> ToolResult:
    return ToolResult(name=call.name, content=f"Error: {reason}"[:MAX_RESULT_CHARS], ok=False)


def _call(selected: Tool, arguments: Mapping[str, Any]) -> Any:
    """Return the function's result. With a time limit it runs in a thread, which is left behind at the limit."""
    call: Callable[[], Any] = functools.partial(selected.fn, **selected.convert(arguments))
    if selected.timeout_s is None:
        result = call()
        if not inspect.iscoroutine(result):
            return result
        call = lambda: result  # awaited in a thread, because this one may have a running loop  # noqa: E731
    answer = begin_in_thread(_complete, call, name=f"tool {selected.name}")
    try:
        return answer.result(selected.timeout_s)
    except TimeoutError as late:
        if answer.done():  # raised by the tool
            raise
        raise ValueError(f"{selected.name} gave no result within {selected.timeout_s:g} s") from late


def _complete(call: Callable[[], Any]) -> Any:
    """Return the result of a function that may be async, also behind a decorator that is not."""
    result = call()
    return asyncio.run(result) if inspect.iscoroutine(result) else result
