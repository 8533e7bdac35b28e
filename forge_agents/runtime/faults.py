"""Counts, records and limits the deaths of processes in a run."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from forge_agents.errors import ActorDiedError, RespawnLimitError, StallError

T = TypeVar("T")

_log = logging.getLogger(__name__)
_MAX_EARLY_DEATHS = 3
"""A process that ends so often before it can be called lacks something that every start needs."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """A process that died or hung."""

    who: str
    """Name of the process in errors."""
    cause: str
    """Message of the error."""
    noticed_at: float
    """Seconds since the epoch."""
    recovered_at: float | None = None
    """Seconds since the epoch. None until a replacement runs."""


class Faults:
    """Faults of a run.

    Args:
        max_respawns: Maximum number of processes that are restarted. One more death ends the run; with 0, the first.
        file: JSON Lines file with one row when a fault is noticed and one when it is over. None writes nothing.
    """

    def __init__(self, *, max_respawns: int = 8, file: Path | None = None) -> None:
        if max_respawns < 0:
            raise ValueError(f"max_respawns={max_respawns} must be at least 0")
        self._max_respawns = max_respawns
        self._places: set[str] = set()
        self._file = file
        self.all: list[Fault] = []
        """Faults, in the order they were noticed."""

    def reset(self, file: Path | None) -> None:
        """Start counting from zero for another run, whose faults go to `file`."""
        self._file = file
        self.all.clear()
        self._places.clear()

    def record(self, who: str, cause: ActorDiedError | StallError) -> Fault:
        """Count a death, before its replacement is started.

        Raises:
            RespawnLimitError: There were too many deaths, or two at the same place, which a replacement would reach
                again.
        """
        fault = Fault(who=who, cause=str(cause), noticed_at=time.time())
        self.all.append(fault)
        self._write(fault.noticed_at, "noticed", fault)
        place = getattr(cause, "place", "")
        if place in self._places:
            raise RespawnLimitError(f"twice the same death at the same place, so nothing is started again: {cause}")
        self._places |= {place} - {""}
        if len(self.all) > self._max_respawns:
            names = ", ".join(dict.fromkeys(fault.who for fault in self.all))
            raise RespawnLimitError(
                f"{len(self.all)} processes died ({names}). A run restarts at most {self._max_respawns} processes. "
                f"The last death: {cause}"
            )
        _log.warning("%s is started again: %s", who, cause)
        return fault

    async def start_with_retries(self, who: str, start: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `start`. If the process `who` dies on the way, `start` is called again."""
        faults: list[Fault] = []
        early = 0
        while True:
            try:
                started = await start()
            except ActorDiedError as error:
                if error.who != who:
                    raise
                faults.append(self.record(who, error))
                early += error.ended_at_start
                if early == _MAX_EARLY_DEATHS:
                    raise RespawnLimitError(
                        f"{who} ended {early} times before it could be called, so it is not started again. The reason "
                        f"may be on the standard error stream. {error}"
                    ) from error
            else:
                for fault in faults:
                    self.recovered(fault)
                return started

    def recovered(self, fault: Fault) -> None:
        """Note that a replacement runs."""
        fault.recovered_at = time.time()
        self._write(fault.recovered_at, "recovered", fault)

    def _write(self, at: float, event: str, fault: Fault) -> None:
        if self._file is None:
            return
        row = json.dumps({"time": at, "event": event, "who": fault.who, "cause": fault.cause})
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(f"{row}\n")
        except OSError as error:  # on a full disk a process is replaced all the same
            _log.warning("%s cannot be written (%s): %s", self._file, error, row)
