"""Files of runs: folders that a stranger may have made hold plain files, and texts are written whole.

In: a folder, or a path and a text. Out: a file, nothing, or an error. Waits for the disk.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from forge_agents.errors import RunFolderError

_OURS = (".yaml", ".json", ".jsonl", ".npz", ".png", ".draft", ".lock")
"""Ends of the names that runs and benchmarks read and write."""


def check_plain_files(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder in which a name of ours is a link to a file, or a pipe, a socket or a device.

    Whoever reads or writes through such an entry reads, shows or overwrites what lies elsewhere, or waits for ever.
    Links to folders, as people make them to larger disks, may stay, and so may what we never open. The folder may be
    missing.

    Raises:
        RunFolderError: Names the entry.
    """
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return  # whoever opens it says why it cannot be
    for entry in entries:
        if entry.name.endswith(_OURS) and not (entry.is_dir() or entry.is_file(follow_symlinks=False)):
            what = "a link" if entry.is_symlink() else "no file"
            raise RunFolderError(
                f"{entry.path} is {what}; a run's folder holds plain files: remove it, or put a copy there"
            )


def check_plain_file(path: Path) -> None:
    """The same of one file.

    Raises:
        RunFolderError: Names it.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise RunFolderError(f"{path} is a link, or no file; a run's folder holds plain files")


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text file by rename, so that nobody ever reads half of it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def is_small(value: Any, most: int = 100_000) -> bool:
    """Whether a value read from YAML has at most `most` parts, each counted as often as it is referred to."""
    waiting, seen = [value], 0
    while waiting and seen <= most:
        part = waiting.pop()
        seen += 1
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple | set) else ()
    return seen <= most
