"""Handles Ctrl-C: everything that a call started ends, and one line instead of a stack trace reports the state."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar, TypeVar

from forge_agents.output import write_error
from forge_agents.runtime import mesh

T = TypeVar("T")

_CANCEL_S = 30.0
"""Maximum seconds until canceled work has ended."""


def interrupted(reason: str) -> KeyboardInterrupt:
    """Return an exception that is shown only as `reason` if it is not caught, in scripts and notebooks."""
    error = KeyboardInterrupt(reason)
    error._render_traceback_ = lambda: [reason]  # type: ignore[attr-defined]  # read by IPython
    if getattr(sys.excepthook, "func", None) is not _show:
        sys.excepthook = functools.partial(_show, sys.excepthook)
    return error


def _show(
    otherwise: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """`sys.excepthook` that prints an `interrupted` exception as one line, and passes others on."""
    if isinstance(error, KeyboardInterrupt) and hasattr(error, "_render_traceback_"):
        write_error(str(error))
    else:
        otherwise(kind, error, trace)


def print_stopping() -> None:
    """Acknowledge Ctrl-C at once."""
    start = "\n" * sys.stderr.isatty()  # after the ^C that a terminal shows
    write_error(f"{start}SIGINT: stopping all processes of this call. Press Ctrl-C again to stop at once")


async def _nothing() -> None:
    pass


class LoopRunner:
    """An event loop for the life of its owner, so that a trainer's actors outlive a call of ``fit``.

    If a loop already runs in this thread, as in a notebook, the work moves to its own thread, which Ctrl-C stops.

    Args:
        on_close: Awaited before the loop closes.
        status: Returns the line that is shown after Ctrl-C: the state and how to continue.
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
        self._canceled = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end. After Ctrl-C everything is closed, and the next call starts a new loop.

        Raises:
            KeyboardInterrupt: Ctrl-C, shown as one line.
        """
        if self._runner is None:
            self._runner, self._others, self._canceled = asyncio.Runner(), mesh.spawned(), False
        runner = self._runner
        self._ensure_thread()
        try:
            with self._acknowledge_sigint():
                return self._run_in_place(lambda: runner.run(self._track(work)))
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._canceled:
                raise
            with contextlib.suppress(KeyboardInterrupt):
                self.close()
            mesh.kill_all(except_for=self._others)
            raise interrupted(str(error) or self._status()) from None
        finally:
            # the last function that is registered is called first, and `work` may have started Monarch
            atexit.unregister(self._close_at_exit)
            if self._runner is not None:
                atexit.register(self._close_at_exit)

    def hand_over(self, on_close: Callable[[], Coroutine[Any, Any, None]], status: Callable[[], str]) -> None:
        """Transfer the loop to a new owner."""
        self._on_close, self._status = on_close, status

    def close(self) -> None:
        """Await `on_close` and end the loop. May be called twice. After Ctrl-C, remaining processes are killed."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        atexit.unregister(self._close_at_exit)
        self._ensure_thread()

        def finish() -> None:
            try:
                with contextlib.closing(runner):
                    runner.run(self._track(self._on_close()))
            except RuntimeError as error:
                # If KeyboardInterrupt leaves the loop when its work has just ended, the stop that was due for that work
                # stops the loop while it cancels the other tasks.
                if isinstance(error.__context__, KeyboardInterrupt):
                    raise KeyboardInterrupt from error
                raise

        try:
            self._run_in_place(finish)
        except KeyboardInterrupt:
            mesh.kill_all(except_for=self._others)
            raise interrupted("stopped. Processes that did not end in time were killed") from None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _ensure_thread(self) -> None:
        """Make a thread for the loop if another loop runs in this thread."""
        if self._thread is None:
            with contextlib.suppress(RuntimeError):  # no loop runs here
                asyncio.get_running_loop()
                self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="forge-controller")

    def _close_at_exit(self) -> None:
        self._thread = None  # Python has ended the thread by now, and no loop runs here any more
        with contextlib.suppress(KeyboardInterrupt):
            self.close()

    async def _track(self, work: Coroutine[Any, Any, T]) -> T:
        self._working = asyncio.current_task()
        return await work

    def _cancel(self) -> None:
        if self._working is not None:
            self._canceled = True
            with contextlib.suppress(RuntimeError):  # the work is over
                self._working.get_loop().call_soon_threadsafe(self._working.cancel)

    def _acknowledge_sigint(self) -> contextlib.AbstractContextManager[None]:
        """Acknowledge the first Ctrl-C inside the block and cancel the work. The second one interrupts at once.

        Without this, the first Ctrl-C would show no reaction while an import or other code blocks the loop.
        """
        if self._thread is not None or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return contextlib.nullcontext()  # the program may have its own handler

        def on_signal(*_: object) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            print_stopping()
            self._cancel()

        return _on_sigint(on_signal)

    def _run_in_place(self, call: Callable[[], T]) -> T:
        """Run `call` in the loop's thread."""
        if self._thread is None:
            return call()
        future = self._thread.submit(call)
        # The signal must raise at once: the loop of this thread is blocked and would never handle it.
        with _on_sigint(signal.default_int_handler):
            while True:
                try:
                    return future.result()
                except KeyboardInterrupt:
                    if future.done():  # raised by the work itself
                        raise
                    if not Interrupt.pass_on(signal.SIGINT):
                        print_stopping()
                        self._cancel()
                        concurrent.futures.wait([future], timeout=_CANCEL_S)  # so that the next call need not wait
                        raise


@contextlib.contextmanager
def _on_sigint(handler: Any) -> Iterator[None]:
    """Use `handler` for SIGINT inside the block, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _handle(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _handle(number: int, handler: Any) -> Any:
    """Set the handler of a signal in this process, and return the previous one, which its forked children keep.

    Otherwise SIGTERM would not end a child of an environment, such as a process of `multiprocessing`.
    """
    if handler is signal.default_int_handler:
        return signal.signal(number, handler)
    owner, before = os.getpid(), signal.getsignal(number)

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            handler(number, frame)
        else:
            signal.signal(number, before)
            signal.raise_signal(number)

    signal.signal(number, handle)
    return before


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a request to finish the step and save it. The second acts as usual.

    Args:
        say: Prints a line for the user.
    """

    _in_threads: ClassVar[list[Interrupt]] = []
    """Instances outside the main thread, where no signals arrive."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._signal: signal.Signals | None = None
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = _handle(number, self._on_signal)
        else:
            self._in_threads.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()
        if self in self._in_threads:
            self._in_threads.remove(self)

    @classmethod
    def pass_on(cls, number: signal.Signals) -> bool:
        """Pass a signal of the main thread to instances in other threads. Returns whether it was the first for any."""
        waiting = [instance for instance in cls._in_threads if not instance.requested]
        for instance in waiting:
            instance._on_signal(number, None)
        return bool(waiting)

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._signal is not None

    def stop_if_requested(self, steps: int, folder: Path) -> None:
        """End the program if a signal has arrived. The first `steps` steps are saved in `folder`.

        Raises:
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM, with the exit status 143 of a process that was ended by it.
        """
        if self._signal is None:
            return
        reason = f"stopped after step {steps}, saved in {folder}. Run it again to continue"
        if self._signal is signal.SIGTERM:
            self._say(reason)
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt(reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        self._restore()
        self._say(f"{self._signal.name}: finishing this step and saving it. Send it again to stop at once")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
