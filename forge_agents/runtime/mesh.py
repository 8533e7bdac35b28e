"""Starts processes as Monarch meshes on the run's hosts, calls them with timeouts, and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import re
import shutil
import signal
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forge_agents.errors import ActorDiedError, HostError, StallError
from forge_agents.private_folder import private_folder
from forge_agents.runtime import deaths as _deaths
from forge_agents.runtime import processes as _processes
from forge_agents.runtime import stalls as _stalls
from forge_agents.runtime import startup
from forge_agents.runtime.hosts import ENVS, Hosts, ProcessSlot
from forge_agents.runtime.machine import gpu_variables, memory_domain
from forge_agents.runtime.threads import all_or_first_error

if TYPE_CHECKING:
    from forge_agents.runtime._monarch import ProcMesh
    from forge_agents.runtime.allocation import Allocation, MeshRequest
    from forge_agents.runtime.cluster import Cluster

T = TypeVar("T")

ENDED = "its process ended"
"""Reason for the loss of a process. The kernel may report later how it ended."""
REPORT_S = 2.0
"""The kernel reports how a local process ended within this time, or does not know it."""
_POLL_S, _REMOTE_POLL_S, _IDLE_POLL_S = 600, 1, 10
"""Seconds between Monarch's checks for ended processes, in a run on this host, in one with other hosts, and without a
run. The kernel reports the end of a local process at once."""
_GRACE_S, _DEAD_GRACE_S = 2.0, 0.3
"""Seconds that Monarch gets to end processes that live, and to confirm the end of those that have ended."""
_log = logging.getLogger(__name__)
_LATE_S = 1.0
"""A thread that wakes up so much too late, and after twice the time that it wanted to wait, was blocked."""
_LOST_AT_START: dict[type[BaseException], tuple[str, ...]] = {
    ValueError: ("error creating proc", "error spawning proc mesh"),
    RuntimeError: ("error spawning",),
}
"""Parts of Monarch's errors, by type, if a process ends or takes too long before it can be called."""
_MAX_LATE = 8
"""Number of late wake-ups that a wait does not count. So a thread that is always blocked notices stalls as well."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spawned:
    """A mesh that this controller started."""

    name: str
    mesh: ProcMesh
    """Mesh with one dimension, ``rank``."""
    whole: ProcMesh
    """The same processes with dimensions ``hosts`` and ``rank``, as they were spawned."""
    role: str
    cluster: Cluster
    allocation: Allocation
    logs: Path
    """Folder with ``RANK.log`` (output of the process) and ``RANK.pid``, on the host of each process. Its name is the
    value of `processes.MESH_VARIABLE`."""

    @property
    def num_procs(self) -> int:
        return self.allocation.each * len(self.allocation.hosts)


_spawned: dict[int, _Spawned] = {}
"""Meshes by `id`, in the order of their start. Threads of environments use it as well, so each access is atomic:
`tuple(_spawned.values())` or a look-up."""
_placing = threading.Lock()
_clusters: list[Cluster] = []
"""The cluster of a run with launched hosts. Empty if everything runs on this host."""
_dividing: list[object] = []
"""A mark for each run that is about to divide GPUs."""
_in_trouble: set[str] = set()
"""Names of meshes that stalled or died. Their logs are kept."""


def spawn_procs(
    name: str,
    *,
    procs: int = 1,
    role: str = "",
    env: Mapping[str, str] | None = None,
    threads: int | None = None,
    program: str = "",
) -> ProcMesh:
    """Start processes as a mesh with one dimension ``rank`` of size `procs`, in the background.

    The first call raises the error of a failed start. Each process writes its output to a file in `log_folder(name)`.

    Args:
        name: Name for errors and the log folder. Any text.
        procs: Number of processes. Replicas that may die independently need one mesh each, because one death ends the
            calls on a mesh.
        role: Role of `Hosts` that determines the host. Empty is this host.
        env: Environment variables that are set before the processes' Python starts.
        threads: Size of the processes' OpenMP, MKL and OpenBLAS pools. None keeps the libraries' defaults.
        program: Python source that each process runs. The source must run Monarch's main program. Empty runs only that.

    Raises:
        HostError: No host is left for the role, or this process was forked from one that started processes.
    """
    from forge_agents.runtime import _monarch

    _monarch.check_not_forked()
    if procs < 1:
        raise ValueError(f"procs={procs} for {name!r}. A mesh needs at least one process")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads} for {name!r}. Give at least 1, or None for the default")
    with _placing:
        cluster = _cluster()
        allocation = cluster.allocate(role, procs, name)
    logs = _processes.make_log_folder(name)

    def command(at: Any) -> Any:
        number = at["hosts"] if allocation.is_remote else 0
        host = allocation.hosts[number].name if allocation.is_remote else ""
        variables = {
            **_processes.variables(host),
            _processes.MESH_VARIABLE: logs.name,
            **mesh_variables(allocation.gpus_by_host[number], env, threads),
        }
        if allocation.on_one_machine:
            variables |= _processes.LOOPBACK_ONLY
        return _processes.bootstrap_command(variables, program)

    whole: ProcMesh = allocation.machines.spawn_procs(
        per_host={"rank": allocation.each},
        name=re.sub(r"[^A-Za-z0-9_]+", "_", name) or "procs",
        bootstrap=functools.partial(_processes.begin, str(logs), allocation.cores),
        bootstrap_command=command,
    )
    mesh = whole.flatten("rank") if allocation.is_remote else whole
    _spawned[id(mesh)] = _Spawned(
        name=name, mesh=mesh, whole=whole, role=role, cluster=cluster, allocation=allocation, logs=logs
    )
    return mesh


def mesh_variables(gpus: Sequence[str], env: Mapping[str, str] | None, threads: int | None) -> dict[str, str]:
    """Return the environment variables of one mesh. Its processes see `gpus` in the order of their ranks."""
    variables = dict(env or {})
    if threads is not None:
        variables |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    return variables | gpu_variables(gpus)


# ---- hosts


async def launch_hosts(config: Hosts, *, paths: Sequence[str | Path] = (), meshes: Sequence[MeshRequest] = ()) -> None:
    """Start the hosts on which meshes are placed from now on.

    Args:
        paths: Files and folders that all hosts must see.
        meshes: Meshes that will compute.

    Raises:
        HostError: There are fewer hosts or GPUs than requested, a host cannot be reached, or it lacks one of the paths.
        StallError: A host did not answer in time.
    """
    from forge_agents.runtime import _monarch
    from forge_agents.runtime.cluster import Cluster

    if busy := [cluster.config.kind for cluster in _clusters if cluster.config.kind != "local"]:
        raise HostError(
            f"this process already runs on hosts of kind {busy[0]!r}. Close their trainer before another one starts"
        )
    _clusters.clear()
    _monarch.check_not_forked()
    _monarch.on_unhandled_fault(_note_fault)
    _monarch.poll_processes(_POLL_S if config.kind == "local" else _REMOTE_POLL_S)
    cluster = Cluster(config, _host, meshes)
    await cluster.launch(meshes)
    _clusters.append(cluster)
    _monarch.leave_quietly()
    try:
        checking = cluster.check_paths([str(Path(path).absolute()) for path in paths])
        await with_deadline(checking, config.start_timeout_s, who="hosts", what="look for files")
    except BaseException:
        await end_hosts(config)
        raise


async def end_hosts(config: Hosts) -> None:
    """End the hosts that `launch_hosts` started with this `config` object, if there are any."""
    for cluster in [cluster for cluster in _clusters if cluster.config is config]:
        _clusters.remove(cluster)
        for entry in tuple(_spawned.values()):
            if entry.role == ENVS and entry.cluster is cluster:
                kill(entry.mesh)
        await cluster.end()
        from forge_agents.runtime import _monarch

        _monarch.poll_processes(_IDLE_POLL_S)


async def exchange_addresses(procs: ProcMesh, timeout_s: float, *, who: str) -> None:
    """Prepare the ranks of a mesh for `ranks.join`: each gets its number and the rendezvous."""
    from forge_agents.runtime.ranks import RankSetup

    entry = _spawned[id(procs)]
    size = entry.num_procs
    setup = procs.spawn("rank_setup", RankSetup)

    async def call(rank: int, name: str, *args: Any) -> Any:
        return await getattr(setup.slice(rank=rank), name).call_one(*args)

    async def prepare() -> None:
        rendezvous = f"file://{entry.logs / 'rendezvous'}"
        if not entry.allocation.on_one_machine:
            rendezvous, interface = await call(0, "listen", await call(size - 1, "hostname"))
            where = rendezvous.removeprefix("tcp://")
            startup.say(f"ranks of {who} meet at {where} ({interface}), open to all that reach that interface")
        each = entry.allocation.each
        await asyncio.gather(*(call(rank, "set_variables", rank, size, each, rendezvous) for rank in range(size)))

    await with_deadline(prepare(), timeout_s, who=who, what="exchange of addresses")


# ---- placement


def preview_placement(meshes: Sequence[MeshRequest]) -> list[ProcessSlot]:
    """Return the places that meshes would get. See `Allocator.preview`."""
    with _placing:
        return _cluster().preview(meshes)


def preview_placement_on(
    config: Hosts, meshes: Sequence[MeshRequest], *, gpus_per_host: int, gpu_bytes: int = 0, here: int | None = None
) -> list[ProcessSlot]:
    """Return the places that meshes would get on hosts that are not started yet. See `Allocator.assume_hosts`.

    Raises:
        HostError: The hosts have fewer GPUs than requested, or than a mesh needs.
    """
    from forge_agents.runtime.allocation import Allocator

    allocator = Allocator(config, meshes=meshes)
    allocator.assume_hosts(gpus_per_host, gpu_bytes=gpu_bytes, here=here)
    allocator.check()
    return allocator.preview(meshes)


def local_gpus() -> list[ProcessSlot]:
    """Return a slot for each GPU that this process sees, for its own models."""
    return _cluster().local_gpus()


def reserve(meshes: Sequence[MeshRequest]) -> None:
    """Reserve the places that `preview_placement` shows for these meshes."""
    with _placing:
        _cluster().reserve(meshes)


def unreserve(meshes: Sequence[MeshRequest]) -> None:
    """Give up the reservations of meshes that will not be spawned again."""
    with _placing:
        _cluster().unreserve(meshes)


def gpu_neighbors(name: str, role: str, procs: int) -> list[str]:
    """Return the names of other meshes on the GPUs that this one would get. Empty without sharing or GPUs."""
    with _placing:
        places = {(slot.host, slot.gpu) for slot in _cluster().preview([(name, role, procs)]) if slot.gpu}
        reserved = _cluster().reserved_on(places)
    coming = ["the processes that a run is about to start"] if places and _dividing else []
    return [other for other in dict.fromkeys((*reserved, *running_on(places), *coming)) if other != name]


def running_on(places: Set[tuple[str, str]]) -> list[str]:
    """Return the names of running meshes that use one of these pairs of host and GPU."""
    return [entry.name for entry in tuple(_spawned.values()) if not places.isdisjoint(entry.allocation.places)]


@contextlib.contextmanager
def dividing_gpus() -> Iterator[None]:
    """While the block runs, mark that a run is about to divide the GPUs. `gpu_neighbors` reports it."""
    mark = object()
    _dividing.append(mark)
    try:
        yield
    finally:
        _dividing.remove(mark)


def has_remote_hosts() -> bool:
    """Return whether the run has other hosts than the controller's."""
    return bool(_cluster().hosts)


