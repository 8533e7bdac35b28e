"""Stopwatch of a training step, and records of stalls."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from forge_agents.errors import ActorDiedError, RespawnLimitError, StallError
from forge_agents.runtime import stalls as _stalls


class Stopwatch:
    """Seconds of the stages of a step, and idle fractions of the machine's parts.

    `busy_s` returns the seconds in which each part of the machine computed, by name.
    """

    def __init__(self, busy_s: Callable[[], Mapping[str, float]] = dict) -> None:
        self._busy_s, self._busy_before = busy_s, busy_s()
        self._started = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}
        self._idle: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to `stage`."""
        now = time.perf_counter()
        self._laps[f"time/{stage}_s"] = self._laps.get(f"time/{stage}_s", 0.0) + now - self._last
        self._last = now
        total_s = now - self._started
        self._idle = {
            f"idle/{name}": min(1.0, max(0.0, 1 - (busy_s - self._busy_before.get(name, 0.0)) / total_s))
            for name, busy_s in self._busy_s().items()
        }

    def move(self, seconds: float, *, source: str, target: str) -> None:
        """Move `seconds` from the lap `source` to `target`, at most the whole lap."""
        lap_s = self._laps[f"time/{source}_s"]
        moved = min(lap_s, seconds)
        self._laps[f"time/{source}_s"] = lap_s - moved
        self._laps[f"time/{target}_s"] = self._laps.get(f"time/{target}_s", 0.0) + moved

    @property
    def times(self) -> dict[str, float]:
        """``time/STAGE_s`` by stage, ``time/step_s`` for all, and ``idle/PART``, a fraction in [0, 1]."""
        return {**self._laps, **self._idle, "time/step_s": self._last - self._started}


@contextlib.contextmanager
def stalls_recorded(folder: Path) -> Iterator[None]:
    """Write a stall or death that leaves the block to ``FOLDER/stall-N.json``, with all pending waits."""
    try:
        yield
    except (StallError, ActorDiedError, RespawnLimitError) as error:
        pending = getattr(error, "snapshot", None) or _stalls.snapshot()
        record = {"error": f"{type(error).__name__}: {error}", **pending}
        file = folder / f"stall-{len(tuple(folder.glob('stall-*.json')))}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(record, indent=1, default=str) + "\n")
        except OSError as cause:  # a full disk must not hide the error
            error.args = (f"{error}. The state of the run could not be written to {file} ({cause})",)
        else:
            error.args = (f"{error}. The state of the run at that moment is in {file}",)
        raise
