"""What every adapter needs around a library's code: its randomness kept to itself, its failures and texts told.

In: a seed; exceptions and texts of libraries. Out: a context in which `random` and `numpy.random` are an instance's
own; outcomes and observations. Waits for another thread that is inside such a context.
"""

from __future__ import annotations

import contextlib
import io
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from forge_agents.envs.env import Outcome, writable

_lock = threading.RLock()


class Randomness:
    """A private state for the global generators of Python and numpy; `copy.deepcopy` forks it."""

    def __init__(self, seed: int) -> None:
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed % 2**32).get_state()  # the global one's kind

    @contextlib.contextmanager
    def contained(self) -> Iterator[None]:
        """The globals hold this state inside, and what they held before afterwards; printed text is dropped."""
        # One lock for all: between two threads that swap the same globals, each would keep the other's state.
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
    """An exception as one short line for an info."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def ended(agent: str, reward: float, **info: Any) -> Outcome:
    """The end of an episode of one seat."""
    return Outcome(rewards={agent: reward}, done=True, info={agent: info})


def fitting(text: str, max_chars: int, mark: str = "[...]\n") -> str:
    """The text in characters that can be written; of a long one its end, after `mark`."""
    text = writable(text)
    return text if len(text) <= max_chars else mark + text[len(mark) - max_chars :]
