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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from forge_agents.display import visible
from forge_agents.files import cache_folder, write_atomic
from forge_agents.runtime.machine import visible_gpus

_MAX_SAMPLES = 5
"""Number of latest durations kept for each kind of startup. Their median is the estimate."""
_MAX_KINDS = 100
"""Number of latest kinds kept."""
_LINE_S = 30.0
"""Interval between repeated lines about a long startup, if there is no spinner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """A startup in progress."""

    name: str
    """Role and name: ``engine team``, ``learner team-learner``."""
    what: str
    """Model, settings and hardware: ``tiny_model, not compiled, on 2 CPU cores``."""
    usual_s: float | None
    """Estimated seconds. None if nothing similar was started on this machine before."""
    began: float
    """Start time by the monotonic clock."""

    @property
    def estimate(self) -> str:
        """The estimate in words."""
        return "first start on this machine" if self.usual_s is None else f"usually {_seconds(self.usual_s)}"


class View(Protocol):
    """Shows startups. Called from any thread."""

    def begin(self, startup: Startup) -> None:
        """Show that a startup began."""

    def end(self, startup: Startup, *, succeeded: bool) -> None:
        """Show that it ended."""

    def say(self, text: str) -> None:
        """Print a line."""


_views: list[View] = []
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
    startup = Startup(
        name=visible(f"{role} {name}"),
        what=visible(f"{what}, on {hardware}"),
        usual_s=usual_s(kind),
        began=time.monotonic(),
    )
    view = _views[-1] if _views else None
    if view is not None:
        view.begin(startup)
    succeeded = False
    try:
        yield
        succeeded = True
        _record(kind, time.monotonic() - startup.began)
    finally:
        if view is not None:
            view.end(startup, succeeded=succeeded)


@contextlib.contextmanager
def show(say: Callable[[str], None] | None = None) -> Iterator[Callable[[str], None]]:
    """Show startups during the block, on the error stream. A terminal gets a spinner.

    Args:
        say: Prints a line, for callers that control the terminal. None prints to the error stream.
    """
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        view: View
        if say is None and console.is_interactive:  # a terminal that supports cursor movements, not a notebook
            view = stack.enter_context(_Spinner(console))
        else:
            view = stack.enter_context(_Lines(say or functools.partial(_print, console)))
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


def usual_s(kind: str) -> float | None:
    """Return the median duration of the last few startups of a kind on this machine, in seconds. None if unknown."""
    seconds = _durations().get(_hardware(), {}).get(kind)
    return statistics.median(seconds) if seconds else None


# ---- views


class _Spinner(Progress):
    """Prints the same lines as `_Lines`, with a spinner and a clock for each running startup below them."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _Clock(),
            console=console,
            transient=True,
            refresh_per_second=8,
            redirect_stdout=sys.stdout.isatty(),  # output that goes to a file stays there
        )
        self._rows: dict[int, TaskID] = {}

    def begin(self, startup: Startup) -> None:
        self.say(_begin_line(startup))
        self._rows[id(startup)] = self.add_task(startup.name, total=None, startup=startup)

    def end(self, startup: Startup, *, succeeded: bool) -> None:
        self.remove_task(self._rows.pop(id(startup)))
        if succeeded:
            self.say(_end_line(startup))

    def say(self, text: str) -> None:
        _print(self.console, text)


class _Clock(ProgressColumn):
    """Elapsed seconds and the estimate."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        startup: Startup = task.fields["startup"]
        return Text(f"{time.monotonic() - startup.began:.0f} s, {startup.estimate}", style="dim")


class _Lines:
    """Prints a line at the beginning and the end of a startup, and every half minute in between."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._running: dict[int, Startup] = {}
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()

    def begin(self, startup: Startup) -> None:
        self._running[id(startup)] = startup
        self.say(_begin_line(startup))
        if self._watcher is None:
            watcher = threading.Thread(target=self._watch, name="forge-startup", daemon=True)
            watcher.start()
            self._watcher = watcher  # Ctrl-C may come before the thread runs, and then it cannot be joined

    def end(self, startup: Startup, *, succeeded: bool) -> None:
        del self._running[id(startup)]
        if succeeded:
            self.say(_end_line(startup))

    def _watch(self) -> None:
        while not self._closed.wait(_LINE_S):
            for startup in tuple(self._running.values()):
                if (elapsed_s := time.monotonic() - startup.began) >= _LINE_S:
                    self.say(f"still starting {startup.name} after {_seconds(elapsed_s)} ({startup.estimate})")


def _begin_line(startup: Startup) -> str:
    return f"starting {startup.name}: {startup.what} ({startup.estimate})"


def _end_line(startup: Startup) -> str:
    return f"started {startup.name} ({_seconds(time.monotonic() - startup.began)})"


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


# ---- recorded durations


def _file() -> Path:
    return cache_folder() / "startup.json"


@functools.cache
def _hardware() -> str:
    """Key of this kind of machine. Machines of several kinds may share the cache folder."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {machine()}"
    return f"{platform.machine()}, {machine()}"


def _record(kind: str, seconds: float) -> None:
    durations = _durations()
    kinds = durations.pop(_hardware(), {})
    earlier = kinds.pop(kind, [])
    kinds[kind] = [*earlier, round(seconds, 2)][-_MAX_SAMPLES:]
    durations[_hardware()] = dict(list(kinds.items())[-_MAX_KINDS:])
    with contextlib.suppress(OSError):  # a lost estimate must not fail a startup that succeeded
        write_atomic(_file(), json.dumps(dict(list(durations.items())[-_MAX_KINDS:])))


def _durations() -> dict[str, dict[str, list[float]]]:
    """Seconds by hardware and kind. Empty if the file is missing or invalid."""
    try:
        content: Any = json.loads(_file().read_text())
        return {
            hardware: {kind: [float(s) for s in seconds if math.isfinite(s)] for kind, seconds in kinds.items()}
            for hardware, kinds in content.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
