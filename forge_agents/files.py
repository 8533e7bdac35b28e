"""Files of runs: checks of folders that a stranger may have made, atomic writes, and checksums."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import re
import secrets
import shlex
import stat
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TextIO

from forge_agents.credentials import is_secret_variable
from forge_agents.errors import RunFolderError

_OURS = (".yaml", ".json", ".jsonl", ".npz", ".png", ".draft", ".lock", ".sha256", ".id")
"""Suffixes of the files that runs and benchmarks read and write."""
_READ_WHOLE = (".yaml", ".json", ".draft", ".lock", ".sha256", ".id")
MAX_BYTES = 1 << 28
"""Maximum size of a file or a log's line that is read as a whole. A sparse file may have any size."""
_MAX_SPARSE = 1000
"""Maximum ratio of a large file's size to its space on the disk. Some file systems compress texts."""
_OUR_FOLDERS = re.compile(
    r"checkpoints|export|failed-batches|league|learner|seed-\d+|tensorboard|\.?wandb|warm-start", re.ASCII
)
"""Names of the subfolders that runs make."""
CHECKPOINT_MARK = "experiment.json"
"""File that marks a checkpoint as complete."""
_CHECKPOINT = re.compile(r"step-(?:\d{6}|[1-9]\d{6,15})", re.ASCII)
CHUNK_BYTES = 1 << 26
"""Size of the chunks with a checksum each, so that several threads can check one large file."""
_MAX_THREADS = 8
_HEAD_BYTES = 4096
_MAX_DEPTH = 100
_log = logging.getLogger(__name__)
CACHE_VARIABLE = "FORGE_AGENTS_CACHE"
"""Environment variable with the path of `cache_folder`."""


def cache_folder() -> Path:
    """Return the folder for expensive but reproducible files: ``FORGE_AGENTS_CACHE``, or the user's cache folder.

    The latter is made with mode 0700, because models in it could otherwise be replaced under some umasks.
    """
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder).expanduser().absolute()
    import platformdirs

    path = platformdirs.user_cache_path("forge_agents", appauthor=False)
    for each in (path.parent, path):
        with contextlib.suppress(OSError):  # it exists, or its user reports why it cannot be made
            each.mkdir(mode=0o700)
    return path


def user_path(path: str | os.PathLike[str]) -> Path:
    """Expand ``~``, ``~name``, ``$NAME`` and ``${NAME}`` in a path as a shell does, unless the literal path exists.

    Raises:
        ValueError: The path is empty, a variable is not set or may hold a credential, or there is no such user.
    """
    written = Path(path)
    text = os.fspath(path)
    if not text:
        raise ValueError("a path is empty. Write . for the current folder")
    if not ({"~", "$"} & set(text)) or written.exists():
        return written
    for name in re.findall(r"\$(\w+|\{[^}]*\})", text, re.ASCII):  # trackers, for example, show the names of folders
        if is_secret_variable(name := name.strip("{}"), os.environ.get(name, "")):
            raise ValueError(f"{text}: the environment variable {name} may hold a credential. Write the path itself")
    filled = os.path.expandvars(text)
    if unset := re.search(r"\$(\w+|\{\w+\})", filled):
        raise ValueError(f"{text}: the environment variable {unset.group(1).strip('{}')} is not set")
    try:
        return Path(filled).expanduser()
    except RuntimeError as cause:
        raise ValueError(f"{text}: there is no home folder of {filled.partition(os.sep)[0]}") from cause


@functools.cache
def warn_of_other_writers(folder: Path) -> None:
    """Log a warning, once per process, if other users of the machine can replace a folder or its files at any time.

    Checks of a folder hold only for the moment at which they are made.
    """
    for path in {each: None for start in (folder.absolute(), folder.resolve()) for each in (start, *start.parents)}:
        try:
            status, parent = path.stat(), path.parent.stat()
        except OSError:
            continue  # opening it reports the error
        is_open = _others_may_write(status) and not status.st_mode & stat.S_ISVTX
        is_foreign = _others_may_write(parent) and status.st_uid not in (0, os.geteuid())
        if is_open or is_foreign:
            reason = f"has mode {stat.S_IMODE(status.st_mode):o}" if is_open else f"is of user {status.st_uid}"
            _log.warning(
                "%s %s, so other users can replace files of %s while they are used. Choose a folder that only you can "
                "write to, or run: chmod go-w",
                path,
                reason,
                folder,
            )
            return


def _others_may_write(status: os.stat_result) -> bool:
    """Return whether the mode of a folder lets other users write to it, or a group that has other members."""
    import grp
    import pwd

    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP or status.st_gid == 0:
        return False
    try:
        members = {user.pw_name for user in pwd.getpwall() if user.pw_gid == status.st_gid}
        members.update(grp.getgrgid(status.st_gid).gr_mem)
        return not members <= {"root", pwd.getpwuid(os.geteuid()).pw_name}
    except KeyError:  # in a container without entries, the user's group usually has the user's number
        return status.st_gid != os.geteuid()


