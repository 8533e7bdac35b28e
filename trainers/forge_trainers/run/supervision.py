"""What stands around a loop: its event loop, Ctrl-C, a stopwatch, and a watchdog that ends what hangs and says why.

In: coroutines, a run's folder. Out: their results, ``stall-N.json`` and errors that name it. Waits for the coroutines.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, TypeVar

from forge_agents.errors import ActorDiedError, RespawnLimitError, StallError
from forge_agents.runtime import waits as _waits

T = TypeVar("T")

_CANCEL_S = 30.0
"""Work that is cancelled ends within this time."""


class LoopRunner:
    """One event loop for the life of a trainer, so that actors outlive a call of ``fit``.

    Inside a running loop, as in a notebook, the work moves to a thread of its own; Ctrl-C asks it to stop there.

    Args:
        on_close: Awaited before the loop closes.
    """

    def __init__(self, on_close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._on_close = on_close
        self._runner: asyncio.Runner | None = None
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._working: asyncio.Task[Any] | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end."""
        if self._runner is None:
            self._runner = asyncio.Runner()
            atexit.register(self.close)
            with contextlib.suppress(RuntimeError):  # no loop is running here
                asyncio.get_running_loop()
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
                runner.run(self._on_close())

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
        """`stage` took the time since the last lap, beside what it took before."""
        now = time.perf_counter()
        self._laps[f"time/{stage}_s"] = self._laps.get(f"time/{stage}_s", 0.0) + now - self._last
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
        reason = f"stopped after step {steps}; run it again to continue"
        if self._asked_by is signal.SIGTERM:
            self._say(reason)
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt(reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked_by = signal.Signals(number)
        self._restore()
        self._say(f"{self._asked_by.name}: finishing this step and saving it; once more stops at once")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


@contextlib.contextmanager
def stalls_recorded(folder: Path) -> Iterator[None]:
    """A stall or a death that leaves the block is written to `folder`, with all that was waited for; its error says so.

    Args:
        folder: Made if absent.
    """
    try:
        yield
    except (StallError, ActorDiedError, RespawnLimitError) as error:
        picture = getattr(error, "picture", None) or _waits.picture()
        found = {"error": f"{type(error).__name__}: {error}", **picture}
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"stall-{len(tuple(folder.glob('stall-*.json')))}.json"
        file.write_text(json.dumps(found, indent=1, default=str) + "\n")
        error.args = (f"{error}. The state of the run at that moment is in {file}",)
        raise


class Watchdog:
    """Interrupts what holds the running loop's thread, such as an environment without isolation, for too long.

    A `StallError` is raised inside it, if the loop runs in the main thread; an environment's is its episode's failure.
    In another thread it can only be told on the error stream.

    Args:
        limit_s: Seconds that code may take without giving the loop a turn.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._period_s = min(1.0, limit_s / 4)
        self._owner = threading.current_thread()
        self._interrupts = self._owner is threading.main_thread()
        self._beat = time.monotonic()
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
        self._beat = time.monotonic()
        self._handle = asyncio.get_running_loop().call_later(self._period_s, self._tick)

    def _watch(self) -> None:
        reported = 0.0
        while not self._over.wait(self._period_s):
            beat = self._beat
            if time.monotonic() - beat < self._limit_s or self._owner.ident is None or reported == beat:
                continue
            if self._interrupts:  # a signal reaches code that never awaits, even in a blocking call
                signal.pthread_kill(self._owner.ident, signal.SIGUSR2)
            else:
                reported = beat
                place = _waits.stack(sys._current_frames().get(self._owner.ident))[-1:]
                sys.stderr.write(f"the controller's thread is held for over {self._limit_s:g} s at {place}\n")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        held_s = time.monotonic() - self._beat
        if held_s < self._limit_s:  # it went on between the signal and here
            return
        self._beat = time.monotonic()  # what cleans up has its own time
        error = StallError(
            f"{_waits.stack(frame)[-1]} held the controller's thread for {held_s:.0f} s and block_timeout_s="
            f"{self._limit_s:g}; nothing else could go on meanwhile. Mend it, register the environment with "
            "isolation='process', or raise block_timeout_s",
            "controller",
        )
        error.picture = _waits.picture()
        raise error
