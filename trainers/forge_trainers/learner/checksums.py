"""CRC-32 of a checkpoint's files, chunk by chunk: taken while they are written, compared before they are loaded.

In: bytes on their way to a file, files. Out: sums that JSON holds. Waits for the disk.

Chunks let one large file be read by several threads, and what is written need not be read again for its sum.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forge_agents.files import check_plain_file

CHUNK_BYTES = 1 << 26
"""Each chunk has a sum of its own."""
_MOST_THREADS = 8


class Sums:
    """Size and sums of one file that is written from its beginning to its end."""

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


def damaged(folder: Path, files: Mapping[str, list[int]], *, chunk_bytes: int) -> str:
    """What is wrong with the first file that is not as it was written; empty where all are. Several threads read.

    Args:
        folder: Of the files.
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
