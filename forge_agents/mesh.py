"""Where processes run: Monarch meshes on this host, their deadlines and their end.

In: a name, an environment, endpoint calls. Out: process meshes, results, or errors that name who stalled or died.
Waits for spawned processes and their answers, always with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forge_agents import _waits
from forge_agents.errors import ActorDiedError, StallError

if TYPE_CHECKING:
    from forge_agents._monarch import ProcMesh

T = TypeVar("T")

RUN_VARIABLE = "FORGE_AGENTS_RUN"
"""Environment variable that marks every process of one controller; its value is the controller's token."""

_GRACE_S = 2.0
_log = logging.getLogger(__name__)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spawned:
    """One mesh that this controller started."""

    name: str
    mesh: ProcMesh
    logs: Path
    """Folder with ``RANK.log`` (what the process printed) and ``RANK.pid``."""


_spawned: list[_Spawned] = []
_in_trouble: set[str] = set()
"""Names that stalled or died: their logs outlive them."""


def spawn_procs(
    name: str, *, procs: int = 1, env: Mapping[str, str] | None = None, threads: int | None = None
) -> ProcMesh:
    """Start processes on this host, one dimension ``rank`` of size `procs`.

    What they print goes to `log_folder(name)`, so that many processes do not write over each other.

    Args:
        name: Said in errors and in the log folder's name; any text.
        procs: Number of processes. Replicas that may die alone need one mesh each: one death ends the calls on a mesh.
        env: Variables that exist before the processes' Python starts.
        threads: Size of the processes' OpenMP, MKL and OpenBLAS pools; None leaves the libraries' defaults.

    Returns:
        A Monarch `ProcMesh`; processes start in the background and a failed start shows in the first call.
    """
    if procs < 1:
        raise ValueError(f"procs={procs} for {name!r}; a mesh needs at least one process")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads} for {name!r}; give at least 1, or None for the default")
    from forge_agents._monarch import default_bootstrap_cmd

    logs = _new_log_folder(name)
    variables = {RUN_VARIABLE: _token(), "PYTHONPATH": _python_path(), **(env or {})}
    if threads is not None:
        variables |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    mesh: ProcMesh = _host().spawn_procs(
        per_host={"rank": procs},
        name=re.sub(r"[^A-Za-z0-9_]+", "_", name) or "procs",
        bootstrap=functools.partial(_send_output_to, str(logs)),
        bootstrap_command=default_bootstrap_cmd().with_env(variables),
    )
    _spawned.append(_Spawned(name=name, mesh=mesh, logs=logs))
    return mesh


async def with_deadline(awaitable: Awaitable[T], timeout_s: float, *, who: str, what: str) -> T:
    """Await a Monarch call or any awaitable, at most `timeout_s` seconds.

    Args:
        awaitable: A coroutine, future or Monarch future.
        timeout_s: Seconds until the wait counts as a stall.
        who: The one waited for, by the name it was spawned under where it has one.
        what: What it should do, as a noun: ``"weight update"``.

    Raises:
        StallError: The deadline passed. The remote work is not cancelled.
        ActorDiedError: The actor's process ended.
        Exception: What the endpoint raised, with the remote traceback as a note.
    """
    task = asyncio.ensure_future(_plain(awaitable))
    try:
        with _waits.waiting(who, what, timeout_s):
            await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise _stall(who, what, timeout_s)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_forget)
    error = task.exception()
    if error is None:
        return task.result()
    raise as_local_error(error, who=who, what=what) from None


def _stall(who: str, what: str, timeout_s: float) -> StallError:
    meanwhile = _waits.summary(without=who)
    error = StallError(
        f"{who} did not finish {what} within {timeout_s:g} s. Look at {log_advice(who)}; raise the timeout if the "
        f"work is just slow{'. Waited for meanwhile: ' * bool(meanwhile)}{meanwhile}",
        who,
    )
    error.picture = _waits.picture()
    return error


