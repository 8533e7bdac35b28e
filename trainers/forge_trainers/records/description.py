"""Python objects as plain values: what ``config.yaml`` says of a reward, a loss, a player or an environment.

An object is described by its import path, its arguments and a hash of its source. Two descriptions are equal where the
objects do the same, so a resumed run can name what has changed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import math
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_agents.bench.code import described
from forge_agents.bench.fingerprints import digest
from forge_agents.credentials import HIDDEN, is_secret, redact

_MAX_DEPTH = 12
_MAX_ITEMS = 64
"""Longest list that is written out; a longer one is described by its length and a hash."""
_MAX_TEXT = 400
"""Longest text that is written out, in characters."""
_MAX_PARTS = 20_000
"""Most values that one description looks at."""
_HASH_LENGTH = 12
_OUR_PACKAGES = ("forge_agents", "forge_envs", "forge_verifiers", "forge_trainers")


def describe(value: Any) -> Any:
    """`value` as nested dicts, lists, texts, numbers, booleans and None, which YAML and JSON hold.

    Functions and classes become ``{"function": "module:name", "source": HASH}`` and ``{"class": ..., "source": ...}``.
    Instances also have their arguments: those of the constructor where they are known, else their attributes. Code of
    this project and of libraries has no hash: their versions stand for it. Keys, tokens and passwords are hidden, if
    the name of the argument or their form shows them.
    """
    return _Describer().describe(value)


class _Describer:
    """One description, with a bound on its size."""

    def __init__(self) -> None:
        self._parts = 0
        self._open: set[int] = set()
        """Ids of the objects that are being described: a second meeting is a cycle."""

    def describe(self, value: Any, depth: int = 0) -> Any:
        self._parts += 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str | os.PathLike):
            return _text(os.fspath(value) if isinstance(value, os.PathLike) else value)
        if isinstance(value, enum.Enum):
            return self.describe(value.value, depth)
        if isinstance(value, int | float | np.number | np.bool_):
            number = value.item() if isinstance(value, np.generic) else value
            return number if not isinstance(number, float) or math.isfinite(number) else str(number)  # NaN is not NaN
        if isinstance(value, bytes | bytearray | np.ndarray):
            return _data(value)
        if depth >= _MAX_DEPTH or self._parts > _MAX_PARTS or id(value) in self._open:
            return {"class": _path(type(value))}
        self._open.add(id(value))
        try:
            return self._compound(value, depth + 1)
        finally:
            self._open.discard(id(value))

    def _compound(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            return self._named(value, depth)
        if isinstance(value, set | frozenset):
            return sorted(self._listed(list(value), depth), key=repr) if len(value) <= _MAX_ITEMS else len(value)
        if isinstance(value, list | tuple):
            return self._listed(value, depth)
        if isinstance(value, functools.partial):
            described = _dict_of(self.describe(value.func, depth))
            return {**described, **self._named({**_by_name(value.func, value.args), **value.keywords}, depth)}
        if isinstance(value, types.MethodType):
            return {**self._code("function", value.__func__), "object": self.describe(value.__self__, depth)}
        if isinstance(value, type):
            return self._code("class", value)
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if inspect.isroutine(value) or isinstance(value, types.ModuleType):
            return {"function": _path(value)}
        return self._instance(value, depth)

    def _code(self, kind: str, target: Callable[..., Any] | type) -> dict[str, Any]:
        """Import path of a function or class, and the hash of its source where it is neither ours nor a library's."""
        module = _module_of(target)
        if module.partition(".")[0] in _OUR_PACKAGES or _is_library(module):
            return {kind: _path(target)}
        try:
            source = digest(described(target))
        except Exception:  # noqa: BLE001  # a stranger's object; the record of a run must not end it
            source = "unreadable"
        return {kind: _path(target), "source": source}

    def _function(self, function: types.FunctionType, depth: int) -> dict[str, Any]:
        found = self._code("function", function)
        if "<" not in function.__qualname__:  # made once, when its module is imported: its source says everything
            return found
        if closure := inspect.getclosurevars(function).nonlocals:
            found["closure"] = self._named(closure, depth)
        positional = {"positional": function.__defaults__} if function.__defaults__ else {}
        if defaults := {**positional, **(function.__kwdefaults__ or {})}:
            found["defaults"] = self._named(defaults, depth)
        return found

    def _instance(self, value: Any, depth: int) -> dict[str, Any]:
        found = self._code("class", type(value))
        if (arguments := _arguments(value)) is not None:
            return {**found, **self._named(arguments, depth)}
        return found if _is_library(_module_of(type(value))) else {**found, **self._named(_attributes(value), depth)}

    def _named(self, values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        if len(values) > _MAX_ITEMS:
            return {"length": len(values), "hash": self._hash(values.items(), depth)}
        return {
            str(name): HIDDEN if is_secret(name, each) else self.describe(each, depth)
            for name, each in values.items()
        }

    def _listed(self, values: Sequence[Any], depth: int) -> Any:
        if len(values) > _MAX_ITEMS:
            return {"length": len(values), "hash": self._hash(values, depth)}
        before = ("", *(each.lstrip("-") if _is_flag(each) else "" for each in values))
        return [
            HIDDEN if flag and is_secret(flag, each) else self.describe(each, depth)
            for flag, each in zip(before, values, strict=False)
        ]

    def _hash(self, values: Iterable[Any], depth: int) -> str:
        """Of as many of `values` as the bound on the size allows."""
        total = hashlib.sha256()
        for each in values:
            if self._parts > _MAX_PARTS:
                break
            total.update(json.dumps(self.describe(each, depth), default=str).encode())
        return total.hexdigest()[:_HASH_LENGTH]


def _dict_of(described: Any) -> dict[str, Any]:
    return described if isinstance(described, dict) else {"function": described}


def _is_flag(value: Any) -> bool:
    """Whether a value is a flag of a command line, which names the value after it."""
    return isinstance(value, str) and value.startswith("-")


def _text(text: str) -> str:
    text = redact(text)
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}... ({len(text)} characters, hash {_hash_of(text.encode('utf-8', 'replace'))})"


