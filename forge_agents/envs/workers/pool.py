"""Worker processes and who has them: what `forge_agents.envs.workers.env` plays in.

In: commands for `forge_agents.envs.workers.process`. Out: its answers. Waits for a free worker and for each answer,
with deadlines.
"""

from __future__ import annotations

import asyncio
import atexit
import pickle
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from multiprocessing.connection import Connection
from typing import Any

from forge_agents.envs.workers._homes import Here, Home, Process
from forge_agents.errors import ForgeError, HostError, StallError

PATIENCE_S = 600.0
"""Seconds that an event loop's episode waits for a free worker while not a single one is given back."""
THREAD_PATIENCE_S = 60.0
"""The same for a plain PettingZoo loop, which may itself hold all workers."""


class WorkerDiedError(ForgeError, RuntimeError):
    """The process of an environment ended in the middle of a call."""


class WorkerHungError(ForgeError, TimeoutError):
    """An environment took longer than its `step_timeout_s`; its process was killed."""


class Worker:
    """One process. It starts at the first call.

    Args:
        home: The host that it runs on.
    """

    def __init__(self, home: Home | None = None) -> None:
        self.home = home or Here()
        self._process: Process | None = None
        self._pipe: Connection | None = None
        self._lock = threading.Lock()
        self._over = False
        self.holders = 0
        """Environments that live there: one, and its forks."""

    @property
    def pid(self) -> int | None:
        """Process id; None before the first call."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether it runs, or was not needed yet."""
        if self._over or self.home.lost:
            return False
        return self._process is None or self._process.poll() is None

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._lock.locked()

    def call(self, what: str, *args: Any, timeout_s: float) -> Any:
        """Do `what` there.

        Raises:
            WorkerDiedError, WorkerHungError: The process is gone now.
            Exception: What the environment raised.
        """
        answer: Any
        with self._lock:
            try:
                pipe = self._pipe or self._start()
                pipe.send_bytes(pickle.dumps((what, args, timeout_s)))
                answered = pipe.poll(timeout_s)
                ok, answer = pickle.loads(pipe.recv_bytes()) if answered else (False, None)  # noqa: S301  # ours
            except HostError as error:
                self._over = True
                raise WorkerDiedError(f"no worker process for {what}: {error}") from None
            except (EOFError, OSError):
                status = self.end(grace_s=2.0)
                how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
                how = self.home.lost or how
                raise WorkerDiedError(f"the worker process died during {what} ({how})") from None
            if not answered:
                self.end()
                raise WorkerHungError(
                    f"{what} took longer than {timeout_s:g} s, so its worker process was killed; mend the environment, "
                    "or register it with a larger step_timeout_s"
                )
        if not ok:
            try:
                raise answer
            finally:
                del answer  # or its traceback keeps this frame alive, and so the environment, until garbage collection
        return answer

    def end(self, grace_s: float = 0.0) -> int:
        """Kill the process and what it started, at once or after `grace_s`. Returns its exit status."""
        self._over = True
        return self._process.end(grace_s) if self._process is not None else 0

    def _start(self) -> Connection:
        self._pipe, self._process = self.home.start()
        if self._over:
            self._process.end(0.0)
            raise HostError("it was ended while its process started")
        return self._pipe


class Pool:
    """A bounded number of workers, each lent to one episode at a time and then to the next.

    Args:
        max_workers: Processes, and so live episodes, at once, at least 1; further episodes wait. None: as many as its
            hosts have cores, at least four each.
        patience_s: How long to wait for a free one while none is given back, in seconds; a thread waits no longer than
            `THREAD_PATIENCE_S`.
        homes: Hosts that they run on, this one alone if empty.
    """

    def __init__(
        self, max_workers: int | None = None, *, patience_s: float = PATIENCE_S, homes: Sequence[Home] = ()
    ) -> None:
        if (max_workers is not None and max_workers < 1) or patience_s <= 0:
            raise ValueError(f"max_workers={max_workers} must be >= 1 and patience_s={patience_s} > 0")
        self.patience_s = patience_s
        self._limit = max_workers
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._lent: set[Worker] = set()
        self._waiting: deque[Future[Worker]] = deque()
        self._last_return = time.monotonic()
        self._settle(homes)
        atexit.register(self.close)

    def _settle(self, homes: Sequence[Home]) -> None:
        self.homes = tuple(homes) or (Here(),)
        self._most = self._limit or sum(home.capacity for home in self.homes)
        self.threads = ThreadPoolExecutor(self._most, thread_name_prefix="env-worker")
        """Where the calls of event loops wait. As many as workers: whoever has a worker has a thread."""

    @property
    def max_workers(self) -> int:
        """Processes at once; fewer once a host is lost."""
        return min(self._most, self._limit or sum(home.capacity for home in self._living))

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
            useful = worker.alive and worker.home in self._living
            if useful:
                self._idle.append(worker)
            while self._waiting and len(self._lent) < self.max_workers:
                future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_result(self._lend())
        if not useful:
            worker.end()

    def move(self, homes: Sequence[Home]) -> None:
        """Let processes that start from now on run on these hosts. Idle ones are ended, others when given back."""
        with self._lock:
            idle, self._idle = self._idle, []
            self.threads.shutdown(wait=False)  # calls that are under way are finished
            self._settle(homes)
        for worker in idle:
            worker.end()

    def close(self) -> None:
        """End all processes."""
        atexit.unregister(self.close)
        for worker in self.workers:
            worker.end()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self) -> Future[Worker]:
        future: Future[Worker] = Future()
        with self._lock:
            if len(self._lent) < self.max_workers:
                future.set_result(self._lend())
            else:
                self._waiting.append(future)
        return future

    def _lend(self) -> Worker:
        self._idle = [worker for worker in self._idle if worker.alive]
        used = Counter(worker.home for worker in self._lent)
        worker = self._idle.pop() if self._idle else Worker(min(self._living, key=lambda h: used[h] / h.capacity))
        self._lent.add(worker)
        return worker

    @property
    def _living(self) -> tuple[Home, ...]:
        """Hosts that are not lost; this one where all are."""
        living = tuple(home for home in self.homes if not home.lost)
        return living or (Here(),)

    def _check_patience(self, future: Future[Worker], patience_s: float, who: str) -> None:
        if time.monotonic() - self._last_return > patience_s and future.cancel():
            raise StallError(
                f"{who} waited {patience_s:g} s for a worker process while none of {self.max_workers} was given "
                "back; close environments that are no longer played, or call "
                "forge_agents.envs.workers.env.use(max_workers=...)"
            )