def check_plain_files(folder: str | os.PathLike[str]) -> None:
    """Refuse a run folder in which one of our files is a link, a pipe, a socket, a device, sparse or far too large.

    Reading or writing such an entry would show or overwrite files elsewhere, or block forever. Links to folders, for
    example on larger disks, are allowed, and so are files that no run opens. The folder may be missing.

    Raises:
        RunFolderError: There is such an entry. The message names it.
    """
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return  # opening it later reports the error
    for entry in entries:
        path, is_plain = Path(entry.path), entry.is_file(follow_symlinks=False)
        if not entry.name.endswith(_OURS) or (not is_plain and path.is_dir()):
            continue
        if not is_plain:
            what = "a link" if entry.is_symlink() else "not a file"
            raise RunFolderError(
                f"{path} is {what}. A run folder must hold plain files: remove it, or put a copy there"
            )
        try:
            if entry.name.endswith(_READ_WHOLE) and (size := path.stat().st_size) > MAX_BYTES:
                raise RunFolderError(f"{path} has {size} bytes. Files of a run with such a name are small: remove it")
            check_dense(path)
        except FileNotFoundError:
            pass  # a running training has replaced it
        except ValueError as cause:
            raise RunFolderError(str(cause)) from None


def check_dense(path: Path) -> None:
    """Refuse a large file that takes almost no space on its disk, because reading it would take all memory.

    Raises:
        ValueError: The file is sparse.
        OSError: There is no such file.
    """
    status = path.stat()
    if status.st_size > max(MAX_BYTES, _MAX_SPARSE * 512 * status.st_blocks):
        raise ValueError(
            f"{path} has {status.st_size} bytes, of which almost none are on the disk. It is damaged: copy it again"
        )


def check_plain_file(path: Path) -> None:
    """Check that a file of a run folder is a plain file.

    Raises:
        RunFolderError: The path is a link or not a file.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise RunFolderError(f"{path} is a link or not a file. A run folder must hold plain files")


def open_plain(path: Path) -> IO[bytes]:
    """Open a file of a run folder for reading. A link or a pipe that replaces the file is not opened.

    Raises:
        RunFolderError: The path is a link or not a file.
        OSError: The file cannot be opened.
    """
    check_plain_file(path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # another user may replace the file after the check
    return os.fdopen(os.open(path, flags), "rb")


def check_contained(folder: str | os.PathLike[str]) -> None:
    """Refuse a run folder in which one of our files, at any depth, leads out of it or is a pipe, a socket or a device.

    Training and exporting write, replace and delete files at many places of a run folder. If the folder came from a
    stranger, a link in it could redirect all of that to other files of the user. The folder itself may be a link, and
    so may entries that no run opens. The folder may be missing.

    Raises:
        RunFolderError: There is such an entry. The message names it.
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
    """Return the first of `entries` that is, or contains, a link out of `root`, a pipe, a socket or a device.

    Args:
        entries: Files, links and folders. Folders are searched at any depth, without following links.
        root: Folder that links must not leave.
    """
    inside, waiting = Path(os.path.realpath(root)), sorted(entries, reverse=True)
    while waiting:
        entry = waiting.pop()
        if entry.is_symlink():
            if not Path(os.path.realpath(entry)).is_relative_to(inside):
                return entry
        elif entry.is_dir():
            with contextlib.suppress(OSError):  # an unreadable folder cannot be read or changed later either
                waiting += sorted(entry.iterdir(), reverse=True)
        elif not entry.is_file() and entry.exists():  # a run in another process may have deleted it
            return entry
    return None


