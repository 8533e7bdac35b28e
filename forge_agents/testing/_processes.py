"""What tests ask about other processes, any of which may end at any moment, and a port for one of them."""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from xml.etree import ElementTree as ET

import psutil


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ended_within(pids: Iterable[int], seconds: float) -> bool:
    """Whether none of the processes runs any more, at the latest after so many seconds."""
    left = list(pids)
    return holds_within(seconds, lambda: not any(map(runs, left)))


def holds_within(seconds: float, condition: Callable[[], object]) -> bool:
    """Whether a condition comes to hold in so many seconds; it is looked at at least twice."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return bool(condition())
        time.sleep(0.02)
    return True


def command_of(pid: int) -> str:
    """The command line of a process; empty if it has ended, is a zombie or belongs to another user."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError):
        return ""


def with_command(part: str) -> list[int]:
    """The processes of this machine whose command line has a text in it."""
    return [pid for pid in psutil.pids() if part in command_of(pid)]


def parent_of(pid: int) -> int:
    """The id of a process's parent; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return 0


def children_of(pid: int) -> list[int]:
    """The ids of a process's own children; none if it has ended."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def allocated_bytes() -> int:
    """The bytes that this process has allocated with glibc's malloc and not freed, in all threads.

    Unlike the memory of the process, it does not depend on what the allocator keeps of freed blocks.
    """
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile() as written:
        file = ctypes.c_void_p(libc.fopen(written.name.encode(), b"w"))
        libc.malloc_info(0, file)
        libc.fclose(file)
        root = ET.parse(written.name).getroot()  # noqa: S314  # libc's
    size = {(one.tag, one.get("type")): int(one.get("size", 0)) for one in root if one.tag != "heap"}
    free = size["total", "fast"] + size["total", "rest"]
    return size["system", "current"] - free + size["total", "mmap"]


def free_port() -> int:
    """A port of this host on which nothing listens.

    It lies below the ports that Linux gives to connections and to servers that name none, so no other program is given
    it before the caller's process listens there.

    Raises:
        RuntimeError: None of many is free.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 200):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("none of 200 ports between 20000 and 32000 is free")
