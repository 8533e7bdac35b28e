"""Memory that processes of one host share through file descriptors.

The pages belong to an anonymous file (memfd). The file has no name in /dev/shm and ends with the last process that maps
it, so a killed process leaves nothing behind and a small /dev/shm does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn
from weakref import WeakValueDictionary

import torch

from forge_agents.runtime.machine import available_bytes

_ATTRIBUTE = "_forge_segment"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHandle:
    """Identifies a segment for another process of the host."""

    pid: int
    """A process that holds the segment open."""
    fd: int
    """Its descriptor in that process."""
    inode: int
    """Identifies the segment, since a descriptor number may be reused."""
    num_bytes: int


class SegmentGoneError(Exception):
    """The process that offered a segment has ended or closed it."""


class Segment:
    """Shared pages and the descriptor that offers them. Closed with the last reference."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd = fd
        self.num_bytes = num_bytes
        self.inode = os.fstat(fd).st_ino
        self._bytes_B = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)

    @property
    def handle(self) -> SegmentHandle:
        """Handle to send to a process of the same host."""
        return SegmentHandle(pid=os.getpid(), fd=self._fd, inode=self.inode, num_bytes=self.num_bytes)

    def tensor(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Flat uint8 view of the bytes from `start` to `end`, which keeps the segment open."""
        bytes_B = self._bytes_B[start:end]
        setattr(bytes_B, _ATTRIBUTE, self)
        return bytes_B

    def __reduce__(self) -> NoReturn:
        # the copy would close a descriptor of its own process that has the same number
        raise TypeError("a segment cannot be copied or sent. Send its handle, or tensor().detach()")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # globals may be gone when the process exits
        close(self._fd)


def try_create(num_bytes: int) -> Segment | None:
    """A new segment of `num_bytes` (at least 1), or None if the machine lacks the memory.

    The pages are reserved at once, because touching pages that do not exist would kill the process.
    """
    if num_bytes > available_bytes():
        return None
    fd = os.memfd_create("forge-agents-weights", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        os.close(fd)
        return None
    return Segment(fd, num_bytes)


def create(num_bytes: int) -> torch.Tensor:
    """Flat uint8 memory: shared pages, or private ones if the machine lacks the memory for shared ones."""
    segment = try_create(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8) if segment is None else segment.tensor()


_opened: WeakValueDictionary[int, Segment] = WeakValueDictionary()


def part_of(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Elements `start` to `end` of a flat tensor, without a copy. A part of a segment's tensor has its segment."""
    segment = segment_of(tensor)
    return tensor[start:end] if segment is None else segment.tensor(start, end)


def open_segment(handle: SegmentHandle, start: int = 0, end: int | None = None) -> torch.Tensor:
    """Map another process's segment, once per process, and view the bytes from `start` to `end`.

    Raises:
        SegmentGoneError: The segment no longer exists.
    """
    segment = _opened.get(handle.inode)
    if segment is None:
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentGoneError(f"process {handle.pid} no longer offers the segment: {error}") from error
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (handle.inode, handle.num_bytes):
            os.close(fd)
            raise SegmentGoneError(f"process {handle.pid} has closed its segment")
        segment = Segment(fd, handle.num_bytes)
        _opened[segment.inode] = segment
    return segment.tensor(start, end)


def segment_of(tensor: torch.Tensor) -> Segment | None:
    """The segment of exactly this tensor object, which came from `Segment.tensor`, or None for private memory."""
    segment: Segment | None = getattr(tensor, _ATTRIBUTE, None)
    return segment
