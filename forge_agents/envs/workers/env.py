"""Environments in worker processes: for those that are slow, or may crash or hang.

In: the spec of an environment with ``isolation="process"``. Out: `WorkerEnv`, which is played like any other. Waits for
a free worker and for each of its answers, with deadlines.

This holds crashes, not malice: a worker has every right of this process. Hostile code belongs in the sandbox.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import math
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
from typing import Any, TypeVar

from pettingzoo import AECEnv

from forge_agents.envs.env import HOOKS, Observation
from forge_agents.envs.spec import EnvSpec
from forge_agents.envs.workers.process import NOT_SHARED, STATE
from forge_agents.errors import ActorDiedError, ForgeError, StallError
from forge_agents.runtime import mesh
from forge_agents.runtime.deaths import describe_exit
from forge_agents.runtime.hosts import ENVS
from forge_agents.runtime.threads import in_thread

T = TypeVar("T")

_slots = itertools.count()
START_TIMEOUT_S = 120.0
"""Seconds that a worker may take to start, to import an environment's module and to build the environment."""
PATIENCE_S = 600.0
"""Seconds that an event loop's episode waits for a free worker while not a single one is used or given back: episodes
may last for long."""
THREAD_PATIENCE_S = 60.0
"""The same for a plain PettingZoo loop, which may itself hold all workers."""

