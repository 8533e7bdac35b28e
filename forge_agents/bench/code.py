"""What code and values something is made of, as plain data that is the same in every process.

In: functions, classes, objects that play or that an environment is made with. Out: JSON-safe facts to be hashed.
Nothing is imported or run to find out. Waits for the disk: sources are read.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, MethodType
from typing import Any

import numpy as np

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LIBRARY = re.compile(r"[/\\](?:(?:site|dist)-packages|lib[/\\]python[\d.]+)[/\\]")
_VERSIONED = {"forge_agents", "forge_envs", "forge_trainers", "forge_verifiers"}
"""Packages whose version stands beside the hash: of another's code they are libraries."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def code_at(target: Any) -> Any:
    """The modules of a class or function, by name, or its own source where it is in the program itself."""
    module = inspect.getmodule(target)
    return _modules(vars(module)) if module is not None and module.__name__ != "__main__" else _source(target)


def described(value: Any) -> Any:
    """What a value is, and what code it is made of.

    A function counts by its source, defaults, closure and what it uses of its own module, of which the rest may change,
    and by the modules that this one imports from its package or folder. So do methods, and objects of classes, which
    also count by their attributes. Functions and classes of libraries count by name, their objects by ``repr``.
    """
    return _Describing(_home(value)).of(value)


class _Describing:
    """One description; what was described once is not described again, so that circles end."""

    def __init__(self, home: str) -> None:
        self._home = home
        """The package that is described, which is no library."""
        self._known: dict[int, int] = {}
        self._told: set[str] = set()
        self._held: list[Any] = []  # so that nothing else gets the address of what was known

    def of(self, value: Any) -> Any:
        """As `described`."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if id(value) in self._known:
            return ["again", self._known[id(value)]]
        self._known[id(value)] = len(self._known)
        self._held.append(value)
        if isinstance(value, Mapping):
            return [[self.of(key), self.of(one)] for key, one in value.items()]
        if isinstance(value, (list, tuple)):
            return [self.of(one) for one in value]
        if isinstance(value, (set, frozenset)):
            return [self.of(one) for one in sorted(value, key=_said)]  # in the same order everywhere
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        return self._made(value)

    def _made(self, value: Any) -> Any:
        """Of what has code."""
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if not inspect.isclass(value) and callable(inner := getattr(value, "__wrapped__", None)):
            return ["wrapped", self.of(inner), *([self._function(value)] if inspect.isfunction(value) else [])]
        if inspect.ismodule(value):
            return value.__name__
        if inspect.isfunction(value) or inspect.isclass(value):
            if not self._is_ours(value):
                return f"{value.__module__}.{value.__qualname__}"
            return self._function(value) if inspect.isfunction(value) else self._class(value)
        if isinstance(value, enum.Enum) or not self._is_ours(type(value)):
            return _said(value)
        return [self.of(type(value)), self.of(_attributes(value))]

    def _is_ours(self, made: Any) -> bool:
        """Whether a function or class is written at a prompt or in a file that is no library's."""
        module, top = inspect.getmodule(made), str(made.__module__).partition(".")[0]
        if top in ("__main__", self._home):
            return True
        file = getattr(module, "__file__", None) or ""
        return top not in _VERSIONED and file.endswith(".py") and not _LIBRARY.search(file)

    def _function(self, function: Any) -> Any:
        cells, names = [_content(cell) for cell in function.__closure__ or ()], function.__globals__
        given = self.of((function.__defaults__, function.__kwdefaults__, cells))
        return [_source(function), given, self._used(function.__code__, names), self._beside(names)]

    def _class(self, kind: type) -> Any:
        bodies = [inspect.unwrap(body) for body in vars(kind).values() if inspect.isfunction(body)]
        used = [self._used(body.__code__, body.__globals__) for body in bodies if inspect.isfunction(body)]
        bases = [self.of(base) for base in kind.__bases__]
        names = getattr(sys.modules.get(kind.__module__), "__dict__", {})
        return [_source(kind), used, bases, self._beside(names)]

    def _used(self, code: CodeType, names: Mapping[str, Any]) -> Any:
        """Globals of its own module that a function uses, by name; what play may change by how it is made."""
        found = {}
        for name in sorted({name for each in _codes(code) for name in each.co_names} & names.keys()):
            used = names[name]
            fixed = _is_fixed(used) or callable(used) or inspect.ismodule(used) or self._is_ours(type(used))
            found[name] = self.of(used) if fixed else _assigned(names.get("__file__"), name)
        return found

    def _beside(self, names: Mapping[str, Any]) -> Any:
        """The sources of the modules that one imports from beside it; told once."""
        file = str(names.get("__file__"))
        if file in self._told:
            return {}
        self._told.add(file)
        return {name: text for name, text in _modules(names).items() if name != names["__name__"]}


