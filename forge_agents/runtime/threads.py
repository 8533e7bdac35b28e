"""Threads and event loops shared by synchronous and asynchronous callers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from forge_agents.errors import ActorDiedError, StallError

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 5.0
_destructor_calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
_log = logging.getLogger(__name__)


async def all_or_first_error(
    work: Iterable[Awaitable[T]], undo: Callable[[T], Awaitable[None]] | None = None
) -> list[T]:
    """Return all results in order. At the first exception, cancel and await the rest, then raise that exception.

    Args:
        work: Each awaitable undoes its own effects if it fails or is cancelled.
        undo: Undoes a finished result after another awaitable failed.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if undo is not None:
            await asyncio.gather(*(undo(result) for result in results if not isinstance(result, BaseException)))
        raise


def begin_in_thread(call: Callable[..., T], *args: Any, name: str) -> Future[T]:
    """Run ``call(*args)`` on a thread of that name. A call that never returns does not delay the program's exit."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a caller may stop waiting, but the call continues

    def run() -> None:
        try:
            done.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001  # re-raised in the caller's thread
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


async def in_thread(call: Callable[..., T], *args: Any, name: str) -> T:
    """Like `asyncio.to_thread`, on a thread of `begin_in_thread`."""
    return await asyncio.wrap_future(begin_in_thread(call, *args, name=name))


def call_from_destructor(call: Callable[[], object]) -> None:
    """Have another thread run `call`, and log its errors. Needs `start_destructor_thread` before.

    A garbage collection may run a destructor in any thread at any moment, also while that thread holds the lock that
    the destructor would wait for.
    """
    _destructor_calls.put(call)  # which is safe in destructors


@functools.lru_cache
def start_destructor_thread(_pid: int) -> None:
    """Start the thread of `call_from_destructor` for the process with this id, once."""

    def run() -> None:
        while True:
            call = _destructor_calls.get()
            try:
                call()
            except Exception as error:  # noqa: BLE001  # of code of users, which no caller can handle
                _log.warning("an object that was dropped without close() cannot be closed: %r", error)
            del call  # it refers to the object

    threading.Thread(target=run, name="destructors", daemon=True).start()


class LoopThread:
    """An event loop on its own thread, for synchronous callers on any thread, even inside another loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False after `close`, and in a forked child process."""
        return self._thread.is_alive()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop and return its future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        """Schedule a call of `function` on the loop's thread."""
        self._loop.call_soon_threadsafe(function)

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """Run `work` and return its result.

        Raises:
            StallError: The work took longer than `timeout_s`.
            ActorDiedError: The thread was closed before the work finished.
            Exception: Any exception raised by `work`.
        """
        future = self.begin(work)
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise ActorDiedError(f"{self._name} was closed during {what}") from None
        except TimeoutError as error:
            if future.done():  # raised by `work`
                raise
            raise StallError(f"{self._name} did not finish {what} within {timeout_s:g} s") from error
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel all running work and end the thread."""
        with contextlib.suppress(CancelledError, TimeoutError):
            self.begin(_cancel_all()).result(_CLOSE_TIMEOUT_S)
        self.call(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class BusyTime:
    """Seconds of work so far, shared between the worker that counts and its readers."""

    seconds: float = 0.0
