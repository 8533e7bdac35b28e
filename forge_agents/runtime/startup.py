"""Startup progress: which processes are starting, on what hardware, and how long that usually takes here."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from forge_agents.display import visible
from forge_agents.files import cache_folder, write_atomic
from forge_agents.runtime.machine import visible_gpus

_MAX_SAMPLES = 5
"""Number of latest durations kept for each kind of startup. Their median is the estimate."""
_MAX_KINDS = 1000
"""Number of latest kinds kept."""
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
    def show(self, name: str, what: str, estimate: str) -> Iterator[None]:
        """Show the startup that happens in the block."""
        began = time.monotonic()
        self.say(f"starting {name}: {what} ({estimate})")
        in_between = self._lines(name, estimate) if self._spinner is None else self._row(f"{name} ({estimate})")
        with in_between:
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
    def _lines(self, name: str, estimate: str) -> Iterator[None]:
        began, ended = time.monotonic(), threading.Event()

        def repeat() -> None:
            while not ended.wait(_LINE_S):
                self.say(f"still starting {name} after {_seconds(time.monotonic() - began)} ({estimate})")

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


@contextlib.contextmanager
def track(role: str, name: str, what: str, *, on: str = "") -> Iterator[None]:
    """Show the startup that happens in the block, and record its duration if it succeeds.

    Args:
        role: Such as "engine".
        what: Properties that the duration depends on, such as the model's name and whether it is compiled.
        on: Hardware, such as "2 CPU cores". Empty is this machine.
    """
    hardware = on or machine()
    kind = f"{role} {what} on {hardware}"
    usual = usual_s(kind)
    estimate = "first start on this machine" if usual is None else f"usually {_seconds(usual)}"
    shown = (
        _views[-1].show(visible(f"{role} {name}"), visible(f"{what}, on {hardware}"), estimate)
        if _views
        else contextlib.nullcontext()
    )
    began = time.monotonic()
    with shown:
        yield
    _record(kind, time.monotonic() - began)


@contextlib.contextmanager
def show(say: Callable[[str], None] | None = None) -> Iterator[Callable[[str], None]]:
    """Show startups during the block, on the error stream. A terminal gets a spinner.

    Args:
        say: Prints a line, for callers that control the terminal. None prints to the error stream.
    """
    console = Console(stderr=True)
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
    """Describe this process's hardware: ``1 GPU``, ``2 CPU cores``; with fewer `threads`, ``1 of 2 CPU cores``."""
    count, unit = (gpus, "GPU") if (gpus := len(visible_gpus())) else (len(os.sched_getaffinity(0)), "CPU core")
    part = f"{threads} of " if threads is not None and not gpus and threads < count else ""
    return f"{part}{count} {unit}{'s' * (count != 1)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


# ---- recorded durations


def usual_s(kind: str) -> float | None:
    """Return the median duration of the last few startups of a kind on this machine, in seconds. None if unknown."""
    seconds = _durations().get(_key(kind))
    return statistics.median(seconds) if seconds else None


def _key(kind: str) -> str:
    """Machines of several kinds may share the cache folder, so the key names the machine as well."""
    return f"{kind}; {_processor()}, {machine()}"


@functools.cache
def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _file() -> Path:
    return cache_folder() / "startup.json"


def _record(kind: str, seconds: float) -> None:
    durations = _durations()
    earlier = durations.pop(_key(kind), [])
    durations[_key(kind)] = [*earlier, round(seconds, 2)][-_MAX_SAMPLES:]
    with contextlib.suppress(OSError):  # a lost estimate must not fail a startup that succeeded
        write_atomic(_file(), json.dumps(dict(list(durations.items())[-_MAX_KINDS:])))


def _durations() -> dict[str, list[float]]:
    """Seconds by machine and kind. Empty if the file is missing or invalid."""
    try:
        content: Any = json.loads(_file().read_text())
        return {kind: [float(s) for s in seconds if math.isfinite(s)] for kind, seconds in content.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
