"""Descriptions of Python objects as plain values, for rewards, losses, players and environments in ``config.yaml``.

An object is described by its import path, its arguments and a hash of its source. Objects with the same behavior have
equal descriptions, so a resumed run can name the changes.
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
from forge_agents.credentials import HIDDEN, is_secret, redact, secret_items, without_keys

_MAX_DEPTH = 12
_MAX_ITEMS = 64
"""Maximum length of a list that is written out. Longer ones are described by length and hash."""
_MAX_TEXT = 400
"""Maximum number of characters of a text that is written out."""
_MAX_VALUES = 20_000
"""Maximum number of values in one description."""
_HASH_LENGTH = 12
_OUR_PACKAGES = ("forge_agents", "forge_envs", "forge_verifiers", "forge_trainers")


def describe(value: Any, *, whole_addresses: bool = False) -> Any:
    """Describe `value` by nested dicts, lists, texts, numbers, booleans and None, for YAML and JSON.

    Functions and classes become ``{"function": "module:name", "source": HASH}`` and ``{"class": ..., "source": ...}``.
    Instances also have the arguments of the constructor if they are known, else their attributes. Code of this project
    and of libraries has no hash, because their versions are recorded. Keys, tokens and passwords are hidden if the name
    of the argument or their form reveals them. With `whole_addresses`, for hashes that tell servers apart, parts of
    addresses that may be tokens stay.
    """
    return _Describer(without_keys if whole_addresses else redact).describe(value)


class _Describer:
    """A description, with a bound on its size."""

    def __init__(self, redact: Callable[[str], str]) -> None:
        self._redact = redact
        self._parts = 0
        self._open: set[int] = set()
        """Ids of the objects that are being described, to detect cycles."""

    def describe(self, value: Any, depth: int = 0) -> Any:
        self._parts += 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str | os.PathLike):
            return _shortened(self._redact(os.fspath(value) if isinstance(value, os.PathLike) else value))
        if isinstance(value, enum.Enum):
            return self.describe(value.value, depth)
        if isinstance(value, int | float | np.number | np.bool_):
            number = value.item() if isinstance(value, np.generic) else value
            return number if not isinstance(number, float) or math.isfinite(number) else str(number)  # NaN is not NaN
        if isinstance(value, bytes | bytearray | np.ndarray):
            return _data(value)
        if depth >= _MAX_DEPTH or self._parts > _MAX_VALUES or id(value) in self._open:
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
            members = sorted((self.describe(each, depth) for each in value), key=repr)
            return members if len(members) <= _MAX_ITEMS else self._listed(members, depth)
        if isinstance(value, list | tuple):
            return self._listed(value, depth)
        if isinstance(value, functools.partial):
            function = self.describe(value.func, depth)
            function = function if isinstance(function, dict) else {"function": function}
            return {**function, **self._named({**_by_name(value.func, value.args), **value.keywords}, depth)}
        if isinstance(value, types.MethodType):
            return {**self._code("function", value.__func__), "object": self.describe(value.__self__, depth)}
        if isinstance(value, type):
            return self._code("class", value)
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if inspect.isroutine(value) or callable(getattr(value, "__wrapped__", None)):  # as of functools.cache
            return self._code("function", value)
        return self._instance(value, depth)

    def _code(self, kind: str, target: Callable[..., Any] | type) -> dict[str, Any]:
        """Return the import path of a function or class, and a hash of its source if it is user code."""
        module = _module_of(target)
        if module.partition(".")[0] in _OUR_PACKAGES or _is_library(module):
            return {kind: _path(target)}
        try:
            source = digest(described(target))
        except Exception:  # noqa: BLE001  # any error of a user's object
            source = "unreadable"
        return {kind: _path(target), "source": source}

    def _function(self, function: types.FunctionType, depth: int) -> dict[str, Any]:
        code = self._code("function", function)
        if "<" not in function.__qualname__:  # a function of a module is fully described by its source
            return code
        if closure := inspect.getclosurevars(function).nonlocals:
            code["closure"] = self._named(closure, depth)
        positional = {"positional": function.__defaults__} if function.__defaults__ else {}
        if defaults := {**positional, **(function.__kwdefaults__ or {})}:
            code["defaults"] = self._named(defaults, depth)
        return code

    def _instance(self, value: Any, depth: int) -> dict[str, Any]:
        code = self._code("class", type(value))
        if (arguments := _arguments(value)) is not None:
            return {**code, **self._named(arguments, depth)}
        module = _module_of(type(value))
        if not _is_library(module):
            return {**code, **self._named(_attributes(value), depth)}
        if module.partition(".")[0] not in (*sys.stdlib_module_names, "torch"):
            return code
        text = str(value)  # of a date, a pattern, a fraction or a tensor
        return code if text.startswith("<") or " at 0x" in text else {**code, "value": _shortened(self._redact(text))}

    def _named(self, values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        if len(values) > _MAX_ITEMS:
            return {"length": len(values), "hash": self._hash(values.items(), depth)}
        return {
            str(name): HIDDEN if is_secret(name, each) else self.describe(each, depth) for name, each in values.items()
        }

    def _listed(self, values: Sequence[Any], depth: int) -> Any:
        if len(values) > _MAX_ITEMS:
            return {"length": len(values), "hash": self._hash(values, depth)}
        hidden = secret_items(values)
        return [HIDDEN if secret else self.describe(each, depth) for secret, each in zip(hidden, values, strict=True)]

    def _hash(self, values: Iterable[Any], depth: int) -> str:
        """Return a hash of `values`, as many as the limit allows."""
        total = hashlib.sha256()
        for each in values:
            if self._parts > _MAX_VALUES:
                break
            total.update(json.dumps(self.describe(each, depth), default=str).encode())
        return total.hexdigest()[:_HASH_LENGTH]


def _shortened(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}... ({len(text)} characters, hash {_hash_of(text.encode('utf-8', 'replace'))})"


def _data(value: bytes | bytearray | np.ndarray) -> dict[str, Any]:
    if not isinstance(value, np.ndarray):
        return {"length": len(value), "hash": _hash_of(bytes(value))}
    array: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype)}
    return array if value.dtype.hasobject else {**array, "hash": _hash_of(np.ascontiguousarray(value).tobytes())}


def _hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_HASH_LENGTH]


def _path(target: Any) -> str:
    """Return ``module:name``, as in a configuration file."""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", type(target).__qualname__)
    return f"{getattr(target, '__module__', None) or 'builtins'}:{name}"


def _by_name(function: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Return positional arguments by parameter name, or by number."""
    try:
        return dict(inspect.signature(function).bind_partial(*args).arguments)
    except (TypeError, ValueError):
        return {f"argument {number}": each for number, each in enumerate(args, 1)}


