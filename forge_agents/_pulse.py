"""Sees that a mesh's processes live, whatever their other actors are busy with.

In: a mesh. Out: the error of the first process that died or fell silent. Waits for their pulse, with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

from forge_agents import mesh
from forge_agents._monarch import Actor, concurrent_endpoint
from forge_agents.errors import ActorDiedError, StallError

if TYPE_CHECKING:
    from forge_agents._monarch import ProcMesh

_HOLD_S = 2.0
"""A question is answered after this long."""


class PulseActor(Actor):
    """Beside a process's other actors, and answered for by none of them."""

    @concurrent_endpoint
    async def hold(self, seconds: float) -> None:
        """Answer after `seconds`."""
        await asyncio.sleep(seconds)


class Pulse:
    """The controller's finger on all processes of a mesh.

    Where a process runs on this machine the kernel tells of its end at once; elsewhere Monarch does, mostly within two
    seconds, under load later.

    Args:
        procs: From `mesh.spawn_procs`, after its processes have answered once.
        size: Its number of processes.
        name: Said in errors; what the mesh was spawned under.
        silence_s: A process that says nothing for longer counts as dead.
    """

    def __init__(self, procs: ProcMesh, size: int, *, name: str, silence_s: float) -> None:
        self._name = name
        self._lost: asyncio.Future[ActorDiedError | StallError] = asyncio.get_running_loop().create_future()
        self._fds: list[int] = []
        for pid in mesh.pids(procs):
            self._fds.append(os.pidfd_open(pid))
            asyncio.get_running_loop().add_reader(self._fds[-1], self._ended, pid)
        actors: Any = procs.spawn("pulse", PulseActor)
        self._task = asyncio.ensure_future(self._feel(actors, size, silence_s + _HOLD_S))

    @property
    def error(self) -> ActorDiedError | StallError | None:
        """What was seen of the processes' end; None while all live."""
        return self._lost.result() if self._lost.done() and not self._lost.cancelled() else None

    async def lost(self) -> ActorDiedError | StallError:
        """Wait until a process dies or falls silent."""
        return await asyncio.shield(self._lost)

    async def lost_within(self, seconds: float) -> bool:
        """Whether a process dies or falls silent in the next `seconds`."""
        await asyncio.wait({self._lost}, timeout=seconds)
        return self.error is not None

    def end(self) -> None:
        """Look no more: the processes are about to be stopped. Twice is no error."""
        self._task.cancel()
        while self._fds:
            fd = self._fds.pop()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def _ended(self, pid: int) -> None:
        advice = mesh.log_advice(self._name)
        self._tell(ActorDiedError(f"{self._name} died: process {pid} ended. Look at {advice}", self._name))

    def _tell(self, error: ActorDiedError | StallError) -> None:
        if not self._lost.done():
            self._lost.set_result(error)
        self.end()

    async def _feel(self, actors: Any, size: int, timeout_s: float) -> None:
        while True:
            try:
                await mesh.call_all(actors, size, "hold", _HOLD_S, timeout_s=timeout_s, who=self._name)
            except (ActorDiedError, StallError) as error:
                self._tell(error)
                return
