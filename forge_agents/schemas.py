"""JSON Schema validation with a time limit, for untrusted schemas and values."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from fractions import Fraction
from functools import lru_cache
from typing import Any

import regex  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator, validators  # type: ignore[import-untyped]
from jsonschema.exceptions import SchemaError, ValidationError  # type: ignore[import-untyped]

_REPEATED_GROUP = re.compile(r"\)\s*[*+?{]")
_VERBOSE = re.compile(r"\(\?[A-Za-z0-9]*x")
"""Matches a flag with which comments may hide repeated groups."""
_MAX_COMPILED = 1 << 21
"""Maximum size of a compiled pattern, if all its repeated groups are nested. Each may double the size."""
_pattern_time_s: ContextVar[float] = ContextVar("remaining seconds for the patterns of a check")
_deadline_s: ContextVar[float] = ContextVar("time of this thread's computation at which a check ends")


class Schema:
    """A JSON schema of the draft that it names, by default 2020-12, with options of ``jsonschema``'s validators.

    The time limit of a check is for all patterns together and for the thread's computation. A small schema may take
    long, because nested references can multiply. A check that exceeds the limit is repeated once, because a garbage
    collection counts as computation of the thread in which it happens. It takes 0.4 s with two million objects.

    Raises:
        SchemaError: The schema has both ``unevaluatedProperties`` and ``patternProperties``, for which there is no time
            limit.
    """

    def __init__(self, schema: Mapping[str, Any], *, timeout_s: float, **options: Any) -> None:
        if {"patternProperties", "unevaluatedProperties"} <= set(_keywords(schema)):
            raise SchemaError(
                "patternProperties and unevaluatedProperties together cannot be matched within a time limit. Write "
                "additionalProperties"
            )
        kind = _within_limits(validators.validator_for(schema, Draft202012Validator))
        self._checker = kind(schema, **options)
        self._timeout_s = timeout_s

    def first_error(self, value: Any) -> Any:
        """Return the first ``ValidationError`` of `value`. None if it is valid.

        Raises:
            TimeoutError: The check exceeds its time limit twice.
        """
        try:
            return self._first_error(value)
        except TimeoutError:
            return self._first_error(value)

    def _first_error(self, value: Any) -> Any:
        pattern_time = _pattern_time_s.set(self._timeout_s)
        deadline = _deadline_s.set(time.thread_time() + self._timeout_s)
        try:
            return next(self._checker.iter_errors(value), None)
        finally:
            _pattern_time_s.reset(pattern_time)
            _deadline_s.reset(deadline)


def _keywords(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for name, inner in schema.items():
            yield name
            yield from _keywords(inner)
    elif isinstance(schema, list):
        for each in schema:
            yield from _keywords(each)


@lru_cache
def _within_limits(kind: Any) -> Any:
    replacements = {
        "multipleOf": _multiple,
        "uniqueItems": _unique,
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional,
    }
    checks = {**kind.VALIDATORS, **replacements}
    limited = validators.extend(kind, {name: _timed(check) for name, check in checks.items()})
    original_evolve = limited.evolve

    def evolve(self: Any, **changes: Any) -> Any:
        """Return a validator of a part of the schema.

        The part's own draft is removed, because jsonschema would select a validator without limits for it. References
        are followed through this function as well, so keywords such as ``unevaluatedProperties`` are limited, too.
        """
        _check_time()
        part = changes.get("schema", self.schema)
        if isinstance(part, Mapping):
            changes["schema"] = {name: inner for name, inner in part.items() if name != "$schema"}
        return original_evolve(self, **changes)

    limited.evolve = evolve
    return limited


def _timed(check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def timed(*arguments: Any) -> Iterator[Any]:
        _check_time()
        return check(*arguments) or iter(())

    return timed


def _check_time() -> None:
    if time.thread_time() > _deadline_s.get(math.inf):  # validators may also be created outside of a check
        raise TimeoutError("the check takes too long")


def _matches(pattern: str, text: str) -> bool:
    if len(pattern) << len(_REPEATED_GROUP.findall(pattern)) > _MAX_COMPILED or _VERBOSE.search(pattern):
        raise SchemaError("a pattern has too many repeated groups, or the flag x. Write a simpler one")
    start = time.thread_time()
    try:
        return regex.search(pattern, text, timeout=max(_pattern_time_s.get(), 0.0)) is not None
    finally:
        _pattern_time_s.set(_pattern_time_s.get() - (time.thread_time() - start))


def _multiple(checker: Any, step: Any, value: Any, schema: Any) -> Iterator[Any]:
    """Compare decimals exactly: 19.99 is a multiple of 0.01, but not in binary floating point."""
    if not checker.is_type(value, "number"):
        return
    numbers = [] if isinstance(value, float) and not math.isfinite(value) else [value, step]
    exact = [Fraction(float.__repr__(number) if isinstance(number, float) else number) for number in numbers]
    if not exact or exact[0] % exact[1]:
        yield ValidationError(f"{value!r} is not a multiple of {step!r}")


def _unique(checker: Any, unique: Any, value: Any, schema: Any) -> Iterator[Any]:
    """Compare texts of items. jsonschema compares each pair of items that Python cannot sort."""
    if not unique or not checker.is_type(value, "array"):
        return
    seen = set[str]()
    for item in value:
        _check_time()
        seen.add(json.dumps(_with_whole_numbers(item), sort_keys=True))
    if len(seen) < len(value):
        yield ValidationError(f"{value!r} has equal items")


def _with_whole_numbers(value: Any) -> Any:
    """Return a JSON value in which equal numbers have equal texts."""
    if isinstance(value, Mapping):
        return {name: _with_whole_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_whole_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _pattern(checker: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    if checker.is_type(value, "string") and not _matches(pattern, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(checker: Any, patterns: Mapping[str, Any], value: Any, schema: Any) -> Iterator[Any]:
    if checker.is_type(value, "object"):
        for pattern, subschema in patterns.items():
            for name, inner in value.items():
                if _matches(pattern, name):
                    yield from checker.descend(inner, subschema, path=name, schema_path=pattern)


def _additional(checker: Any, subschema: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    if not checker.is_type(value, "object"):
        return
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extra = [name for name in value if name not in properties and not any(_matches(p, name) for p in patterns)]
    if checker.is_type(subschema, "object"):
        for name in extra:
            yield from checker.descend(value[name], subschema, path=name)
    elif not subschema and extra:
        yield ValidationError(f"additional properties are not allowed: {', '.join(map(repr, extra))}")