def memory_domain_of(procs: ProcMesh) -> str:
    """Return the `memory_domain` of a mesh's first process."""
    first = _spawned[id(procs)].allocation.hosts[0]
    is_remote = first.agent is not None and first.facts is not None
    return first.facts.memory_domain if is_remote else memory_domain()  # type: ignore[union-attr]


def hardware_of(procs: ProcMesh, *, threads: int | None = None) -> str:
    """Describe a mesh's hardware: ``2 CPU cores``, ``1 of 2 CPU cores``, ``1 GPU each of 2 other hosts``."""
    allocation = _spawned[id(procs)].allocation
    gpus = f"{len(allocation.gpus)} GPU{'s' * (len(allocation.gpus) != 1)}" * bool(allocation.gpus)
    if not allocation.is_remote:
        return gpus or startup.machine(threads)
    hosts = f"{len(allocation.hosts)} other host{'s' * (len(allocation.hosts) != 1)}"
    return f"{gpus} each of {hosts}" if gpus else hosts


def on_lost_host(procs: ProcMesh, tell: Callable[[str], None]) -> bool:
    """Call `tell` with the reason when a host of the mesh is lost. Returns whether the mesh runs on remote hosts."""
    allocation = _spawned[id(procs)].allocation
    if allocation.lost:
        tell(allocation.lost)
    for host in allocation.hosts:
        host.listeners.append(tell)
    return allocation.is_remote


