"""Sees that a run ends rather than hangs, and says why.

In: a run's folder. Out: ``stall-N.json`` and errors that name it; an interrupt for code that holds the controller's
thread too long. Waits for nothing on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from forge_agents.errors import ActorDiedError, RespawnLimitError, StallError
from forge_agents.runtime import waits as _waits

_SIGNAL = signal.SIGUSR2


@contextlib.contextmanager
def stalls_told(folder: Path) -> Iterator[None]:
    """A stall or a death that leaves the block is written to `folder`, with all that was waited for; its error says so.

    Args:
        folder: Made if absent.
    """
    try:
        yield
    except (StallError, ActorDiedError, RespawnLimitError) as error:
        picture = getattr(error, "picture", None) or _waits.picture()
        file = _write(folder, {"error": f"{type(error).__name__}: {error}", **picture})
        error.args = (f"{error}. The state of the run at that moment is in {file}",)
        raise


def _write(folder: Path, found: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    number = len(tuple(folder.glob("stall-*.json")))
    file = folder / f"stall-{number}.json"
    file.write_text(json.dumps(found, indent=1, default=str) + "\n")
    return file


class LoopGuard:
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
            self._before = signal.signal(_SIGNAL, self._interrupt)
        self._watcher.start()

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._handle.cancel()
        self._watcher.join()
        if self._interrupts:
            signal.signal(_SIGNAL, self._before)

    def _tick(self) -> None:
        self._beat = time.monotonic()
        self._handle = asyncio.get_running_loop().call_later(self._period_s, self._tick)

    def _watch(self) -> None:
        told = 0.0
        while not self._over.wait(self._period_s):
            beat = self._beat
            if time.monotonic() - beat < self._limit_s or self._owner.ident is None or told == beat:
                continue
            if self._interrupts:
                signal.pthread_kill(self._owner.ident, _SIGNAL)
            else:
                told = beat
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
