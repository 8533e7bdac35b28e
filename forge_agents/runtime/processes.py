"""The processes of one controller: their mark, import paths and memory, what they print, and how they end.

In: names, and how the kernel says that a process ended. Out: variables, folders, process ids, `Death`. Waits for the
end of processes, with a deadline.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import functools
import itertools
import os
import re
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from forge_agents.imports import extend_path, path_variables

RUN_VARIABLE = "FORGE_AGENTS_RUN"
"""Environment variable that marks every process of one controller; its value is the controller's token."""
MESH_VARIABLE = "FORGE_AGENTS_MESH"
"""Environment variable that marks every process of one mesh, and what these start."""
HOST_VARIABLE = "FORGE_AGENTS_HOST"
"""Environment variable of processes on another host than the controller's: that host's name in the run."""

LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables of processes whose ranks are all on one machine: gloo and NCCL listen on its loopback interface."""

_DONE = ".done"
"""Ends the name of a file beside a process's log: it is about to end, and has done what it does then."""
_TAIL_BYTES = 65536
_LAST_LINES = 8
_ASK_S = 20.0
_FRAMES = 3
_DUMP = "Fatal Python error: "
"""Begins what faulthandler, on in every process that we start, writes at the signals of a crash."""
_CRASHES = {
    "Segmentation": signal.SIGSEGV,
    "Illegal": signal.SIGILL,
    "Bus": signal.SIGBUS,
    "Floating": signal.SIGFPE,
    "Aborted": signal.SIGABRT,
}
"""Signals by the first word of faulthandler's name for them."""
_COUNTERS = ("/proc/vmstat", "/sys/fs/cgroup{}/memory.events", "/sys/fs/cgroup/memory{}/memory.oom_control")
"""Where the kernel counts whom it has killed for want of memory: in all, and by control group, of either version."""
_GROUPS = Path("/proc/self/cgroup")
"""Says in which control groups this process is: of a container, of a job of Slurm's, of systemd's."""
_MEMORY_LIMITS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Where control groups are, and each one's limit and what is used of it: version 2 and version 1."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # <malloc.h>
_MEANINGS: dict[int, str] = {
    signal.SIGILL: "a library uses an instruction that this processor does not have: it was built for another one; "
    "`forge-agents doctor` tries each part",
    signal.SIGBUS: "often /dev/shm or a disk is full",
    signal.SIGTERM: "somebody asked it to end, such as a job manager",
}
_PART = re.compile(r"^\s+MIG \S*?\.(\d+)gb\S*\s.*\(UUID: (MIG-[^)]+)\)", re.MULTILINE)
_CURRENT = re.compile(r"^Current thread .*\n((?:  .*\n)+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@functools.cache
def _token() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def run_folder() -> Path:
    """Holds a folder for each mesh; the same path on every host."""
    return Path(tempfile.gettempdir()) / f"forge-agents-{os.getuid()}" / _token()


def new_log_folder(name: str) -> Path:
    """A new folder for a mesh of that name; its own name is unique in the run."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name) or "procs"
    _oom_kills_before()
    base = run_folder()
    for level in (base.parent, base):
        _make_own(level)
    return Path(tempfile.mkdtemp(prefix=f"{safe}-", dir=base))


def _make_own(folder: Path) -> None:
    """Make a folder that nobody else may write to, or see that one is there.

    Its name can be guessed, and whoever makes it first could leave links in it, which logs would follow.

    Raises:
        PermissionError: What is there is somebody else's, or no folder.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(
            f"{folder} is no folder of yours (its owner is user {found.st_uid}); logs of processes go there. Remove "
            "it, or set TMPDIR to a folder of your own"
        )
    if found.st_mode & 0o022:  # made by an earlier version
        folder.chmod(0o700)


def is_ours(pid: int) -> bool:
    """Whether a process of this controller still runs under that id (ids are reused)."""
    return environment(pid).get(RUN_VARIABLE) == _token()


def environment(pid: int) -> dict[str, str]:
    """The variables that a process began with; none if it has ended or belongs to another user."""
    try:
        found: dict[str, str] = psutil.Process(pid).environ()
    except (psutil.Error, OSError):  # the process may end at any moment
        return {}
    return found


