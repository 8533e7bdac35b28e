"""The live view of a benchmark.

In: episodes as they end. Out: a progress bar in a terminal, nothing elsewhere. Waits for nothing.
"""

from __future__ import annotations

from types import TracebackType

from rich import progress
from rich.console import Console


class Progress:
    """Shows episodes done, tokens, failures and the time left.

    Args:
        total: Episodes of the whole benchmark.
        shown: Whether to show anything.
    """

    def __init__(self, total: int, *, shown: bool) -> None:
        console = Console(stderr=True)
        self._shown, self._failed = shown, 0
        self._first = 0
        self._bar = progress.Progress(
            progress.TextColumn("[bold]bench"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[facts]}"),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task("bench", total=total, facts="")

    def start_at(self, done: int, *, unreadable: int) -> None:
        """`done` episodes are known already; `unreadable` lines of the log were dropped."""
        self._first = done
        self._bar.update(self._task, completed=done)
        if done and self._shown:
            self._bar.print(f"{done} episodes were played before and are not repeated")
        if unreadable and self._shown:
            self._bar.print(f"{unreadable} lines of the log could not be read; their episodes are played again")

    def step(self, played: int, tokens: int, *, failed: bool) -> None:
        """One more episode has ended."""
        self._failed += failed
        facts = f"{tokens:,} tokens" + (f", {self._failed} failed" if self._failed else "")
        self._bar.update(self._task, completed=self._first + played, facts=facts)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
