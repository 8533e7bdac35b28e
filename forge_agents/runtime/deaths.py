"""How a process ended, from its exit status, its log and the kernel's counters."""

from __future__ import annotations

import functools
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from forge_agents.runtime.machine import own_groups

_TAIL_BYTES = 65536
_LAST_LINES = 8
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
_MEANINGS: dict[int, str] = {
    signal.SIGILL: "a library uses an instruction that this processor does not have: it was built for another one; "
    "`forge-agents doctor` tries each part",
    signal.SIGBUS: "often /dev/shm or a disk is full",
    signal.SIGTERM: "somebody asked it to end, such as a job manager",
}
_CURRENT = re.compile(r"^Current thread .*\n((?:  .*\n)+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


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
    ended = "ended" if status is None else describe_exit(status)
    where = " < ".join(f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})" for file, line, name in frames[:_FRAMES])
    return Death(
        how=f"{ended} in {where}" if where else ended,
        known=status is not None,
        place=f"{ended} in {frames}" if frames else "",
        meaning="" if status is None or status >= 0 else _meaning(-status),
        last_lines="\n".join([line for line in before.splitlines() if line.strip()][-_LAST_LINES:]),
    )


def name_signals(text: str) -> str:
    """`text` with each ``sig=9`` of Monarch's as ``SIGKILL``."""
    return re.sub(r"\bsig=(\d+)", lambda found: _signal(int(found[1])), text)


def describe_exit(status: int) -> str:
    """In words; `status` as `death`'s."""
    return f"was ended by {_signal(-status)}" if status < 0 else f"ended with exit status {status}"


def _meaning(number: int) -> str:
    if number != signal.SIGKILL:
        return _MEANINGS.get(number, "")
    if any(now > before for now, before in zip(oom_kills(), oom_kills_before(), strict=True)):
        return (
            "most likely by the kernel, which has killed for want of memory since this run began: take a smaller "
            "model, engine.kv_cache_gb or batch, or fewer processes"
        )
    return "the kernel counts nobody killed for want of memory since this run began, so somebody else killed it"


def oom_kills() -> tuple[int, ...]:
    """How many processes the kernel has killed for want of memory so far, by each count there is."""
    counts = []
    for file in dict.fromkeys(counter.format(group) for counter in _COUNTERS for group in (*own_groups(), "")):
        try:
            found = re.search(r"^oom_kill (\d+)$", Path(file).read_text(), re.MULTILINE)
        except OSError:
            found = None
        counts.append(int(found[1]) if found else 0)
    return tuple(counts)


@functools.cache
def oom_kills_before() -> tuple[int, ...]:
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
