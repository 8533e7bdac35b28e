"""Where processes run: Monarch meshes on the run's hosts, their deadlines and their end.

In: a name, a role, an environment, endpoint calls. Out: process meshes, results, or errors that name who stalled or
died. Waits for spawned processes and their answers, always with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from forge_agents.runtime import deaths as _deaths
from forge_agents.runtime import processes as _processes
from forge_agents.runtime import stalls as _stalls
from forge_agents.runtime import startup
from forge_agents.runtime.hosts import ENVS, Hosts, ProcessSlot
from forge_agents.runtime.machine import gpu_variables, memory_domain
from forge_agents.runtime.threads import all_or_first_error

if TYPE_CHECKING:
    from forge_agents.runtime._monarch import ProcMesh
    from forge_agents.runtime.cluster import Cluster, Spot

T = TypeVar("T")

ENDED = "its process ended"
"""Of the end of a process; how it ended Monarch may know later."""
_GRACE_S = 2.0
_log = logging.getLogger(__name__)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spawned:
    """One mesh that this controller started."""

    name: str
    mesh: ProcMesh
    """One dimension, ``rank``."""
    whole: ProcMesh
    """The same as it was spawned: hosts and the processes of each."""
    role: str
    layout: Cluster
    spot: Spot
    logs: Path
    """Folder with ``RANK.log`` (what the process printed) and ``RANK.pid``, on the hosts of the processes. Its name
    marks them."""


_spawned: dict[int, _Spawned] = {}
"""By `id` of their mesh, in the order of their start. Threads of environments' calls read and write it, too: each does
so in one step, `tuple(_spawned.values())` or a look-up."""
_placing = threading.Lock()
_hosts: list[Cluster] = []
"""The one layout of a run that was launched, or none: everything is on this host."""
_dividing: list[object] = []
"""A mark of each run that is about to divide GPUs."""
_in_trouble: set[str] = set()
"""Names that stalled or died: their logs outlive them."""


def spawn_procs(
    name: str,
    *,
    procs: int = 1,
    role: str = "",
    env: Mapping[str, str] | None = None,
    threads: int | None = None,
    program: str = "",
) -> ProcMesh:
    """Start processes, one dimension ``rank`` of size `procs`.

    What they print goes to `log_folder(name)`, so that many processes do not write over each other.

    Args:
        name: Said in errors and in the log folder's name; any text.
        procs: Number of processes. Replicas that may die alone need one mesh each: one death ends the calls on a mesh.
        role: As in `Hosts`, which says on which host; empty is this one.
        env: Variables that exist before the processes' Python starts.
        threads: Size of the processes' OpenMP, MKL and OpenBLAS pools; None leaves the libraries' defaults.
        program: Python that each process runs, Monarch's own main program somewhere in it; empty is that one alone.

    Returns:
        A Monarch `ProcMesh`; processes start in the background and a failed start shows in the first call.

    Raises:
        HostError: No host is left for the role.
    """
    if procs < 1:
        raise ValueError(f"procs={procs} for {name!r}; a mesh needs at least one process")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads} for {name!r}; give at least 1, or None for the default")
    with _placing:
        layout = _layout()
        spot = layout.spot(role, procs, name)
    logs = _processes.new_log_folder(name)

    def command(at: Any) -> Any:
        number = at["hosts"] if spot.elsewhere else 0
        host = spot.hosts[number].name if spot.elsewhere else ""
        variables = {_processes.MESH_VARIABLE: logs.name, **mesh_variables(spot.gpus_by_host[number], env, threads)}
        if spot.on_one_machine:
            variables |= _processes.LOOPBACK_ONLY
        return _processes.bootstrap_command({**_processes.variables(host), **variables}, program)

    whole: ProcMesh = spot.machines.spawn_procs(
        per_host={"rank": spot.each},
        name=re.sub(r"[^A-Za-z0-9_]+", "_", name) or "procs",
        bootstrap=functools.partial(_processes.begin, str(logs), spot.cores),
        bootstrap_command=command,
    )
    mesh = whole.flatten("rank") if spot.elsewhere else whole
    entry = _Spawned(name=name, mesh=mesh, whole=whole, role=role, layout=layout, spot=spot, logs=logs)
    _spawned[id(mesh)] = entry
    return mesh


def mesh_variables(gpus: Sequence[str], env: Mapping[str, str] | None, threads: int | None) -> dict[str, str]:
    """What the processes of one mesh find in their environment beside what all of the run find.

    Args:
        gpus: Of all its processes on a host, in the order of their ranks.
    """
    found = dict(env or {})
    if threads is not None:
        found |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    return found | gpu_variables(gpus)


async def launch_hosts(
    config: Hosts, *, paths: Sequence[str | Path] = (), meshes: Sequence[tuple[str, str, int]] = ()
) -> None:
    """Bring up the hosts on which roles are placed from now on.

    Args:
        paths: Files and folders that all hosts must see.
        meshes: Name, role and processes of each mesh that is going to compute.

    Raises:
        HostError: There are fewer hosts or GPUs than asked for, one cannot be reached, or lacks one of the paths.
        StallError: A host did not answer in time.
    """
    from forge_agents.runtime import _monarch
    from forge_agents.runtime.cluster import Cluster, processes_by_role

    if busy := [layout.config.kind for layout in _hosts if layout.config.kind != "local"]:
        raise HostError(
            f"this process runs on hosts of kind {busy[0]!r} already; close the trainer that has them before another "
            "one starts"
        )
    _hosts.clear()
    _monarch.on_unhandled_fault(_note_fault)
    layout = Cluster(config, _host, processes_by_role(meshes))
    await layout.launch(_processes.variables, meshes)
    _hosts.append(layout)
    _monarch.leave_quietly()
    try:
        checking = layout.check_paths([str(Path(path).absolute()) for path in paths])
        await with_deadline(checking, config.start_timeout_s, who="hosts", what="look for files")
    except BaseException:
        await end_hosts(config)
        raise


async def end_hosts(config: Hosts) -> None:
    """End the hosts of a `launch_hosts` with this very `config`; without any, nothing happens."""
    for layout in [layout for layout in _hosts if layout.config is config]:
        _hosts.remove(layout)
        for entry in tuple(_spawned.values()):
            if entry.role == ENVS and entry.layout is layout:
                kill(entry.mesh)
        await layout.end()


async def exchange_addresses(procs: ProcMesh, timeout_s: float, *, who: str) -> None:
    """Prepare the ranks of a mesh for `ranks.join`: each learns its number and where all of them meet."""
    from forge_agents.runtime.ranks import RankSetup

    entry = _spawned[id(procs)]
    hosts, each = entry.spot.hosts, entry.spot.each
    size = each * len(hosts)
    setup = procs.spawn("rank_setup", RankSetup)

    async def ask(rank: int, name: str, *args: Any) -> Any:
        return await getattr(setup.slice(rank=rank), name).call_one(*args)

    async def prepare() -> None:
        rendezvous = f"file://{entry.logs / 'rendezvous'}"
        if not entry.spot.on_one_machine:
            rendezvous, interface = await ask(0, "listen", await ask(size - 1, "hostname"))
            place = rendezvous.removeprefix("tcp://")
            startup.say(f"ranks of {who} meet at {place} ({interface}), open to whoever reaches that interface")
        await asyncio.gather(*(ask(rank, "set_variables", rank, size, each, rendezvous) for rank in range(size)))

    await with_deadline(prepare(), timeout_s, who=who, what="exchange of addresses")


def preview_placement(meshes: Sequence[tuple[str, str, int]]) -> list[ProcessSlot]:
    """Where meshes of that name, role and number of processes would be; see `Cluster.rehearse`."""
    with _placing:
        return _layout().rehearse(meshes)


def preview_placement_on(
    config: Hosts,
    meshes: Sequence[tuple[str, str, int]],
    *,
    gpus_per_host: int,
    gpu_bytes: int = 0,
    here: int | None = None,
) -> list[ProcessSlot]:
    """Where meshes would be on hosts that nobody has asked for yet.

    Args:
        config: The hosts.
        meshes: Name, role and processes of each.
        gpus_per_host: Of each host whose role ``config.gpus`` does not name.
        gpu_bytes: Memory of each GPU.
        here: GPUs of the controller's host; None: those that it has.

    Raises:
        HostError: The hosts have fewer GPUs than are asked for, or than a mesh needs.
    """
    from forge_agents.runtime.cluster import Cluster, processes_by_role

    layout = Cluster(config, lambda: None, processes_by_role(meshes))
    layout.suppose(gpus_per_host, gpu_bytes=gpu_bytes, here=here)
    layout.check_gpus()
    return layout.rehearse(meshes)


def local_gpus() -> list[ProcessSlot]:
    """A seat on each GPU that this process sees, for what it has there itself."""
    return _layout().gpus_here()


def reserve(meshes: Sequence[tuple[str, str, int]]) -> None:
    """Keep the places that `rehearse` says for these meshes; see `Cluster.plan`."""
    with _placing:
        _layout().plan(meshes)


def unreserve(meshes: Sequence[tuple[str, str, int]]) -> None:
    """Give back the places of meshes that come no more, if they were planned."""
    with _placing:
        _layout().unplan(meshes)


def gpu_neighbors(name: str, role: str, procs: int) -> list[str]:
    """Names of other meshes on the GPUs that this one would get; empty where it would have them alone, or none."""
    with _placing:
        places = {(seat.host, seat.gpu) for seat in _layout().rehearse([(name, role, procs)]) if seat.gpu}
        planned = _layout().planned_on(places)
    coming = ["what a run is about to start"] if places and _dividing else []
    return [other for other in dict.fromkeys((*planned, *running_on(places), *coming)) if other != name]


def running_on(places: Set[tuple[str, str]]) -> list[str]:
    """Names of the meshes that have one of these places, host and GPU, now."""
    return [entry.name for entry in tuple(_spawned.values()) if not places.isdisjoint(entry.spot.places)]


@contextlib.contextmanager
def dividing_gpus() -> Iterator[None]:
    """Inside the block a run is about to divide the GPUs, and `beside` says so of each."""
    mark = object()
    _dividing.append(mark)
    try:
        yield
    finally:
        _dividing.remove(mark)


def has_remote_hosts() -> bool:
    """Whether the run has other hosts than the controller's."""
    return bool(_layout().hosts)


