"""Checks of arrays in saved states, which a stranger may have written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_WHOLE = 2**53
"""Largest whole number that is read. Floats represent all numbers up to it exactly."""


def numbers(
    state: Mapping[str, NDArray[Any]],
    name: str,
    *shape: int,
    low: float = -math.inf,
    high: float = math.inf,
    nan: bool = False,
) -> NDArray[Any]:
    """Return an array of a state, float64. Length -1 in `shape` is any length.

    Raises:
        ValueError: The array is missing or has another type or shape, or a number is not finite or outside of `low` to
            `high`. With `nan`, NaN is allowed.
    """
    import numpy as np

    array = _array(state, name, shape, "biuf", "numbers").astype(np.float64)
    values = array[~np.isnan(array)] if nan else array
    if not (np.isfinite(values).all() and (values >= low).all() and (values <= high).all()):
        bad = values[~(np.isfinite(values) & (values >= low) & (values <= high))]
        raise ValueError(f"{name} holds {bad[0]:g}. Expected finite numbers from {low:g} to {high:g}")
    return array


def whole(
    state: Mapping[str, NDArray[Any]], name: str, *shape: int, low: int = 0, high: int = MAX_WHOLE
) -> NDArray[Any]:
    """Return an array of whole numbers of a state, int64. Raises ValueError as `numbers` does."""
    import numpy as np

    array = _array(state, name, shape, "iu", "whole numbers")
    if array.size and not low <= int(array.min()) <= int(array.max()) <= high:
        bad = int(array.min()) if int(array.min()) < low else int(array.max())
        raise ValueError(f"{name} holds {bad}. Expected whole numbers from {low} to {high}")
    return array.astype(np.int64)


def texts(state: Mapping[str, NDArray[Any]], name: str, *shape: int) -> list[Any]:
    """Return an array of texts of a state as a list. Raises ValueError as `numbers` does."""
    array = _array(state, name, shape, "U", "texts")
    result: list[Any] = array.tolist()
    return result


def _array(
    state: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...], kinds: str, expected: str
) -> NDArray[Any]:
    import numpy as np

    if name not in state:
        raise ValueError(f"the state has no {name}")
    array = np.asarray(state[name])
    fits = len(array.shape) == len(shape) and all(n in (-1, m) for n, m in zip(shape, array.shape, strict=True))
    if not fits or (array.dtype.kind not in kinds and array.size):
        sizes = ", ".join("any" if n < 0 else str(n) for n in shape)
        raise ValueError(f"{name} holds {array.dtype} of shape {array.shape}. Expected {expected} of shape ({sizes})")
    return array
