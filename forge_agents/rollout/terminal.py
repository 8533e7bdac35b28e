"""A person at the terminal: what a seat sees is shown, what the person types is the action.

In: what a seat sees. Out: lines of text. Waits for the person, as long as it takes.
"""

from __future__ import annotations

import asyncio
import functools
import os
import select
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_agents.display import visible
from forge_agents.errors import PlayerLeftError

if TYPE_CHECKING:
    from rich.console import Console

_LOOK_S = 0.1
"""Seconds between looks whether the answer is still wanted."""
_STDIN = 0


class Terminal:
    """A console to show on and a file descriptor to read from; one question at a time, whichever loop or thread asks.

    Lines are read below Python's own buffers, so that a question can be given up: a blocked ``input()`` would take the
    next line with it, or hold up the end of the program.

    Args:
        fd: Where to read: a terminal, a pipe or a file.
    """

    def __init__(self, console: Console, fd: int = _STDIN) -> None:
        self.console, self._fd = console, fd
        self._turn = threading.Lock()
        self._waiting = b""
        self._ended = False

    async def ask(
        self, agent: str, observation: str, *, instructions: str = "", legal_actions: Sequence[str] = ()
    ) -> str:
        """What the person answers in seat `agent`, without the line's end.

        Raises:
            PlayerLeftError: The input ended, now or before (Ctrl-D, or the end of a pipe).
        """
        given_up = threading.Event()
        try:
            line = await asyncio.to_thread(self._ask, given_up, agent, observation, instructions, legal_actions)
        finally:
            given_up.set()
        if line is None:
            raise PlayerLeftError(f"the person in seat {agent!r} left: the input has ended")
        return line

    def show(self, text: str, style: str = "") -> None:
        """Show `text`, which anyone may have written, as it is: no markup, no control characters."""
        from rich.text import Text

        self.console.print(Text(visible(text), style=style))

    def _ask(
        self, given_up: threading.Event, agent: str, observation: str, instructions: str, legal: Sequence[str]
    ) -> str | None:
        """The next line; None at the end of the input."""
        while not self._turn.acquire(timeout=_LOOK_S):
            if given_up.is_set():
                return None
        try:
            if self._ended or given_up.is_set():
                return None
            if instructions:
                self.show(instructions, "dim")
            self.show(f"\n{agent} sees", "bold")
            self.show(observation)
            if legal:
                self.show(f"legal: {' | '.join(legal)}", "cyan")
            self.console.print(f"{visible(agent)}> ", end="", markup=False, highlight=False)
            self.console.file.flush()
            return self._line(given_up)
        finally:
            self._turn.release()

    def _line(self, given_up: threading.Event) -> str | None:
        while b"\n" not in self._waiting and not self._ended:
            if given_up.is_set():
                return None
            ready, _, _ = select.select([self._fd], [], [], _LOOK_S)
            if ready:
                more = os.read(self._fd, 65536)
                self._waiting += more
                self._ended = not more
        if not self._waiting:
            self.console.print()
            return None
        line, _, self._waiting = self._waiting.partition(b"\n")
        return line.decode(errors="replace").removesuffix("\r")


@functools.cache
def terminal() -> Terminal:
    """The terminal that this process was started in."""
    from rich.console import Console

    return Terminal(Console())
