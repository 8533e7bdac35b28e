"""Calls that must fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def raises(
    error: type[BaseException] | tuple[type[BaseException], ...],
    message: str,
    call: Callable[..., object],
    /,
    *args: object,
    **options: object,
) -> None:
    """Fail unless ``call(*args, **options)`` raises `error` with a text in which the pattern `message` is found."""
    __tracebackhide__ = True
    with pytest.raises(error, match=message):
        call(*args, **options)
