"""Objects that users name by their import path, and imports of big libraries in four fifths of the time."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forge_agents.errors import did_you_mean


def imported(place: str, what: str) -> Any:
    """The object at "package.module:name".

    Args:
        place: What a user wrote.
        what: The setting that it was written for, for the message.

    Raises:
        ValueError: There is no such module or name.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as cause:
        near = did_you_mean(name, vars(sys.modules[module])) if module in sys.modules else ""
        raise ValueError(
            f"{what} {place!r} cannot be imported ({cause}); write 'package.module:object'.{near}"
        ) from cause


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
