"""Check of the Arrow files of a data set before they are loaded.

Loading decompresses all rows, and a kilobyte can stand for any number of equal bytes. The package datasets never writes
compressed rows.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

_DICTIONARY, _ROWS = 2, 3
"""Types of messages: https://github.com/apache/arrow/blob/main/format/Message.fbs."""


def check_uncompressed(folder: Path) -> None:
    """Raise ValueError if a file of a data set from ``Dataset.save_to_disk`` is compressed, or not in its folder."""
    for state in folder.rglob("state.json"):
        try:
            names = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ValueError(f"{state} is damaged. Save the data set again with save_to_disk") from None
        for name in names:
            file = state.parent / str(name)
            if file.name != name or file.is_symlink():
                raise ValueError(f"{state} names {name!r:.200}. Expected a file in the same folder")
            if file.is_file() and _has_compressed_rows(file):
                raise ValueError(f"the rows in {file} are compressed. Save the data set with save_to_disk, or as JSONL")


def _has_compressed_rows(file: Path) -> bool:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

    with pa.memory_map(str(file)) as source:
        try:
            messages = pa.ipc.MessageReader.open_stream(source)
            return any(_is_compressed(message.metadata.to_pybytes()) for message in messages)
        except (pa.ArrowException, struct.error, IndexError) as cause:
            raise ValueError(f"{file} is not a complete Arrow file ({cause})") from None


def _is_compressed(message: bytes) -> bool:
    """Return whether a message has compressed rows. It is a flatbuffer: tables of fields, each found by an offset."""
    root = _follow(message, 0)
    kind = _field(message, root, 1)
    rows = _follow(message, _field(message, root, 2))
    if not kind or message[kind] not in (_DICTIONARY, _ROWS):
        return False
    if message[kind] == _DICTIONARY:
        rows = _follow(message, _field(message, rows, 1))
    return bool(_field(message, rows, 3))


def _field(message: bytes, table: int, number: int) -> int:
    """Return the position of a field of a table. 0 if the table lacks it."""
    layout: int = table - struct.unpack_from("<i", message, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", message, layout)[0]:
        return 0
    offset: int = struct.unpack_from("<H", message, layout + entry)[0]
    return offset and table + offset


def _follow(message: bytes, position: int) -> int:
    offset: int = struct.unpack_from("<I", message, position)[0]
    return position + offset
