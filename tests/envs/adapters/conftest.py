"""Lets the tests of adapters share how they play and what hostile texts there are."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]


@pytest.fixture(scope="module", autouse=True)
def signals():
    """The verifiers library installs handlers whenever one of its environments is made."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
