"""Checks of a call's arguments against the tool's JSON schema, perhaps an untrusted one."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from forge_agents.errors import did_you_mean

_CHECK_TIMEOUT_S = 0.25
"""Time limit of a check in seconds: of computation, and of matching patterns."""
_MAX_PARTS = 500
"""Maximum number of parts of a schema in which names of arguments are looked up."""
_MAX_SHOWN = 1000
"""Maximum length of a schema in an error."""
_BRANCHES = ("allOf", "anyOf", "oneOf")
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose values are mappings of names to schemas."""
_PARTS = frozenset((*_BRANCHES, "items", "prefixItems", "additionalProperties", "not", "if", "then", "else"))
"""Keywords whose values are schemas or lists of them."""
_TYPES = {
    "str": "string", "text": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean",
    "list": "array", "tuple": "array", "dict": "object", "none": "null",
}  # fmt: skip
"""Standard names of types, by names in Python and in published lists of tools."""
_DECIDES = frozenset((
    *_BRANCHES, "$ref", "$dynamicRef", "if", "not", "dependentSchemas", "patternProperties", "additionalProperties",
    "unevaluatedProperties", "propertyNames",
))  # fmt: skip
"""Keywords that decide about arguments outside of the schema's ``properties``."""


def argument_schemas(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schemas of arguments by name, including those in combined schemas and local references.

    A schema may also be ``true``, which is returned as ``{}``.
    """
    schemas: dict[str, dict[str, Any]] = {}
    waiting: deque[Any] = deque([parameters])
    for _ in range(_MAX_PARTS):
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
        waiting.append(resolve_reference(parameters, part))
    return schemas


def resolve_reference(parameters: Mapping[str, Any], part: Mapping[str, Any]) -> Any:
    """Return the part of `parameters` to which the ``$ref`` of `part` points. None if there is none."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: Any = parameters
    for name in reference.split("/")[1:]:
        place = place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def required_names(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of a schema's ``required``, without entries that are no names."""
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def check_arguments(tool: str, parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
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
    for name in required_names(parameters):
        if name not in arguments:
            return f"{tool} needs the argument {name!r}"
    return _schema_error(tool, parameters, arguments, schemas)


def _unknown(tool: str, name: str, schemas: Mapping[str, Any]) -> str:
    names = ", ".join(schemas) or "none"
    return f"{tool} has no argument {name!r}; arguments: {names}.{did_you_mean(name, schemas)}"


def _schema_error(
    tool: str, parameters: Mapping[str, Any], arguments: Mapping[str, Any], schemas: Mapping[str, dict[str, Any]]
) -> str:
    from referencing import Registry

    from forge_agents.schemas import Schema

    try:  # an empty registry: the schema of an untrusted server must not make us fetch anything
        schema = Schema(_standard(parameters), timeout_s=_CHECK_TIMEOUT_S, registry=Registry())
        error = schema.first_error(dict(arguments))
    except TimeoutError:
        return f"the arguments of {tool} take too long to compare with its schema; shorten them, or call another tool"
    except Exception as broken:  # noqa: BLE001  # the schema may be anything
        return f"the schema of {tool} cannot be used ({type(broken).__name__}); call another tool"
    if error is None:
        return ""
    name = str(error.absolute_path[0]) if error.absolute_path else ""
    if name and schemas.get(name) and "$ref" not in (expected := _shorten(schemas[name])):
        return f"argument {name!r} of {tool} is {arguments[name]!r}; expected {expected}"
    if name and schemas.get(name):
        return f"argument {name!r} of {tool} is {arguments[name]!r}: {error.message}"
    if name:
        return f"argument {name!r} of {tool} does not fit: {error.message}"
    closed = error.validator in ("additionalProperties", "unevaluatedProperties") and error.validator_value is False
    if closed and (extra := next((each for each in arguments if each not in schemas), None)):
        return _unknown(tool, extra, schemas)
    expected = _shorten({error.validator: error.validator_value})
    return f"the arguments of {tool} do not fit: {error.message}; expected {expected}"


def _standard(schema: Any) -> Any:
    """Return a schema with standard keywords in place of other common spellings.

    Such spellings are OpenAPI's ``nullable``, names of types such as "str" and "STRING", and lists of ``items``.
    """
    if not isinstance(schema, Mapping):
        return schema
    standard = dict(schema)
    for keyword in _MAPS.intersection(standard):
        if isinstance(parts := standard[keyword], Mapping):
            standard[keyword] = {name: _standard(part) for name, part in parts.items()}
    for keyword in _PARTS.intersection(standard):
        value = standard[keyword]
        standard[keyword] = [_standard(part) for part in value] if isinstance(value, list) else _standard(value)
    if isinstance(standard.get("type"), str):
        kind = standard["type"].lower()
        standard["type"] = _TYPES.get(kind, kind)
    if standard.get("type", "any") in ("any", None):
        standard.pop("type", None)
    if isinstance(standard.get("items"), list) and "$schema" not in standard:
        standard["prefixItems"] = standard.pop("items")
    if standard.get("nullable") is True:
        return {"anyOf": [standard, {"type": "null"}]}
    return standard


def _shorten(schema: Any) -> str:
    text = json.dumps(schema, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
