"""Faster import of transformers, without libraries that text models do not need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from forge_agents.imports import without_garbage_collection

_UNUSED = ("is_scipy_available", "is_sklearn_available")
"""transformers uses SciPy for losses of vision models and scikit-learn for a curve of assisted generation."""


@contextmanager
def lean_transformers() -> Iterator[None]:
    """Keep transformers from importing SciPy and scikit-learn inside the block. Saves a second."""
    with without_garbage_collection():
        import transformers.utils

        originals = {name: getattr(transformers.utils, name) for name in _UNUSED}
        try:
            for name in _UNUSED:
                setattr(transformers.utils, name, lambda: False)
            yield
        finally:
            for name, function in originals.items():
                setattr(transformers.utils, name, function)
