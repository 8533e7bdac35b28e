"""The arguments of a tool call against the tool's JSON schema, which may be a stranger's."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from forge_agents.errors import did_you_mean

_CHECK_S = 0.25
"""Seconds that a check may take: of computation, and of matching patterns."""
_MOST_PARTS = 500
"""Parts of a schema in which the names of arguments are looked up."""
_MOST_SHOWN = 1000
"""Characters of a schema in an error."""
_BRANCHES = ("allOf", "anyOf", "oneOf")
_DECIDES = frozenset((
    *_BRANCHES, "$ref", "$dynamicRef", "if", "not", "dependentSchemas", "patternProperties", "additionalProperties",
    "unevaluatedProperties", "propertyNames",
))  # fmt: skip
"""Keywords with which a schema itself decides about arguments that are not among its ``properties``."""


def argument_schemas(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schemas of arguments by name, including those in combined schemas and local references.

    A schema may also be ``true``, which is returned as ``{}``.
    """
    schemas: dict[str, dict[str, Any]] = {}
    waiting: deque[Any] = deque([parameters])
    for _ in range(_MOST_PARTS):
        if not waiting:
            break
        part = waiting.popleft()
        if not isinstance(part, Mapping):
            continue
        properties = part.get("properties")
        for name, schema in properties.items() if isinstance(properties, Mapping) else ():
            schemas.setdefault(str(name), schema if isinstance(schema, dict) else {})
        for keyword in _BRANCHES:
            waiting.extend(part[keyword] if isinstance(part.get(keyword), list) else ())
        waiting.extend(part.get(keyword) for keyword in ("then", "else"))
        waiting.append(referred(parameters, part))
    return schemas


def referred(parameters: Mapping[str, Any], part: Mapping[str, Any]) -> Any:
    """Return the part of `parameters` to which the ``$ref`` of `part` points; None if it does not point into them."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: Any = parameters
    for name in reference.split("/")[1:]:
        place = place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def wrong_arguments(tool: str, parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Return an error message for the model if the arguments do not fit the schema, else an empty string.

    JSON Schema accepts unknown arguments unless a schema forbids them. Here a schema that only lists ``properties``
    forbids them, because the tool is a function without other parameters.
    """
    schemas, properties = argument_schemas(parameters), parameters.get("properties")
    decides = any(keyword in parameters and parameters[keyword] is not False for keyword in _DECIDES)
    if isinstance(properties, Mapping) and not decides:
        for name in arguments:
            if name not in properties:
                return _unknown(tool, name, schemas)
    required = parameters.get("required")
    for name in required if isinstance(required, list) else ():
        if name not in arguments:
            return f"{tool} needs the argument {name!r}"
    return _breach(tool, parameters, arguments, schemas)


def _unknown(tool: str, name: str, schemas: Mapping[str, Any]) -> str:
    names = ", ".join(schemas) or "none"
    return f"{tool} has no argument {name!r}; arguments: {names}.{did_you_mean(name, schemas)}"


def _breach(
    tool: str, parameters: Mapping[str, Any], arguments: Mapping[str, Any], schemas: Mapping[str, dict[str, Any]]
) -> str:
    from referencing import Registry

    from forge_agents.schemas import Schema

    try:  # an empty registry: a schema of a stranger's server must not make us fetch anything
        error = Schema(_with_null(parameters), timeout_s=_CHECK_S, registry=Registry()).breach(dict(arguments))
    except TimeoutError:
        return f"the arguments of {tool} take too long to compare with its schema; shorten them, or call another tool"
    except Exception as broken:  # noqa: BLE001  # that schema may be anything
        return f"the schema of {tool} cannot be used ({type(broken).__name__}); call another tool"
    if error is None:
        return ""
    name = str(error.absolute_path[0]) if error.absolute_path else ""
    if name and schemas.get(name) and "$ref" not in (expected := _shown(schemas[name])):
        return f"argument {name!r} of {tool} is {arguments[name]!r}; expected {expected}"
    if name and schemas.get(name):
        return f"argument {name!r} of {tool} is {arguments[name]!r}: {error.message}"
    if name:
        return f"argument {name!r} of {tool} does not fit: {error.message}"
    closed = error.validator in ("additionalProperties", "unevaluatedProperties") and error.validator_value is False
    if closed and (extra := next((each for each in arguments if each not in schemas), None)):
        return _unknown(tool, extra, schemas)
    expected = _shown({error.validator: error.validator_value})
    return f"the arguments of {tool} do not fit: {error.message}; expected {expected}"


def _with_null(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """`parameters` with null for arguments that are ``nullable``, a word of OpenAPI that JSON Schema does not know."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return parameters
    allowed = {
        name: {"anyOf": [schema, {"type": "null"}]}
        for name, schema in properties.items()
        if isinstance(schema, Mapping) and schema.get("nullable") is True
    }
    return {**parameters, "properties": {**properties, **allowed}} if allowed else parameters


def _shown(schema: Any) -> str:
    text = json.dumps(schema, default=str)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
