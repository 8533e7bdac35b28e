"""Descriptions of code and values as plain data that is equal in every process, to be hashed.

Sources are read, but nothing is imported or run.
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
"""Packages whose version is part of the key anyway. For code of a user, the packages are libraries."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def code_at(target: Any) -> Any:
    """Return the modules of a class or function by name, or its own source if it is defined in the main program."""
    module = inspect.getmodule(target)
    return _modules(vars(module)) if module is not None and module.__name__ != "__main__" else _source(target)


def described(value: Any) -> Any:
    """Describe a value and the code that it is made of.

    A function is described by its source, defaults, closure, the globals that it uses, and the modules of its package
    or folder that its module imports. So are methods and objects of classes, together with their attributes. Functions
    and classes of libraries are described by name, and their objects by ``repr``.
    """
    return _Description(_package(value)).of(value)


class _Description:
    """A description. A value that occurs again is described by its number, so that cycles end."""

    def __init__(self, package: str) -> None:
        self._package = package
        """Top-level package of the described value. The package is no library."""
        self._numbers: dict[int, int] = {}
        self._described_files: set[str] = set()
        self._alive: list[Any] = []  # keeps ids unique

    def of(self, value: Any) -> Any:
        """Describe a value, as `described`."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)]]
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        if isinstance(value, Mapping):
            return [[self.of(key), self.of(entry)] for key, entry in value.items()]
        if isinstance(value, (list, tuple)):
            return [self.of(entry) for entry in value]
        if isinstance(value, (set, frozenset)):
            return [self.of(entry) for entry in sorted(value, key=_repr)]  # equal order in every process
        array = _as_array(value)
        if array is None:
            return self._code(value)
        is_plain = not array.dtype.hasobject
        numbers = hashlib.sha256(array.tobytes()).hexdigest() if is_plain else self.of(array.tolist())
        content = [str(array.dtype), list(array.shape), numbers]
        if isinstance(value, np.ndarray):
            return content
        # an object of the user has more than its array, and a table has names
        is_own = self._is_user_code(type(value))
        return [content, self._code(value) if is_own else self.of(getattr(value, "axes", None))]

    def _code(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if not inspect.isclass(value) and callable(inner := getattr(value, "__wrapped__", None)):
            return ["wrapped", self.of(inner), *([self._function(value)] if inspect.isfunction(value) else [])]
        if inspect.ismodule(value):
            return value.__name__
        if inspect.isfunction(value) or inspect.isclass(value):
            if not self._is_user_code(value):
                return f"{value.__module__}.{value.__qualname__}"
            return self._function(value) if inspect.isfunction(value) else self._class(value)
        if isinstance(value, enum.Enum) or not self._is_user_code(type(value)):
            return _repr(value)
        return [self.of(type(value)), self.of(_attributes(value))]

    def _is_user_code(self, target: Any) -> bool:
        """Return whether a function or class is defined interactively or in a file outside libraries."""
        module, top = inspect.getmodule(target), str(target.__module__).partition(".")[0]
        if top in ("__main__", self._package):
            return True
        file = getattr(module, "__file__", None) or ""
        return top not in _VERSIONED and file.endswith(".py") and not _LIBRARY.search(file)

    def _function(self, function: Any) -> Any:
        cells, names = [_content(cell) for cell in function.__closure__ or ()], function.__globals__
        defaults = self.of((function.__defaults__, function.__kwdefaults__, cells))
        return [_source(function), defaults, self._globals(function.__code__, names), self._imports(names)]

    def _class(self, cls: type) -> Any:
        bodies = [inspect.unwrap(body) for body in vars(cls).values() if inspect.isfunction(body)]
        used = [self._globals(body.__code__, body.__globals__) for body in bodies if inspect.isfunction(body)]
        bases = [self.of(base) for base in cls.__bases__]
        names = getattr(sys.modules.get(cls.__module__), "__dict__", {})
        return [_source(cls), used, bases, self._imports(names)]

    def _globals(self, code: CodeType, names: Mapping[str, Any]) -> Any:
        """Describe the globals that code uses. A value that play may change is described by its assignments."""
        result = {}
        for name in sorted({name for body in _bodies(code) for name in body.co_names} & names.keys()):
            value = names[name]
            fixed = _is_immutable(value) or callable(value) or inspect.ismodule(value)
            if fixed or self._is_user_code(type(value)):
                result[name] = self.of(value)
            else:
                result[name] = _assignments(names.get("__file__"), name)
        return result

    def _imports(self, names: Mapping[str, Any]) -> Any:
        """Return the sources of the user's modules that a module imports, once per module."""
        file = str(names.get("__file__"))
        if file in self._described_files:
            return {}
        self._described_files.add(file)
        return {name: text for name, text in _modules(names).items() if name != names["__name__"]}


