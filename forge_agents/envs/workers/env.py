"""Environments in worker processes, and the pool of workers.

A worker contains crashes and hangs, but is no security boundary, because it has all rights of this process. Run hostile
code in the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pettingzoo import AECEnv

from forge_agents.envs.env import HOOKS, Observation
from forge_agents.envs.spec import EnvSpec
from forge_agents.envs.workers.process import NOT_SHARED, STATE
from forge_agents.errors import ActorDiedError, ForgeError, StallError
from forge_agents.imports import restrictions
from forge_agents.runtime import mesh, processes
from forge_agents.runtime.deaths import describe_exit
from forge_agents.runtime.hosts import ENVS
from forge_agents.runtime.threads import call_from_destructor, in_thread, start_destructor_thread

if TYPE_CHECKING:
    from forge_agents.runtime._monarch import ReplyPort

T = TypeVar("T")

_slots = itertools.count()
START_TIMEOUT_S = 120.0
"""Maximum seconds to start a worker, import an environment's module and build the environment."""
PATIENCE_S = 600.0
"""Maximum seconds that an episode on an event loop waits for a free worker while no worker is used or returned."""
THREAD_PATIENCE_S = 60.0
"""The same for a plain PettingZoo loop. Such a loop may hold all workers itself."""

_POLL_S, _START_POLL_S = 0.5, 0.05
"""Seconds between checks whether the worker's process or host has ended, and the same during its first call."""
_numbers = itertools.count()
_MAX_CALLS = 20_000
"""Number of calls after which a worker process is replaced at the end of its episode. Monarch 0.7 keeps 350 bytes of
each call in the process that answers it, unless the answer goes to a `ReplyPort`, and an environment may keep more."""