def _arguments(value: Any) -> Mapping[str, Any] | None:
    """Return the constructor arguments of an object, or None if they are unknown."""
    if (recorded := getattr(value, "__dict__", {}).get("_constructor_arguments")) is not None:
        args, kwargs = recorded
        try:
            bound = inspect.signature(type(value).__init__).bind(value, *args, **kwargs).arguments
            return dict(list(bound.items())[1:])  # without self
        except (TypeError, ValueError):
            return {**{f"argument {number}": each for number, each in enumerate(args, 1)}, **kwargs}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value) if field.init}
    return None


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including slots, without names that begin with two underscores."""
    values: dict[str, Any] = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        values |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    values |= getattr(value, "__dict__", {})
    return {name.lstrip("_"): each for name, each in values.items() if not name.startswith("__")}


def _module_of(target: Any) -> str:
    return str(getattr(target, "__module__", None) or "")


def _is_library(module: str) -> bool:
    """Return whether a module belongs to an installed package or to Python itself."""
    top = module.partition(".")[0]
    if top in (*_OUR_PACKAGES, "__main__"):
        return False
    file = getattr(sys.modules.get(module) or sys.modules.get(top), "__file__", None) or ""
    return top in sys.stdlib_module_names or bool({"site-packages", "dist-packages"} & set(Path(file).parts))
