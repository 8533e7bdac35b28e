"""Environments in worker processes: for those that are slow, or may crash or hang.

In: the spec of an environment with ``isolation="process"``. Out: `WorkerEnv`, which is played like any other. Waits for
a free worker and for each of its answers, with deadlines.

This holds crashes, not malice: a worker has every right of this process. Hostile code belongs in the sandbox.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import functools
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

from pettingzoo import AECEnv

from forge_agents._worker_process import NOT_SHARED, STATE
from forge_agents.env import Observation
from forge_agents.errors import ForgeError, StallError
from forge_agents.registry import EnvSpec

T = TypeVar("T")
MAX_WORKERS = max(4, os.cpu_count() or 1)
"""Processes, and so live episodes of isolated environments, at once. Further episodes wait; `use` changes it."""
START_TIMEOUT_S = 120.0
"""Seconds that a worker may take to start, to import an environment's module and to build the environment."""
PATIENCE_S = 600.0
"""Seconds that an event loop's episode waits for a free worker while not a single one is given back."""
THREAD_PATIENCE_S = 60.0
"""The same for a plain PettingZoo loop, which may itself hold all workers."""

_PROGRAM = (
    "import sys; descriptor, *sys.path = sys.argv[1:]; "
    "from forge_agents._worker_process import serve; serve(int(descriptor))"
)
_slots = itertools.count()


class WorkerDiedError(ForgeError, RuntimeError):
    """The process of an environment ended in the middle of a call."""


class WorkerHungError(ForgeError, TimeoutError):
    """An environment took longer than its `step_timeout_s`; its process was killed."""


class Worker:
    """One process. It starts at the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lock = threading.Lock()
        self.holders = 0
        """Environments that live there: one, and its forks."""

    @property
    def pid(self) -> int | None:
        """Process id; None before the first call."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether it runs, or was not needed yet."""
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
            pipe = self._pipe or self._start()
            try:
                pipe.send_bytes(pickle.dumps((what, args, timeout_s)))
                answered = pipe.poll(timeout_s)
                ok, answer = pickle.loads(pipe.recv_bytes()) if answered else (False, None)  # noqa: S301  # ours
            except (EOFError, OSError):
                status = self.end(grace_s=2.0)
                how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
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
        if self._process is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own
        return self._process.wait()

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._pipe = ours
        return ours


class Pool:
    """A bounded number of workers, each lent to one episode at a time and then to the next.

    Args:
        max_workers: At least 1.
        patience_s: How long to wait for a free one while none is given back, in seconds; a thread waits no longer than
            `THREAD_PATIENCE_S`.
    """

    def __init__(self, max_workers: int = MAX_WORKERS, *, patience_s: float = PATIENCE_S) -> None:
        if max_workers < 1 or patience_s <= 0:
            raise ValueError(f"max_workers={max_workers} must be >= 1 and patience_s={patience_s} > 0")
        self.max_workers, self.patience_s = max_workers, patience_s
        self.threads = ThreadPoolExecutor(max_workers, thread_name_prefix="env-worker")
        """Where the calls of event loops wait. As many as workers: whoever has a worker has a thread."""
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._lent: set[Worker] = set()
        self._waiting: deque[Future[Worker]] = deque()
        self._last_return = time.monotonic()
        atexit.register(self.close)

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
            if worker.alive:
                self._idle.append(worker)
            while self._waiting and len(self._lent) < self.max_workers:
                future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_result(self._lend())

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
        worker = self._idle.pop() if self._idle else Worker()
        self._lent.add(worker)
        return worker

    def _check_patience(self, future: Future[Worker], patience_s: float, who: str) -> None:
        if time.monotonic() - self._last_return > patience_s and future.cancel():
            raise StallError(
                f"{who} waited {patience_s:g} s for a worker process while none of {self.max_workers} was given "
                "back; close environments that are no longer played, or call forge_agents.workers.use(max_workers=...)"
            )


