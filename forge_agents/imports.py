"""Imports of big libraries in four fifths of the time.

In: a block that imports. Out: nothing. Waits for nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Nobody looks for garbage inside the block: what thousands of modules define lives on."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
