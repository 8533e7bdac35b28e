"""JSON schemas that neither a text nor a hostile schema can stall: a check has a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import regex  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator, validators  # type: ignore[import-untyped]
from jsonschema.exceptions import SchemaError, ValidationError  # type: ignore[import-untyped]

_left_s: ContextVar[float] = ContextVar("seconds left for the patterns of a check")
_ends_at_s: ContextVar[float] = ContextVar("time of this thread's computation at which a check ends")


class Schema:
    """A JSON schema, of the draft that it names, or of 2020-12.

    Args:
        schema: What a value is to fit.
        timeout_s: Seconds that one check may take: of waiting for patterns, all together, and of the thread's
            computation. References that double each other make a small schema large.
        options: Of ``jsonschema``'s validators.

    Raises:
        SchemaError: It holds ``unevaluatedProperties`` beside ``patternProperties``, which no limit is kept for.
    """

    def __init__(self, schema: Mapping[str, Any], *, timeout_s: float, **options: Any) -> None:
        if {"patternProperties", "unevaluatedProperties"} <= set(_keywords(schema)):
            raise SchemaError(
                "patternProperties and unevaluatedProperties together cannot be matched within a time limit; write "
                "additionalProperties"
            )
        kind = _within_limits(validators.validator_for(schema, Draft202012Validator))
        self._checker = kind(schema, **options)
        self._timeout_s = timeout_s

    def breach(self, value: Any) -> Any:
        """The first error of `value`, a ``ValidationError``; None where it fits.

        Raises:
            TimeoutError: The check takes longer than it may.
        """
        left, end = _left_s.set(self._timeout_s), _ends_at_s.set(time.thread_time() + self._timeout_s)
        try:
            return next(self._checker.iter_errors(value), None)
        finally:
            _left_s.reset(left)
            _ends_at_s.reset(end)


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
    mine = {"pattern": _pattern, "patternProperties": _pattern_properties, "additionalProperties": _additional}
    made = validators.extend(kind, {name: _timed(check) for name, check in {**kind.VALIDATORS, **mine}.items()})
    theirs = made.evolve

    def evolve(self: Any, **changes: Any) -> Any:
        """A checker of a part of the schema, without the draft that it names, for which jsonschema drops the limits.

        References are followed through here, also by keywords such as ``unevaluatedProperties``, which ask for no
        other keyword's check meanwhile.
        """
        _check_time()
        part = changes.get("schema", self.schema)
        if isinstance(part, Mapping):
            changes["schema"] = {name: inner for name, inner in part.items() if name != "$schema"}
        return theirs(self, **changes)

    made.evolve = evolve
    return made


def _timed(check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """The check of a keyword, which is not begun when the time is up."""

    def timed(*arguments: Any) -> Iterator[Any]:
        _check_time()
        return check(*arguments) or iter(())

    return timed


def _check_time() -> None:
    if time.thread_time() > _ends_at_s.get(math.inf):  # a checker may also be made outside a check
        raise TimeoutError("the check takes too long")


def _matches(pattern: str, text: str) -> bool:
    began = time.perf_counter()
    try:
        return regex.search(pattern, text, timeout=max(_left_s.get(), 0.0)) is not None
    finally:
        _left_s.set(_left_s.get() - (time.perf_counter() - began))


def _pattern(checker: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    if checker.is_type(value, "string") and not _matches(pattern, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(checker: Any, patterns: Mapping[str, Any], value: Any, schema: Any) -> Iterator[Any]:
    if checker.is_type(value, "object"):
        for pattern, wanted in patterns.items():
            for name, inner in value.items():
                if _matches(pattern, name):
                    yield from checker.descend(inner, wanted, path=name, schema_path=pattern)


def _additional(checker: Any, wanted: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    if not checker.is_type(value, "object"):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    more = [name for name in value if name not in known and not any(_matches(each, name) for each in patterns)]
    if checker.is_type(wanted, "object"):
        for name in more:
            yield from checker.descend(value[name], wanted, path=name)
    elif not wanted and more:
        yield ValidationError(f"additional properties are not allowed: {', '.join(map(repr, more))}")
