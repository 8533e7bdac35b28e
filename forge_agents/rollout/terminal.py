"""A person at the terminal: shows observations and reads actions."""

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

_POLL_S = 0.1
"""Seconds between checks whether the question was canceled."""
_STDIN = 0


class Terminal:
    """A console for output and a file descriptor for input, one question at a time, from any loop or thread.

    Lines are read below Python's own buffers, so that a question can be canceled: a blocked ``input()`` would consume
    the next line or delay the end of the program.
    """

    def __init__(self, console: Console, fd: int = _STDIN) -> None:
        self.console, self._fd = console, fd
        self._lock = threading.Lock()
        self._buffer = b""
        self._ended = False

    async def ask(
        self, agent: str, observation: str, *, instructions: str = "", legal_actions: Sequence[str] = ()
    ) -> str:
        """Ask the person for the action of `agent`. Returns a line without its end.

        Raises:
            PlayerLeftError: The input has ended (Ctrl-D, or the end of a pipe).
        """
        canceled = threading.Event()
        try:
            line = await asyncio.to_thread(self._ask, canceled, agent, observation, instructions, legal_actions)
        finally:
            canceled.set()
        if line is None:
            raise PlayerLeftError(f"the person who plays {agent!r} left: the input has ended")
        return line

    def show(self, text: str, style: str = "") -> None:
        """Show untrusted `text` literally, without markup or control characters."""
        from rich.text import Text

        self.console.print(Text(visible(text), style=style))

    def _ask(
        self, canceled: threading.Event, agent: str, observation: str, instructions: str, legal: Sequence[str]
    ) -> str | None:
        while not self._lock.acquire(timeout=_POLL_S):
            if canceled.is_set():
                return None
        try:
            if self._ended or canceled.is_set():
                return None
            if instructions:
                self.show(instructions, "dim")
            self.show(f"\n{agent} sees", "bold")
            self.show(observation)
            if legal:
                self.show(f"legal: {' | '.join(legal)}", "cyan")
            self.console.print(f"{visible(agent)}> ", end="", markup=False, highlight=False)
            self.console.file.flush()
            line = self._read_line(canceled)
            if line is not None and not os.isatty(self._fd):  # a terminal shows what is typed, a pipe does not
                self.show(line)
            return line
        finally:
            self._lock.release()

    def _read_line(self, canceled: threading.Event) -> str | None:
        while b"\n" not in self._buffer and not self._ended:
            if canceled.is_set():
                return None
            ready, _, _ = select.select([self._fd], [], [], _POLL_S)
            if ready:
                chunk = os.read(self._fd, 65536)
                self._buffer += chunk
                self._ended = not chunk
        if not self._buffer:
            self.console.print()
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace").removesuffix("\r")


@functools.cache
def terminal() -> Terminal:
    """The terminal of this process."""
    from rich.console import Console

    return Terminal(Console())
