"""Helpers for tests that observe other processes, which may end at any moment."""

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
    """Return whether a process runs. A zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ended_within(pids: Iterable[int], seconds: float) -> bool:
    """Return whether all processes end within so many seconds."""
    remaining = list(pids)
    return holds_within(seconds, lambda: not any(map(runs, remaining)))


def holds_within(seconds: float, condition: Callable[[], object]) -> bool:
    """Return whether a condition becomes true within so many seconds. It is checked at least twice."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return bool(condition())
        time.sleep(0.02)
    return True


def command_of(pid: int) -> str:
    """Return the command line of a process. Empty if it ended, is a zombie or belongs to another user."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError):
        return ""


def with_command(part: str) -> list[int]:
    """Return the processes of this machine whose command line contains a text."""
    return [pid for pid in psutil.pids() if part in command_of(pid)]


def parent_of(pid: int) -> int:
    """Return the id of a process's parent, or 0 if it ended."""
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return 0


def children_of(pid: int) -> list[int]:
    """Return the ids of a process's direct children. Empty if it ended."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def allocated_bytes() -> int:
    """Return the bytes that all threads of this process allocated with glibc's malloc and did not free.

    Unlike the memory of the process, this does not include freed blocks that the allocator keeps.
    """
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile() as written:
        file = ctypes.c_void_p(libc.fopen(written.name.encode(), b"w"))
        libc.malloc_info(0, file)
        libc.fclose(file)
        root = ET.parse(written.name).getroot()  # libc's
    size = {(node.tag, node.get("type")): int(node.get("size", 0)) for node in root if node.tag != "heap"}
    free = size["total", "fast"] + size["total", "rest"]
    return size["system", "current"] - free + size["total", "mmap"]


def free_port() -> int:
    """Return a port of this host on which no process listens.

    It is below the range from which Linux assigns ports, so no other program gets it before the caller listens there.

    Raises:
        RuntimeError: None of 200 ports is free.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 200):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("none of 200 ports between 20000 and 32000 is free")


def ports_of(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens."""
    connections = psutil.Process(pid).net_connections("inet")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def keeps_connections(pid: int) -> bool:
    """Return whether a process opens files for connections of strangers to the ports on which it listens."""
    before = psutil.Process(pid).num_fds()
    with contextlib.ExitStack() as connections:
        for port in ports_of(pid) * 50:
            connection = connections.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
        time.sleep(1)
        return psutil.Process(pid).num_fds() > before + 9
