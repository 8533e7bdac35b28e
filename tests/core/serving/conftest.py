"""Asynchronous tests of this folder, marked with ``anyio``, run on asyncio's event loop."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