def memory_domain_of(procs: ProcMesh) -> str:
    """Who shares memory with a mesh's first process."""
    first = _spawned[id(procs)].spot.hosts[0]
    return first.facts.place if first.warden is not None and first.facts is not None else memory_domain()


def hardware_of(procs: ProcMesh, *, threads: int | None = None) -> str:
    """On what a mesh computes, in words: ``2 CPU cores``, ``1 of 2 CPU cores``, ``1 GPU each of 2 other hosts``.

    Args:
        threads: CPU threads of all its processes; None: as many as there are cores.
    """
    spot = _spawned[id(procs)].spot
    gpus = f"{len(spot.gpus)} GPU{'s' * (len(spot.gpus) != 1)}" * bool(spot.gpus)
    if not spot.elsewhere:
        return gpus or startup.machine(threads)
    others = f"{len(spot.hosts)} other host{'s' * (len(spot.hosts) != 1)}"
    return f"{gpus} each of {others}" if gpus else others


def on_lost_host(procs: ProcMesh, tell: Callable[[str], None]) -> bool:
    """Call `tell` with what was seen as soon as a host of the mesh is lost; at once where it is already.

    Returns:
        Whether the mesh is on other hosts than this one.
    """
    spot = _spawned[id(procs)].spot
    if spot.lost:
        tell(spot.lost)
    for host in spot.hosts:
        host.listeners.append(tell)
    return spot.elsewhere


