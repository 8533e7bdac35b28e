"""What is known of a process's end: its signal or exit status, where it was, and what it printed last.

In: how the kernel says it ended, and its log. Out: `Death`. Waits for nothing.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

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


def death(status: int | None, log: Path | None) -> Death:
    """Put together what is known.

    Args:
        status: As `subprocess.Popen.returncode`: -4 is SIGILL; None where nobody was told.
        log: What the process printed; None or absent where it is not here.
    """
    printed = "" if log is None else _tail(log)
    before, _, dump = printed.partition(_DUMP)
    current = _CURRENT.search(dump)
    # a library's own thread has no Python stack; then those of all threads say where
    frames = _FRAME.findall(current[1] if current else "") or _FRAME.findall(dump)
    word = re.match("[A-Z][a-z]+", dump)
    if status is None and word and word[0] in _CRASHES:
        status = -_CRASHES[word[0]]
    ended = "ended" if status is None else _ended(status)
    where = " < ".join(f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})" for file, line, name in frames[:_FRAMES])
    return Death(
        how=f"{ended} in {where}" if where else ended,
        known=status is not None,
        place=f"{ended} in {frames}" if frames else "",
        last_lines="\n".join([line for line in before.splitlines() if line.strip()][-_LAST_LINES:]),
    )


def named(text: str) -> str:
    """`text` with each ``sig=9`` of Monarch's as ``SIGKILL``."""
    return re.sub(r"\bsig=(\d+)", lambda found: _signal(int(found[1])), text)


def _ended(status: int) -> str:
    return f"was ended by {_signal(-status)}" if status < 0 else f"ended with exit status {status}"


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