def with_variable(name: str, value: str) -> list[psutil.Process]:
    """The processes of this machine that began with a variable of that value."""
    return [process for process in psutil.process_iter() if environment(process.pid).get(name) == value]


def kill_marked(mark: str) -> None:
    """Kill the processes of a mesh here, and what they have started."""
    for process in with_variable(MESH_VARIABLE, mark):
        with contextlib.suppress(psutil.Error):  # it ended; `kill` leaves a process alone that has taken over its id
            process.kill()


async def kill_after(grace_s: float, pids: Sequence[int], folder: Path) -> None:
    """Wait until the processes are gone, and kill those that take longer or have nothing left to do.

    Big libraries take seconds to unload, which nobody needs to wait for.

    Args:
        grace_s: Seconds for what they have to do at their end.
        folder: That they `begin` with.
    """
    deadline, late = time.monotonic() + grace_s, False
    while not late and (alive := [pid for pid in pids if is_ours(pid)]):
        late = time.monotonic() > deadline
        for pid in alive:
            if late or (folder / f"{pid}{_DONE}").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.02)


def bootstrap_command(environment: Mapping[str, str], program: str = "") -> Any:
    """Return how Monarch starts a process, which never imports modules of the current folder for being there.

    Args:
        environment: Variables in addition to those of its host.
        program: Python source to run, with Monarch's own main program somewhere in it; empty runs that alone.
    """
    from forge_agents.runtime._monarch import default_bootstrap_cmd

    command = default_bootstrap_cmd().with_env(dict(environment))
    command.args = ["-P", *(["-c", program] if program else command.args)]
    return command


