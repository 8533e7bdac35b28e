"""Startup progress: which processes are starting, on what hardware, and how long they took."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from forge_agents import output
from forge_agents.display import visible
from forge_agents.runtime.machine import has_fast_bfloat16, visible_gpus

_LINE_S = 30.0
"""Interval between repeated lines about a long startup, if there is no spinner."""


class _View:
    """Prints a line when a startup begins, and when it succeeds. May be used from any thread.

    In between, a terminal shows a spinner with a clock. Other outputs get a line every half minute.
    """

    def __init__(self, say: Callable[[str], None], spinner: Progress | None) -> None:
        self.say = say
        self._spinner = spinner

    @contextlib.contextmanager
    def show(self, name: str, what: str) -> Iterator[None]:
        """Show the startup that happens in the block."""
        began = time.monotonic()
        self.say(f"starting {name}: {what}")
        with self._lines(name) if self._spinner is None else self._row(name):
            yield
        self.say(f"started {name} ({_seconds(time.monotonic() - began)})")

    @contextlib.contextmanager
    def _row(self, text: str) -> Iterator[None]:
        assert self._spinner is not None
        row = self._spinner.add_task(text, total=None)
        try:
            yield
        finally:
            self._spinner.remove_task(row)

    @contextlib.contextmanager
    def _lines(self, name: str) -> Iterator[None]:
        began, ended = time.monotonic(), threading.Event()

        def repeat() -> None:
            while not ended.wait(_LINE_S):
                self.say(f"still starting {name} after {_seconds(time.monotonic() - began)}")

        thread = threading.Thread(target=repeat, name="forge-startup", daemon=True)
        try:
            thread.start()
            yield
        finally:
            ended.set()
            if thread.is_alive():  # not if Ctrl-C came before it began
                thread.join()


_views: list[_View] = []
"""Only the last view shows startups. A reward, for example, starts its judge in another thread."""


def track(role: str, name: str, what: str, *, on: str = "") -> contextlib.AbstractContextManager[object]:
    """Show the startup that happens in the block.

    Args:
        role: Such as "engine".
        what: The model's name, whether it is compiled, and the like.
        on: Hardware, such as "2 CPU cores". Empty is this machine.
    """
    if not _views:
        return contextlib.nullcontext()
    return _views[-1].show(visible(f"{role} {name}"), visible(f"{what}, on {on or machine()}"))


@contextlib.contextmanager
def show(say: Callable[[str], None] | None = None) -> Iterator[Callable[[str], None]]:
    """Show startups during the block, on the error stream. A terminal gets a spinner.

    Args:
        say: Prints a line, for callers that control the terminal. None prints to the error stream.
    """
    console = output.console(stderr=True)
    with contextlib.ExitStack() as stack:
        spinner = None
        if say is None and console.is_interactive:  # a terminal that supports cursor movements, not a notebook
            text = TextColumn("{task.description}", markup=False)
            spinner = stack.enter_context(
                Progress(
                    SpinnerColumn(),
                    text,
                    TimeElapsedColumn(),
                    console=console,
                    transient=True,
                    redirect_stdout=sys.stdout.isatty(),  # output that goes to a file stays there
                )
            )
        view = _View(say or functools.partial(console.print, markup=False, highlight=False, soft_wrap=True), spinner)
        _views.append(view)
        try:
            yield view.say
        finally:
            _views.remove(view)


def say(text: str) -> None:
    """Print a line in the current view, if there is one."""
    if _views:
        _views[-1].say(visible(text))


def machine(threads: int | None = None) -> str:
    """Describe this process's hardware: ``1 GPU``, ``2 CPU cores``; with fewer `threads`, ``1 of 2 CPU cores``.

    "without bfloat16" says that engines and learners compute in float32 by default.
    """
    count, unit = (gpus, "GPU") if (gpus := len(visible_gpus())) else (len(os.sched_getaffinity(0)), "CPU core")
    part = f"{threads} of " if threads is not None and not gpus and threads < count else ""
    lacks = "" if gpus or has_fast_bfloat16() else " without bfloat16"
    return f"{part}{count} {unit}{'s' * (count != 1)}{lacks}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