async def with_deadline(
    awaitable: Awaitable[T], timeout_s: float, *, who: str, what: str, progress: Callable[[], int] = lambda: 0
) -> T:
    """Await a Monarch call or any awaitable, at most `timeout_s` seconds or as long as it makes progress.

    Args:
        timeout_s: Seconds without progress until the wait counts as a stall; with progress before, it is seen before
            twice as long.
        who: The one waited for, by the name it was spawned under where it has one.
        what: What it should do, as a noun: ``"weight update"``.
        progress: Counts whatever is done, for work of any length.

    Raises:
        StallError: The deadline passed. The remote work is not cancelled.
        ActorDiedError: The actor's process ended.
        Exception: What the endpoint raised, with the remote traceback as a note.
    """
    task, seen = asyncio.ensure_future(_plain(awaitable)), progress()
    try:
        with _stalls.waiting(who, what, timeout_s):
            while not (await asyncio.wait({task}, timeout=timeout_s))[0]:
                before, seen = seen, progress()
                if seen == before:
                    break
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
    meanwhile = _stalls.summary(without=who)
    error = StallError(
        f"{who} did not finish {what} within {timeout_s:g} s. Look at {log_hint(who)}; raise the timeout if the "
        f"work is just slow{'. Waited for meanwhile: ' * bool(meanwhile)}{meanwhile}",
        who,
    )
    error.snapshot = _stalls.snapshot()
    return error


