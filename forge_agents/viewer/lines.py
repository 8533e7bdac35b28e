"""A JSON-lines file that another process appends to, or replaces.

In: a file. Out: its rows so far, and what is wrong with other lines. Waits for the disk; reads only what is new.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Lines:
    """The rows of one file.

    Args:
        file: It may be missing so far.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._start_anew(0)

    def read(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows, and why lines are left out. A last line without its end is left for later, unless it is whole."""
        try:
            with self._file.open("rb") as file:
                stat = self._file.stat()
                if stat.st_ino != self._inode or stat.st_size < self._at:
                    self._start_anew(stat.st_ino)
                file.seek(self._at)
                for raw in file:
                    if not self._take(raw):
                        break
        except FileNotFoundError:
            self._start_anew(0)
        return self._rows, self._wrong

    def _start_anew(self, inode: int) -> None:
        self._inode, self._at, self._number = inode, 0, 0
        self._rows: list[dict[str, Any]] = []
        self._wrong: list[str] = []

    def _take(self, raw: bytes) -> bool:
        """Take in one line; False where it is half-written."""
        ended = raw.endswith(b"\n")
        try:
            row = json.loads(raw) if raw.strip() else None
        except (ValueError, RecursionError):
            if not ended:
                return False
            row = None
            what = f"line {self._number + 1} of {self._file.name} is left out: it is not JSON; the file was damaged"
            self._wrong.append(what)
        if isinstance(row, dict):
            self._rows.append(row)
        self._at += len(raw)
        self._number += ended
        return True
