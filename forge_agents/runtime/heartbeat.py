"""Detects that a process of a mesh died or hangs, independent of what its actors are doing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from forge_agents.errors import ActorDiedError, ForgeError, StallError
from forge_agents.runtime import mesh, processes
from forge_agents.runtime._monarch import Actor, concurrent_endpoint

if TYPE_CHECKING:
    from forge_agents.runtime._monarch import ProcMesh

T = TypeVar("T")

_POLL_S = 0.05
"""Time between two searches for newly started processes."""
_MAX_HOLD_S = 10.0
"""Maximum time that a process holds a heartbeat call before it answers. Monarch keeps some KB of each call."""
_HOST_S = 0.3
"""The loss of a host is noticed within this time after the end of a process on it."""
_NOTICE_S = 3.0
"""The end of a process is noticed within this time."""


class HeartbeatActor(Actor):
    """Answers heartbeat calls, next to a process's other actors and independent of them."""

    @concurrent_endpoint
    async def hold(self, seconds: float) -> None:
        """Answer after `seconds`."""
        await asyncio.sleep(seconds)


class Heartbeat:
    """Watches all processes of a mesh.

    The kernel reports the end of a local process at once, with its signal. Monarch reports the end of a remote one,
    mostly within two seconds. Heartbeat calls detect processes that live but hang. The loss of a whole host is noticed
    at once through its connection.

    Args:
        name: Name under which the mesh was spawned, for errors.
        heartbeat_timeout_s: Seconds without an answer after which a process counts as hung, from `start_timeout` on. A
            process that loads large libraries may not answer for long.
    """

    def __init__(self, procs: ProcMesh, size: int, *, name: str, heartbeat_timeout_s: float) -> None:
        self._name, self._heartbeat_timeout_s = name, heartbeat_timeout_s
        self._hold_s = min(_MAX_HOLD_S, heartbeat_timeout_s / 6)
        self._procs, self._size = procs, size
        self._timeout_applies = False
        self._lost: asyncio.Future[ActorDiedError | StallError] = asyncio.get_running_loop().create_future()
        actors: Any = procs.spawn("heartbeat", HeartbeatActor)
        loop = asyncio.get_running_loop()
        self._is_remote = mesh.on_lost_host(
            procs, lambda why: _call_in(loop, self._tell, ActorDiedError(f"{name} died: {why}", name))
        )
        self._tasks = [asyncio.ensure_future(work) for work in (self._watch_processes(), self._call(actors))]

    @property
    def error(self) -> ActorDiedError | StallError | None:
        """Error of the first process that was lost. None while all live."""
        return self._lost.result() if self._lost.done() and not self._lost.cancelled() else None

    def start_timeout(self) -> None:
        """Apply `heartbeat_timeout_s` from now on."""
        self._timeout_applies = True

    def add_probe(self, probe: Callable[[], Awaitable[object]], what: str) -> None:
        """Watch one actor as well, because it may end or hang in a process that lives.

        Args:
            probe: Makes a short request to the actor. The probe is called again and again, and each call may take
                `heartbeat_timeout_s`.
            what: The actor's answer, as a noun: ``"answer of the store"``.
        """
        self._tasks.append(asyncio.ensure_future(self._probe(probe, what)))

    async def lost(self) -> ActorDiedError | StallError:
        """Wait until a process dies or hangs, and return its error."""
        return await asyncio.shield(self._lost)

    async def guard(self, work: Awaitable[T]) -> T:
        """Await `work` that needs the processes. Raise the error of a lost process at once.

        If `work` fails with a `RuntimeError` and one of several processes turns out to be lost, that error is raised
        instead: the collectives of the other ranks break a moment before the loss is noticed.
        """
        if self.error is not None:
            if isinstance(work, Coroutine):
                work.close()
            raise self.error
        task = asyncio.ensure_future(work)
        try:
            both: set[asyncio.Future[Any]] = {task, self._lost}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._lost.result()
            return task.result()
        except RuntimeError as error:
            if self._size > 1 and not isinstance(error, ForgeError):
                await asyncio.wait({self._lost}, timeout=_NOTICE_S)
                if self._lost.done():
                    raise self._lost.result() from error
            raise
        finally:
            task.cancel()

    def end(self) -> None:
        """Stop watching, before the processes are stopped. May be called twice."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, pid: int, status: int | None = None) -> None:
        if self._lost.done():
            return
        end = mesh.death(self._procs, pid, status)
        message = f"{self._name} died: process {pid} {end}. Look at {mesh.log_hint(self._name)}"
        if end.last_lines:
            message += f". Last lines of its log:\n{end.last_lines}"
        # A remote process's host may have ended as well, and then nothing must be started there.
        delay_s = _HOST_S if self._is_remote else 0
        asyncio.get_running_loop().call_later(delay_s, self._tell, ActorDiedError(message, self._name, end.place))

    def _tell(self, error: ActorDiedError | StallError) -> None:
        if not self._lost.done():
            self._lost.set_result(error)
        self.end()

    async def _call(self, actors: Any) -> None:
        """Call all ranks again and again. Each holds the call, so that a death ends it and few messages are needed."""
        timeout_s = self._heartbeat_timeout_s + self._hold_s
        while True:
            try:
                await mesh.call_all(actors, self._size, "hold", self._hold_s, timeout_s=timeout_s, who=self._name)
            except ActorDiedError as error:
                self._tell(error)
                return
            except StallError as error:
                if self._timeout_applies:
                    self._tell(self._hung(error))
                    return

    async def _probe(self, probe: Callable[[], Awaitable[object]], what: str) -> None:
        while True:
            try:
                await mesh.with_deadline(probe(), self._heartbeat_timeout_s, who=self._name, what=what)
            except StallError as error:
                self._tell(self._hung(error))
                return
            except ActorDiedError as error:
                await asyncio.wait({self._lost}, timeout=_NOTICE_S)  # the end of its process would say more
                self._tell(error)
                return
            except Exception as error:  # noqa: BLE001  # an actor that answers with any error is as good as dead
                message = f"{self._name} gives no {what}: {type(error).__name__}: {error}"
                self._tell(ActorDiedError(message, self._name))
                return
            await asyncio.sleep(self._hold_s)

    def _hung(self, error: StallError) -> StallError:
        hung = StallError(
            f"{self._name} gave no sign of life for heartbeat_timeout_s={self._heartbeat_timeout_s:g} s: it hangs, or "
            f"its machine is too busy. If so, raise heartbeat_timeout_s. {error}",
            self._name,
        )
        hung.snapshot = error.snapshot
        return hung

    async def _watch_processes(self) -> None:
        """Have the kernel report the end of each local process, from its start on."""
        watched: set[int] = set()
        loop = asyncio.get_running_loop()
        while True:
            for pid in set(mesh.pids(self._procs)) - watched:
                watched.add(pid)
                with contextlib.suppress(ProcessLookupError):  # then it is among the ended ones
                    processes.on_end(pid, functools.partial(_call_in, loop, self._ended, pid))
            if ended := mesh.ended(self._procs):  # before it could be watched
                self._ended(ended[0])
                return
            if len(watched) == self._size or self._timeout_applies:  # the others are remote
                return
            await asyncio.sleep(_POLL_S)


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call, *args)