def begin(folder: str, cores: frozenset[int]) -> None:
    """Runs first in every spawned process: what it prints goes to a file; its id is noted beside it."""
    from forge_agents.runtime._monarch import current_rank

    extend_path()
    for thread in Path("/proc/self/task").iterdir() if cores else ():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cores)
    atexit.register(lambda: Path(folder, f"{os.getpid()}{_DONE}").touch())  # the first that registers is called last
    rank = current_rank().rank
    path = Path(folder)
    path.parents[2].mkdir(parents=True, exist_ok=True)
    for level in (*path.parents[1::-1], path):  # another host has no such folder yet
        _make_own(level)
    (path / f"{rank}.pid").write_text(str(os.getpid()))
    log = os.open(Path(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(file=2)  # a death by SIGSEGV, SIGILL, ... leaves its stack there


def variables(host: str) -> dict[str, str]:
    """What every process of this run finds in its environment; those on another host also its name."""
    variables = {RUN_VARIABLE: _token(), **path_variables(), **waiting()}
    return {**variables, HOST_VARIABLE: host} if host else variables


def waiting() -> dict[str, str]:
    """How long OpenMP's threads wait awake for each other, where the user has not said it.

    libgomp turns 300,000 times, milliseconds, before a thread sleeps. Where anything else runs on a core, a thread
    that waits burns its time while the one it waits for is not on: a learner's step of two threads beside one busy
    process took 3.4 times as long, with 4,000 turns 2.2 times, and on quiet cores the same.
    """
    if os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        return {}
    return {"GOMP_SPINCOUNT": "4000"}


def resident_bytes() -> tuple[int, int]:
    """This process's resident memory, now and at its peak.

    `resource.getrusage` counts what held the process before it began with a program of its own: its parent.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


@functools.cache
def place() -> str:
    """Names what processes must have in common to share memory: host, kernel, process-id namespace and user.

    Hosts that are processes of one machine count as several: they are there to try what several machines do.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = os.environ.get(HOST_VARIABLE, "")
    return f"{host}/{boot}/{Path('/proc/self/ns/pid').readlink()}/{os.getuid()}"


def visible_gpus() -> tuple[str, ...]:
    """Ids of NVIDIA GPUs here, without loading a library that would take hold of them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:  # CUDA sees those before the first that there is not
        named = [one.strip() for one in chosen.split(",")]
        return tuple(itertools.takewhile(lambda one: one not in ("", "-1", "NoDevFiles", "void", "none"), named))
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return tuple(str(number) for number in range(len(devices)))


def seeing(gpus: Sequence[str]) -> dict[str, str]:
    """Variables of processes that are to see these GPUs alone; none where there are none.

    CUDA numbers the fastest GPU first unless it is told otherwise, nvidia-smi by their place on the bus.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus else {}


def gpu_bytes(gpus: Sequence[str]) -> tuple[int, ...]:
    """Memory of each of those GPUs here, as the driver's own program says; nothing where it cannot say.

    Args:
        gpus: As CUDA_VISIBLE_DEVICES has them: numbers, UUIDs or their beginnings, parts of a GPU (MIG).
    """
    if not gpus:
        return ()
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,mig.mode.current", "--format=csv,noheader,nounits"]
    try:
        known: dict[str, int] = {}
        for line in _said(command).splitlines():
            index, uuid, mib, divided = (cell.strip() for cell in line.split(","))
            if divided != "Enabled":  # CUDA sees one part of it, and nobody says which
                known |= dict.fromkeys((index, uuid), int(mib) << 20)
        if any(one.startswith("MIG-") for one in gpus):  # its name has its size: "MIG 3g.40gb Device  0: (UUID: MIG-"
            parts = _PART.findall(_said(["nvidia-smi", "-L"]))
            known |= {uuid: int(gb) * 1_000_000_000 for gb, uuid in parts}
        return tuple(_one_of(known, one) for one in gpus)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        return ()


def _said(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_S).stdout.strip()


def _one_of(known: Mapping[str, int], name: str) -> int:
    """What is known by `name`, or by the only one that begins so, where it is no number."""
    if name in known:
        return known[name]
    (only,) = [size for full, size in known.items() if not name.isdigit() and full.startswith(name)]
    return only


def available_bytes() -> int:
    """Memory that this process may still take, by the kernel's estimate and by the limit of its control group."""
    available = _of_host("MemAvailable")
    for limit, used in _memory_limits():
        with contextlib.suppress(OSError, ValueError):
            available = min(available, limit - int(used.read_text()) + _inactive_bytes(used.parent / "memory.stat"))
    return available


def total_bytes() -> int:
    """Memory of this host, or of the tightest control group that this process is in, used or not."""
    return min([_of_host("MemTotal"), *(limit for limit, _ in _memory_limits())])


def _of_host(name: str) -> int:
    """Bytes of one of the kernel's counts of the whole host."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(meminfo[name].split()[0]) * 1024


def _memory_limits() -> Iterator[tuple[int, Path]]:
    """Limits of this process's control group and of those around it, and the files that say what is used.

    A container mostly sees its own as the outermost, whatever it is called; a job of Slurm's sees those of the machine.
    """
    within = dict.fromkeys(at for group in _own_groups() for at in (Path(group), *Path(group).parents))
    for (root, limit, used), at in itertools.product(_MEMORY_LIMITS, within or [Path("/")]):
        folder = root / at.relative_to("/")
        with contextlib.suppress(OSError, ValueError):  # no such group of this version, or "max"
            yield int((folder / limit).read_text()), folder / used


def _own_groups() -> list[str]:
    """Paths of the control groups that this process is in, of all hierarchies."""
    try:
        return [line.split(":", 2)[2] for line in _GROUPS.read_text().splitlines()]
    except OSError:
        return []


def _inactive_bytes(stat: Path) -> int:
    """Pages of files that nobody has read lately: they count as used and give way."""
    try:
        counts = dict(line.split() for line in stat.read_text().splitlines())
        return int(counts.get("total_inactive_file") or counts.get("inactive_file") or 0)
    except (OSError, ValueError):
        return 0


def keep_freed_memory() -> bool:
    """Make glibc's malloc reuse big blocks, for the rest of this process.

    By default every big tensor is mapped afresh, and the kernel fills its pages anew: 0.7 to 2.7 s for each GB, a
    third of a training step on CPU. The price: resident memory stays at its peak.

    Returns:
        Whether the allocator took it; False where it is not glibc's.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 << 20))
    return all(mallopt(key, value) == 1 for key, value in settings)


def keep_few_products() -> None:
    """Make oneDNN keep what it has compiled for the last 256 products of matrices, and not for 1,024.

    Each takes memory to work in along, for a model's head as much as its weights, and a learner's rows have other
    lengths in every step. But a layer's products must all be kept until the next layer: else each is compiled anew
    in every layer. They are a dozen, twice that with adapters, and three for each bucket of attention, of which a long
    row of many lengths has dozens. Counts before the first product only; a value of the user's stays.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")


# ---- deaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """One process's end."""

    how: str
    """The signal or exit status, and the innermost Python frames; says only that it ended where nothing is known."""
    place: str
    """Signal and Python stack, equal for two deaths at the same place; empty where the process could not note it."""
    known: bool
    """Whether `how` says more than that it ended."""
    last_lines: str
    """What it printed before, a few lines; empty where it printed nothing or its log is elsewhere."""
    meaning: str = ""
    """What such an end mostly comes from, and what to do; empty where that is not known."""


def death(status: int | None, log: Path | None) -> Death:
    """Put together what is known.

    Args:
        status: As `subprocess.Popen.returncode`: -4 is SIGILL; None where nobody was told.
        log: What the process printed; None or absent where it is not here.
    """
    printed = "" if log is None else _tail(log)
    # the dump itself may fault at a thread that runs on meanwhile: a second one begins where the first broke off
    before, _, rest = printed.partition(_DUMP)
    dump, _, second = rest.partition(_DUMP)
    current = _CURRENT.search(dump)
    frames = _FRAME.findall(current[1] if current else "")
    if not frames and not second:  # a library's own thread has no Python stack; then those of all threads say where
        frames = _FRAME.findall(dump)
    word = re.match("[A-Z][a-z]+", dump)
    broke_off = second and status is not None and -status in _CRASHES.values()  # else the dumps are of its children
    if (status is None or broke_off) and word and word[0] in _CRASHES:
        status = -_CRASHES[word[0]]
    ended = "ended" if status is None else how_it_ended(status)
    where = " < ".join(f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})" for file, line, name in frames[:_FRAMES])
    return Death(
        how=f"{ended} in {where}" if where else ended,
        known=status is not None,
        place=f"{ended} in {frames}" if frames else "",
        meaning="" if status is None or status >= 0 else _meaning(-status),
        last_lines="\n".join([line for line in before.splitlines() if line.strip()][-_LAST_LINES:]),
    )


def named(text: str) -> str:
    """`text` with each ``sig=9`` of Monarch's as ``SIGKILL``."""
    return re.sub(r"\bsig=(\d+)", lambda found: _signal(int(found[1])), text)


def how_it_ended(status: int) -> str:
    """In words; `status` as `death`'s."""
    return f"was ended by {_signal(-status)}" if status < 0 else f"ended with exit status {status}"


def _meaning(number: int) -> str:
    if number != signal.SIGKILL:
        return _MEANINGS.get(number, "")
    if any(now > before for now, before in zip(oom_kills(), _oom_kills_before(), strict=True)):
        return (
            "most likely by the kernel, which has killed for want of memory since this run began: take a smaller "
            "model, engine.kv_cache_gb or batch, or fewer processes"
        )
    return "the kernel counts nobody killed for want of memory since this run began, so somebody else killed it"


def oom_kills() -> tuple[int, ...]:
    """How many processes the kernel has killed for want of memory so far, by each count there is."""
    counts = []
    for file in dict.fromkeys(counter.format(group) for counter in _COUNTERS for group in (*_own_groups(), "")):
        try:
            found = re.search(r"^oom_kill (\d+)$", Path(file).read_text(), re.MULTILINE)
        except OSError:
            found = None
        counts.append(int(found[1]) if found else 0)
    return tuple(counts)


@functools.cache
def _oom_kills_before() -> tuple[int, ...]:
    """`oom_kills` when the first process of this run was started."""
    return oom_kills()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
