"""What stands around a loop: a stopwatch, and a watchdog that ends what hangs and says why.

In: a run's folder. Out: ``stall-N.json`` and errors that name it. Waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from forge_agents.errors import ActorDiedError, RespawnLimitError, StallError
from forge_agents.runtime import stalls as _stalls


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

    def part(self, stage: str, of: str, seconds: float) -> None:
        """Of the last lap, which was `of`, so much was `stage`, as far as the lap reaches."""
        whole = self._laps[f"time/{of}_s"]
        moved = min(whole, seconds)
        self._laps[f"time/{of}_s"] = whole - moved
        self._laps[f"time/{stage}_s"] = self._laps.get(f"time/{stage}_s", 0.0) + moved

    @property
    def total_s(self) -> float:
        """From the start to the last lap."""
        return self._last - self._started

    @property
    def times(self) -> dict[str, float]:
        """``time/STAGE_s`` by stage, ``time/step_s`` for all, and ``idle/PART``, a share in [0, 1]."""
        return {**self._laps, **self._idle, "time/step_s": self.total_s}


@contextlib.contextmanager
def stalls_recorded(folder: Path) -> Iterator[None]:
    """A stall or a death that leaves the block is written to `folder`, with all that was waited for; its error says so.

    Args:
        folder: Made if absent.
    """
    try:
        yield
    except (StallError, ActorDiedError, RespawnLimitError) as error:
        picture = getattr(error, "snapshot", None) or _stalls.snapshot()
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
                place = _stalls.stack(sys._current_frames().get(self._owner.ident))[-1:]
                sys.stderr.write(f"the controller's thread is held for over {self._limit_s:g} s at {place}\n")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        held_s = time.monotonic() - self._beat
        if held_s < self._limit_s:  # it went on between the signal and here
            return
        self._beat = time.monotonic()  # what cleans up has its own time
        error = StallError(
            f"{_stalls.stack(frame)[-1]} held the controller's thread for {held_s:.0f} s and block_timeout_s="
            f"{self._limit_s:g}; nothing else could go on meanwhile. Mend it, register the environment with "
            "isolation='process', or raise block_timeout_s",
            "controller",
        )
        error.snapshot = _stalls.snapshot()
        raise error
