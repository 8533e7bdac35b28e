"""Import of user modules and objects, import paths of child processes, and faster imports of large libraries."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from forge_agents.errors import UntrustedModuleError, did_you_mean

_LAST_FOLDERS = "FORGE_AGENTS_PYTHONPATH"
"""Environment variable of child processes: folders that follow the installed packages on their import path."""
_user_folders: list[str] = []
_OURS = ("forge_agents", "forge_envs", "forge_trainers", "forge_verifiers")
_PLUGINS = ("forge_agents.envs", "forge_agents.verifiers")
"""Entry points of packages for this project."""
MODULE_FLAG = "--trust_module"
MODULE_ADVICE = "Run the command in the module's folder, put the module next to the run's file, or install it"
_file_texts: list[str] = []
"""Texts of the settings files of this call, perhaps of a stranger."""
_trusted: list[str] = []
_OF_RUNS = ("metrics.jsonl", "episodes.jsonl", "plan.yaml", ".lock")
"""Files of a run."""
_run_folders: list[Path] = []
"""Folders of runs whose settings were read, perhaps of strangers."""


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
        UntrustedModuleError: A settings file names the module. See `restrict_modules` and `exclude_run_folder`.
        ImportError: There is no such module, or its import fails.
    """
    if any(f"{name}:" in text for text in _file_texts):
        _check_trusted(package := name.partition(".")[0])
        if "__main__" in name.split(".")[1:] and package not in _trusted:
            raise UntrustedModuleError(
                f"the settings file names {name}, a program. Add {MODULE_FLAG} {package} to allow this"
            )
    sys.path += [folder for folder in _searched_folders() if folder not in sys.path]
    if not all(name.split(".")):  # a relative import, for which Python raises TypeError
        raise ModuleNotFoundError(f"No module named {name!r}")
    if _run_folders and name.partition(".")[0] not in _trusted:
        _check_folder(name)
    return importlib.import_module(name)


def holds_run(folder: Path) -> bool:
    """Return whether a folder has files of a run. Other programs write folders named ``checkpoints`` as well."""
    return any((folder / name).exists() for name in _OF_RUNS) or any((folder / "checkpoints").glob("step-*"))


def exclude_run_folder(folder: Path) -> None:
    """Make `import_user_module` refuse modules in the folder of a run, which may be a stranger's.

    The current folder may be that folder or one above it, where ``run.module`` names a module of the run.
    """
    if (resolved := folder.resolve()) not in _run_folders:
        _run_folders.append(resolved)
    searched = _searched_folders()
    sys.path[:] = [entry for entry in sys.path if entry not in _user_folders or entry in searched]


def _searched_folders() -> list[str]:
    """Return the users' folders on the import path, of a run's only those with a trusted module.

    Libraries also try to import optional packages, which a file in these folders could stand for.
    """
    trusted = [name for name in _trusted if not _is_installed(name)]
    return [
        folder
        for folder in _user_folders
        if not any(map(Path(folder).is_relative_to, _run_folders)) or any(_is_in(folder, name) for name in trusted)
    ]


def _is_in(folder: str, name: str) -> bool:
    return PathFinder.find_spec(name, [folder]) is not None


def _check_folder(name: str) -> None:
    """Raise UntrustedModuleError if a module, or a package that contains it, lies in an excluded folder."""
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        try:  # this imports the packages around the module, which were checked before
            spec = importlib.util.find_spec(".".join(parts[:number]))
        except ImportError:
            return  # the import itself explains it
        except ValueError:  # a module of a script or notebook, which has no spec
            continue
        if spec is None:
            for excluded in set(_user_folders).difference(_searched_folders()):
                if _is_in(excluded, parts[0]):
                    raise _of_run(name, excluded)
            return
        for place in (*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else ())):
            path = Path(place).resolve()
            if any(map(path.is_relative_to, _library_folders())):
                continue  # of a virtual environment in the folder
            for folder in filter(path.is_relative_to, _run_folders):
                raise _of_run(name, folder)


def _of_run(name: str, folder: str | Path) -> UntrustedModuleError:
    return UntrustedModuleError(
        f"the module {name} lies in the folder of a run, {folder}, whose code is not run. Move the module out of this "
        f"folder, or add {MODULE_FLAG} {name.partition('.')[0]} to allow this"
    )


def restrict_modules(files: Iterable[Any], trusted: Iterable[str] = ()) -> None:
    """Restrict the modules that settings files may name from now on. Earlier restrictions end.

    A file may come from a stranger, and among the functions of Python's library and of installed packages are some that
    run commands. The user's own modules, those of this project and of packages with an entry point for it are allowed.

    Args:
        files: Contents of the files.
        trusted: Values of `MODULE_FLAG`, each a module or package that is allowed as well.
    """
    _file_texts.clear()
    _trusted[:] = [name.partition(".")[0] for name in trusted]
    restrict_modules_of(files)


def restrict_modules_of(files: Iterable[Any]) -> None:
    """Restrict the modules that these files may name as well. See `restrict_modules`."""
    waiting = list(files)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            _file_texts.append(value)
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value


def restrictions() -> tuple[list[str], list[str], list[Path]]:
    """Return the restrictions of this process, for `take_restrictions` in a child process."""
    return [text for text in _file_texts if ":" in text], _trusted, _run_folders


