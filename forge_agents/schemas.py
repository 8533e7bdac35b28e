"""JSON Schema validation with a time limit, for untrusted schemas and values."""

from __future__ import annotations

import json
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from fractions import Fraction
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import regex  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator, validators  # type: ignore[import-untyped]
from jsonschema.exceptions import SchemaError, ValidationError  # type: ignore[import-untyped]

_MAX_PATTERN_CHARS = 10_000
_MAX_PATTERN_SIZE = 100_000
"""Maximum size of a pattern with its repetitions written out. Compiling may take 650 bytes for each part."""
_PROPERTY = re.compile(r"\\[pP]\{[A-Za-z][^{}]*\}")
_CHARACTERS = frozenset(("LITERAL", "NOT_LITERAL", "ANY", "IN"))
_NAMED_GROUP = re.compile(r"\(\?<(?=\w)")
_pattern_time_s: ContextVar[float] = ContextVar("remaining seconds for the patterns of a check")
_deadline_s: ContextVar[float] = ContextVar("time of this thread's computation at which a check ends")


class Schema:
    """A JSON schema of the draft that it names, by default 2020-12, with options of ``jsonschema``'s validators.

    The time limit of a check is for all patterns together and for the thread's computation. A small schema may take
    long, because nested references can multiply. A check that exceeds the limit is repeated once, because a garbage
    collection counts as computation of the thread in which it happens. A collection takes 0.4 s with two million
    objects.

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
    if len(pattern) > _MAX_PATTERN_CHARS or _size(pattern) > _MAX_PATTERN_SIZE:
        raise SchemaError("a pattern is too long, has too many repetitions, or has unusual syntax. Write a simpler one")
    start = time.thread_time()
    try:
        return regex.search(pattern, text, timeout=max(_pattern_time_s.get(), 0.0)) is not None
    finally:
        _pattern_time_s.set(_pattern_time_s.get() - (time.thread_time() - start))


@lru_cache
def _size(pattern: str) -> float:
    """Return the number of a pattern's parts with its repetitions written out. Infinite for unknown syntax.

    `regex` writes out repetitions when it compiles a pattern, without a time limit, and may overflow the stack.
    """
    pattern = _NAMED_GROUP.sub("(?P<", _PROPERTY.sub(r"\\w", pattern))  # ECMAScript's syntax that Python's lacks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # sets in sets
            return _parsed_size(_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError):
        return math.inf


def _parsed_size(parsed: Any) -> int:
    """Return the size of a list of parts, as `re._parser` makes them: pairs of an operation and its operands."""
    size = 0
    for operation, operands in parsed:
        times, inner = 1, operands
        if str(operation).endswith("_REPEAT"):
            low, high, inner = operands
            is_character = len(inner) == 1 and str(inner[0][0]) in _CHARACTERS
            times = max(low, 1) if is_character else max(low, 2) if high is _parser.MAXREPEAT else max(high, 2)
        size += int(times) * max(1, sum(map(_parsed_size, _lists_in(inner))))
    return size


def _lists_in(operands: Any) -> Iterator[Any]:
    """Yield the lists of parts among an operation's operands, which may be in a tuple or a list."""
    if isinstance(operands, _parser.SubPattern):
        yield operands
    elif isinstance(operands, tuple | list):
        for each in operands:
            yield from _lists_in(each)


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
