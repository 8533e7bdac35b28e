"""Threads and event loops that synchronous and asynchronous callers share."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from forge_agents.errors import ActorDiedError, StallError

T = TypeVar("T")


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
class BusyTime:
    """Seconds of work so far, counted by the clock of who did it; shared by those who tell and those who ask."""

    seconds: float = 0.0
