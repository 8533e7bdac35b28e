"""Sees that a mesh's processes live, whatever their other actors are busy with.

In: a mesh. Out: the error of the first process that died or fell silent. Waits for their heartbeat, with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from forge_agents.errors import ActorDiedError, ForgeError, StallError
from forge_agents.runtime import mesh
from forge_agents.runtime._monarch import Actor, concurrent_endpoint

if TYPE_CHECKING:
    from forge_agents.runtime._monarch import ProcMesh

T = TypeVar("T")

_LOOK_S = 0.2
"""Between two looks for processes that have started."""
_HOLD_S = 2.0
"""A question is answered after this long."""
_BEAT_S = 1.0
"""Between two looks whether the controller's own thread was held."""
_LINE_S = 0.3
"""The end of a host is seen within this time of the end of a process on it."""
_NAMED_S = 1.5
"""Monarch names the signal of a process's end within this time."""
_NOTICE_S = 3.0
"""A process's end is seen within this time."""


class HeartbeatActor(Actor):
    """Beside a process's other actors, and answered for by none of them."""

    @concurrent_endpoint
    async def hold(self, seconds: float) -> None:
        """Answer after `seconds`."""
        await asyncio.sleep(seconds)


class Heartbeat:
    """The controller's finger on all processes of a mesh.

    Where a process runs on this machine the kernel tells of its end at once; elsewhere Monarch does, mostly within two
    seconds, under load later. The end of a whole host is seen at once, too.

    Args:
        name: Said in errors; what the mesh was spawned under.
        heartbeat_timeout_s: A process that says nothing for longer is dead, from `started` on: one that loads big
            libraries may be silent for long.
    """

    def __init__(self, procs: ProcMesh, size: int, *, name: str, heartbeat_timeout_s: float) -> None:
        self._name, self._heartbeat_timeout_s = name, heartbeat_timeout_s
        self._procs, self._size = procs, size
        self._silence_counts = False
        self._holds = 0
        self._lost: asyncio.Future[ActorDiedError | StallError] = asyncio.get_running_loop().create_future()
        actors: Any = procs.spawn("heartbeat", HeartbeatActor)
        loop = asyncio.get_running_loop()
        self._elsewhere = mesh.on_lost_host(
            procs, lambda why: _call_in(loop, self._tell, ActorDiedError(f"{name} died: {why}", name))
        )
        self._tasks = [
            asyncio.ensure_future(self._watch_processes()),
            asyncio.ensure_future(self._feel(actors)),
        ]

    @property
    def error(self) -> ActorDiedError | StallError | None:
        """What was seen of the processes' end; None while all live."""
        return self._lost.result() if self._lost.done() and not self._lost.cancelled() else None

    def start_timeout(self) -> None:
        """From now on silence counts."""
        self._silence_counts = True

    def add_probe(self, sign: Callable[[], Awaitable[object]], what: str) -> None:
        """From now on `sign` counts as well: an actor may end, or hang, in a process that lives.

        It has `heartbeat_timeout_s` each time, and more where the controller's own thread was held meanwhile.

        Args:
            sign: Asks the actor for something short, again and again.
            what: What it gives, as a noun: ``"answer of the store"``.
        """
        self._tasks += [asyncio.ensure_future(work) for work in (self._hear(sign, what), self._count_holds())]

    async def lost(self) -> ActorDiedError | StallError:
        """Wait until a process dies or falls silent."""
        return await asyncio.shield(self._lost)

    async def guard(self, work: Awaitable[T]) -> T:
        """What `work`, which needs the processes, gives; or at once the error of the one that is lost.

        Where it fails with a `RuntimeError`, and one of several processes turns out to be lost, that is the error: the
        others' collectives break a moment before its end is seen.
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
        """Look no more: the processes are about to be stopped. Twice is no error."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, pid: int, status: int | None = None) -> None:
        if self._lost.done():
            return
        end = mesh.death(self._procs, pid, status)
        meaning = f" ({end.meaning})" if end.meaning else ""
        words = f"{self._name} died: process {pid} {end.how}{meaning}. Look at {mesh.log_hint(self._name)}"
        if end.last_lines:
            words += f". It printed last:\n{end.last_lines}"
        error = ActorDiedError(words, self._name, end.place)
        if self._elsewhere:  # its host may have ended with it, and nothing is to be started there
            asyncio.get_running_loop().call_later(_LINE_S, self._tell, error)
        elif not end.known:  # Monarch took the signal before us, and is about to say it
            asyncio.get_running_loop().call_later(_NAMED_S, self._tell, error)
        else:
            self._tell(error)

    def _tell(self, error: ActorDiedError | StallError) -> None:
        if not self._lost.done():
            self._lost.set_result(error)
        self.end()

    async def _feel(self, actors: Any) -> None:
        within = self._heartbeat_timeout_s + _HOLD_S
        while True:
            try:
                await mesh.call_all(actors, self._size, "hold", _HOLD_S, timeout_s=within, who=self._name)
            except ActorDiedError as error:
                self._tell(error)
                return
            except StallError as error:
                if self._silence_counts:
                    self._tell(self._silent(error))
                    return

    async def _hear(self, sign: Callable[[], Awaitable[object]], what: str) -> None:
        while True:
            try:
                await mesh.with_deadline(
                    sign(), self._heartbeat_timeout_s, who=self._name, what=what, progress=lambda: self._holds
                )
            except StallError as error:
                self._tell(self._silent(error))
                return
            except ActorDiedError as error:
                await asyncio.wait({self._lost}, timeout=_NOTICE_S)  # where its process has ended, that says more
                self._tell(error)
                return
            except Exception as error:  # noqa: BLE001  # whatever it says, it does not give what it owes
                words = f"{self._name} gives no {what}: {type(error).__name__}: {error}"
                self._tell(ActorDiedError(words, self._name))
                return
            await asyncio.sleep(_HOLD_S)

    async def _count_holds(self) -> None:
        """Code that holds this thread keeps answers from being heard, of which a sign may take several."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_BEAT_S)
            self._holds += time.monotonic() - before > _BEAT_S + self._heartbeat_timeout_s / 4

    def _silent(self, error: StallError) -> StallError:
        words = f"{self._name} gave no sign of life for heartbeat_timeout_s={self._heartbeat_timeout_s:g} s"
        why = f"it hangs, or its machine is too busy; if so, raise heartbeat_timeout_s. {error}"
        silent = StallError(f"{words}: {why}", self._name)
        silent.snapshot = error.snapshot
        return silent

    async def _watch_processes(self) -> None:
        """Ask the kernel to tell of the end of each process that runs here, from its first moment on."""
        known: set[int] = set()
        loop = asyncio.get_running_loop()
        while True:
            for pid in set(mesh.pids(self._procs)) - known:
                known.add(pid)
                with contextlib.suppress(ProcessLookupError):  # it is among the ended
                    fd = os.pidfd_open(pid)
                    threading.Thread(target=self._see_end, args=(pid, fd, loop), daemon=True).start()
            if gone := mesh.ended(self._procs):  # before it could be watched
                self._ended(gone[0])
                return
            if len(known) == self._size or self._silence_counts:  # the rest run elsewhere
                return
            await asyncio.sleep(_LOOK_S)

    def _see_end(self, pid: int, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        """Wait on a thread for a process's end: only who already waits sees its signal before Monarch takes it."""
        status = None
        try:
            if (seen := os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)) is not None:
                status = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
        except ChildProcessError:  # it is another host's, or taken already
            waiting = select.poll()
            waiting.register(fd, select.POLLIN)
            waiting.poll()
        finally:
            os.close(fd)
        _call_in(loop, self._ended, pid, status)


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call, *args)
