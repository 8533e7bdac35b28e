"""Import of user modules and objects, import paths of child processes, and faster imports of large libraries."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from forge_agents.errors import did_you_mean

_LAST_FOLDERS = "FORGE_AGENTS_PYTHONPATH"
"""Environment variable of child processes: folders that follow the installed packages on their import path."""
_user_folders: list[str] = []


def add_user_folder(folder: Path) -> None:
    """Make `import_user_module` search `folder` as well.

    A folder may hold a stranger's run, so it joins the import path only when a user module is imported, after
    everything that is installed. The folder added last is searched first.
    """
    name = str(folder.resolve())
    _user_folders[:] = [name, *(other for other in _user_folders if other != name)]


def import_user_module(name: str) -> ModuleType:
    """Import a module that the user has named.

    Raises:
        ImportError: There is no such module, or its import fails.
    """
    sys.path += [folder for folder in _user_folders if folder not in sys.path]
    return importlib.import_module(name)


def path_variables() -> dict[str, str]:
    """Return environment variables that give a child process the import path of this one.

    Folders that this process searches before the installed packages go to ``PYTHONPATH``. `extend_path` adds the
    others in the child. The child should be started with ``-P``: without it, Python searches the current folder first.
    """
    first, last = list[str](), list[str]()
    folders = first
    for entry in sys.path:
        folder = Path(entry).resolve()
        if is_library(folder):
            folders = last
        elif folder.is_dir():
            folders.append(str(folder))
    first += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    last += [folder for folder in _user_folders if folder not in first]
    paths = {"PYTHONPATH": first, _LAST_FOLDERS: last}
    return {name: os.pathsep.join(dict.fromkeys(folders)) for name, folders in paths.items()}


def is_library(path: str | Path) -> bool:
    """Return whether a file or folder belongs to Python's library or to installed packages.

    The prefix of the installation does not decide: with Python in ``/usr``, a user's project may be in ``/usr/src``.
    """
    if str(path).startswith("<frozen"):
        return True
    path = Path(path).resolve()
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    return any(map(path.is_relative_to, _library_folders()))


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({Path(sysconfig.get_path(kind)).resolve() for kind in kinds})


def extend_path() -> None:
    """In a child process, add the folders that `path_variables` put behind the installed packages."""
    folders = os.environ.get(_LAST_FOLDERS, "").split(os.pathsep)
    sys.path += [folder for folder in folders if folder and folder not in sys.path]


def import_object(place: str, what: str) -> Any:
    """Return the object at "package.module:name". `what` names the setting in the ValueError if there is none."""
    module, _, name = place.partition(":")
    try:
        return getattr(import_user_module(module), name)
    except (ImportError, AttributeError, ValueError) as cause:
        near = did_you_mean(name, vars(sys.modules[module])) if module in sys.modules else ""
        raise ValueError(
            f"{what} {place!r} cannot be imported ({cause}). Write 'package.module:object'.{near}"
        ) from cause


def plugin_object(place: str) -> Any:
    """Return the object at "module:name" of one of our plugins.

    The core names its plugins as text and imports them when they are used, so it works without them.
    """
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection inside the block, which imports thousands of long-lived modules."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
