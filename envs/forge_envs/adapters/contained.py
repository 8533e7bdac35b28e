"""Isolation of a library's randomness, and conversion of its errors and texts."""

from __future__ import annotations

import contextlib
import io
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from forge_agents.credentials import redact
from forge_agents.envs.env import Outcome, writable

_lock = threading.RLock()


class Randomness:
    """Private state of the global generators of Python and NumPy. `copy.deepcopy` forks it."""

    def __init__(self, seed: int) -> None:
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed % 2**32).get_state()  # same kind as the global one

    @contextlib.contextmanager
    def contained(self) -> Iterator[None]:
        """Use this state for the global generators inside the context, and discard printed text."""
        # A global lock, because two threads that swap the global states would mix them up.
        with _lock, contextlib.redirect_stdout(io.StringIO()):
            outer = random.getstate(), np.random.get_state()  # noqa: NPY002
            random.setstate(self._python)
            np.random.set_state(self._numpy)  # noqa: NPY002
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
                random.setstate(outer[0])
                np.random.set_state(outer[1])  # noqa: NPY002


def failure(error: BaseException) -> str:
    """Return an exception as one short line for an info."""
    text = redact(" ".join(str(error)[:2000].split()))  # addresses may hold a token
    return f"{type(error).__name__}: {text[:200]}"


def ended(agent: str, reward: float, **info: Any) -> Outcome:
    """Return the end of a single-agent episode."""
    return Outcome(rewards={agent: reward}, done=True, info={agent: info})


def fitting(text: str, max_chars: int, mark: str = "[...]\n") -> str:
    """Return `text` without lone surrogates, shortened to its end after `mark`."""
    text = writable(text)
    return text if len(text) <= max_chars else mark + text[len(mark) - max_chars :]