async def call_all(mesh: Any, n: int, endpoint_name: str, *args: Any, timeout_s: float, who: str) -> list[Any]:
    """Call an endpoint on every rank of an actor mesh; the first failure wins without waiting for the others.

    Monarch's own ``call`` reports only after all ranks have replied, so one rank that fails inside a collective would
    leave the caller waiting for ranks that wait for it. Each rank is called as a mesh of one: inside the endpoint
    ``current_rank()`` is 0 everywhere; actors that need their rank take it in their constructor.

    Args:
        mesh: Actor mesh spawned on a mesh of `spawn_procs`.
        n: Its number of ranks.
        endpoint_name: The endpoint to call.
        args: The same arguments for every rank.
        timeout_s: Deadline for all ranks together.
        who: As in `with_deadline`.

    Returns:
        Results by rank.
    """

    async def one(rank: int) -> Any:
        endpoint = getattr(mesh.slice(rank=rank), endpoint_name)
        return await with_deadline(endpoint.call_one(*args), timeout_s, who=who, what=f"{endpoint_name} (rank {rank})")

    tasks = [asyncio.ensure_future(one(rank)) for rank in range(n)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if (error := task.exception()) is not None:
                raise error
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(_forget)


def as_local_error(error: BaseException, *, who: str, what: str) -> BaseException:
    """Turn what Monarch raises into what the user should read: the endpoint's own exception, or `ActorDiedError`."""
    from forge_agents._monarch import ActorError, SupervisionError

    if isinstance(error, ActorError):
        inner = as_local_error(error.exception, who=who, what=what)
        if not getattr(inner, "__notes__", None):
            inner.add_note(f"raised by {who} during {what}:\n{error.exception_formatted}")
        return inner
    if isinstance(error, SupervisionError):
        reason = " ".join(str(error).split())
        return ActorDiedError(f"{who} died during {what}: {reason}. Look at {log_advice(who)}", who)
    if type(error) is RuntimeError and "error spawning" in str(error):  # Monarch's, where the process is gone
        return ActorDiedError(f"{who} died while it was started. Look at {log_advice(who)}", who)
    return error


async def stop(mesh: ProcMesh, *, timeout_s: float = 10.0) -> None:
    """End a mesh's processes: asked first, killed after a grace of 2 s. Twice is no error.

    Args:
        mesh: From `spawn_procs`.
        timeout_s: Most seconds to wait for Monarch's word that it is over.
    """
    entry = next((s for s in _spawned if s.mesh is mesh), None)
    if entry is None:
        return
    _spawned.remove(entry)
    killer = asyncio.ensure_future(_kill_after(min(_GRACE_S, timeout_s), _pids(entry)))
    try:
        await with_deadline(mesh.stop(), timeout_s, who=entry.name, what="stop")
    except (StallError, RuntimeError) as error:  # RuntimeError: Monarch's, for a mesh that is dead already
        _log.info("stopping %s: %s", entry.name, error)
    await killer
    if entry.name not in _in_trouble:
        shutil.rmtree(entry.logs, ignore_errors=True)


async def _kill_after(grace_s: float, pids: Sequence[int]) -> None:
    """Wait until the processes are gone, and kill those that take longer: big libraries take seconds to unload."""
    deadline = time.monotonic() + grace_s
    while alive := [pid for pid in pids if _is_ours(pid)]:
        if time.monotonic() > deadline:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        await asyncio.sleep(0.02)


async def shutdown_all(*, timeout_s: float = 10.0) -> None:
    """Stop every mesh that this controller spawned, the latest first."""
    for entry in reversed(_spawned.copy()):
        await stop(entry.mesh, timeout_s=timeout_s)
    with contextlib.suppress(OSError):  # logs of a process that died stay
        _run_folder().rmdir()


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[None]:
    """Stop everything spawned inside the block, however it ends."""
    try:
        yield
    finally:
        await shutdown_all()


def pids(mesh: ProcMesh) -> list[int]:
    """Process ids of a mesh's ranks that have started and run on this machine."""
    entry = next((s for s in _spawned if s.mesh is mesh), None)
    return [] if entry is None else [pid for pid in _pids(entry) if _is_ours(pid)]


def log_folder(name: str) -> Path | None:
    """Folder of what the latest mesh of that name printed, one file a rank; None where no such mesh runs."""
    return next((s.logs for s in reversed(_spawned) if s.name == name), None)


def log_advice(who: str) -> str:
    """Where to read what `who` printed, for an error's text; from now on its logs are kept after it is stopped."""
    _in_trouble.add(who)
    folder = log_folder(who)
    return f"its log in {folder}" if folder is not None else f"the logs in {_run_folder()}"


def _pids(entry: _Spawned) -> list[int]:
    return [int(path.read_text()) for path in entry.logs.glob("*.pid")]


async def _plain(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _forget(task: asyncio.Future[Any]) -> None:
    """Take the result of a task nobody waits for, so that asyncio does not report it as lost."""
    if not task.cancelled():
        task.exception()


@functools.cache
def _token() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def _run_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"forge-agents-{os.getuid()}" / _token()


def _new_log_folder(name: str) -> Path:
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name) or "procs"
    base = _run_folder()
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Path(tempfile.mkdtemp(prefix=f"{safe}-", dir=base))


def _python_path() -> str:
    """Import paths of this process, so that what it can import, its actors can."""
    entries = [Path(entry).resolve() for entry in sys.path]
    installed = (sys.prefix, sys.base_prefix)
    ours = [str(entry) for entry in entries if not str(entry).startswith(installed) and entry.is_dir()]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join(dict.fromkeys(ours + inherited))


def _is_ours(pid: int) -> bool:
    """Whether a process of this controller still runs under that id (ids are reused)."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{RUN_VARIABLE}={_token()}".encode() in environment


def _send_output_to(folder: str) -> None:
    """Runs first in every spawned process: what it prints goes to a file; its id is noted beside it."""
    from forge_agents._monarch import current_rank

    rank = current_rank().rank
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    log = os.open(Path(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


@functools.cache
def _host() -> Any:
    from forge_agents import _monarch

    host = _monarch.start_runtime()
    _monarch.on_unhandled_fault(_note_fault)
    return host


def _note_fault(failure: Any) -> None:
    """Deaths reach the callers as errors; Monarch's default would end this process as well."""
    _log.info("a process failed: %s", failure.report())
