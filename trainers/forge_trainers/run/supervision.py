"""How a synchronous caller runs the controller: its event loop, Ctrl-C, and a stopwatch.

In: coroutines. Out: their results. Waits for them.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import FrameType
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

_CANCEL_S = 30.0
"""Work that is cancelled ends within this time."""


class LoopRunner:
    """One event loop for the life of a trainer, so that actors outlive a call of ``fit``.

    Inside a running loop, as in a notebook, the work moves to a thread of its own; Ctrl-C asks it to stop there.

    Args:
        on_close: Awaited before the loop closes.
    """

    def __init__(self, on_close: Callable[[], Awaitable[None]]) -> None:
        self._on_close = on_close
        self._runner: asyncio.Runner | None = None
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._working: asyncio.Task[Any] | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end."""
        if self._runner is None:
            self._runner = asyncio.Runner()
            atexit.register(self.close)
            if _inside_a_loop():
                self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="forge-controller")
        runner = self._runner

        async def tracked() -> T:
            self._working = asyncio.current_task()
            return await work

        return self._in_place(lambda: runner.run(tracked()))

    def close(self) -> None:
        """Await `on_close` and end the loop. Safe to call twice."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        atexit.unregister(self.close)

        def finish() -> None:
            with contextlib.closing(runner):
                runner.run(self._closing())

        self._in_place(finish)
        if self._thread is not None:
            self._thread.shutdown()

    def _in_place(self, call: Callable[[], T]) -> T:
        """Run `call` where the loop lives."""
        if self._thread is None:
            return call()
        future = self._thread.submit(call)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if future.done() or not Interrupt.pass_on(signal.SIGINT):
                    self._give_up(future)
                    raise

    def _give_up(self, future: concurrent.futures.Future[Any]) -> None:
        """Cancel what the thread does, so that the next call need not wait for it."""
        if self._runner is not None and self._working is not None:
            self._runner.get_loop().call_soon_threadsafe(self._working.cancel)
        concurrent.futures.wait([future], timeout=_CANCEL_S)

    async def _closing(self) -> None:
        await self._on_close()


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Stopwatch:
    """Seconds of the stages of a step, and who had nothing to do meanwhile.

    Args:
        busy_s: Gives the seconds in which each part of the machine had something to do, by its name.
    """

    def __init__(self, busy_s: Callable[[], Mapping[str, float]] = dict) -> None:
        self._busy_s, self._busy_before = busy_s, busy_s()
        self._started = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}
        self._idle: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """`stage` took the time since the last lap."""
        now = time.perf_counter()
        self._laps[f"time/{stage}_s"] = now - self._last
        self._last = now
        self._idle = {
            f"idle/{name}": min(1.0, max(0.0, 1 - (busy_s - self._busy_before.get(name, 0.0)) / self.total_s))
            for name, busy_s in self._busy_s().items()
        }

    @property
    def total_s(self) -> float:
        """From the start to the last lap."""
        return self._last - self._started

    @property
    def times(self) -> dict[str, float]:
        """``time/STAGE_s`` by stage, ``time/step_s`` for all, and ``idle/PART``, a share in [0, 1]."""
        return {**self._laps, **self._idle, "time/step_s": self.total_s}


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a request to finish the step and save it; the second acts as ever.

    Args:
        say: Shows a line to the user.
    """

    _in_threads: ClassVar[list[Interrupt]] = []
    """Those that get no signal themselves."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._asked_by: signal.Signals | None = None
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        else:
            self._in_threads.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()
        if self in self._in_threads:
            self._in_threads.remove(self)

    @classmethod
    def pass_on(cls, number: signal.Signals) -> bool:
        """Tell those in other threads of a signal that came to the main one. Returns whether one heard its first."""
        fresh = [one for one in cls._in_threads if not one.asked]
        for one in fresh:
            one._on_signal(number, None)
        return bool(fresh)

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._asked_by is not None

    def stop_if_asked(self, steps: int) -> None:
        """End the program where a signal has come; `steps` are saved.

        Raises:
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM, with the status 143 of a process that it ended.
        """
        if self._asked_by is None:
            return
        told = f"stopped after step {steps}; run it again to continue"
        if self._asked_by is signal.SIGTERM:
            self._say(told)
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt(told)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked_by = signal.Signals(number)
        self._restore()
        self._say(f"{self._asked_by.name}: finishing this step and saving it; once more stops at once")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