class WorkerEnv(AECEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """An environment that runs in a worker process.

    The environment holds a worker from its first `reset` to `close`. If a call exceeds the spec's `step_timeout_s` or
    the process ends, the call raises, and `reset` continues in another worker. `copy.deepcopy` copies the environment
    within its worker.

    Raises:
        ForgeError: Another process cannot import the environment's class.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.spec = spec
        self.max_turns = spec.max_turns
        self._packed = _packed(spec)
        self._about = _about(self._packed)
        self.metadata, self.render_mode = self._about["metadata"], self._about["render_mode"]
        self.observes_reasoning: bool = self._about["observes_reasoning"]
        self.judges_silence: bool = self._about["judges_silence"]
        self.can_fork: bool = self._about["can_fork"]
        self.acts_together: bool = self._about["acts_together"]
        self.possible_agents = list(self._about["possible_agents"])
        self.sides: Sequence[Sequence[str]] = self._about["sides"]
        self.agents: list[str] = []
        self._worker: Worker | None = None
        self._slot = -1
        self._spaces: dict[str, dict[str, Any]] = {}
        self._seen: Any = None

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode in a worker."""
        if self._worker is None:
            self._worker = pool().borrow(str(self))
        if self._slot < 0:
            slot = next(_slots)
            self._ask("build", slot, self._packed, timeout_s=START_TIMEOUT_S)
            self._slot = slot
            self._worker.hold(1)
        self._take(self._ask("reset", self._slot, seed, None if options is None else dict(options)))

    def step(self, action: Any) -> None:
        """Apply an action, or None for a terminated or truncated agent."""
        if self._slot < 0:
            raise RuntimeError(f"{self}: no episode is running. Call reset() before step()")
        self._take(self._ask("step", self._slot, action))

    def observe(self, agent: str) -> Any:
        """Return the observation of `agent`."""
        if self._seen is not None and agent == self.agent_selection:
            return self._seen
        return _as_observation(self._ask("call", self._slot, "observe", (agent,), {}))

    def observation_space(self, agent: str) -> Any:
        """Return a copy of the environment's observation space."""
        return self._space("observation_spaces", agent)

    def action_space(self, agent: str) -> Any:
        """Return a copy of the environment's action space."""
        return self._space("action_spaces", agent)

    def render(self) -> Any:
        """Render the environment."""
        return self._ask("call", self._slot, "render", (), {}) if self._slot >= 0 else ""

    def fork(self) -> WorkerEnv:
        """Return an independent copy in the same state, in the same worker."""
        return copy.deepcopy(self)

    def close(self) -> None:
        """Return the worker to the pool, or kill it if a call is still running or the environment does not close.

        Raises WorkerHungError after `step_timeout_s`, and what the environment raises.
        """
        self._close()

    def _close(self, *, dropped: bool = False) -> None:
        worker, slot = self._worker, self._slot
        self._worker, self._slot = None, -1
        if worker is None:
            return
        holders = worker.hold(-(slot >= 0))
        try:
            if worker.busy and not dropped:  # the call of a copy does not end because this one was dropped
                worker.end()
            elif worker.alive and slot >= 0:
                worker.call("close", slot, timeout_s=self.spec.step_timeout_s, dropped=dropped)
        except Exception:
            worker.end()
            raise
        finally:
            if holders <= 0:
                pool().give_back(worker)

    async def off_loop(self, where: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `call(*args, **kwargs)` in a thread. The call uses this environment.

        A `reset` first waits for a free worker on the event loop, so that waiting episodes occupy no thread.

        Args:
            where: "reset", "observe", "step", "reward" or "close".
            call: Function to run.
        """
        if self._worker is None and where == "reset":
            self._worker = await pool().borrow_async(str(self))
        if self._worker is not None and self._worker.busy:  # a cancelled call still occupies its thread
            return call(*args, **kwargs)  # only a close can follow, which kills the worker
        return await in_thread(functools.partial(call, *args, **kwargs), name=f"environment {self}")

    def __getattr__(self, name: str) -> Any:
        about = self.__dict__.get("_about", {})
        if name in about.get("methods", ()):
            return functools.partial(self._remote, name)
        if name.startswith("_") or name in (*NOT_SHARED, *HOOKS) or self.__dict__.get("_slot", -1) < 0:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, or only from reset() on")
        return self._ask("get", self._slot, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> WorkerEnv:
        twin = WorkerEnv(self.spec)
        if self._worker is not None and self._slot >= 0:
            slot = next(_slots)
            self._ask("fork", self._slot, slot)
            twin._worker, twin._slot = self._worker, slot
            self._worker.hold(1)
            twin._take({**{name: getattr(self, name) for name in STATE}, "seen": self._seen})
        return twin

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # bound early: `sys` may be gone
        if not finalizing() and self.__dict__.get("_worker") is not None:
            call_from_destructor(functools.partial(self._close, dropped=True))

    def __str__(self) -> str:
        return self.spec.id

    def _space(self, kind: str, agent: str) -> Any:
        if kind not in self._spaces:
            self._spaces[kind] = copy.deepcopy(self._about[kind])  # spaces have random generators
        return self._spaces[kind][agent]

    def _remote(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._slot < 0:
            raise RuntimeError(f"{self}: call reset() before {name}()")
        if name not in ("instructions", "tool_schemas"):
            self._seen = None  # the call may have changed the observation
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


def _packed(spec: EnvSpec) -> bytes:
    """Pickle a spec, and which modules may be imported, for another process to import the environment by name."""
    target = spec.entry_point
    if not isinstance(target, str):
        target = f"{getattr(target, '__module__', '__main__')}:{getattr(target, '__qualname__', '<lambda>')}"
    if target.startswith("__main__:") or "<" in target:
        raise ForgeError(
            f"{spec.id} runs in worker processes (isolation='process', or hosts for envs in the mesh), which cannot "
            f"import {target}. Move the environment to a module and register 'package.module:Class'"
        )
    try:
        return pickle.dumps((restrictions(), replace(spec, entry_point=target, oracle=None)))  # oracles play here
    except (pickle.PicklingError, AttributeError, TypeError) as cause:
        raise ForgeError(
            f"{spec.id} runs in worker processes, and one of its arguments cannot be sent there ({cause}). Pass only "
            "module-level functions, and no open files or connections"
        ) from None


_DESCRIBE = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from forge_agents.envs.workers.process import describe_here; describe_here()"
)


@functools.lru_cache(maxsize=64)
def _about(packed: bytes) -> dict[str, Any]:
    """Describe an environment by a short-lived process, without a free worker.

    The process is not an actor, because a run describes its environments before its hosts exist, and with hosts on TCP
    Monarch must not have been used earlier.
    """
    command = [sys.executable, "-P", "-c", _DESCRIBE, *sys.path]
    try:
        done = subprocess.run(
            command, input=packed, stdout=subprocess.PIPE, timeout=START_TIMEOUT_S, start_new_session=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise WorkerHungError(
            f"importing and building the environment took longer than {START_TIMEOUT_S:g} s, so its process was killed"
        ) from None
    if done.returncode:
        raise WorkerDiedError(f"the process that imports and builds the environment {describe_exit(done.returncode)}")
    ok, answer = pickle.loads(done.stdout)  # noqa: S301  # written by our own process
    if not ok:
        raise answer
    return dict(answer)


def _as_observation(seen: Any) -> Any:
    return Observation(seen) if isinstance(seen, str) else seen


# ---- worker processes


class WorkerDiedError(ForgeError, RuntimeError):
    """The process of an environment ended during a call."""


class WorkerHungError(ForgeError, TimeoutError):
    """An environment exceeded its `step_timeout_s`. Its process was killed."""


class Worker:
    """A worker process, started at the first call. A Monarch mesh of its own, so that failures stay separate."""

    def __init__(self) -> None:
        self.name = f"env-worker-{next(_numbers)}"
        self._procs: Any = None
        self._actor: Any = None
        self._port: ReplyPort | None = None
        """Port of the next answer. None before the first, and on launched hosts, where only a failed call reports an
        end."""
        self._lock = threading.Lock()
        self._ended = False
        self.used_at = time.monotonic()
        """Time of creation or of the end of the last call."""
        self._holders, self._holding = 0, threading.Lock()
        """Number of environments in the process: one and its forks."""
        self.closes_dropped = False
        """Whether the running call closes an environment that nobody refers to any more."""
        self._calls = 0
        self._watched = False
        self._status: int | None = None
        """Exit status of the process, once the kernel has reported it."""

    @property
    def pid(self) -> int | None:
        """Process id. None before the first call, or if the process runs on another machine."""
        return next(iter(mesh.pids(self._procs)), None)

    @property
    def alive(self) -> bool:
        """Whether the process runs or has not started yet."""
        return not self._ended and (self._procs is None or not mesh.failure_of(self._procs))

    @property
    def reusable(self) -> bool:
        """Whether the process belongs to the current run's hosts and has not answered too many calls."""
        return self._calls < _MAX_CALLS and self.alive and (self._procs is None or mesh.is_current(self._procs))

    @property
    def busy(self) -> bool:
        """Whether a call is running, other than the close of a dropped environment, which ends soon."""
        return self._lock.locked() and not self.closes_dropped

    def hold(self, count: int) -> int:
        """Add to the number of environments in the process, and return it."""
        with self._holding:
            self._holders += count
            return self._holders

    def call(self, what: str, *args: Any, timeout_s: float, dropped: bool = False) -> Any:
        """Run a command of `process.Environments`. Raises what the environment raises.

        `dropped` marks the close of an environment that nobody refers to any more.

        Raises WorkerDiedError or WorkerHungError if the process has ended.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._call(what, args, timeout_s, dropped=dropped)
        with ThreadPoolExecutor(1) as executor:  # Monarch warns of blocking waits in the event loop's thread
            return executor.submit(self._call, what, args, timeout_s).result()

    def end(self) -> None:
        """Kill the process and its children, without waiting."""
        self._ended = True
        if self._procs is not None:
            mesh.kill(self._procs)

    def _call(self, what: str, args: tuple[Any, ...], timeout_s: float, *, dropped: bool = False) -> Any:
        with self._lock:
            self.closes_dropped = dropped
            try:
                if self._procs is None and not self._ended:
                    self._start()
                if self._ended:
                    raise ActorDiedError(f"{self.name} died before {what}: it was ended", self.name)
                self._calls += 1
                port, self._port = self._port, None  # not used again if this call is interrupted and answered later
                answer = port.call(self._actor.do, what, args) if port else self._actor.do.choose(what, args)
                packed = self._wait(answer, what, timeout_s)
                if self._calls == 1:
                    self._watch()  # the worker may have answered before the first check
                self._port = port or self._new_port()
                ok, result = pickle.loads(packed)  # noqa: S301  # written by our own process
                if ok is None:
                    raise ActorDiedError(f"{self.name} died during {what}: {result}", self.name)
            except ActorDiedError as error:
                self.end()
                raise WorkerDiedError(str(error)) from None
            except WorkerHungError:
                self.end()
                raise
            finally:
                self.used_at = time.monotonic()
                self.closes_dropped = False
        if not ok:
            try:
                raise result
            finally:
                del result  # its traceback refers to this frame, which would keep the environment alive
        return result

    def _start(self) -> None:
        from forge_agents.envs.workers.actor import PROGRAM, EnvActor

        procs = mesh.spawn_procs(self.name, role=ENVS, program=PROGRAM)
        self._actor, self._procs = procs.spawn("environments", EnvActor), procs
        if self._ended:  # the episode was cancelled during the start
            mesh.kill(procs)

    def _new_port(self) -> ReplyPort | None:
        from forge_agents.runtime._monarch import ReplyPort

        return None if mesh.has_remote_hosts() else ReplyPort()

    def _watch(self) -> None:
        """Have the kernel report how the process ends, from its start on."""

        def tell(status: int | None) -> None:
            self._status = status

        if not self._watched and (pid := self.pid) is not None:
            self._watched = True
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                processes.on_end(pid, tell)

    def _wait(self, answer: Any, what: str, timeout_s: float) -> bytes:
        """Wait for a Monarch future, or raise the error of a process or host that ended in the meantime."""
        start, end_noticed = time.monotonic(), math.inf
        poll_s = _START_POLL_S if self._calls == 1 else _POLL_S
        while True:
            waited = time.monotonic() - start
            try:
                packed: bytes = answer.get(min(poll_s, max(0.05, timeout_s - waited)))
            except TimeoutError:
                self._watch()
                if reason := mesh.failure_of(self._procs):
                    end_noticed = min(end_noticed, waited)
                    for pid in mesh.ended(self._procs):
                        if (end := mesh.death(self._procs, pid, self._status)).known:
                            reason = f"process {pid} {end}. Look at {mesh.log_hint(self.name)}"
                    if waited >= end_noticed + mesh.REPORT_S * (reason == mesh.ENDED):
                        raise ActorDiedError(f"{self.name} died during {what}: {reason}", self.name) from None
                elif waited >= timeout_s:
                    raise WorkerHungError(
                        f"{what} took longer than {timeout_s:g} s, so its worker process was killed. Fix the "
                        "environment, or register it with a larger step_timeout_s"
                    ) from None
            except Exception as error:  # noqa: BLE001  # Monarch raises several types
                cause = mesh.as_local_error(error, who=self.name, what=what)
                if not isinstance(cause, ActorDiedError):  # the process failed to start
                    message = f"{self.name} died during {what}: {type(cause).__name__}: {cause}"
                    cause = ActorDiedError(f"{message}. See {mesh.log_hint(self.name)}", self.name)
                raise cause from None
            else:
                return packed


class Pool:
    """A bounded set of workers, each used by one episode at a time.

    Args:
        max_workers: Maximum number of processes, and so of concurrent episodes. At least 1. None uses the number of
            cores of the hosts for environments, at least four per host.
    """

    def __init__(self, max_workers: int | None = None) -> None:
        if max_workers is not None and max_workers < 1:
            raise ValueError(f"max_workers={max_workers} must be >= 1")
        self.patience_s = PATIENCE_S
        self._limit = max_workers
        self._lock = threading.Lock()
        start_destructor_thread(os.getpid())
        self._idle: list[Worker] = []
        self._lent: set[Worker] = set()
        self._waiting: deque[Future[Worker]] = deque()
        self._last_return = time.monotonic()

    @property
    def max_workers(self) -> int:
        """Maximum number of processes. Falls when a host is lost."""
        return self._limit or mesh.capacity(ENVS)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Workers, in use and idle."""
        with self._lock:
            return (*self._lent, *self._idle)

    def borrow(self, borrower: str) -> Worker:
        """Wait for a free worker in this thread. Raises StallError if none was used or returned for too long."""
        future, patience_s = self._request(), min(self.patience_s, THREAD_PATIENCE_S)
        while True:
            try:
                return future.result(patience_s)
            except NotYetError:
                self._check_patience(future, patience_s, borrower)

    async def borrow_async(self, borrower: str) -> Worker:
        """Wait for a free worker on the event loop, as `borrow`."""
        future = self._request()
        waiting = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait({waiting}, timeout=self.patience_s))[0]:
                self._check_patience(future, self.patience_s, borrower)
        except BaseException:
            if not future.cancel() and future.exception() is None:
                self.give_back(future.result())
            raise
        return waiting.result()

    def give_back(self, worker: Worker) -> None:
        """Return a worker, and serve waiting requests. Ended workers are replaced."""
        with self._lock:
            self._last_return = time.monotonic()
            self._lent.discard(worker)
            self._idle.append(worker)
            while self._waiting and len(self._lent) < self.max_workers:
                future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_result(self._lend())
            self._end_unusable()

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.end()

    def _request(self) -> Future[Worker]:
        future: Future[Worker] = Future()
        with self._lock:
            if len(self._lent) < self.max_workers:
                future.set_result(self._lend())
            else:
                self._waiting.append(future)
        return future

    def _lend(self) -> Worker:
        self._end_unusable()
        worker = self._idle.pop() if self._idle else Worker()
        self._lent.add(worker)
        worker.used_at = time.monotonic()
        return worker

    def _end_unusable(self) -> None:
        unusable = [worker for worker in self._idle if not worker.reusable]
        self._idle = [worker for worker in self._idle if worker not in unusable]
        for worker in unusable:
            worker.end()

    def _check_patience(self, future: Future[Worker], patience_s: float, borrower: str) -> None:
        with self._lock:
            lent, last_activity = tuple(self._lent), self._last_return
        if any(worker.busy for worker in lent):  # the running call has its own timeout
            return
        last_activity = max([last_activity, *(worker.used_at for worker in lent)])
        if time.monotonic() - last_activity > patience_s and future.cancel():
            raise StallError(
                f"{borrower} waited {patience_s:g} s for a worker process while none of {self.max_workers} was used or "
                "returned. Close environments that are no longer needed, or call "
                "forge_agents.envs.workers.env.use(max_workers=...)"
            )


def pool() -> Pool:
    """Return the pool of this process."""
    global _pool  # noqa: PLW0603  # one pool per process
    if _pool is None:
        _pool = Pool()
    return _pool


def use(max_workers: int | None) -> None:
    """Replace the pool. Its processes end, and their episodes fail."""
    global _pool  # noqa: PLW0603  # one pool per process
    if _pool is not None:
        _pool.close()
    _pool = Pool(max_workers)


def shutdown() -> None:
    """End all worker processes. The next episode starts new ones."""
    use(None)


_pool: Pool | None = None