async def call_all(mesh: Any, n: int, endpoint_name: str, *args: Any, timeout_s: float, who: str) -> list[Any]:
    """Call an endpoint on every rank of an actor mesh; the first failure wins without waiting for the others.

    Monarch's own ``call`` reports only after all ranks have replied, so one rank that fails inside a collective would
    leave the caller waiting for ranks that wait for it. Each rank is called as a mesh of one: inside the endpoint
    ``current_rank()`` is 0 everywhere; actors that need their rank take it in their constructor.

    Monarch 0.7 keeps some 600 bytes in the calling process for every ``call_one``, nothing for ``choose`` (which picks
    the only actor of a mesh of one), and 1 KB for every mesh of one that is called; these are therefore kept.

    Args:
        mesh: Actor mesh spawned on a mesh of `spawn_procs`.
        timeout_s: Deadline for all ranks together.

    Returns:
        Results by rank.
    """

    async def one(rank: int) -> Any:
        endpoint = getattr(_rank_meshes(mesh, n)[rank], endpoint_name)
        return await with_deadline(endpoint.choose(*args), timeout_s, who=who, what=f"{endpoint_name} (rank {rank})")

    return await all_or_first_error(one(rank) for rank in range(n))


_meshes_by_rank: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _rank_meshes(mesh: Any, n: int) -> list[Any]:
    """A mesh of one for every rank of an actor mesh, the same each time."""
    if mesh not in _meshes_by_rank:
        _meshes_by_rank[mesh] = [mesh.slice(rank=rank) for rank in range(n)]
    return _meshes_by_rank[mesh]


def as_local_error(error: BaseException, *, who: str, what: str) -> BaseException:
    """Turn what Monarch raises into what the user should read: the endpoint's own exception, or `ActorDiedError`."""
    from forge_agents.runtime._monarch import ActorError, SupervisionError

    if isinstance(error, ActorError):
        inner = as_local_error(error.exception, who=who, what=what)
        if not getattr(inner, "__notes__", None):
            inner.add_note(f"raised by {who} during {what}:\n{error.exception_formatted}")
        return inner
    if isinstance(error, SupervisionError):
        reason = _deaths.name_signals(" ".join(str(error).split()))
        return ActorDiedError(f"{who} died during {what}: {reason}. Look at {log_hint(who)}", who)
    if type(error) is RuntimeError and "error spawning" in str(error):  # Monarch's, where the process is gone
        return ActorDiedError(f"{who} died while it was started. Look at {log_hint(who)}", who)
    return error