def _package(value: Any) -> str:
    """Return the top-level package or module of a player."""
    while isinstance(value, (functools.partial, MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    target = value if inspect.isfunction(value) or inspect.isclass(value) else type(value)
    return str(target.__module__).partition(".")[0]


def _is_immutable(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (tuple, frozenset)) and all(map(_is_immutable, value)))


def _attributes(value: Any) -> Any:
    """Return the attributes of an object, with or without slots."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in names if hasattr(value, name)}}


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return an array, a tensor or a table, whose ``repr`` would be abbreviated, as an array. None for other values."""
    if isinstance(value, np.generic) or not hasattr(type(value), "__array__"):
        return None
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            value = value.float() if str(value.dtype) == "torch.bfloat16" else value  # numpy has none
        return np.asarray(value)
    except Exception:  # noqa: BLE001  # such as of sparse tensors
        return None


def _repr(value: Any) -> str:
    """Return ``repr`` without memory addresses."""
    return _ADDRESS.sub("", repr(value))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _bodies(code: CodeType) -> Iterator[CodeType]:
    """Yield code and the code of functions defined in it."""
    yield code
    for inner in code.co_consts:
        if inspect.iscode(inner):
            yield from _bodies(inner)


def _source(target: Any) -> str:
    code = getattr(target, "__code__", None)
    try:
        source = inspect.getsource(target)
    except (OSError, TypeError):  # entered interactively, read from stdin, or compiled
        return " ".join([getattr(target, "__qualname__", ""), *map(_compiled, [code] if code else _members(target))])
    if code is not None and code.co_name == "<lambda>":  # another one may be in the same line
        return f"{min((column for *_, column, _ in code.co_positions() if column), default=0)} {source}"
    return source


def _members(cls: Any) -> list[Any]:
    """Return the code of the methods of a class, and its constants."""
    members = [(name, getattr(each, "__func__", each)) for name, each in getattr(cls, "__dict__", {}).items()]
    return [
        getattr(each, "__code__", each)
        for name, each in members
        if inspect.isfunction(each) or (_is_immutable(each) and not name.startswith("__"))
    ]


def _compiled(code: Any) -> str:
    """Describe code without a source, or a constant."""
    if inspect.iscode(code):
        return " ".join(
            f"{body.co_code.hex()} {[_compiled(each) for each in body.co_consts if not inspect.iscode(each)]} "
            f"{body.co_names}"
            for body in _bodies(code)
        )
    if isinstance(code, tuple | frozenset):
        parts = list(map(_compiled, code))
        return f"{type(code).__name__} {parts if isinstance(code, tuple) else sorted(parts)}"  # equal in each process
    return repr(code)


def _assignments(file: Any, name: str) -> list[str]:
    """Return the assignments to a global in the source of a module. Empty without a file."""
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (TypeError, OSError, SyntaxError, ValueError, RecursionError):
        return []
    result = []
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            if any(part.id == name for part in names):
                result.append(ast.unparse(node))
    return result


def _modules(names: Mapping[str, Any]) -> dict[str, str]:
    """Return the source of a module, given its globals, and of all modules of its package or folder that it imports."""
    file = names.get("__file__")
    if not file or not file.endswith(".py"):
        return {}
    name, path = str(names["__name__"]), Path(file)
    folder = path.parent.parent if path.name == "__init__.py" else path.parent
    root = folder.parents[name.count(".") - 1] if "." in name else folder
    top = name.partition(".")[0] if "." in name or path.name == "__init__.py" else ""
    find = functools.partial(_file_of, root=root, top=top)
    sources: dict[str, str] = {}
    queue = [(name, path)]
    while queue:
        name, path = queue.pop()
        if name in sources:
            continue
        sources[name] = path.read_text(encoding="utf-8", errors="replace")
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        queue += [
            (module, file) for module in _imported(sources[name], package, find) if (file := find(module)) is not None
        ]
    return sources


def _file_of(name: str, *, root: Path, top: str) -> Path | None:
    """Return the source file of a module in the package `top` without an import, or None for any other module."""
    if not name or (top and name.partition(".")[0] != top):
        return None
    path = root.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imported(text: str, package: str, find: Callable[[str], Path | None]) -> Iterator[str]:
    """Yield the modules that a source imports anywhere in it. Some names are objects of a module instead."""
    for level, module, aliases in _import_statements(text):
        if level is None:
            yield from aliases
            continue
        parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
        base = ".".join(filter(None, [*parents, module]))
        names = [f"{base}.{alias}" for alias in aliases]
        yield from names
        if not all(map(find, names)):
            yield base


@functools.lru_cache(maxsize=512)  # players and environments of a benchmark share most modules
def _import_statements(text: str) -> tuple[tuple[int | None, str, tuple[str, ...]], ...]:
    """Return level, module and names of each ``from`` import of a source. Others have no level and no module."""
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError):  # the import would fail, too, or never happens
        return ()
    return tuple(
        (getattr(node, "level", None), getattr(node, "module", None) or "", tuple(alias.name for alias in node.names))
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
