"""What is starting, on what, and how long that usually takes on this machine: shown from the first second.

In: starts as they begin and end. Out: a spinner in a terminal, plain lines elsewhere; the seconds of the last few
starts, kept in the cache folder. Waits for nothing.
"""

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

_KEPT = 5
"""Starts of one kind that are remembered, and the median of which is told."""
_KINDS = 100
"""Kinds that are remembered, the latest."""
_LINE_S = 30.0
"""Where there is no spinner, a start that takes long is told again after so many seconds each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Something that is starting."""

    name: str
    """``engine team``, ``learner team-learner``."""
    what: str
    """On what and how: ``tiny_model, not compiled, on 2 CPU cores``."""
    usual_s: float | None
    """Seconds that it took the last few times, the median; None where nothing like it was started here."""
    began: float
    """By the monotonic clock."""

    @property
    def usually(self) -> str:
        """In words."""
        return "first time here" if self.usual_s is None else f"usually {_seconds(self.usual_s)} here"


class View(Protocol):
    """Where starts are shown. Any thread may call."""

    def begin(self, start: Start) -> None:
        """It has begun."""

    def end(self, start: Start, *, well: bool) -> None:
        """It is over."""

    def say(self, text: str) -> None:
        """A line beside them."""


_views: list[View] = []
"""The last one shows what starts: a judge, say, that a reward starts in its own thread."""


@contextlib.contextmanager
def track(role: str, name: str, what: str, *, on: str = "") -> Iterator[None]:
    """Inside the block something starts. How long it took is remembered where it ended well.

    Args:
        role: Such as "engine".
        what: What the time depends on, beside the machine: a model's name, whether it is compiled.
        on: Where: "2 CPU cores"; empty is this machine.
    """
    where = on or machine()
    kind = f"{role} {what} on {where}"
    told, now = visible(f"{what}, on {where}"), time.monotonic()
    start = Start(name=visible(f"{role} {name}"), what=told, usual_s=usual_s(kind), began=now)
    view = _views[-1] if _views else None
    if view is not None:
        view.begin(start)
    well = False
    try:
        yield
        well = True
        _remember(kind, time.monotonic() - start.began)
    finally:
        if view is not None:
            view.end(start, well=well)


@contextlib.contextmanager
def show(say: Callable[[str], None] | None = None) -> Iterator[Callable[[str], None]]:
    """Show what starts inside the block: on the error stream, by a spinner where that is a terminal.

    Args:
        say: Shows a line; for whoever has the terminal already. None: this has it.
    """
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        view: View
        if say is None and console.is_interactive:  # a terminal that is not dumb, and no notebook
            view = stack.enter_context(_Spinner(console))
        else:
            view = stack.enter_context(_Lines(say or functools.partial(_print, console)))
        _views.append(view)
        try:
            yield view.say
        finally:
            _views.remove(view)


def say(text: str) -> None:
    """Show a line beside what starts; nothing where that is not shown."""
    if _views:
        _views[-1].say(visible(text))


def machine(threads: int | None = None) -> str:
    """What this process may compute on: ``1 GPU``, ``2 CPU cores``; with fewer `threads`, ``1 of 2 CPU cores``."""
    count, unit = (gpus, "GPU") if (gpus := len(visible_gpus())) else (len(os.sched_getaffinity(0)), "CPU core")
    some = f"{threads} of " if threads is not None and not gpus and threads < count else ""
    return f"{some}{count} {unit}{'s' * (count != 1)}"


def usual_s(kind: str) -> float | None:
    """The median of the last few starts of a kind on this machine, in seconds; None where there was none."""
    seconds = _remembered().get(_hardware(), {}).get(kind)
    return statistics.median(seconds) if seconds else None


# ---- views


class _Spinner(Progress):
    """The same lines as elsewhere, and below them a spinner and a clock of each start under way."""

    def __init__(self, console: Console) -> None:
        clock = _Clock()
        text = TextColumn("{task.description}", markup=False)
        super().__init__(
            SpinnerColumn(),
            text,
            clock,
            console=console,
            transient=True,
            refresh_per_second=8,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file stays there
        )
        self._rows: dict[int, TaskID] = {}

    def begin(self, start: Start) -> None:
        self.say(_begun(start))
        self._rows[id(start)] = self.add_task(start.name, total=None, of=start)

    def end(self, start: Start, *, well: bool) -> None:
        self.remove_task(self._rows.pop(id(start)))
        if well:
            self.say(_over(start))

    def say(self, text: str) -> None:
        _print(self.console, text)


class _Clock(ProgressColumn):
    """Seconds so far, and how many it usually takes."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        start: Start = task.fields["of"]
        return Text(f"{time.monotonic() - start.began:.0f} s, {start.usually}", style="dim")


class _Lines:
    """A line when a start begins, one when it has ended, and one every half minute between."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._under_way: dict[int, Start] = {}
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()

    def begin(self, start: Start) -> None:
        self._under_way[id(start)] = start
        self.say(_begun(start))
        if self._watcher is None:
            watcher = threading.Thread(target=self._watch, name="forge-starts", daemon=True)
            watcher.start()
            self._watcher = watcher  # Ctrl-C may come before it runs, and then it cannot be joined

    def end(self, start: Start, *, well: bool) -> None:
        del self._under_way[id(start)]
        if well:
            self.say(_over(start))

    def _watch(self) -> None:
        while not self._over.wait(_LINE_S):
            for start in tuple(self._under_way.values()):
                if (so_far := time.monotonic() - start.began) >= _LINE_S:
                    self.say(f"{start.name} is starting for {_seconds(so_far)} ({start.usually})")


def _begun(start: Start) -> str:
    return f"starting {start.name}: {start.what} ({start.usually})"


def _over(start: Start) -> str:
    return f"{start.name} is ready after {_seconds(time.monotonic() - start.began)}"


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


# ---- what is remembered


def _file() -> Path:
    return cache_folder() / "starts.json"


@functools.cache
def _hardware() -> str:
    """What two machines have in common on which the same takes the same time; a shared folder may serve many."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {machine()}"
    return f"{platform.machine()}, {machine()}"


def _remember(kind: str, seconds: float) -> None:
    all_of_them = _remembered()
    own = all_of_them.pop(_hardware(), {})
    before = own.pop(kind, [])
    own[kind] = [*before, round(seconds, 2)][-_KEPT:]
    all_of_them[_hardware()] = dict(list(own.items())[-_KINDS:])
    with contextlib.suppress(OSError):  # it is an estimate, and not worth a start that went well
        write_atomic(_file(), json.dumps(dict(list(all_of_them.items())[-_KINDS:])))


def _remembered() -> dict[str, dict[str, list[float]]]:
    """Seconds by hardware and kind; nothing where the file is not there or holds something else."""
    try:
        found: Any = json.loads(_file().read_text())
        return {
            hardware: {kind: [float(s) for s in seconds if math.isfinite(s)] for kind, seconds in kinds.items()}
            for hardware, kinds in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
