"""How a process ended, from its exit status, its log and the kernel's counters."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from forge_agents.runtime.machine import control_groups

_TAIL_BYTES = 65536
_LAST_LINES = 8
_MAX_FRAMES = 3
_DUMP = "Fatal Python error: "
"""First words of a faulthandler dump. faulthandler is enabled in all of our processes."""
_CRASHES = {
    "Segmentation": signal.SIGSEGV,
    "Illegal": signal.SIGILL,
    "Bus": signal.SIGBUS,
    "Floating": signal.SIGFPE,
    "Aborted": signal.SIGABRT,
}
"""Signals by the first word of faulthandler's description."""
_OOM_COUNTERS = ("/proc/vmstat", "/sys/fs/cgroup{}/memory.events", "/sys/fs/cgroup/memory{}/memory.oom_control")
"""Files in which the kernel counts out-of-memory kills: in total, and by control group of version 2 and 1."""
_MEANINGS: dict[int, str] = {
    signal.SIGILL: "a library uses an instruction that this processor lacks, because it was built for another one. "
    "`forge-agents doctor` checks each part",
    signal.SIGBUS: "often /dev/shm or a disk is full",
    signal.SIGTERM: "another program asked it to end, such as a job manager",
}
_CURRENT_THREAD = re.compile(r"^Current thread .*\n((?:  .*\n)+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of one process."""

    how: str
    """The signal or exit status and the innermost Python frames, as a phrase: "was ended by SIGKILL"."""
    place: str
    """Signal and Python stack, equal for two deaths at the same place. Empty if the process could not write them."""
    known: bool
    """Whether the exit status is known."""
    last_lines: str
    """Last lines of the process's log. Empty if there are none or the log is on another host."""
    meaning: str = ""
    """Usual cause of such an end and its remedy. Empty if not known."""

    def __str__(self) -> str:
        return f"{self.how} ({self.meaning})" if self.meaning else self.how


def death(status: int | None, log: Path | None) -> Death:
    """Describe the end of a process.

    Args:
        status: Exit status as in `subprocess.Popen.returncode` (-4 is SIGILL). None if not known.
        log: The process's log. None or missing if it is on another host.
    """
    printed = ""
    if log is not None:
        with contextlib.suppress(OSError), log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            printed = file.read().decode(errors="replace")
    # The dump itself may crash at a thread that still runs. Then a second dump begins where the first one broke off.
    before, _, rest = printed.partition(_DUMP)
    dump, _, second = rest.partition(_DUMP)
    current = _CURRENT_THREAD.search(dump)
    frames = _FRAME.findall(current[1] if current else "")
    if not frames and not second:  # a native thread has no Python stack; the stacks of all threads show the place
        frames = _FRAME.findall(dump)
    word = re.match("[A-Z][a-z]+", dump)
    broke_off = second and status is not None and -status in _CRASHES.values()  # else the dumps are of its children
    if (status is None or broke_off) and word and word[0] in _CRASHES:
        status = -_CRASHES[word[0]]
    ended = "ended" if status is None else describe_exit(status)
    where = " < ".join(
        f"{function} ({'/'.join(Path(file).parts[-2:])}:{line})" for file, line, function in frames[:_MAX_FRAMES]
    )
    return Death(
        how=f"{ended} in {where}" if where else ended,
        known=status is not None,
        place=f"{ended} in {frames}" if frames else "",
        meaning="" if status is None or status >= 0 else _meaning(-status),
        last_lines="\n".join([line for line in before.splitlines() if line.strip()][-_LAST_LINES:]),
    )


def name_signals(text: str) -> str:
    """Replace each ``sig=9`` in a message of Monarch's by ``SIGKILL``."""
    return re.sub(r"\bsig=(\d+)", lambda match: _signal(int(match[1])), text)


def describe_exit(status: int) -> str:
    """Describe an exit status, as in `subprocess.Popen.returncode`: "was ended by SIGKILL"."""
    return f"was ended by {_signal(-status)}" if status < 0 else f"ended with exit status {status}"


def _meaning(number: int) -> str:
    if number != signal.SIGKILL:
        return _MEANINGS.get(number, "")
    if any(now > before for now, before in zip(oom_kills(), oom_kills_before(), strict=True)):
        return "most likely by the kernel for want of memory: use a smaller model, engine.kv_cache_gb or batch"
    return "by another program: the kernel has killed no process for want of memory since this run began"


def oom_kills() -> tuple[int, ...]:
    """Return the number of the kernel's out-of-memory kills so far, by counter."""
    counts = []
    for file in dict.fromkeys(counter.format(group) for counter in _OOM_COUNTERS for group in (*control_groups(), "")):
        try:
            match = re.search(r"^oom_kill (\d+)$", Path(file).read_text(), re.MULTILINE)
        except OSError:
            match = None
        counts.append(int(match[1]) if match else 0)
    return tuple(counts)


@functools.cache
def oom_kills_before() -> tuple[int, ...]:
    """Return `oom_kills` as of the start of this run's first process."""
    return oom_kills()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
