"""transformers and vLLM, imported without what models of text do not need.

In: a block that imports. Out: nothing. Waits for nothing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_agents.files import cache_folder, write_atomic
from forge_agents.imports import without_garbage_collection

_UNUSED = ("is_scipy_available", "is_sklearn_available")
"""SciPy is for losses of models that see, scikit-learn for one curve of drafts."""


@contextmanager
def lean_transformers() -> Iterator[None]:
    """What transformers loads meanwhile does without SciPy and scikit-learn: more than a second of imports."""
    with without_garbage_collection():
        _import_transformers()
        import transformers.utils

        known = {name: getattr(transformers.utils, name) for name in _UNUSED}
        try:
            for name in _UNUSED:
                setattr(transformers.utils, name, lambda: False)
            yield
        finally:
            for name, function in known.items():
                setattr(transformers.utils, name, function)


@contextmanager
def without_scipy_signal() -> Iterator[None]:
    """What vLLM loads meanwhile does without SciPy's signals, half a second of imports to change a sound's rate."""
    name = "scipy.signal"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # the documented way to make its import fail
    try:
        yield
    finally:
        del sys.modules[name]


def _import_transformers() -> None:
    """It asks for `packages_distributions` in every process, at its import: half a second."""
    if "transformers" in sys.modules:
        return
    asked = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: packages_distributions(asked)
    try:
        import transformers.utils  # noqa: F401
    finally:
        importlib.metadata.packages_distributions = asked


def packages_distributions(ask: Callable[[], Mapping[str, list[str]]]) -> Mapping[str, list[str]]:
    """What `importlib.metadata.packages_distributions` says, which reads files of every package that is installed.

    It is kept in the cache folder for as long as no package comes, goes or changes.

    Args:
        ask: That function.
    """
    places, file = _places(), cache_folder() / "packages.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # none, or somebody else's
        kept = json.loads(file.read_text())
        if kept["places"] == places:
            return dict(kept["packages"])
    said = ask()
    with contextlib.suppress(OSError):  # then it is asked again next time
        write_atomic(file, json.dumps({"places": places, "packages": said}))
    return said


def _places() -> list[list[Any]]:
    """Folders of the search path where packages are installed, and when one last came, went or changed there."""
    places: list[list[Any]] = []
    for entry in sys.path:
        with contextlib.suppress(OSError):
            folder = Path(entry).absolute()
            changed = folder.stat().st_mtime_ns  # an upgrade renames a package's folder in it
            if folder.is_file() or any(one.suffix in (".dist-info", ".egg-info") for one in folder.iterdir()):
                places.append([str(folder), changed])
    return places
