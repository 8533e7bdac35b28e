"""Writes messages of a run to standard streams whose reader may have ended, and which may lack characters."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_GONE = frozenset((errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET))
"""Errors of streams that no later write can reach: the reader of a pipe has ended, or a terminal was closed."""


class Stream:
    """`sys.stdout` or `sys.stderr` as a file that drops text which cannot be written.

    A run outlives the reader of its output. If the reader has ended or the terminal was closed, all later output of
    this process goes to the null device. A full disk or a reader that is too slow costs only the text.

    Args:
        name: "stdout" or "stderr".
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, text: str) -> int:
        """Write a text. Characters that the stream's encoding lacks become escapes."""

        def write(stream: Any) -> None:
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

        self._attempt(write)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._attempt(lambda stream: stream.flush())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def _stream(self) -> Any:
        stream = getattr(sys, self._name)
        return getattr(stream, "rich_proxied_file", stream)  # Rich replaces the stream during a live view

    def _attempt(self, call: Callable[[Any], object]) -> None:
        stream = self._stream
        try:
            call(stream)
        except OSError as error:
            if error.errno in _GONE:
                discard(stream)
        except ValueError:  # the stream was closed in this process
            pass


def has_no_reader(stream: Any) -> bool:
    """Return whether a stream is a pipe whose reader has ended."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def discard(stream: Any) -> None:
    """Send all later output of a stream to the null device."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console for messages of a run, which never fail."""
    from rich.console import Console

    return Console(file=Stream("stderr" if stderr else "stdout"), quiet=quiet)  # type: ignore[arg-type]


def write_error(text: str) -> None:
    """Write a line to the error stream. Never fails."""
    stream = Stream("stderr")
    stream.write(f"{text}\n")
    stream.flush()