class WorkerEnv(AECEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """An environment that lives in a worker process.

    It has a worker from its first `reset` to its `close`. A call that outlives the spec's `step_timeout_s`, or the end
    of the process, raises; the worker is replaced, and `reset` starts over in another one. `copy.deepcopy` copies the
    environment within its worker.

    Raises:
        ForgeError: The environment's class cannot be imported by another process.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.spec = spec
        self.max_turns = spec.max_turns
        self._packed = _packed(spec)
        self._about = _about(self._packed)
        self.metadata, self.render_mode = self._about["metadata"], self._about["render_mode"]
        self.possible_agents = list(self._about["possible_agents"])
        self.agents: list[str] = []
        self._worker: Worker | None = None
        self._slot = -1
        self._spaces: dict[str, dict[str, Any]] = {}
        self._seen: Any = None

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode, in a worker."""
        if self._worker is None:
            self._worker = pool().borrow(str(self))
        if self._slot < 0:
            slot = next(_slots)
            self._ask("build", slot, self._packed, timeout_s=START_TIMEOUT_S)
            self._slot = slot
            self._worker.holders += 1
        self._take(self._ask("reset", self._slot, seed, None if options is None else dict(options)))

    def step(self, action: Any) -> None:
        """Play a decision; None for an agent that is out."""
        if self._slot < 0:
            raise RuntimeError(f"{self}: no episode is running; call reset() before step()")
        self._take(self._ask("step", self._slot, action))

    def observe(self, agent: str) -> Any:
        """What `agent` sees now."""
        if self._seen is not None and agent == self.agent_selection:
            return self._seen
        return _as_observation(self._ask("call", self._slot, "observe", (agent,), {}))

    def observation_space(self, agent: str) -> Any:
        """A copy of the environment's own."""
        return self._space("observation_spaces", agent)

    def action_space(self, agent: str) -> Any:
        """A copy of the environment's own."""
        return self._space("action_spaces", agent)

    def render(self) -> Any:
        """What the environment renders."""
        return self._ask("call", self._slot, "render", (), {}) if self._slot >= 0 else ""

    def fork(self) -> WorkerEnv:
        """An independent copy in the same state, in the same worker."""
        return copy.deepcopy(self)

    def close(self) -> None:
        """Give the worker back; one that is still at work is killed."""
        worker, slot = self._worker, self._slot
        self._worker, self._slot = None, -1
        if worker is None:
            return
        worker.holders -= slot >= 0
        if worker.busy:
            worker.end()
        elif worker.alive and slot >= 0:
            try:
                worker.call("close", slot, timeout_s=self.spec.step_timeout_s)
            except Exception:  # noqa: BLE001  # an environment that does not close takes its process with it
                worker.end()
        if worker.holders <= 0:
            pool().give_back(worker)

    async def off_loop(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `call`, which uses this environment, beside the event loop.

        Waits for a free worker first, so that episodes that wait hold no thread.
        """
        if self._worker is None:
            self._worker = await pool().borrow_async(str(self))
        running = asyncio.get_running_loop().run_in_executor
        return await running(pool().threads, functools.partial(call, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        about = self.__dict__.get("_about", {})
        if name in about.get("methods", ()):
            return functools.partial(self._remote, name)
        if name.startswith("_") or name in NOT_SHARED or self.__dict__.get("_slot", -1) < 0:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, or only from reset() on")
        return self._ask("get", self._slot, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> WorkerEnv:
        twin = WorkerEnv(self.spec)
        if self._worker is not None and self._slot >= 0:
            slot = next(_slots)
            self._ask("fork", self._slot, slot)
            twin._worker, twin._slot = self._worker, slot
            self._worker.holders += 1
            twin._take({**{name: getattr(self, name) for name in STATE}, "seen": self._seen})
        return twin

    def __del__(self) -> None:
        if not sys.is_finalizing() and self.__dict__.get("_worker") is not None:
            self.close()

    def __str__(self) -> str:
        return self.spec.id

    def _space(self, kind: str, agent: str) -> Any:
        if kind not in self._spaces:
            self._spaces[kind] = copy.deepcopy(self._about[kind])  # spaces have generators of their own
        return self._spaces[kind][agent]

    def _remote(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._slot < 0:
            raise RuntimeError(f"{self}: call reset() before {name}()")
        if name != "instructions":
            self._seen = None  # it may have changed what is seen
        return self._ask("call", self._slot, name, args, kwargs)

    def _ask(self, what: str, *args: Any, timeout_s: float | None = None) -> Any:
        assert self._worker is not None
        try:
            return self._worker.call(what, *args, timeout_s=timeout_s or self.spec.step_timeout_s)
        except (WorkerDiedError, WorkerHungError):
            self.agents = []
            self.close()
            raise

    def _take(self, state: Mapping[str, Any]) -> None:
        for name in STATE:
            value = state[name]
            setattr(self, name, value.copy() if isinstance(value, (dict, list)) else value)
        self._seen = _as_observation(state["seen"])


def pool() -> Pool:
    """The workers of this process."""
    global _pool  # noqa: PLW0603  # processes are the process's
    if _pool is None:
        _pool = Pool()
    return _pool


def use(max_workers: int) -> None:
    """Replace the pool: its processes end, and episodes that live there fail."""
    global _pool  # noqa: PLW0603  # processes are the process's
    shutdown()
    _pool = Pool(max_workers)


def shutdown() -> None:
    """End all worker processes. The next episode starts new ones."""
    global _pool  # noqa: PLW0603  # processes are the process's
    if _pool is not None:
        _pool.close()
        _pool = None


_pool: Pool | None = None


def _packed(spec: EnvSpec) -> bytes:
    """The spec for another process, which imports the environment by name."""
    target = spec.entry_point
    if not isinstance(target, str):
        target = f"{getattr(target, '__module__', '__main__')}:{getattr(target, '__qualname__', '<lambda>')}"
    if target.startswith("__main__:") or "<" in target:
        raise ForgeError(
            f"{spec.id} has isolation='process', but a worker process cannot import {target}; put the environment into "
            "a module and register 'package.module:Class'"
        )
    return pickle.dumps(replace(spec, entry_point=target))


@functools.lru_cache(maxsize=64)
def _about(packed: bytes) -> dict[str, Any]:
    """What the environment is, from a process of its own: asking must not wait for a free worker."""
    worker = Worker()
    try:
        return dict(worker.call("describe", packed, timeout_s=START_TIMEOUT_S))
    finally:
        worker.end()


def _as_observation(seen: Any) -> Any:
    return Observation(seen) if isinstance(seen, str) else seen
