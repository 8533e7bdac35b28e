"""Worker processes and who has them: what `forge_agents.envs.workers.env` plays in.

In: commands for `forge_agents.envs.workers.process`. Out: its answers. Waits for a free worker and for each answer,
with deadlines.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from typing import Any

from forge_agents.errors import ActorDiedError, ForgeError, StallError
from forge_agents.runtime import mesh
from forge_agents.runtime.hosts import ENVS

START_TIMEOUT_S = 120.0
"""Seconds that a worker may take to start, to import an environment's module and to build the environment."""
PATIENCE_S = 600.0
"""Seconds that an event loop's episode waits for a free worker while not a single one is given back."""
THREAD_PATIENCE_S = 60.0
"""The same for a plain PettingZoo loop, which may itself hold all workers."""

_LOOK_S = 0.5
"""The end of a process or a host is seen within this time."""
_NAMED_S = 1.5
"""Within this time Monarch mostly says how a process ended that is seen to be gone."""
_numbers = itertools.count()


class WorkerDiedError(ForgeError, RuntimeError):
    """The process of an environment ended in the middle of a call."""


class WorkerHungError(ForgeError, TimeoutError):
    """An environment took longer than its `step_timeout_s`; its process was killed."""


class Worker:
    """One process, a Monarch mesh of its own: it may die alone. It starts at the first call."""

    def __init__(self) -> None:
        self.name = f"env-worker-{next(_numbers)}"
        self._procs: Any = None
        self._actor: Any = None
        self._lock = threading.Lock()
        self._over = False
        self.holders = 0
        """Environments that live there: one, and its forks."""

    @property
    def pid(self) -> int | None:
        """Process id; None before the first call, and where the process runs on another machine."""
        return next(iter(mesh.pids(self._procs)), None)

    @property
    def alive(self) -> bool:
        """Whether it runs, or was not needed yet."""
        return not self._over and (self._procs is None or not mesh.end_seen(self._procs))

    @property
    def useful(self) -> bool:
        """Whether it lives on a host of the run of this moment."""
        return self.alive and (self._procs is None or mesh.is_current(self._procs))

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._lock.locked()

    def call(self, what: str, *args: Any, timeout_s: float) -> Any:
        """Do `what` there, as `process.Environments.answer`.

        Raises:
            WorkerDiedError, WorkerHungError: The process is gone now.
            Exception: What the environment raised.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._call(what, args, timeout_s)
        with ThreadPoolExecutor(1) as beside:  # Monarch warns of a wait on an event loop's own thread
            return beside.submit(self._call, what, args, timeout_s).result()

    def end(self) -> None:
        """Kill the process and what it started, and have Monarch forget it; does not wait."""
        self._over = True
        if self._procs is not None:
            mesh.kill(self._procs)

    def _call(self, what: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        with self._lock:
            try:
                if self._procs is None and not self._over:
                    self._start()
                if self._over:
                    raise ActorDiedError(f"{self.name} died before {what}: it was ended", self.name)
                ok, answer = pickle.loads(self._wait(self._actor.do.call_one(what, args), what, timeout_s))  # noqa: S301  # ours
            except ActorDiedError as error:
                self.end()
                raise WorkerDiedError(str(error)) from None
            except WorkerHungError:
                self.end()
                raise
        if not ok:
            try:
                raise answer
            finally:
                del answer  # or its traceback keeps this frame alive, and so the environment, until garbage collection
        return answer

    def _start(self) -> None:
        from forge_agents.envs.workers.actor import PROGRAM, EnvActor

        procs = mesh.spawn_procs(self.name, role=ENVS, program=PROGRAM)
        self._actor, self._procs = procs.spawn("environments", EnvActor), procs
        if self._over:  # its episode was cancelled meanwhile
            mesh.kill(procs)

    def _wait(self, answer: Any, what: str, timeout_s: float) -> bytes:
        """What `answer`, a Monarch future, gives, or the error of the process or host that was lost meanwhile."""
        began, seen_at = time.monotonic(), math.inf
        while True:
            waited = time.monotonic() - began
            try:
                packed: bytes = answer.get(min(_LOOK_S, max(0.05, timeout_s - waited)))
            except TimeoutError:
                if why := mesh.end_seen(self._procs):
                    seen_at = min(seen_at, waited)
                    if waited >= seen_at + _NAMED_S * (why == mesh.ENDED):
                        raise ActorDiedError(f"{self.name} died during {what}: {why}", self.name) from None
                elif waited >= timeout_s:
                    raise WorkerHungError(
                        f"{what} took longer than {timeout_s:g} s, so its worker process was killed; mend the "
                        "environment, or register it with a larger step_timeout_s"
                    ) from None
            except Exception as error:  # noqa: BLE001  # Monarch's, of several types; environments' own come as answers
                cause = mesh.as_local_error(error, who=self.name, what=what)
                if not isinstance(cause, ActorDiedError):  # its process could not begin
                    words = f"{self.name} died during {what}: {type(cause).__name__}: {cause}"
                    cause = ActorDiedError(f"{words}. Look at {mesh.log_advice(self.name)}", self.name)
                raise cause from None
            else:
                return packed


class Pool:
    """A bounded number of workers, each lent to one episode at a time and then to the next.

    Args:
        max_workers: Processes, and so live episodes, at once, at least 1; further episodes wait. None: as many as the
            hosts for environments have cores, at least four each.
    """

    def __init__(self, max_workers: int | None = None) -> None:
        if max_workers is not None and max_workers < 1:
            raise ValueError(f"max_workers={max_workers} must be >= 1")
        self.patience_s = PATIENCE_S
        self._limit = max_workers
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._lent: set[Worker] = set()
        self._waiting: deque[Future[Worker]] = deque()
        self._last_return = time.monotonic()

    @property
    def max_workers(self) -> int:
        """Processes at once; fewer once a host is lost."""
        return self._limit or mesh.room(ENVS)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those that are lent and those that are idle."""
        with self._lock:
            return (*self._lent, *self._idle)

    def borrow(self, who: str) -> Worker:
        """A free worker, waited for in this thread.

        Raises:
            StallError: None came back in time.
        """
        future, patience_s = self._ask(), min(self.patience_s, THREAD_PATIENCE_S)
        while True:
            try:
                return future.result(patience_s)
            except NotYetError:
                self._check_patience(future, patience_s, who)

    async def borrow_async(self, who: str) -> Worker:
        """A free worker, waited for on the event loop.

        Raises:
            StallError: None came back in `patience_s`.
        """
        future = self._ask()
        waiting = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait({waiting}, timeout=self.patience_s))[0]:
                self._check_patience(future, self.patience_s, who)
        except BaseException:
            if not future.cancel() and future.exception() is None:
                self.give_back(future.result())
            raise
        return waiting.result()

    def give_back(self, worker: Worker) -> None:
        """Hand a worker to whoever waits; a new one where it is dead."""
        with self._lock:
            self._last_return = time.monotonic()
            self._lent.discard(worker)
            self._idle.append(worker)
            while self._waiting and len(self._lent) < self.max_workers:
                future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_result(self._lend())
            self._drop_useless()

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.end()

    def _ask(self) -> Future[Worker]:
        future: Future[Worker] = Future()
        with self._lock:
            if len(self._lent) < self.max_workers:
                future.set_result(self._lend())
            else:
                self._waiting.append(future)
        return future

    def _lend(self) -> Worker:
        self._drop_useless()
        worker = self._idle.pop() if self._idle else Worker()
        self._lent.add(worker)
        return worker

    def _drop_useless(self) -> None:
        useless = [worker for worker in self._idle if not worker.useful]
        self._idle = [worker for worker in self._idle if worker not in useless]
        for worker in useless:
            worker.end()

    def _check_patience(self, future: Future[Worker], patience_s: float, who: str) -> None:
        if time.monotonic() - self._last_return > patience_s and future.cancel():
            raise StallError(
                f"{who} waited {patience_s:g} s for a worker process while none of {self.max_workers} was given "
                "back; close environments that are no longer played, or call "
                "forge_agents.envs.workers.env.use(max_workers=...)"
            )
