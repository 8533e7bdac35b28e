"""Reads all rows of a Parquet file, or of the Arrow files of a folder, in a process with limits, and counts their size.

Decoding a file of a kilobyte can take any memory, and Arrow does not check the offsets in its files: a text may lie
outside of the file, in the memory of the process. Run by `forge_agents.programs.arrow_files`.
"""

import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

_VALUE_BYTES = 32
"""Minimum size that counts for a value. Nulls and equal values take no space in a file."""
_BATCH_ROWS = 16
_MAX_COLUMNS = 1000
"""Maximum number of columns and of fields in them. The package datasets takes more than quadratic time for them."""


def main(path: str, max_bytes: int, max_memory: int, max_cpu_s: int) -> None:
    """Print the size of the rows as JSON, or the reason why they cannot be read. Stops above `max_bytes`."""
    resource.setrlimit(resource.RLIMIT_DATA, (max_memory, max_memory))
    resource.setrlimit(resource.RLIMIT_CPU, (max_cpu_s, max_cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    total = 0
    try:
        for batch in _batches(Path(path)):
            batch.validate(full=True)
            total += sum(map(_num_bytes, batch.columns))
            if total > max_bytes:
                break
    except (MemoryError, pa.ArrowMemoryError):
        _report({"problem": f"reading its rows takes more than {max_memory >> 20} MiB of memory"})
    except _RefusedError as cause:
        _report({"problem": str(cause)})
    except (pa.ArrowException, OSError, ValueError) as cause:
        _report({"problem": f"its rows are damaged ({str(cause)[:200]})"})
    else:
        _report({"bytes": total})


class _RefusedError(Exception):
    """A file has too many columns or compressed rows."""


def _check_width(schema: Any) -> None:
    pending, number = list(schema), 0
    while pending:
        kind = pending.pop().type
        number += 1
        pending += [kind.field(index) for index in range(kind.num_fields)]
    if number > _MAX_COLUMNS:
        raise _RefusedError(f"it has {number} columns and fields. Expected at most {_MAX_COLUMNS}")


def _report(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result))


def _batches(path: Path) -> Iterator[Any]:
    if path.is_dir():
        for file in sorted(path.glob("*.arrow")):
            with pa.memory_map(str(file)) as source:
                stream = pa.ipc.open_stream(source)
                _check_width(stream.schema)
                yield from _mapped(stream)
        return
    import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]

    with pyarrow.parquet.ParquetFile(path) as file:
        _check_width(file.schema_arrow)
        yield from file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)


def _mapped(stream: Any) -> Iterator[Any]:
    """Yield the batches of a mapped file, which take no memory of their own unless they are decompressed.

    The package datasets never writes compressed rows, and would decompress them at each access.
    """
    while True:
        allocated = pa.total_allocated_bytes()
        try:
            batch = stream.read_next_batch()
        except StopIteration:
            return
        if pa.total_allocated_bytes() > allocated:
            raise _RefusedError("its rows are compressed. Save the data set with save_to_disk")
        yield batch


def _num_bytes(column: Any) -> int:
    """Bytes of a column, where each value, also in lists and structs, has at least `_VALUE_BYTES`."""
    return int(column.nbytes) + _VALUE_BYTES * _num_values(column)


def _num_values(column: Any) -> int:
    """Number of values of a column, including those in its lists and structs."""
    kind = column.type
    if isinstance(column, pa.ExtensionArray):
        return _num_values(column.storage)
    if pa.types.is_dictionary(kind):  # equal values are stored once
        return _num_values(column.dictionary_decode())
    if pa.types.is_struct(kind):
        return len(column) + sum(map(_num_values, column.flatten()))
    if pa.types.is_map(kind):  # datasets refuses these
        return len(column)
    if hasattr(column, "flatten"):  # lists
        return len(column) + _num_values(column.flatten())
    if pa.types.is_union(kind):
        return len(column) + sum(_num_values(column.field(number)) for number in range(kind.num_fields))
    return len(column)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