def capacity(role: str) -> int:
    """Return the number of processes of a role that the hosts should run at once. See `Allocator.capacity`."""
    return _cluster().capacity(role)


# ---- calls


async def with_deadline(
    awaitable: Awaitable[T], timeout_s: float, *, who: str, what: str, progress: Callable[[], int] = lambda: 0
) -> T:
    """Await a Monarch call or any other awaitable with a timeout.

    Args:
        timeout_s: Maximum seconds without progress. A stall after some progress is noticed before twice that time. The
            first eight times for which this thread is blocked, or its process suspended, do not count.
        who: Name of the mesh that is waited for, or another name.
        what: The expected result, as a noun: ``"weight update"``.
        progress: Returns a counter that grows with the work done, for work of unknown length.

    Raises:
        StallError: The deadline passed. The remote work is not cancelled.
        ActorDiedError: The actor's process ended.
        Exception: The endpoint's exception, with the remote traceback as a note.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        with _stalls.waiting(who, what, timeout_s):
            in_time = await _ends_in_time(task, timeout_s, progress)
        if not in_time:
            others = _stalls.summary(without=who)
            stall = StallError(
                f"{who} did not finish {what} within {timeout_s:g} s. Look at {log_hint(who)}. Raise the timeout if "
                f"the work is just slow{'. Other waits at that time: ' * bool(others)}{others}",
                who,
            )
            stall.snapshot = _stalls.snapshot()
            raise stall
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_retrieve)
    error = task.exception()
    if error is None:
        return task.result()
    raise as_local_error(error, who=who, what=what) from None


async def _ends_in_time(task: asyncio.Future[Any], timeout_s: float, progress: Callable[[], int]) -> bool:
    """Wait for a task. Returns whether it ended before there was no progress for `timeout_s`. See `with_deadline`."""
    count, remaining_s, num_late = progress(), timeout_s, 0
    while True:
        part_s, started = max(0.0, min(remaining_s, timeout_s / 4)), time.monotonic()
        done, _ = await asyncio.wait({task}, timeout=part_s)
        if done:
            return True
        if num_late < _MAX_LATE and time.monotonic() - started > part_s + max(part_s, _LATE_S):
            num_late += 1
            continue  # this thread was blocked, and answers that arrived meanwhile are not late
        remaining_s -= part_s
        if remaining_s <= 0:
            before, count, remaining_s = count, progress(), timeout_s
            if count == before:
                return False


async def call_all(mesh: Any, n: int, endpoint_name: str, *args: Any, timeout_s: float, who: str) -> list[Any]:
    """Call an endpoint on every rank of an actor mesh. Returns the results by rank, or raises the first failure.

    Monarch's own ``call`` reports only after all ranks have replied. If one rank fails inside a collective, the others
    wait for it, so the caller would wait as well. Each rank is therefore called as a mesh of size 1. Inside the
    endpoint ``current_rank()`` is 0 everywhere, and actors that need their rank take it in their constructor.

    Monarch 0.7 keeps about 600 bytes in the calling process for every ``call_one``, but nothing for ``choose``. On a
    mesh of size 1, ``choose`` picks the only actor. Monarch keeps 1 KB for each such mesh, so the meshes are reused.
    """
    if mesh not in _meshes_by_rank:
        _meshes_by_rank[mesh] = [mesh.slice(rank=rank) for rank in range(n)]

    async def call(rank: int, actor: Any) -> Any:
        calling = getattr(actor, endpoint_name).choose(*args)
        return await with_deadline(calling, timeout_s, who=who, what=f"{endpoint_name} (rank {rank})")

    return await all_or_first_error(itertools.starmap(call, enumerate(_meshes_by_rank[mesh])))


_meshes_by_rank: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""For every actor mesh a mesh of size 1 of each rank."""


