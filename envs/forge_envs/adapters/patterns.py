"""Time limits for the regular expressions of libraries.

Libraries apply patterns to model-written texts. Some of them take cubic time, and Python's `re` blocks all threads
meanwhile and cannot be interrupted. This module replaces `re` in a library with the package `regex`, which accepts the
same patterns, releases the GIL and supports timeouts.
"""

from __future__ import annotations

import re
import sys
import types
from functools import cache
from typing import Any

import regex  # type: ignore[import-untyped]

LIMIT_S = 2.0
"""Maximum processor seconds per match. Ordinary texts take less than a millisecond."""
_MATCHING = ("search", "match", "fullmatch", "findall", "finditer", "sub", "subn", "split")
_LIMITS = {"timeout": LIMIT_S, "concurrent": True}


class BoundedPattern:
    """A compiled `regex` pattern whose matching methods raise `TimeoutError` after `LIMIT_S` seconds."""

    def __init__(self, pattern: str | bytes, flags: int = 0) -> None:
        self._pattern = regex.compile(pattern, _flags(flags))

    def __getattr__(self, name: str) -> Any:
        if name == "_pattern":  # not yet set while copying
            raise AttributeError(name)
        value = getattr(self._pattern, name)
        if name not in _MATCHING:
            return value
        return lambda *args, **named: value(*args, **named, **_LIMITS)


def _flags(flags: int) -> int:
    """Convert flags of `re` to those of `regex`, where ASCII has another value."""
    ascii_only = regex.ASCII if flags & re.ASCII else 0
    return int(flags) & ~int(re.ASCII | re.DEBUG) | ascii_only


@cache
def _compiled(pattern: str | bytes, flags: int) -> BoundedPattern:
    return BoundedPattern(pattern, flags)


def _compile(pattern: Any, flags: int = 0) -> BoundedPattern:
    if isinstance(pattern, re.Pattern):
        return _compiled(pattern.pattern, pattern.flags)
    return pattern if isinstance(pattern, BoundedPattern) else _compiled(pattern, int(flags))


def _function(name: str, num_args: int) -> Any:
    """Return the bounded version of a function of `re` with `num_args` arguments between pattern and flags."""

    def matching(pattern: Any, *args: Any, flags: int = 0, **named: Any) -> Any:
        if len(args) > num_args:
            *args, flags = args  # type: ignore[assignment]
        return getattr(_compile(pattern, flags), name)(*args, **named)

    return matching


bounded_re = types.ModuleType("re")
"""The module `re` with a time limit in every function that matches."""
vars(bounded_re).update({name: value for name, value in vars(re).items() if not name.startswith("__")})
vars(bounded_re).update(
    {name: _function(name, {"sub": 3, "subn": 3, "split": 2}.get(name, 1)) for name in _MATCHING}, compile=_compile
)


_bounded: set[str] = set()
"""Names of the modules that use `bounded_re`."""
_newest: dict[tuple[str, ...], tuple[int, str]] = {}
"""Number of imported modules and name of the newest one at the last call of `bound_patterns`, by packages."""


def bound_patterns(*packages: str) -> None:
    """Replace `re` with `bounded_re` in all imported modules of some packages.

    Environments call this before each episode, because libraries import modules late. Without new modules, the call
    takes microseconds.
    """
    modules = list(sys.modules)
    newest = len(modules), modules[-1]
    if _newest.get(packages) == newest:
        return
    names = (*_MATCHING, "compile")
    substitutes = {id(re): bounded_re} | {id(getattr(re, name)): getattr(bounded_re, name) for name in names}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and name not in _bounded and hasattr(module, "__name__"):
            _bounded.add(name)
            _replace(module, substitutes)
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    _replace(value, substitutes)
    _newest[packages] = newest  # only now, because other threads rely on it


def _replace(owner: Any, substitutes: dict[int, Any]) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, re.Pattern):
            setattr(owner, name, _compile(value))
        elif id(value) in substitutes:
            setattr(owner, name, substitutes[id(value)])
