"""This machine's GPUs and memory, and settings of its memory allocators."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

HOST_VARIABLE = "FORGE_AGENTS_HOST"
"""Environment variable of processes on hosts other than the controller's: name of the host in the run."""
_QUERY_TIMEOUT_S = 20.0
_GROUPS = Path("/proc/self/cgroup")
"""Lists the control groups of this process: of a container, a Slurm job, systemd."""
_MEMORY_LIMITS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Root folder and the files with limit and usage of control groups, for versions 2 and 1."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # <malloc.h>
_FAST_BFLOAT16 = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
"""Flags of x86 and Arm processors in /proc/cpuinfo."""
_MIG_PART = re.compile(r"^\s+MIG \S*?\.(\d+)gb\S*\s.*\(UUID: (MIG-[^)]+)\)", re.MULTILINE)


def resident_bytes() -> tuple[int, int]:
    """Return this process's resident memory in bytes: current and peak.

    `resource.getrusage` would also count the memory of the parent process from before the exec.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    current, peak = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return current, peak


@functools.cache
def memory_domain() -> str:
    """Return an id that is equal for processes that can share memory: host, kernel, process-id namespace and user.

    Hosts that are processes of one machine (``kind="process"``) have different ids, because they imitate machines.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = os.environ.get(HOST_VARIABLE, "")
    return f"{host}/{boot}/{Path('/proc/self/ns/pid').readlink()}/{os.getuid()}"


# ---- GPUs


def visible_gpus() -> tuple[str, ...]:
    """Return the ids of this process's NVIDIA GPUs, without initializing CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # CUDA ignores all entries after the first invalid one
        names = [name.strip() for name in visible.split(",")]
        return tuple(itertools.takewhile(lambda name: name not in ("", "-1", "NoDevFiles", "void", "none"), names))
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return tuple(str(number) for number in range(len(devices)))


def gpu_variables(gpus: Sequence[str]) -> dict[str, str]:
    """Return environment variables that restrict processes to these GPUs. Empty if there are none.

    By default CUDA numbers the fastest GPU first, but nvidia-smi numbers GPUs by bus id.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus else {}


def gpu_bytes(gpus: Sequence[str]) -> tuple[int, ...]:
    """Return the memory of each GPU in bytes, by nvidia-smi. Empty if it is not known.

    GPUs are given as in CUDA_VISIBLE_DEVICES: indices, UUIDs or their prefixes, MIG devices.
    """
    if not gpus:
        return ()
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,mig.mode.current", "--format=csv,noheader,nounits"]
    sizes: dict[str, int] = {}

    def size_of(name: str) -> int:
        if name in sizes:
            return sizes[name]
        (size,) = [size for full, size in sizes.items() if not name.isdigit() and full.startswith(name)]
        return size

    try:
        for line in _output(command).splitlines():
            index, uuid, mib, mig_mode = (cell.strip() for cell in line.split(","))
            if mig_mode != "Enabled":  # CUDA sees only one part of such a GPU, and it is not known which
                sizes |= dict.fromkeys((index, uuid), int(mib) << 20)
        if any(gpu.startswith("MIG-") for gpu in gpus):  # the size is in "MIG 3g.40gb Device  0: (UUID: MIG-..."
            parts = _MIG_PART.findall(_output(["nvidia-smi", "-L"]))
            sizes |= {uuid: int(gb) * 1_000_000_000 for gb, uuid in parts}
        return tuple(size_of(gpu) for gpu in gpus)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        return ()


def _output(command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_QUERY_TIMEOUT_S)
    return result.stdout.strip()


# ---- processor


def has_fast_bfloat16() -> bool:
    """Return whether the processor has instructions for bfloat16: AVX512-BF16, AMX or those of Arm.

    Without them, matrix products in bfloat16 are emulated: 4 to 60 times slower than in float32 on a processor with
    AVX2.
    """
    return not _FAST_BFLOAT16.isdisjoint(processor_flags())


@functools.cache
def processor_flags() -> frozenset[str]:
    """Return the names of the processor's instruction sets as Linux writes them. Empty where it does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # in a sandbox without /proc
        return frozenset()
    return frozenset(re.findall(r"\S+", "".join(re.findall(r"^(?:flags|Features)\s*:(.*)", text, re.MULTILINE))))


# ---- memory


def available_bytes() -> int:
    """Return the memory that this process may still allocate: the kernel's estimate, bounded by its control groups."""
    available: int = psutil.virtual_memory().available
    for limit, used in _memory_limits():
        with contextlib.suppress(OSError, ValueError):
            available = min(available, limit - int(used.read_text()) + _inactive_bytes(used.parent / "memory.stat"))
    return available


def total_bytes() -> int:
    """Return the memory of this host, or of the tightest control group of this process."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _memory_limits())])


def _memory_limits() -> Iterator[tuple[int, Path]]:
    """Limits of this process's control group and its ancestors, each with the file that holds its usage.

    A container usually sees its own group as the root, whatever its path says. A Slurm job sees the machine's groups.
    """
    paths = dict.fromkeys(path for group in control_groups() for path in (Path(group), *Path(group).parents))
    for (root, limit, used), path in itertools.product(_MEMORY_LIMITS, paths or [Path("/")]):
        folder = root / path.relative_to("/")
        with contextlib.suppress(OSError, ValueError):  # no such group in this version, or "max"
            yield int((folder / limit).read_text()), folder / used


def control_groups() -> list[str]:
    """Return the paths of this process's control groups, in all hierarchies."""
    try:
        return [line.split(":", 2)[2] for line in _GROUPS.read_text().splitlines()]
    except OSError:
        return []


def _inactive_bytes(stat: Path) -> int:
    """File pages that have not been read lately. Such pages count as used, but the kernel can reclaim them."""
    try:
        counts = dict(line.split() for line in stat.read_text().splitlines())
        return int(counts.get("total_inactive_file") or counts.get("inactive_file") or 0)
    except (OSError, ValueError):
        return 0


def keep_freed_memory() -> bool:
    """Make glibc's malloc reuse large blocks, for the rest of this process. Returns whether it accepted the settings.

    By default each large tensor is mapped again and the kernel zeroes its pages: 0.7 to 2.7 s per GB, a third of a
    training step on CPU. In return, resident memory stays at its peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 << 20))
    return all(mallopt(key, value) == 1 for key, value in settings)


def limit_matmul_cache() -> None:
    """Limit oneDNN's cache of compiled matrix products to 256 entries (default: 1,024).

    Each entry has scratch memory, for a model's head as much as its weights, and a learner's rows have different
    lengths in each step. But all products of a layer must stay in the cache until the next layer, or each is compiled
    again in every layer: a dozen, twice that with adapters, and three for each of dozens of buckets of attention. The
    limit has an effect only before the first product. A value set by the user stays.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