async def stop(mesh: ProcMesh, *, timeout_s: float = 10.0, at_once: bool = False) -> None:
    """End a mesh's processes: asked first, killed after a grace of 2 s. Twice is no error.

    Args:
        timeout_s: Most seconds to wait for Monarch's word that it is over.
        at_once: Kill them without asking. One that is asked ends its actors before itself, and an answer to an actor
            that has ended in a process that lives is an invalid reference to Monarch, which ends whoever sent it: so
            did the weight store, with readers that were stopped while they read.
    """
    entry = _spawned.get(id(mesh))
    if entry is None:
        return
    if not entry.spot.elsewhere and len(ended(mesh)) == entry.spot.each:
        timeout_s = min(timeout_s, _GRACE_S)  # all are dead already, of which Monarch may never hear
    if _spawned.pop(id(mesh), None) is None:  # another thread has begun to
        return
    if at_once:
        _processes.kill_marked(entry.logs.name)
        await _sweep(entry, logs="", timeout_s=timeout_s)
        timeout_s = min(timeout_s, _GRACE_S)
    killer = asyncio.ensure_future(_processes.kill_after(min(_GRACE_S, timeout_s), tuple(_pids(entry)), entry.logs))
    try:
        if not entry.spot.lost:  # Monarch would wait for a host that does not answer
            await with_deadline(entry.whole.stop(), timeout_s, who=entry.name, what="stop")
    except Exception as error:  # noqa: BLE001  # Monarch's: it is dead already; or the error that its start ended with
        _log.info("stopping %s: %s", entry.name, error)
    await killer
    well = entry.name not in _in_trouble
    await _sweep(entry, logs=str(entry.logs) if well else "", timeout_s=timeout_s)
    with _placing:
        entry.spot.give_back()
    if well:
        shutil.rmtree(entry.logs, ignore_errors=True)


def kill(mesh: ProcMesh) -> None:
    """End a mesh's processes at once, from any thread, without a wait; the rest of `stop` follows in the background."""
    for pid in pids(mesh):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def stop_it() -> None:
        if (entry := _spawned.get(id(mesh))) is None:
            return
        begun = len(_pids(entry)) == entry.spot.each * len(entry.spot.hosts)
        _processes.kill_marked(entry.logs.name)  # children in groups of their own, too
        asyncio.run(stop(mesh))
        if not begun:  # Monarch goes on to start what it was told to stop
            time.sleep(_GRACE_S)
            _processes.kill_marked(entry.logs.name)
            shutil.rmtree(entry.logs, ignore_errors=True)

    threading.Thread(target=stop_it, name="stop", daemon=True).start()


def spawned() -> frozenset[int]:
    """The meshes of this moment, as `kill_all` knows them."""
    return frozenset(_spawned)


def kill_all(*, except_for: frozenset[int]) -> None:
    """`kill` the meshes that are none of those. Environments' workers and judges stay: they are somebody else's."""
    for key, entry in tuple(_spawned.items()):
        if key not in except_for and entry.role not in (ENVS, "judges"):
            kill(entry.mesh)


async def _sweep(entry: _Spawned, *, logs: str, timeout_s: float) -> None:
    """Have what is left of a mesh killed on the other hosts that live."""
    for host in entry.spot.hosts:
        if host.warden is not None and not host.lost:
            killing = host.warden.kill.call_one(entry.logs.name, logs)
            try:
                await with_deadline(killing, timeout_s, who=host.name, what="stop")
            except (StallError, ActorDiedError) as error:  # the host is about to be noticed as lost
                _log.info("stopping %s on %s: %s", entry.name, host, error)


