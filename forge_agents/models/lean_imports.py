"""Faster imports of transformers and vLLM, without libraries that text models do not need."""

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
"""transformers uses SciPy for losses of vision models and scikit-learn for a curve of assisted generation."""


@contextmanager
def lean_transformers() -> Iterator[None]:
    """Keep transformers from importing SciPy and scikit-learn inside the block. Saves more than a second."""
    with without_garbage_collection():
        _import_transformers()
        import transformers.utils

        originals = {name: getattr(transformers.utils, name) for name in _UNUSED}
        try:
            for name in _UNUSED:
                setattr(transformers.utils, name, lambda: False)
            yield
        finally:
            for name, function in originals.items():
                setattr(transformers.utils, name, function)


@contextmanager
def without_scipy_signal() -> Iterator[None]:
    """Keep vLLM from importing ``scipy.signal``, used to resample audio, inside the block. Saves half a second."""
    name = "scipy.signal"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # the documented way to make an import fail
    try:
        yield
    finally:
        del sys.modules[name]


def _import_transformers() -> None:
    """Import transformers with a cached `packages_distributions`, which takes half a second in every process."""
    if "transformers" in sys.modules:
        return
    original = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: packages_distributions(original)
    try:
        import transformers.utils  # noqa: F401
    finally:
        importlib.metadata.packages_distributions = original


def packages_distributions(compute: Callable[[], Mapping[str, list[str]]]) -> Mapping[str, list[str]]:
    """Return `importlib.metadata.packages_distributions`, which reads files of every installed package, from a cache.

    The cache is valid until a package is installed, removed or changed.

    Args:
        compute: The original function.
    """
    places, file = _places(), cache_folder() / "packages.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # missing or invalid
        cached = json.loads(file.read_text())
        if cached["places"] == places:
            return dict(cached["packages"])
    packages = compute()
    with contextlib.suppress(OSError):  # without the cache, it is computed again
        write_atomic(file, json.dumps({"places": places, "packages": packages}))
    return packages


def _places() -> list[list[Any]]:
    """Folders of the search path with installed packages, and the time of the last change in each."""
    places: list[list[Any]] = []
    for entry in sys.path:
        with contextlib.suppress(OSError):
            folder = Path(entry).absolute()
            changed = folder.stat().st_mtime_ns  # an upgrade renames a package's folder in it
            if folder.is_file() or any(child.suffix in (".dist-info", ".egg-info") for child in folder.iterdir()):
                places.append([str(folder), changed])
    return places