def _data(value: bytes | bytearray | np.ndarray) -> dict[str, Any]:
    if not isinstance(value, np.ndarray):
        return {"length": len(value), "hash": _hash_of(bytes(value))}
    found: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype)}
    return found if value.dtype.hasobject else {**found, "hash": _hash_of(np.ascontiguousarray(value).tobytes())}


def _hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_HASH_LENGTH]


def _path(target: Any) -> str:
    """``module:name``, as a configuration file names it."""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", type(target).__qualname__)
    return f"{getattr(target, '__module__', None) or 'builtins'}:{name}"


def _by_name(function: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Positional arguments by the names of their parameters, or by their numbers."""
    try:
        return dict(inspect.signature(function).bind_partial(*args).arguments)
    except (TypeError, ValueError):
        return {f"argument {number}": each for number, each in enumerate(args, 1)}


def _arguments(value: Any) -> Mapping[str, Any] | None:
    """What an object was made with; None where it does not say so."""
    if (given := getattr(value, "__dict__", {}).get("_constructor_arguments")) is not None:
        args, kwargs = given
        try:
            bound = inspect.signature(type(value).__init__).bind(value, *args, **kwargs).arguments
            return dict(list(bound.items())[1:])  # without self
        except (TypeError, ValueError):
            return {**{f"argument {number}": each for number, each in enumerate(args, 1)}, **kwargs}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value) if field.init}
    return None


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes of a user's object that have a value; ``__slots__`` count, names with two underscores do not."""
    slots = (name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name))
    found = {name: getattr(value, name) for name in slots} | dict(getattr(value, "__dict__", {}))
    return {name.lstrip("_"): each for name, each in found.items() if not name.startswith("__")}


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _module_of(target: Any) -> str:
    return str(getattr(target, "__module__", None) or "")


def _is_library(module: str) -> bool:
    """Whether a module is of an installed package or of Python itself."""
    top = module.partition(".")[0]
    if top in (*_OUR_PACKAGES, "__main__"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if top in sys.stdlib_module_names or not file:
        return True
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))
