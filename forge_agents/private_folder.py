"""The private folder of a run: sockets, certificates and logs that no other user of the machine can reach."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import math
import os
import pwd
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER_VARIABLE = "FORGE_AGENTS_PRIVATE"
"""Environment variable with the private folder of the process that started this one on the same machine."""
CODE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with PyTorch's folder for compiled code. Importing PyTorch may set it to the default."""
LONGEST_NAME = 36
"""Maximum length of a socket's name in bytes, so that its path fits into a socket address. vLLM's names are UUIDs."""
SOCKET_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Environment variable with vLLM's folder for sockets."""
_PREFIX = "forge-agents-private-"
_COMPILED = "forge-agents-compiled-"
_MAX_SOCKET_PATH = 107
_LOCK = "lock"
_LOG_NAME = "monarch"
_LOGS_OF_MONARCH = Path("/tmp")  # noqa: S108  # Monarch's choice
"""Parent of the folder, named after the user, in which Monarch 0.7 opens its log."""
_LOG_BYTES = 8 << 20
"""Size at which the log is moved to ``monarch.log.1``, replacing the previous one."""
_LOG_CHECK_S = 20.0
_YOUNG_S = 60.0
"""A folder that changed within this time may belong to a process that is about to lock it."""
_OLD_S = 7 * 24 * 3600.0
"""Logs of killed runs are kept for this time."""
_UP = "/.." * 16
"""Leads from any folder to the root: the root's parent is the root."""


@functools.cache
def private_folder() -> Path:
    """Folder of mode 0700 for this process and those it starts.

    The first process of a run on a machine makes it and removes it at exit, except subfolders with logs of failed
    processes. The first process also removes the folders of earlier runs that were killed.
    """
    inherited = os.environ.get(FOLDER_VARIABLE, "")
    if inherited and is_private(inherited):
        return Path(inherited)
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) + len(_PREFIX) + LONGEST_NAME + 10 > _MAX_SOCKET_PATH:
        parent = "/tmp"  # noqa: S108  # mkdtemp makes a folder of mode 0700
    _remove_abandoned(Path(parent))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # held until this process ends
    os.environ[FOLDER_VARIABLE] = str(folder)
    owner = os.getpid()
    atexit.register(lambda: _remove(folder) if os.getpid() == owner else None)
    threading.Thread(target=_rotate, args=(folder / f"{_LOG_NAME}.log",), name="monarch-log", daemon=True).start()
    return folder


def is_private(folder: str | Path, *, others: int = 0, dir_fd: int | None = None) -> bool:
    """Return whether a path is this user's folder, not a link to one, and gives others at most the rights `others`.

    A relative path starts at the folder whose descriptor is `dir_fd`.
    """
    try:
        status = os.lstat(folder, dir_fd=dir_fd)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077 & ~others