def as_local_error(error: BaseException, *, who: str, what: str) -> BaseException:
    """Convert an exception of Monarch's to the endpoint's own exception, or to `ActorDiedError`."""
    from forge_agents.runtime._monarch import ActorError, SupervisionError

    if isinstance(error, ActorError):
        inner = as_local_error(error.exception, who=who, what=what)
        if not getattr(inner, "__notes__", None):
            inner.add_note(f"raised by {who} during {what}:\n{error.exception_formatted}")
        return inner
    if isinstance(error, SupervisionError):
        reason = _deaths.name_signals(" ".join(str(error).split()))
        return ActorDiedError(f"{who} died during {what}: {reason}. Look at {log_hint(who)}", who)
    if any(text in str(error) for text in _LOST_AT_START.get(type(error), ())):
        waited = re.search(r"Timeout\((\d+)", str(error))
        late = f" or took over {waited[1]} s for its first answer" if waited else ""
        died = ActorDiedError(f"{who} died{late} while it was started. Look at {log_hint(who)}", who)
        died.ended_at_start = waited is None
        return died
    return error


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Retrieve the result of an abandoned task, so that asyncio does not report it as lost."""
    if not task.cancelled():
        task.exception()


# ---- the end


async def stop(mesh: ProcMesh, *, timeout_s: float = 10.0, at_once: bool = False) -> None:
    """End a mesh's processes: ask first, kill after 2 s. May be called twice.

    Args:
        timeout_s: Maximum seconds to wait for Monarch's confirmation.
        at_once: Kill the processes without asking. A process that is asked ends its actors first, and Monarch treats a
            reply to such an actor as an invalid reference and ends the sender. The weight store ended that way when its
            readers were stopped during a read.
    """
    entry = _spawned.get(id(mesh))
    if entry is None:
        return
    if not entry.allocation.is_remote and len(ended(mesh)) == entry.allocation.each:
        timeout_s = min(timeout_s, _DEAD_GRACE_S)  # all are dead already, which Monarch may never notice
    if _spawned.pop(id(mesh), None) is None:  # another thread is stopping it
        return
    if at_once:
        _processes.kill_mesh(entry.logs.name)
        await _sweep(entry, logs="", timeout_s=timeout_s)
        timeout_s = min(timeout_s, _GRACE_S)
    actors = [*entry.mesh._pending_actor_spawns]
    killer = asyncio.ensure_future(_processes.kill_after(min(_GRACE_S, timeout_s), tuple(_pids(entry)), entry.logs))
    try:
        if not entry.allocation.lost:  # Monarch would wait for a host that does not answer
            await with_deadline(entry.whole.stop(), timeout_s, who=entry.name, what="stop")
    except Exception as error:  # noqa: BLE001  # Monarch's: it is dead already, or its start had failed
        _log.info("stopping %s: %s", entry.name, error)
    await killer
    succeeded = entry.name not in _in_trouble
    if at_once or not succeeded:  # other processes may wait for answers
        from forge_agents.runtime import _monarch

        _monarch.end_calls(actors)
    await _sweep(entry, logs=str(entry.logs) if succeeded else "", timeout_s=timeout_s)
    with _placing:
        entry.allocation.release()
    if succeeded:
        shutil.rmtree(entry.logs, ignore_errors=True)


def kill(mesh: ProcMesh) -> None:
    """Kill a mesh's processes from any thread, without waiting. The rest of `stop` follows in the background."""
    for pid in pids(mesh):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def stop_it() -> None:
        if (entry := _spawned.get(id(mesh))) is None:
            return
        started = len(_pids(entry)) == entry.num_procs
        _processes.kill_mesh(entry.logs.name)  # including children in process groups of their own
        asyncio.run(stop(mesh))
        if not started:  # Monarch may still start processes that it was told to stop
            time.sleep(_GRACE_S)
            _processes.kill_mesh(entry.logs.name)
            shutil.rmtree(entry.logs, ignore_errors=True)

    threading.Thread(target=stop_it, name="stop", daemon=True).start()