def take_restrictions(of_parent: tuple[list[str], list[str], list[Path]]) -> None:
    """Restrict the modules that this process imports as its parent does."""
    _file_texts[:], _trusted[:], _run_folders[:] = of_parent


def check_origin(value: Any, place: str, *, ours: bool = True) -> Any:
    """Return the object at "module:name", unless a settings file names one that its module has from elsewhere.

    `ours` says whether functions of this project are allowed. A player calls its function with texts of other players.

    Raises:
        UntrustedModuleError: The object is a function or class of a module that a file may not name.
    """
    # functions of any kind, such as cached and compiled ones, and classes
    if hasattr(value, "__qualname__") and any(place in text for text in _file_texts):
        package = str(getattr(value, "__module__", None) or "builtins").partition(".")[0]
        if package in _OURS and not ours:
            raise UntrustedModuleError(f"the settings file names {place}, which is no function of a player")
        _check_trusted(package)
    return value


def _check_trusted(package: str) -> None:
    """Raise UntrustedModuleError if a settings file may not name code of this package."""
    if package in (*_OURS, *_trusted) or not _is_installed(package):
        return
    plugins = (point.value for group in _PLUGINS for point in metadata.entry_points(group=group))
    if package not in {plugin.partition(":")[0].partition(".")[0] for plugin in plugins}:
        raise UntrustedModuleError(
            f"the settings file names code of {package}, which is installed here and not made for this project. It "
            f"could run anything. Add {MODULE_FLAG} {package} to allow this"
        )


def _is_installed(package: str) -> bool:
    """Return whether a package belongs to Python's library or to installed packages."""
    if package in sys.stdlib_module_names or package == "__main__":
        return True
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return True
    if spec is None:
        return False
    return any(map(is_library, spec.submodule_search_locations or [spec.origin or "<frozen"]))


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
    last += [folder for folder in _searched_folders() if folder not in first]
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
    if not name:  # `import_user_module` would not recognize the module of a file, and its import may run anything
        raise ValueError(f"{what} {place!r} names no object of a module. Write 'package.module:object'.")
    try:
        return check_origin(getattr(import_user_module(module), name), place)
    except UntrustedModuleError as cause:
        raise ValueError(f"{what} {place!r}: {cause}") from cause
    except (ImportError, AttributeError, ValueError) as cause:
        advice = import_advice(module, cause, "Write 'package.module:object'")
        near = did_you_mean(name, vars(sys.modules[module])) if module in sys.modules else ""
        raise ValueError(f"{what} {place!r} cannot be imported ({cause}). {advice}.{near}") from cause


def import_advice(module: str, cause: BaseException, form: str) -> str:
    """Return what to do about a failed import: where to put the module if there is none, else `form`."""
    is_missing = isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}.")
    return MODULE_ADVICE if is_missing else form


def plugin_object(place: str) -> Any:
    """Return the object at "module:name" of one of our plugins.

    The core names its plugins as text and imports them when they are used, so it works without them.
    """
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection inside the block, for imports of thousands of long-lived modules."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _PackageNames(Mapping[str, list[str]]):
    """Distributions by top-level module. A name that is a distribution's as well is answered without reading all."""

    def __init__(self, read: Callable[[], Mapping[str, list[str]]]) -> None:
        self._read = functools.cache(read)

    def __getitem__(self, name: str) -> list[str]:
        try:
            return [metadata.metadata(name)["Name"]]
        except metadata.PackageNotFoundError:
            return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


@contextmanager
def with_lazy_package_names() -> Iterator[None]:
    """Let libraries that are imported inside the block read the file lists of all installed packages only at need.

    Transformers asks for `packages_distributions` at its import and then looks up three names. Reading all lists takes
    a tenth of an engine's start. A block that begins inside one of another thread changes and restores nothing.
    """
    module: Any = metadata
    read = module.packages_distributions
    if getattr(read, "func", None) is not _PackageNames:
        module.packages_distributions = functools.partial(_PackageNames, read)
    try:
        yield
    finally:
        if getattr(read, "func", None) is not _PackageNames:
            module.packages_distributions = read


def _is_absent() -> bool:
    return False


@contextmanager
def lean_transformers() -> Iterator[None]:
    """Let transformers be imported inside the block without scikit-learn, pandas and garbage collections.

    Only assisted generation uses scikit-learn, whose import takes a quarter of the time for a tokenizer. A block that
    begins inside one of another thread changes and restores nothing.
    """
    from forge_agents.private_folder import use_code_folder

    use_code_folder()
    with without_garbage_collection(), with_lazy_package_names():
        from transformers import utils

        check: Any = utils.is_sklearn_available
        if check is not _is_absent:
            vars(utils)["is_sklearn_available"] = _is_absent
        try:
            yield
        finally:
            if check is not _is_absent:
                vars(utils)["is_sklearn_available"] = check


@contextmanager
def without_packages(*names: str) -> Iterator[None]:
    """Make packages appear as not installed inside the block, so that large libraries do not import them.

    The names may be modules of packages as well. Modules that were imported before the block stay imported.
    """
    hidden = [name for name in names if name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(hidden))  # the import of a module that is None fails
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
