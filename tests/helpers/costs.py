"""Helper for tests of how the cost of a computation grows with its input."""

import time
from collections.abc import Callable


def costs_less_than(
    factor: float, work: Callable[[int], object], large: int, small: int, *, slack_s: float = 0.0
) -> bool:
    """Return whether ``work(large)`` takes less than `factor` times the processor time of ``work(small)``.

    The times are measured up to three times, because other programs of the machine can slow one measurement down.
    """

    def seconds(size: int) -> float:
        start = time.thread_time()
        work(size)
        return time.thread_time() - start

    return any(seconds(large) < factor * seconds(small) + slack_s for _ in range(3))
