"""Records what this process waits for, so that errors and dumps can explain a stall."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

_MAX_NAMES = 4
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_FRESH_S = 1.0
"""Stalls within this time share one snapshot."""


@dataclass(frozen=True, slots=True)
class _Wait:
    who: str
    what: str
    timeout_s: float
    since: float


_waits: dict[int, _Wait] = {}
_numbers = itertools.count()
_states: dict[str, Callable[[], Any]] = {}
_last: tuple[float, dict[str, Any]] | None = None


@contextlib.contextmanager
def waiting(who: str, what: str, timeout_s: float) -> Iterator[None]:
    """While the block runs, record that this process waits for `who` to do `what`."""
    number = next(_numbers)
    _waits[number] = _Wait(who, what, timeout_s, time.monotonic())
    try:
        yield
    finally:
        _waits.pop(number, None)


def register(name: str, state: Callable[[], Any] | None) -> None:
    """Include the JSON-safe result of `state` in snapshots under `name`. None removes it."""
    _states.pop(name, None)
    if state is not None:
        _states[name] = state


def summary(without: str = "") -> str:
    """Describe the current waits, longest first, except those for `without`. Empty if there are none."""
    ages_by_wait: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    now = time.monotonic()
    for wait in tuple(_waits.values()):
        if wait.who != without:
            ages_by_wait[wait.who, wait.what].append(now - wait.since)
    longest = sorted(ages_by_wait.items(), key=lambda item: -max(item[1]))
    return "; ".join(
        f"{who}: {what} ({len(ages)} x, up to {max(ages):.1f} s)" for (who, what), ages in longest[:_MAX_NAMES]
    )


def snapshot() -> dict[str, Any]:
    """Return the current waits, registered states, asyncio tasks and thread stacks, JSON-safe."""
    global _last  # noqa: PLW0603  # one snapshot per process
    now = time.monotonic()
    if _last is not None and now - _last[0] < _FRESH_S:
        return _last[1]
    content: dict[str, Any] = {
        "time": time.time(),
        "waits": [
            {"who": wait.who, "what": wait.what, "for_s": round(now - wait.since, 2), "timeout_s": wait.timeout_s}
            for wait in tuple(_waits.values())
        ],
        **{name: _value(state) for name, state in tuple(_states.items())},
        "tasks": _tasks(),
        "threads": _threads(),
    }
    _last = now, content
    return content


def _value(state: Callable[[], Any]) -> Any:
    try:
        return state()
    except Exception as error:  # noqa: BLE001  # a snapshot of a broken run is useful even with a gap
        return f"{type(error).__name__}: {error}"


def _threads() -> dict[str, list[str]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # documented as the way to other threads' stacks
    return {f"{names.get(ident, 'unknown')} ({ident})": stack(frame) for ident, frame in frames.items()}


def stack(frame: FrameType | None) -> list[str]:
    """Return a frame and its callers, outermost first, as ``FILE:LINE function``."""
    # `traceback.extract_stack` would read every source file
    entries = [f"{f.f_code.co_filename}:{line} {f.f_code.co_name}" for f, line in traceback.walk_stack(frame)]
    return entries[::-1]


def place(frame: FrameType | None) -> str:
    """Return the innermost entry of `stack` that is not in Python's standard library, so that users know the code."""
    entries = stack(frame)
    standard = (_STANDARD_LIBRARY, "<frozen")
    others = [entry for entry in entries if "site-packages" in entry or not entry.startswith(standard)]
    return (others or entries)[-1]


def _tasks() -> list[dict[str, Any]]:
    """Tasks of the running loop, grouped by the place where they are suspended."""
    try:
        alive = asyncio.all_tasks()
    except RuntimeError:  # no loop runs in this thread
        return []
    names_by_stack: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    for task in alive:
        names_by_stack[await_chain(task.get_coro())].append(task.get_name())
    return [
        {"count": len(names), "names": names[:_MAX_NAMES], "stack": list(chain)}
        for chain, names in names_by_stack.items()
    ]


def await_chain(coroutine: Any) -> tuple[str, ...]:
    """Return the line where a suspended coroutine stands and those of the coroutines it awaits, outermost first."""
    chain = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            chain.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return tuple(chain)