def spawned() -> frozenset[int]:
    """Return the current meshes, for `kill_all`."""
    return frozenset(_spawned)


def kill_all(*, except_for: frozenset[int]) -> None:
    """`kill` all other meshes, except those with other owners: environments' workers and judges."""
    for key, entry in tuple(_spawned.items()):
        if key not in except_for and entry.role not in (ENVS, "judges"):
            kill(entry.mesh)


async def _sweep(entry: _Spawned, *, logs: str, timeout_s: float) -> None:
    """Kill the remaining processes of a mesh on all remote hosts that live."""
    for host in entry.allocation.hosts:
        if host.agent is not None and not host.lost:
            killing = host.agent.kill.call_one(entry.logs.name, logs)
            try:
                await with_deadline(killing, timeout_s, who=host.name, what="stop")
            except (StallError, ActorDiedError) as error:  # the loss of the host is about to be noticed
                _log.info("stopping %s on %s: %s", entry.name, host, error)


async def shutdown_all() -> None:
    """Stop all meshes of this controller, the latest first, and the hosts.

    Environments' workers stay unless their hosts were launched, because their pool is shared by all users.
    """
    for entry in reversed(tuple(_spawned.values())):
        if entry.role != ENVS:
            await stop(entry.mesh)
    for cluster in _clusters.copy():
        await end_hosts(cluster.config)


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[None]:
    """Stop everything that is spawned inside the block, however the block ends."""
    try:
        yield
    finally:
        await shutdown_all()


