"""This machine's GPUs and memory, and the settings of its memory allocators."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HOST_VARIABLE = "FORGE_AGENTS_HOST"
"""Environment variable of processes on another host than the controller's: that host's name in the run."""
_ASK_S = 20.0
_GROUPS = Path("/proc/self/cgroup")
"""Says in which control groups this process is: of a container, of a job of Slurm's, of systemd's."""
_MEMORY_LIMITS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Where control groups are, and each one's limit and what is used of it: version 2 and version 1."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # <malloc.h>
_PART = re.compile(r"^\s+MIG \S*?\.(\d+)gb\S*\s.*\(UUID: (MIG-[^)]+)\)", re.MULTILINE)


def resident_bytes() -> tuple[int, int]:
    """This process's resident memory, now and at its peak.

    `resource.getrusage` counts what held the process before it began with a program of its own: its parent.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


@functools.cache
def memory_domain() -> str:
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


def gpu_variables(gpus: Sequence[str]) -> dict[str, str]:
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
    within = dict.fromkeys(at for group in own_groups() for at in (Path(group), *Path(group).parents))
    for (root, limit, used), at in itertools.product(_MEMORY_LIMITS, within or [Path("/")]):
        folder = root / at.relative_to("/")
        with contextlib.suppress(OSError, ValueError):  # no such group of this version, or "max"
            yield int((folder / limit).read_text()), folder / used


def own_groups() -> list[str]:
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


def limit_matmul_cache() -> None:
    """Make oneDNN keep what it has compiled for the last 256 products of matrices, and not for 1,024.

    Each takes memory to work in along, for a model's head as much as its weights, and a learner's rows have other
    lengths in every step. But a layer's products must all be kept until the next layer: else each is compiled anew
    in every layer. They are a dozen, twice that with adapters, and three for each bucket of attention, of which a long
    row of many lengths has dozens. Counts before the first product only; a value of the user's stays.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