async def shutdown_all() -> None:
    """Stop every mesh that this controller spawned, the latest first, and the hosts.

    Worker processes of environments outlive it unless their hosts were launched: their pool has them, whoever plays.
    """
    for entry in reversed(tuple(_spawned.values())):
        if entry.role != ENVS:
            await stop(entry.mesh)
    for layout in _hosts.copy():
        await end_hosts(layout.config)
    with contextlib.suppress(OSError):  # logs of a process that died stay
        _processes.run_folder().rmdir()


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[None]:
    """Stop everything spawned inside the block, however it ends."""
    try:
        yield
    finally:
        await shutdown_all()


def capacity(role: str) -> int:
    """Processes of a role that the hosts should have at once, one a core of theirs but at least four a host."""
    return _layout().room(role)


def failure_of(mesh: ProcMesh) -> str:
    """What was seen of the end of a mesh's hosts or, on this machine, processes; empty while all live."""
    entry = _spawned.get(id(mesh))
    if entry is None:
        return "it was ended"
    return entry.spot.lost or ENDED * bool(ended(mesh))


def is_current(mesh: ProcMesh) -> bool:
    """Whether a mesh runs on hosts of the run of this moment."""
    entry = _spawned.get(id(mesh))
    return entry is not None and entry.layout is _layout()


def pids(mesh: ProcMesh) -> list[int]:
    """Process ids of a mesh's ranks that have started and run on this machine, in the order of the ranks."""
    entry = _spawned.get(id(mesh))
    return [] if entry is None else [pid for pid in _pids(entry) if _processes.is_ours(pid)]


def ended(mesh: ProcMesh) -> list[int]:
    """Process ids of a mesh's ranks that have started on this machine and run no more."""
    entry = _spawned.get(id(mesh))
    if entry is None or entry.spot.elsewhere:
        return []
    return [pid for pid in _pids(entry) if not _processes.is_ours(pid)]


def death(mesh: ProcMesh, pid: int, status: int | None) -> _deaths.Death:
    """What is known of the end of one of a mesh's processes."""
    entry = _spawned.get(id(mesh))
    noted = None if entry is None else _pids(entry).get(pid)
    log = None if noted is None else noted.with_suffix(".log")
    return _deaths.death(status, log)


def log_folder(name: str) -> Path | None:
    """Folder of what the latest mesh of that name prints, one file a rank; None where none runs."""
    return next((s.logs for s in reversed(tuple(_spawned.values())) if s.name == name), None)


def log_hint(who: str) -> str:
    """Where to read what `who` printed, for an error's text; from now on its logs are kept after it is stopped."""
    _in_trouble.add(who)
    entry = next((s for s in reversed(tuple(_spawned.values())) if s.name == who), None)
    if entry is None:
        return f"the logs in {_processes.run_folder()}"
    where = f" on {', '.join(map(str, entry.spot.hosts))}" if entry.spot.elsewhere else ""
    return f"its log in {entry.logs}{where}"


def _pids(entry: _Spawned) -> dict[int, Path]:
    """Those that have started, with the file that says so; one may be writing it, another thread removing all."""
    found: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(entry.logs.glob("*.pid"), key=lambda path: int(path.stem)):
            with contextlib.suppress(FileNotFoundError, ValueError):
                found[int(path.read_text())] = path
    return found


async def _plain(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _forget(task: asyncio.Future[Any]) -> None:
    """Take the result of a task nobody waits for, so that asyncio does not report it as lost."""
    if not task.cancelled():
        task.exception()


def _layout() -> Cluster:
    return _hosts[-1] if _hosts else _this_host_alone()


@functools.cache
def _this_host_alone() -> Cluster:
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
    """Deaths reach the callers as errors; Monarch's default would end this process as well."""
    _log.info("a process failed: %s", failure.report())