def _home(value: Any) -> str:
    """The package or module that a player is of."""
    while isinstance(value, (functools.partial, MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    made = value if inspect.isfunction(value) or inspect.isclass(value) else type(value)
    return str(made.__module__).partition(".")[0]


def _is_fixed(value: Any) -> bool:
    """Whether nothing can change a value; what can is known by the source of its module."""
    return isinstance(value, _PLAIN) or (isinstance(value, (tuple, frozenset)) and all(map(_is_fixed, value)))


def _attributes(value: Any) -> Any:
    """An object's own, with or without slots."""
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}


def _said(value: Any) -> str:
    """Its ``repr`` without an address."""
    return _ADDRESS.sub("", repr(value))


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A body and those inside it."""
    yield code
    for inner in code.co_consts:
        if inspect.iscode(inner):
            yield from _codes(inner)


def _source(target: Any) -> str:
    try:
        return inspect.getsource(target)
    except (OSError, TypeError):  # written at a prompt, or compiled
        code = getattr(target, "__code__", None)
        return f"{getattr(target, '__qualname__', '')} {code.co_code.hex() if code else ''}"


def _assigned(file: Any, name: str) -> list[str]:
    """How a module makes a global of that name; nothing of what is no file."""
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (TypeError, OSError, SyntaxError, ValueError, RecursionError):
        return []
    found = []
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(each, ast.Name) and each.id == name for one in targets for each in ast.walk(one)):
                found.append(ast.unparse(node))
    return found


def _modules(names: Mapping[str, Any]) -> dict[str, str]:
    """The text of a module and of what it imports from its package, or from its folder if it is in none, by name.

    Args:
        names: The module's own.
    """
    file = names.get("__file__")
    if not file or not file.endswith(".py"):
        return {}
    name, path = str(names["__name__"]), Path(file)
    folder = path.parent.parent if path.name == "__init__.py" else path.parent
    root = folder.parents[name.count(".") - 1] if "." in name else folder
    top = name.partition(".")[0] if "." in name or path.name == "__init__.py" else ""
    find = functools.partial(_file_of, root=root, top=top)
    found: dict[str, str] = {}
    waiting = [(name, path)]
    while waiting:
        name, path = waiting.pop()
        if name in found:
            continue
        found[name] = path.read_text(encoding="utf-8", errors="replace")
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        named = _imported(found[name], package, find)
        waiting += [(each, place) for each in named if (place := find(each)) is not None]
    return found


def _file_of(name: str, *, root: Path, top: str) -> Path | None:
    """The source of a module of ours, which is not imported; None where it has none, or is elsewhere."""
    if not name or (top and name.partition(".")[0] != top):
        return None
    place = root.joinpath(*name.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _imported(text: str, package: str, find: Callable[[str], Path | None]) -> Iterator[str]:
    """The names of the modules that a source imports, wherever in it; some are no modules but what is in one."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # it would fail where it stands, too, or is never imported
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(filter(None, [*parents, node.module or ""]))
            parts = [f"{base}.{alias.name}" for alias in node.names]
            yield from parts
            if not all(map(find, parts)):
                yield base
