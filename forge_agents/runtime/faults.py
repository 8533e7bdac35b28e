"""Deaths of processes in a run: counted, written down, and limited.

In: who died or fell silent, and when it was back. Out: rows of ``faults.jsonl``, or the error that ends the run.
Waits for what is started again, within its own deadline.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from forge_agents.errors import ActorDiedError, RespawnLimitError, StallError

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Fault:
    """One process that died or fell silent."""

    who: str
    """As errors call it."""
    cause: str
    """What was seen of its end."""
    noticed_at: float
    """Seconds since the epoch."""
    recovered_at: float | None = None
    """Seconds since the epoch; None as long as nothing took its place."""


class Faults:
    """All faults of a run.

    Args:
        max_respawns: Processes that may be started again; one more death ends the run. 0: the first one does.
        file: JSON lines, one when a fault is noticed and one when it is over; None writes nothing.
    """

    def __init__(self, *, max_respawns: int = 8, file: Path | None = None) -> None:
        if max_respawns < 0:
            raise ValueError(f"max_respawns={max_respawns} must be at least 0")
        self._max_respawns = max_respawns
        self._file = file
        self._all: list[Fault] = []
        self._places: set[str] = set()

    def reset(self, file: Path | None) -> None:
        """Count anew, for another run, whose faults go to `file`."""
        self._file = file
        self._all.clear()
        self._places.clear()

    @property
    def all(self) -> Sequence[Fault]:
        """In the order they were noticed."""
        return tuple(self._all)

    def record(self, who: str, cause: ActorDiedError | StallError) -> Fault:
        """Count a death before something is started in its place.

        Raises:
            RespawnLimitError: It is one too many; or the second at one place, which what is started again would reach
                as well.
        """
        fault = Fault(who=who, cause=str(cause), noticed_at=time.time())
        self._all.append(fault)
        self._write("noticed", fault)
        place = getattr(cause, "place", "")
        if place in self._places:
            raise RespawnLimitError(f"twice the same death at the same place, so nothing is started again: {cause}")
        self._places |= {place} - {""}
        if len(self._all) > self._max_respawns:
            earlier = ", ".join(dict.fromkeys(fault.who for fault in self._all))
            raise RespawnLimitError(
                f"{len(self._all)} processes died ({earlier}) and max_respawns={self._max_respawns} may be started "
                f"again; the last one: {cause}"
            )
        _log.warning("%s is started again: %s", who, cause)
        return fault

    async def start_with_retries(self, who: str, start: Callable[[], Awaitable[T]]) -> T:
        """What `start` starts under the name `who`; it is tried again where that dies on the way."""
        died: list[Fault] = []
        while True:
            try:
                started = await start()
            except ActorDiedError as error:
                if error.who != who:
                    raise
                died.append(self.record(who, error))
            else:
                for fault in died:
                    self.recovered(fault)
                return started

    def recovered(self, fault: Fault) -> None:
        """Something took the place of what died."""
        fault.recovered_at = time.time()
        self._write("recovered", fault)

    def _write(self, event: str, fault: Fault) -> None:
        if self._file is None:
            return
        at = fault.noticed_at if event == "noticed" else fault.recovered_at
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            file.write(json.dumps({"time": at, "event": event, "who": fault.who, "cause": fault.cause}) + "\n")