def lock_file(path: Path) -> IO[str]:
    """Open and lock a file that only this user can open, because whoever may read a file may lock it. Closing unlocks.

    Forked children do not hold the lock: a child of an environment may live longer than the run.

    Raises:
        BlockingIOError: Another process holds the lock.
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    file = os.fdopen(descriptor, "r+", encoding="utf-8")
    _locked.add(file)
    return file


_locked: weakref.WeakSet[IO[str]] = weakref.WeakSet()
"""Open files of `lock_file`."""


def _release_locks() -> None:
    """Close the files of `lock_file` in a forked child. The parent keeps its locks."""
    for file in tuple(_locked):
        file.close()


os.register_at_fork(after_in_child=_release_locks)


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Open a text file that gets its name when the block ends, so that no reader sees a partial file.

    An error in the block leaves an existing file unchanged. The permissions follow the umask.

    Raises:
        RunFolderError: Something other than a file has that name, which would be replaced as well.
    """
    target = user_path(path)
    parent = os.path.realpath(target.parent)
    if (os.path.lexists(target) and not target.is_file()) or parent == "/dev" or f"{parent}/".startswith("/proc/"):
        raise RunFolderError(f"{target} is no file, and would be replaced by one. Choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
    try:
        with draft.open("x", encoding="utf-8", errors="replace") as file:
            yield file
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_atomic(path: str | os.PathLike[str], text: str, *, replaces: str = "") -> Path:
    """Write a text file with `atomic_writer` and return its path.

    Args:
        replaces: Text near the begin of each file that may be replaced, so that files of other programs are kept. Empty
            replaces any file.

    Raises:
        RunFolderError: There is a file without that text.
    """
    target = user_path(path)
    if replaces and target.is_file():
        with target.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if head.strip() and replaces.encode() not in head:
            raise RunFolderError(f"{target} is a file of another program, so it is not replaced. Choose another name")
    with atomic_writer(path) as file:
        file.write(text)
    return user_path(path)


def apply_umask(file: Path) -> None:
    """Give a new file the permissions that the umask allows. safetensors writes files that only the user can read."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE):
            file.chmod(0o666 & ~int(found.group(1), 8))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, newest first, also past step 999999.

    Folders with names that no run writes, such as a backup ``step-000010-best``, are not among them.

    Raises:
        RunFolderError: A folder cannot be read. Taken for empty, a run in it would begin anew and delete its records.
    """
    try:
        names = filter(_CHECKPOINT.fullmatch, os.listdir(folder))  # noqa: PTH208  # `glob` ignores errors
        complete = [folder / name for name in names if _is_there(folder / name / CHECKPOINT_MARK)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as cause:
        raise RunFolderError(f"checkpoints cannot be read ({cause}). Make them readable, or move the run") from cause
    return sorted(complete, key=lambda path: (len(path.name), path.name), reverse=True)


def _is_there(path: Path) -> bool:
    """Return whether a path exists. Raises OSError if that is unknown."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def outdated_export(run: Path) -> str:
    """Return a message if a run has a newer checkpoint than its export, such as after more steps. Else empty."""
    with contextlib.suppress(OSError):
        newest, export = next(iter(complete_checkpoints(run / "checkpoints")), None), run / "export"
        if newest is None or (newest / "exported").exists() or newest.stat().st_mtime <= export.stat().st_mtime:
            return ""
        return (
            f"{export} is older than checkpoint {newest.name}: the run went on after its export. For newer weights use "
            f"`forge-agents export {shlex.quote(str(run))}` and name the folder that it writes"
        )
    return ""


def is_shallow(value: Any) -> bool:
    """Return whether lists and objects are nested at most 100 deep, so that recursive functions can process them."""
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        inside = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        if not (level := [inner for parts in inside for inner in parts]):
            return True
    return False


class Checksums:
    """Size and CRC-32 checksums of a file, computed while it is written from beginning to end."""

    def __init__(self) -> None:
        self.size = 0
        self._crcs: list[int] = []

    def add(self, data: Any) -> None:
        """Add the next bytes."""
        rest = memoryview(data).cast("B")
        while rest:
            if self.size % CHUNK_BYTES == 0:
                self._crcs.append(0)
            part = rest[: CHUNK_BYTES - self.size % CHUNK_BYTES]
            self._crcs[-1] = zlib.crc32(part, self._crcs[-1])
            self.size += len(part)
            rest = rest[len(part) :]

    @property
    def all(self) -> list[int]:
        """Size in bytes, followed by the CRC-32 of each chunk."""
        return [self.size, *self._crcs]


def find_damage(folder: Path, files: Mapping[str, list[int]], *, chunk_bytes: int) -> str:
    """Compare files with their checksums, on several threads. Returns the first difference. Empty if there is none.

    Args:
        files: Size and checksums by path in `folder`.
        chunk_bytes: Chunk size of the checksums, or 0 if each covers its whole file.

    Raises:
        ValueError: A file is sparse, or `chunk_bytes` is negative.
        RunFolderError: A file is a link.
    """
    if chunk_bytes < 0:
        raise ValueError(f"chunk_bytes={chunk_bytes} of the checksums. Expected at least 0")
    chunks: list[tuple[str, int, int, int]] = []
    checked: set[tuple[int, ...]] = set()
    for name, (size, *crcs) in files.items():
        check_plain_file(folder / name)
        check_dense(folder / name)
        status = (folder / name).stat()
        if status.st_size != size:
            return f"{name} has {status.st_size} bytes, {size} were written"
        step = chunk_bytes or max(size, 1)
        if size and len(crcs) != -(-size // step):
            return f"{name} has {len(crcs)} sums for {size} bytes"
        if (file := (status.st_dev, status.st_ino, *crcs)) not in checked:  # a file may have a thousand names
            chunks += [(name, at * step, min(step, size - at * step), crc) for at, crc in enumerate(crcs) if size]
        checked.add(file)

    def compare(chunk: tuple[str, int, int, int]) -> str:
        name, start, length, expected = chunk
        crc = 0
        with (folder / name).open("rb") as stream:
            stream.seek(start)
            while length and (data := stream.read(min(length, 1 << 22))):
                crc, length = zlib.crc32(data, crc), length - len(data)
        difference = f"{name} has CRC-32 {crc} from byte {start} on, it was written with {expected}"
        return "" if crc == expected and not length else difference

    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return next((difference for difference in threads.map(compare, chunks) if difference), "")