def make_private(folder: Path) -> None:
    """Make a folder of mode 0700.

    Raises:
        PermissionError: The path is no folder of this user. Another one may have guessed the name, and made a folder
            with links that logs would follow.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(
            f"{folder} is not a folder of yours (its owner is user {status.st_uid}), so no logs are written there. Set "
            "TMPDIR to a folder of your own"
        )
    if status.st_mode & 0o022:
        folder.chmod(0o700)


def code_folder() -> Path:
    """Return a folder of this machine for compiled code, which no other user can change.

    PyTorch runs the code that it finds there. Its default folder, ``torchinductor_USER`` in the folder for temporary
    files, may have been made by another user. Any other value of `CODE_VARIABLE` is the user's choice, unless a process
    of ours chose it, possibly on another machine.
    """
    chosen = os.environ.get(CODE_VARIABLE, "")
    inherited = _PREFIX in chosen or _COMPILED in chosen
    if chosen and not inherited and not chosen.startswith(f"{tempfile.gettempdir()}/torchinductor_"):
        return Path(chosen)
    folder = Path(tempfile.gettempdir()) / f"{_COMPILED}{os.geteuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    return folder if is_private(folder) else private_folder() / "compiled"


def use_code_folder() -> None:
    """Make PyTorch compile in `code_folder`. Call this before an import of PyTorch's compiler or of transformers.

    The import makes the folder, and fails if another user has made a file with the name of the default folder.
    """
    os.environ[CODE_VARIABLE] = str(code_folder())


def socket_folder() -> Path:
    """Return vLLM's folder for sockets: the user's choice in `SOCKET_VARIABLE`, or else the private folder.

    A value may also come from the process that started this one, which may have ended, or be on another machine.
    """
    chosen = os.environ.get(SOCKET_VARIABLE, "")
    return Path(chosen) if chosen and _PREFIX not in chosen else private_folder()


def log_suffix() -> str:
    """Return a value of ``MONARCH_LOG_SUFFIX`` that makes Monarch write its log to the private folder.

    Monarch 0.7 appends its log to ``/tmp/USER/monarch_log_SUFFIX.log`` and follows any links of other users there. A
    suffix that leads to the private folder is safe if other users can change neither ``/tmp/USER`` nor the folder
    ``monarch_log_`` in it. Otherwise the suffix is too long for a file name, so that Monarch logs to the standard error
    stream.
    """
    try:
        beginning = _LOGS_OF_MONARCH / pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return "x" * 256
    for folder in (beginning, beginning / "monarch_log_"):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)
        if not is_private(folder, others=0o055):  # other users may read it
            return "x" * 256
    return f"{_UP}{private_folder()}/{_LOG_NAME}"


def _remove_abandoned(parent: Path) -> None:
    """Remove private folders of this user whose owner was killed. The owner held a lock as long as it lived.

    A folder without a lock may be in use: processes of a run on another host have their logs in it.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _open(folder) as opened:
            if time.time() - os.fstat(opened).st_mtime < _YOUNG_S:
                continue
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW, dir_fd=opened)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder, max_age_s=_OLD_S)
            finally:
                os.close(lock)


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[int]:
    """Open a private folder. In a folder that all may change, another user may put a link in its place at any time."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not is_private(".", dir_fd=opened):
            raise PermissionError(f"{folder} is not private")
        yield opened
    finally:
        os.close(opened)


def _remove(folder: Path, *, max_age_s: float = math.inf) -> None:
    """Remove a private folder, except logs: subfolders whose newest file is at most `max_age_s` old stay."""
    with contextlib.suppress(OSError):
        with _open(folder) as opened, os.scandir(opened) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name == _LOCK):
                if entry.is_dir(follow_symlinks=False):
                    if time.time() - _last_change(entry.name, opened) > max_age_s:
                        shutil.rmtree(entry.name, ignore_errors=True, dir_fd=opened)
                elif entry.name != _LOCK or os.listdir(opened) == [_LOCK]:  # noqa: PTH208  # with logs the lock stays
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.name, dir_fd=opened)
        folder.rmdir()


def _last_change(folder: str, parent: int) -> float:
    """Time of the last change of a folder or a file in it. A folder's own time is not that of its growing files."""
    times = (
        os.lstat(name, dir_fd=at).st_mtime
        for _, _, files, at in os.fwalk(folder, dir_fd=parent)
        for name in (".", *files)
    )
    return max(times, default=math.inf)  # it cannot be read


def _rotate(log: Path) -> None:
    """Keep the log small. Its writers append to an open file, so the contents are moved instead of the file."""
    while True:
        time.sleep(_LOG_CHECK_S)
        with contextlib.suppress(OSError):
            rotate(log)


def rotate(log: Path) -> None:
    """Move the contents of a log of 8 MiB or more to ``FILE.1``."""
    if log.stat().st_size >= _LOG_BYTES:
        shutil.copyfile(log, f"{log}.1")
        os.truncate(log, 0)
