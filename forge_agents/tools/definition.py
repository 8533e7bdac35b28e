"""What a tool is: a function, and the JSON schema that its type hints and docstring say.

In: typed functions or methods. Out: `Tool`. Waits for nothing.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, overload


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
        fn: Parameters are hinted str, int, float, bool, list[...], dict[str, ...], Literal[...], or any of them | None.
        timeout_s: Deadline of a call in seconds, for functions that wait; None is for those that do not.

    Raises:
        TypeError: A parameter without a hint, with one that JSON cannot express, or variadic.
        ValueError: No docstring: a model could not know what the tool does.
    """
    if fn is None:
        return lambda fn: _tool_of(fn, timeout_s)
    return _tool_of(fn, timeout_s)


def _tool_of(fn: Callable[..., Any], timeout_s: float | None) -> Tool:
    name = getattr(fn, "__name__", type(fn).__name__)
    doc = inspect.getdoc(fn)
    if not doc:
        raise ValueError(f"tool {name} has no docstring; say in one what it does")
    parameters = dict(inspect.signature(fn).parameters)
    method = next(iter(parameters), "") == "self"
    if method:
        del parameters["self"]
    hints = typing.get_type_hints(fn)
    described = _described_arguments(doc)
    properties: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {name}: parameter {parameter.name!r} is variadic; name each argument")
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: parameter {parameter.name!r} has no type hint; add one, e.g. `: str`")
        properties[parameter.name] = _json_type(hints[parameter.name], f"tool {name}: parameter {parameter.name!r}")
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    return Tool(
        name=name,
        description=doc.split("\n\n")[0].replace("\n", " "),
        parameters={"type": "object", "properties": properties, "required": required},
        fn=fn,
        timeout_s=timeout_s,
        method=method,
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


_JSON_NAMES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
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