_LOOK_S = 0.5
"""The end of a process or a host is seen within this time."""
_NAMED_S = 1.5
"""Within this time Monarch mostly says how a process ended that is seen to be gone."""
_numbers = itertools.count()
_MAX_CALLS = 20_000
"""Calls after which a worker process is replaced when its episode is over. Monarch 0.7 keeps 350 bytes of each call in
the process that answers it, and an environment may keep more."""


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
        self.observes_reasoning: bool = self._about["observes_reasoning"]
        self.possible_agents = list(self._about["possible_agents"])
        self.sides: Sequence[Sequence[str]] = self._about["sides"]
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
        """Give the worker back; one that is still at work is killed.

        Raises:
            WorkerHungError: The environment did not close within its `step_timeout_s`; its process is gone.
            Exception: What the environment raised; its process is gone, too.
        """
        worker, slot = self._worker, self._slot
        self._worker, self._slot = None, -1
        if worker is None:
            return
        worker.holders -= slot >= 0
        try:
            if worker.busy:
                worker.end()
            elif worker.alive and slot >= 0:
                worker.call("close", slot, timeout_s=self.spec.step_timeout_s)
        except Exception:
            worker.end()
            raise
        finally:
            if worker.holders <= 0:
                pool().give_back(worker)

    async def off_loop(self, where: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `call`, which uses this environment, beside the event loop.

        A `reset` waits for a free worker first, so that episodes that wait hold no thread.

        Args:
            where: "reset", "observe", "step", "reward" or "close".
            call: What is run, with all that follows.
        """
        if self._worker is None and where == "reset":
            self._worker = await pool().borrow_async(str(self))
        if self._worker is not None and self._worker.busy:  # with a call that was cancelled and holds its thread
            return call(*args, **kwargs)  # which can only be a close, and that kills
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
            self._worker.holders += 1
            twin._take({**{name: getattr(self, name) for name in STATE}, "seen": self._seen})
        return twin

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # at the end modules are gone
        if not finalizing() and self.__dict__.get("_worker") is not None:
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
        if name not in ("instructions", "tool_schemas"):
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


def _packed(spec: EnvSpec) -> bytes:
    """The spec for another process, which imports the environment by name."""
    target = spec.entry_point
    if not isinstance(target, str):
        target = f"{getattr(target, '__module__', '__main__')}:{getattr(target, '__qualname__', '<lambda>')}"
    if target.startswith("__main__:") or "<" in target:
        raise ForgeError(
            f"{spec.id} plays in worker processes (isolation='process', or hosts for envs in the mesh), and these "
            f"cannot import {target}; put the environment into a module and register 'package.module:Class'"
        )
    try:
        return pickle.dumps(replace(spec, entry_point=target, oracle=None))  # who plays lives here
    except (pickle.PicklingError, AttributeError, TypeError) as cause:
        raise ForgeError(
            f"{spec.id} plays in worker processes, and an argument of it cannot be sent there ({cause}); give "
            "functions that a module defines by name, and no open files or connections"
        ) from None


_DESCRIBE = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from forge_agents.envs.workers.process import describe_here; describe_here()"
)


@functools.lru_cache(maxsize=64)
def _about(packed: bytes) -> dict[str, Any]:
    """What the environment is, from a process of its own: asking must not wait for a free worker.

    It is no actor: what a run plays is looked at before its hosts are there, and where these need TCP, nobody may have
    used Monarch before.
    """
    command = [sys.executable, "-P", "-c", _DESCRIBE, *sys.path]
    try:
        done = subprocess.run(
            command, input=packed, stdout=subprocess.PIPE, timeout=START_TIMEOUT_S, start_new_session=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise WorkerHungError(
            f"to import and build the environment took longer than {START_TIMEOUT_S:g} s, so its process was killed"
        ) from None
    if done.returncode:
        raise WorkerDiedError(f"the process that imports and builds the environment {describe_exit(done.returncode)}")
    ok, answer = pickle.loads(done.stdout)  # noqa: S301  # ours
    if not ok:
        raise answer
    return dict(answer)


def _as_observation(seen: Any) -> Any:
    return Observation(seen) if isinstance(seen, str) else seen


# ---- worker processes, and who has them


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
        self.used_at = time.monotonic()
        """When a call ended last, or it was made."""
        self.holders = 0
        """Environments that live there: one, and its forks."""
        self._calls = 0

    @property
    def pid(self) -> int | None:
        """Process id; None before the first call, and where the process runs on another machine."""
        return next(iter(mesh.pids(self._procs)), None)

    @property
    def alive(self) -> bool:
        """Whether it runs, or was not needed yet."""
        return not self._over and (self._procs is None or not mesh.failure_of(self._procs))

    @property
    def useful(self) -> bool:
        """Whether it lives on a host of the run of this moment, and has not answered too many calls."""
        return self._calls < _MAX_CALLS and self.alive and (self._procs is None or mesh.is_current(self._procs))

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
                self._calls += 1
                ok, answer = pickle.loads(self._wait(self._actor.do.choose(what, args), what, timeout_s))  # noqa: S301  # ours
            except ActorDiedError as error:
                self.end()
                raise WorkerDiedError(str(error)) from None
            except WorkerHungError:
                self.end()
                raise
            finally:
                self.used_at = time.monotonic()
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
                if why := mesh.failure_of(self._procs):
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
                    cause = ActorDiedError(f"{words}. Look at {mesh.log_hint(self.name)}", self.name)
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
        return self._limit or mesh.capacity(ENVS)

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
        worker.used_at = time.monotonic()
        return worker

    def _drop_useless(self) -> None:
        useless = [worker for worker in self._idle if not worker.useful]
        self._idle = [worker for worker in self._idle if worker not in useless]
        for worker in useless:
            worker.end()

    def _check_patience(self, future: Future[Worker], patience_s: float, who: str) -> None:
        with self._lock:
            lent, last_sign = tuple(self._lent), self._last_return
        if any(worker.busy for worker in lent):  # its call has a deadline of its own
            return
        last_sign = max([last_sign, *(worker.used_at for worker in lent)])
        if time.monotonic() - last_sign > patience_s and future.cancel():
            raise StallError(
                f"{who} waited {patience_s:g} s for a worker process while none of {self.max_workers} was used or "
                "given back; close environments that are no longer played, or call "
                "forge_agents.envs.workers.env.use(max_workers=...)"
            )


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
