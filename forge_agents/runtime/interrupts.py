"""How Ctrl-C ends a call: everything that it started ends, and a line says where it stands instead of a stack.

In: coroutines, and what to say when they are stopped. Out: their results, or a `KeyboardInterrupt`. Waits for them.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar, TypeVar

from forge_agents.runtime import mesh

T = TypeVar("T")

_CANCEL_S = 30.0
"""Work that is cancelled ends within this time."""


def interrupted(reason: str) -> KeyboardInterrupt:
    """An exception to raise that shows as `reason` alone, in scripts and notebooks, where nobody catches it."""
    error = KeyboardInterrupt(reason)
    error._render_traceback_ = lambda: [reason]  # type: ignore[attr-defined]  # IPython's way to ask
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)
    return error


def print_stopping() -> None:
    """Acknowledge Ctrl-C at once."""
    start = "\n" * sys.stderr.isatty()  # after the ^C that a terminal shows
    sys.stderr.write(f"{start}SIGINT: stopping, and ending what was started; once more does not wait for it\n")


class _Hook:
    """Python's hook for exceptions that nobody catches, and before it ours."""

    def __init__(self, otherwise: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._otherwise = otherwise

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and hasattr(error, "_render_traceback_"):
            sys.stderr.write(f"{error}\n")
        else:
            self._otherwise(kind, error, trace)


async def _nothing() -> None:
    pass


class LoopRunner:
    """One event loop for the life of its owner, so that a trainer's actors outlive a call of ``fit``.

    Inside a running loop, as in a notebook, the work moves to a thread of its own; Ctrl-C asks it to stop there.

    Args:
        on_close: Awaited before the loop closes.
        standing: Says where things stand and how to go on, after work that Ctrl-C stopped.
    """

    def __init__(
        self,
        on_close: Callable[[], Coroutine[Any, Any, None]] = _nothing,
        status: Callable[[], str] = lambda: "stopped",
    ) -> None:
        self._on_close, self._status = on_close, status
        self._others: frozenset[int] = frozenset()
        self._runner: asyncio.Runner | None = None
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._working: asyncio.Task[Any] | None = None
        self._cancelled = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end. After Ctrl-C everything is closed; the next call starts anew.

        Raises:
            KeyboardInterrupt: Ctrl-C; it shows as one line.
        """
        if self._runner is None:
            self._runner, self._others, self._cancelled = asyncio.Runner(), mesh.spawned(), False
            atexit.register(self._close_at_exit)
        runner = self._runner
        self._make_way()
        try:
            with _told_at_once(self._cancel) if self._thread is None else contextlib.nullcontext():
                return self._in_place(lambda: runner.run(self._tracked(work)))
        except (KeyboardInterrupt, asyncio.CancelledError) as stopped:
            if isinstance(stopped, asyncio.CancelledError) and not self._cancelled:
                raise
            with contextlib.suppress(KeyboardInterrupt):
                self.close()
            mesh.kill_all(except_for=self._others)
            raise interrupted(str(stopped) or self._status()) from None

    def hand_over(self, on_close: Callable[[], Coroutine[Any, Any, None]], status: Callable[[], str]) -> None:
        """From now on somebody else owns what runs in it."""
        self._on_close, self._status = on_close, status

    def close(self) -> None:
        """Await `on_close` and end the loop. Safe to call twice. What Ctrl-C does not let end is killed."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        atexit.unregister(self._close_at_exit)
        self._make_way()

        def finish() -> None:
            with contextlib.closing(runner):
                runner.run(self._tracked(self._on_close()))

        try:
            self._in_place(finish)
        except KeyboardInterrupt:
            mesh.kill_all(except_for=self._others)
            raise interrupted("stopped; what did not end in time was killed") from None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _make_way(self) -> None:
        """Have a thread where a loop is running in this one."""
        if self._thread is None:
            with contextlib.suppress(RuntimeError):  # no loop is running here
                asyncio.get_running_loop()
                self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="forge-controller")

    def _close_at_exit(self) -> None:
        self._thread = None  # Python has ended it before it asks this, and no loop runs here any more
        with contextlib.suppress(KeyboardInterrupt):
            self.close()

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        self._working = asyncio.current_task()
        return await work

    def _cancel(self) -> None:
        if self._working is not None:
            self._cancelled = True
            with contextlib.suppress(RuntimeError):  # it is over
                self._working.get_loop().call_soon_threadsafe(self._working.cancel)

    def _in_place(self, call: Callable[[], T]) -> T:
        """Run `call` where the loop lives."""
        if self._thread is None:
            return call()
        future = self._thread.submit(call)
        # raised at once: the loop that runs in this thread has no turn in which it would hear of it
        with _on_sigint(signal.default_int_handler):
            return self._awaited(future)

    def _awaited(self, future: concurrent.futures.Future[T]) -> T:
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if future.done():  # the work's own
                    raise
                if not Interrupt.pass_on(signal.SIGINT):
                    print_stopping()
                    self._cancel()
                    concurrent.futures.wait([future], timeout=_CANCEL_S)  # the next call need not wait for it
                    raise


@contextlib.contextmanager
def _on_sigint(handler: Any) -> Iterator[None]:
    """Inside the block `handler` has the signal, in the main thread, which alone is told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _told_at_once(stop: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """The first Ctrl-C inside the block is acknowledged and calls `stop`; another one interrupts whatever is going on.

    Without it the first one would be silent for as long as something, such as an import, keeps the loop from its turn.
    Only the main thread, where nobody else listens, is told.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return contextlib.nullcontext()

    def on_signal(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print_stopping()
        stop()

    return _on_sigint(on_signal)


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a request to finish the step and save it; the second acts as ever.

    Args:
        say: Shows a line to the user.
    """

    _in_threads: ClassVar[list[Interrupt]] = []
    """Those that get no signal themselves."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._asked_by: signal.Signals | None = None
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        else:
            self._in_threads.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()
        if self in self._in_threads:
            self._in_threads.remove(self)

    @classmethod
    def pass_on(cls, number: signal.Signals) -> bool:
        """Tell those in other threads of a signal that came to the main one. Returns whether one heard its first."""
        fresh = [one for one in cls._in_threads if not one.requested]
        for one in fresh:
            one._on_signal(number, None)
        return bool(fresh)

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._asked_by is not None

    def stop_if_requested(self, steps: int, folder: Path) -> None:
        """End the program where a signal has come; `steps` are saved in `folder`.

        Raises:
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM, with the status 143 of a process that it ended.
        """
        if self._asked_by is None:
            return
        reason = f"stopped after step {steps}, saved in {folder}; run it again to continue"
        if self._asked_by is signal.SIGTERM:
            self._say(reason)
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt(reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked_by = signal.Signals(number)
        self._restore()
        self._say(f"{self._asked_by.name}: finishing this step and saving it; once more stops at once")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
