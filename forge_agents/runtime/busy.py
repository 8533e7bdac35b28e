"""How long a part of the machine had something to do.

In: the beginnings and ends of its work. Out: seconds. Waits for nothing.
"""

from __future__ import annotations

import time


class Busy:
    """Counts the seconds in which at least one piece of work is under way; pieces may overlap.

    Use it as a context around each piece, in one thread.
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._since = self._before = 0.0

    def __enter__(self) -> None:
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1

    def __exit__(self, *exc: object) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._before += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """So far, the work under way included."""
        return self._before + (time.perf_counter() - self._since if self._under_way else 0.0)
