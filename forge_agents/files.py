"""Files of runs: folders that a stranger may have made hold plain files, texts are written whole, sums tell of damage.

In: a folder, a path and a text, bytes on their way to a file. Out: a file, sums that JSON holds, nothing, or an error.
Waits for the disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from forge_agents.errors import RunFolderError

_OURS = (".yaml", ".json", ".jsonl", ".npz", ".png", ".draft", ".lock", ".sha256", ".id")
"""Ends of the names that runs and benchmarks read and write."""
_OUR_FOLDERS = re.compile(
    r"checkpoints|export|failed-batches|league|learner|seed-\d+|tensorboard|wandb|warm-start", re.ASCII
)
"""Names of the folders that runs make in their own."""
CHUNK_BYTES = 1 << 26
"""Each chunk of a file has a sum of its own, so that several threads can read one large file."""
_MOST_THREADS = 8
_MOST_DEPTH = 100
CACHE_VARIABLE = "FORGE_AGENTS_CACHE"
"""Environment variable that says where `cache_folder` is."""


def cache_folder() -> Path:
    """What may be made again but took its time lies here: ``FORGE_AGENTS_CACHE``, or else the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("forge_agents", appauthor=False)


def user_path(path: str | os.PathLike[str]) -> Path:
    """A path as a user writes one: ``~``, ``~name``, ``$NAME`` and ``${NAME}`` stand for what a shell puts there.

    A path that exists as it is written is left so.

    Raises:
        ValueError: A variable is not set, or there is no such user.
    """
    written = Path(path)
    text = os.fspath(path)
    if not ({"~", "$"} & set(text)) or written.exists():
        return written
    filled = os.path.expandvars(text)
    if left := re.search(r"\$(\w+|\{\w+\})", filled):
        raise ValueError(f"{text}: the environment variable {left.group(1).strip('{}')} is not set")
    try:
        return Path(filled).expanduser()
    except RuntimeError as cause:
        raise ValueError(f"{text}: there is no home folder of {filled.partition(os.sep)[0]}") from cause


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


def check_contained(folder: str | os.PathLike[str]) -> None:
    """Refuse a run folder in which a name of ours leads out of it, at any depth, or is a pipe, a socket or a device.

    Training and exporting write, replace and delete files at many places of a run folder. If the folder came from
    somebody else, a link in it could lead all of that to other files of the user. The folder itself may be a link, and
    so may anything in it that no run opens. The folder may be missing.

    Raises:
        RunFolderError: Names the entry.
    """
    check_plain_files(folder)
    subfolders = (path for path in Path(folder).glob("*") if _OUR_FOLDERS.fullmatch(path.name))
    if (entry := foreign_entry(subfolders, Path(folder))) is not None:
        what = "a link" if entry.is_symlink() else "not a file"
        raise RunFolderError(
            f"{entry} is {what}. Training and exporting refuse such a run folder, because they would write or delete "
            f"files elsewhere. Remove {entry.name}, or put a copy of its target there. To use another disk, put the "
            "whole run folder on it"
        )


def foreign_entry(entries: Iterable[Path], root: Path) -> Path | None:
    """The first of `entries` that is a link out of `root`, a pipe, a socket or a device, or has such an entry in it.

    Args:
        entries: Files, links and folders. Folders are searched at any depth, without following links.
        root: The folder that links may not leave.
    """
    inside, waiting = Path(os.path.realpath(root)), sorted(entries, reverse=True)
    while waiting:
        entry = waiting.pop()
        if entry.is_symlink():
            if not Path(os.path.realpath(entry)).is_relative_to(inside):
                return entry
        elif entry.is_dir():
            with contextlib.suppress(OSError):  # a folder that cannot be read cannot be read or changed later either
                waiting += sorted(entry.iterdir(), reverse=True)
        elif not entry.is_file():
            return entry
    return None


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """A text file to write that takes its name when the block ends, so that no reader sees half of it.

    An error in the block leaves an existing file as it was. The file's permissions are what the umask allows.
    """
    target = user_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
    try:
        with draft.open("x", encoding="utf-8", errors="replace") as file:
            yield file
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_atomic(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text file with `atomic_writer`, and return its path."""
    with atomic_writer(path) as file:
        file.write(text)
    return user_path(path)


def is_shallow(value: Any) -> bool:
    """Whether at most 100 lists and objects lie within each other: what copies a value calls itself for each."""
    level = [value]
    for _ in range(_MOST_DEPTH + 1):
        inside = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        if not (level := [inner for parts in inside for inner in parts]):
            return True
    return False


class Checksums:
    """Size and CRC-32, chunk by chunk, of a file that is written from its beginning to its end.

    Taken on the way, so that what is written need not be read again for its sum.
    """

    def __init__(self) -> None:
        self.size = 0
        self._crcs: list[int] = []

    def add(self, data: Any) -> None:
        """The next bytes."""
        left = memoryview(data).cast("B")
        while left:
            if self.size % CHUNK_BYTES == 0:
                self._crcs.append(0)
            part = left[: CHUNK_BYTES - self.size % CHUNK_BYTES]
            self._crcs[-1] = zlib.crc32(part, self._crcs[-1])
            self.size += len(part)
            left = left[len(part) :]

    @property
    def all(self) -> list[int]:
        """The size in bytes, then the CRC-32 of each chunk."""
        return [self.size, *self._crcs]


def find_damage(folder: Path, files: Mapping[str, list[int]], *, chunk_bytes: int) -> str:
    """What is wrong with the first file that is not as it was written; empty where all are. Several threads read.

    Args:
        files: Size and sums by path in `folder`.
        chunk_bytes: What each sum is of; 0: of the whole file.
    """
    places: list[tuple[str, int, int, int]] = []
    for name, (size, *crcs) in files.items():
        check_plain_file(folder / name)
        if (found := (folder / name).stat().st_size) != size:
            return f"{name} has {found} bytes, {size} were written"
        step = chunk_bytes or max(size, 1)
        if len(crcs) < -(-size // step):
            return f"{name} has {len(crcs)} sums for {size} bytes"
        places += [(name, at * step, min(step, size - at * step), crc) for at, crc in enumerate(crcs) if size]

    def wrong(place: tuple[str, int, int, int]) -> str:
        name, start, length, written = place
        crc = 0
        with (folder / name).open("rb") as stream:
            stream.seek(start)
            while length and (data := stream.read(min(length, 1 << 22))):
                crc, length = zlib.crc32(data, crc), length - len(data)
        end = f"{name} has CRC-32 {crc} from byte {start} on, it was written with {written}"
        return "" if crc == written and not length else end

    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return next((found for found in threads.map(wrong, places) if found), "")
