"""Who waits for whom in this process, and who is busy: for errors and files that a stall leaves, and for measures.

In: waits and work as they begin and end, and what others know of their state. Out: a JSON-safe picture of all of it.
Waits for what it is given to wait for; give that a deadline.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

_MOST_NAMED = 4
_FRESH_S = 1.0
"""Stalls that come together share one picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    who: str
    what: str
    timeout_s: float
    since: float


_waits: dict[int, _Wait] = {}
_numbers = itertools.count()
_reporters: dict[str, Callable[[], Any]] = {}
_last: tuple[float, dict[str, Any]] | None = None


@contextlib.contextmanager
def waiting(who: str, what: str, timeout_s: float) -> Iterator[None]:
    """Inside the block somebody waits for `who` to do `what`."""
    number = next(_numbers)
    _waits[number] = _Wait(who=who, what=what, timeout_s=timeout_s, since=time.monotonic())
    try:
        yield
    finally:
        _waits.pop(number, None)


def register(name: str, state: Callable[[], Any] | None) -> None:
    """From now on `state`, which returns what JSON holds, belongs to the picture as `name`; None: no longer."""
    _reporters.pop(name, None)
    if state is not None:
        _reporters[name] = state


def summary(without: str = "") -> str:
    """The waits of this moment in words, the longest first; empty where there is none but for those for `without`."""
    grouped: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    now = time.monotonic()
    for wait in tuple(_waits.values()):
        if wait.who != without:
            grouped[wait.who, wait.what].append(now - wait.since)
    longest = sorted(grouped.items(), key=lambda item: -max(item[1]))
    told = [
        f"{who}: {what} ({len(ages)} x, up to {max(ages):.1f} s)" for (who, what), ages in longest[:_MOST_NAMED]
    ]
    return "; ".join(told)


def snapshot() -> dict[str, Any]:
    """Waits, what was reported, asyncio tasks and threads with their stacks."""
    global _last  # noqa: PLW0603  # one picture of the process
    if _last is not None and time.monotonic() - _last[0] < _FRESH_S:
        return _last[1]
    now = time.monotonic()
    found: dict[str, Any] = {
        "time": time.time(),
        "waits": [
            {"who": wait.who, "what": wait.what, "for_s": round(now - wait.since, 2), "timeout_s": wait.timeout_s}
            for wait in tuple(_waits.values())
        ],
        **{name: _asked(state) for name, state in tuple(_reporters.items())},
        "tasks": _tasks(),
        "threads": threads(),
    }
    _last = now, found
    return found


def threads() -> dict[str, list[str]]:
    """Stacks of all threads, outermost call first, by thread name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # the documented way to other threads' stacks
    return {f"{names.get(ident, 'unknown')} ({ident})": stack(frame) for ident, frame in frames.items()}


def stack(frame: FrameType | None) -> list[str]:
    """A frame and its callers, outermost first, as ``FILE:LINE function``."""
    # not `traceback.extract_stack`, which reads every source file
    entries = [f"{f.f_code.co_filename}:{line} {f.f_code.co_name}" for f, line in traceback.walk_stack(frame)]
    return entries[::-1]


def _tasks() -> list[dict[str, Any]]:
    """Tasks of the running loop; those at the same place together."""
    try:
        alive = asyncio.all_tasks()
    except RuntimeError:  # no loop runs in this thread
        return []
    grouped: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    for task in alive:
        grouped[await_chain(task.get_coro())].append(task.get_name())
    return [
        {"count": len(names), "names": names[:_MOST_NAMED], "stack": list(chain)} for chain, names in grouped.items()
    ]


def await_chain(coroutine: Any) -> tuple[str, ...]:
    """Where a suspended coroutine stands, and those that it awaits, outermost first."""
    chain = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            chain.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return tuple(chain)


def _asked(state: Callable[[], Any]) -> Any:
    try:
        return state()
    except Exception as error:  # noqa: BLE001  # the boundary: the picture of a broken run is worth more than its gap
        return f"{type(error).__name__}: {error}"
