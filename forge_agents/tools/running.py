"""Run calls: arguments are checked against the schema first, and whatever goes wrong is text for the model.

In: the tools that may be called, a call. Out: a `ToolResult`. Waits for the function, with the tool's deadline.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from forge_agents.errors import did_you_mean
from forge_agents.tools.definition import Tool
from forge_agents.tools.parsing import ToolCall

MAX_RESULT_CHARS = 4000
"""Longer results are cut, with a note."""


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
        wrong = _wrong_arguments(chosen, call.arguments)
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
    if chosen.timeout_s is None:
        return chosen.fn(**arguments)
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(chosen.fn(**arguments))
        except BaseException as error:  # noqa: BLE001  # carried to the caller's thread
            answer.set_exception(error)

    threading.Thread(target=work, name=f"tool {chosen.name}", daemon=True).start()
    try:
        return answer.result(chosen.timeout_s)
    except TimeoutError as late:
        if answer.done():  # the tool's own
            raise
        raise ValueError(f"{chosen.name} gave no result within {chosen.timeout_s:g} s") from late


def _wrong_arguments(chosen: Tool, arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments, or an empty string."""
    properties = chosen.parameters.get("properties", {})
    for name in arguments:
        if name not in properties and not chosen.parameters.get("additionalProperties"):
            known = ", ".join(properties) or "none"
            return f"{chosen.name} has no argument {name!r}; arguments: {known}.{did_you_mean(name, properties)}"
    for name in chosen.parameters.get("required", ()):
        if name not in arguments:
            return f"{chosen.name} needs the argument {name!r}"
    return _breach(chosen, arguments, properties) if arguments else ""


def _breach(chosen: Tool, arguments: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:  # an empty registry: a schema of a stranger's server must not make us fetch anything
        checker = Draft202012Validator(chosen.parameters, registry=Registry())
        error = next(iter(checker.iter_errors(dict(arguments))), None)
    except (SchemaError, Unresolvable, RecursionError) as broken:
        return f"the schema of {chosen.name} cannot be used ({type(broken).__name__}); call another tool"
    if error is None:
        return ""
    if not error.absolute_path:
        return f"the arguments of {chosen.name} do not fit: {error.message}"
    name = str(error.absolute_path[0])
    return f"argument {name!r} of {chosen.name} is {arguments[name]!r}; expected {json.dumps(properties.get(name))}"
