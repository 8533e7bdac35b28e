"""Modules and objects that users name, where they are found, and faster imports of large libraries."""

from __future__ import annotations

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
"""Environment variable of our child processes: folders that follow the installed packages on their import path."""
_user_folders: list[str] = []


def add_user_folder(folder: Path) -> None:
    """Have `import_user_module` look in `folder`, too.

    A folder may hold a stranger's run, so it comes onto the import path only when a module of the user's is named, and
    then behind everything that is installed. The folder that was added last is searched before the others.
    """
    name = str(folder.resolve())
    _user_folders[:] = [name, *(other for other in _user_folders if other != name)]


def import_user_module(name: str) -> ModuleType:
    """Import a module that the user has named.

    Raises:
        ImportError: There is no such module, or it fails to be imported.
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
        if _is_installed(folder):
            folders = last
        elif folder.is_dir():
            folders.append(str(folder))
    first += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    last += [folder for folder in _user_folders if folder not in first]
    paths = {"PYTHONPATH": first, _LAST_FOLDERS: last}
    return {name: os.pathsep.join(dict.fromkeys(folders)) for name, folders in paths.items()}


def _is_installed(folder: Path) -> bool:
    """Whether a folder belongs to Python's library or to installed packages, and not just to the same prefix.

    With Python in ``/usr``, a user's project may well be in ``/usr/src``.
    """
    roots = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return folder.name in ("site-packages", "dist-packages") or any(map(folder.is_relative_to, roots))


def extend_path() -> None:
    """In a child process: add the folders that `path_variables` put behind the installed packages."""
    folders = os.environ.get(_LAST_FOLDERS, "").split(os.pathsep)
    sys.path += [folder for folder in folders if folder and folder not in sys.path]


def import_object(place: str, what: str) -> Any:
    """The object at "package.module:name".

    Args:
        place: What a user wrote.
        what: The setting that it was written for, for the message.

    Raises:
        ValueError: There is no such module or name.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(import_user_module(module), name)
    except (ImportError, AttributeError, ValueError) as cause:
        near = did_you_mean(name, vars(sys.modules[module])) if module in sys.modules else ""
        raise ValueError(
            f"{what} {place!r} cannot be imported ({cause}); write 'package.module:object'.{near}"
        ) from cause


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Nobody looks for garbage inside the block: what thousands of modules define lives on."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
