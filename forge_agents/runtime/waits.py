"""Who waits for whom in this process, and who is busy: for errors and files that a stall leaves, and for measures.

In: waits and work as they begin and end, and what others know of their state. Out: a JSON-safe picture of all of it.
Waits for what it is given to wait for; give that a deadline.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import queue
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from forge_agents.errors import ActorDiedError, StallError

T = TypeVar("T")
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


async def all_or_first_error(
    work: Iterable[Awaitable[T]], undo: Callable[[T], Awaitable[None]] | None = None
) -> list[T]:
    """Results in order; at the first exception the rest is cancelled, awaited, and that exception raised.

    Args:
        work: Each undoes what it began where it fails or is cancelled.
        undo: Undoes what one of them has finished.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        if undo is not None:
            await asyncio.gather(*(undo(one) for one in ended if not isinstance(one, BaseException)))
        raise


def report(name: str, state: Callable[[], Any] | None) -> None:
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


def picture() -> dict[str, Any]:
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


_MOST_IDLE = 64
"""Threads of `in_thread` that are kept for the next call: to start one costs more than most calls."""
_idle: list[_Helper] = []


class _Helper:
    """A thread that runs one call after another; one whose call never returns is left behind at the end."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False in a process that was forked from its own."""
        return self._thread.is_alive()

    def begin(self, name: str, call: Callable[[], None]) -> None:
        """Run `call`, which raises nothing; the thread bears this name meanwhile."""
        self._thread.name = name
        self._calls.put(call)

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            call()
            del call  # what it held need not live until the next
            self._thread.name = "idle"
            if len(_idle) >= _MOST_IDLE:
                return
            _idle.append(self)


def _helper() -> _Helper:
    with contextlib.suppress(IndexError):  # none is idle
        while not (kept := _idle.pop()).alive:
            pass
        return kept
    return _Helper()


def begin_in_thread(call: Callable[..., T], *args: Any, name: str) -> Future[T]:
    """Run `call` with `args` on a thread; one that never returns is left behind when the program ends, not waited for.

    Args:
        name: The thread's, for a picture of a stall.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # who waits may stop to; the call goes on

    def run() -> None:
        try:
            done.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001  # the boundary: the caller's thread raises it
            done.set_exception(error)

    _helper().begin(name, run)
    return done


async def in_thread(call: Callable[..., T], *args: Any, name: str) -> T:
    """As `asyncio.to_thread`, on a thread of `begin_in_thread`."""
    return await asyncio.wrap_future(begin_in_thread(call, *args, name=name))


class LoopThread:
    """An event loop on a thread of its own, for synchronous callers on any thread, inside another loop or not."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False after `close`, and in a process that was forked from its own."""
        return self._thread.is_alive()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work`; its end is the future's."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` there, soon."""
        self._loop.call_soon_threadsafe(function)

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """The result of `work`.

        Raises:
            StallError: It took longer than `timeout_s`.
            ActorDiedError: The thread was closed meanwhile.
            Exception: What `work` raised.
        """
        future = self.begin(work)
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise ActorDiedError(f"{self._name} was closed during {what}") from None
        except TimeoutError as error:
            if future.done():  # what `work` raised
                raise
            raise StallError(f"{self._name} did not finish {what} within {timeout_s:g} s") from error
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        with contextlib.suppress(CancelledError, TimeoutError):
            self.begin(_cancel_all()).result(5)
        self.call(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Busy:
    """Seconds of work so far, counted by the clock of who did it; shared by those who tell and those who ask."""

    seconds: float = 0.0