# ---- state


def failure_of(mesh: ProcMesh) -> str:
    """Return the reason why a mesh lost a host or, on this machine, a process. Empty while all live."""
    entry = _spawned.get(id(mesh))
    if entry is None:
        return "it was ended"
    return entry.allocation.lost or ENDED * bool(ended(mesh))


def is_current(mesh: ProcMesh) -> bool:
    """Return whether a mesh runs on hosts of the current run."""
    entry = _spawned.get(id(mesh))
    return entry is not None and entry.cluster is _cluster()


def pids(mesh: ProcMesh) -> list[int]:
    """Return the process ids of a mesh's running local ranks, in the order of the ranks."""
    entry = _spawned.get(id(mesh))
    return [] if entry is None else [pid for pid in _pids(entry) if _processes.is_ours(pid)]


def ended(mesh: ProcMesh) -> list[int]:
    """Return the process ids of a mesh's local ranks that have ended."""
    entry = _spawned.get(id(mesh))
    if entry is None or entry.allocation.is_remote:
        return []
    return [pid for pid in _pids(entry) if not _processes.is_ours(pid)]


def death(mesh: ProcMesh, pid: int, status: int | None) -> _deaths.Death:
    """Describe the end of one of a mesh's processes."""
    entry = _spawned.get(id(mesh))
    file = None if entry is None else _pids(entry).get(pid)
    return _deaths.death(status, None if file is None else file.with_suffix(".log"))


def log_folder(name: str) -> Path | None:
    """Return the log folder of the latest running mesh of that name. None if there is none."""
    entry = _latest(name)
    return None if entry is None else entry.logs


def log_hint(who: str) -> str:
    """Return the location of the logs of `who`, for an error message. The logs are kept after the mesh stops."""
    _in_trouble.add(who)
    entry = _latest(who)
    if entry is None:
        return f"the logs in {private_folder()}"
    where = f" on {', '.join(map(str, entry.allocation.hosts))}" if entry.allocation.is_remote else ""
    return f"its log in {entry.logs}{where}"


def _latest(name: str) -> _Spawned | None:
    return next((entry for entry in reversed(tuple(_spawned.values())) if entry.name == name), None)


def _pids(entry: _Spawned) -> dict[int, Path]:
    """Ids of the ranks that have started, with their pid files. Files may be incomplete or removed concurrently."""
    files: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(entry.logs.glob("*.pid"), key=lambda path: int(path.stem)):
            with contextlib.suppress(FileNotFoundError, ValueError):
                files[int(path.read_text())] = path
    return files


def _cluster() -> Cluster:
    return _clusters[-1] if _clusters else _this_host()


@functools.cache
def _this_host() -> Cluster:
    from forge_agents.runtime.cluster import Cluster

    return Cluster(Hosts(), _host)


@functools.cache
def _host() -> Any:
    from forge_agents.runtime import _monarch

    host = _monarch.start_runtime()
    _monarch.on_unhandled_fault(_note_fault)
    _monarch.leave_quietly()
    return host


def _note_fault(failure: Any) -> None:
    """Log a failure. Callers get deaths as errors, but Monarch's default would end this process as well."""
    _log.info("a process failed: %s", failure.report())
