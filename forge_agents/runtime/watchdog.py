"""Interrupts code of environments and scripts that blocks the thread of the event loop."""

from __future__ import annotations

import asyncio
import select
import signal
import sys
import threading
import time
from types import FrameType

from forge_agents.errors import StallError
from forge_agents.output import write_error
from forge_agents.runtime import stalls as _stalls

BLOCK_TIMEOUT_S = 120.0
"""Timeout in seconds of code that blocks the controller's thread, such as a step of an environment."""

CONTROLLER = "controller"
"""`StallError.who` of code that blocked the thread."""


class Watchdog:
    """Interrupts code that blocks the thread of the event loop for over `limit_s`, such as an unisolated environment.

    A process that was suspended continues, and so does one whose output nobody reads.

    If the loop runs in the main thread, a `StallError` is raised inside that code, and its episode fails. In another
    thread, or with ``interrupts=False``, the watchdog only writes to the error stream.
    """

    def __init__(self, limit_s: float | None = None, *, interrupts: bool = True) -> None:
        self._limit_s = limit_s or BLOCK_TIMEOUT_S
        self._period_s = min(1.0, self._limit_s / 4)
        self._owner = threading.current_thread()
        self._interrupts = interrupts and self._owner is threading.main_thread()
        self._last_tick = time.monotonic()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="forge-watchdog", daemon=True)

    def __enter__(self) -> None:
        self._tick()
        if self._interrupts:
            self._before = signal.signal(signal.SIGUSR2, self._interrupt)
        self._watcher.start()

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._handle.cancel()
        self._watcher.join()
        if self._interrupts:
            signal.signal(signal.SIGUSR2, self._before)

    def _tick(self) -> None:
        self._last_tick = time.monotonic()
        self._handle = asyncio.get_running_loop().call_later(self._period_s, self._tick)

    def _watch(self) -> None:
        reported, woke, busy = 0.0, time.monotonic(), time.process_time()
        while not self._over.wait(self._period_s):
            before, woke, busy_before, busy = woke, time.monotonic(), busy, time.process_time()
            slept = woke - before > self._period_s + self._limit_s / 2  # this thread as well
            suspended = slept and busy - busy_before < (woke - before) / 4  # or else a library held the interpreter
            if suspended or _nobody_reads():
                self._last_tick = woke
            last_tick = self._last_tick
            if time.monotonic() - last_tick < self._limit_s or self._owner.ident is None or reported == last_tick:
                continue
            if self._interrupts:  # a signal also interrupts blocking calls
                signal.pthread_kill(self._owner.ident, signal.SIGUSR2)
            else:
                reported = last_tick
                place = _stalls.place(sys._current_frames().get(self._owner.ident))
                write_error(f"{place} has blocked the controller's thread for over {self._limit_s:g} s")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        held_s = time.monotonic() - self._last_tick
        if held_s < self._limit_s:  # it continued before the signal arrived
            return
        self._last_tick = time.monotonic()  # cleanup gets its own time
        error = StallError(
            f"{_stalls.place(frame)} blocked the controller's thread for {held_s:.0f} s; at most "
            f"{self._limit_s:g} s are allowed, because nothing else runs meanwhile. Fix it, or register the "
            "environment with isolation='process'",
            CONTROLLER,
        )
        error.snapshot = _stalls.snapshot()
        raise error


def _nobody_reads() -> bool:
    """Return whether output or error stream are full, as after Ctrl-S. Then a write blocks, which is no fault."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, select.POLLOUT)
    return len(poll.poll(0)) < 2
