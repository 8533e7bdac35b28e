"""Checks of Parquet files and of the Arrow files of a data set before they are loaded.

Loading decompresses all rows, and a kilobyte can stand for any number of equal bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from forge_agents.files import check_dense
from forge_agents.http_body import bounded_json

_FREE_BYTES, _MAX_EXPANSION = 1 << 28, 100
"""Rows may have 256 MiB, or 100 times the size on disk if that is more."""
_WORKER = Path(__file__).with_name("_arrow_worker.py")
_WORKER_BYTES, _MAX_WORKER_BYTES = 1 << 29, 1 << 33
"""Memory of the worker in addition to the rows that it may read, and at most."""
_CPU_S, _BYTES_PER_S = 60, 1 << 20
"""Processor time of the worker, and size on disk per second of additional time."""
_WALL_PER_CPU = 20
"""Maximum ratio of the worker's time to its processor time, on a busy machine."""


def check_rows(path: Path) -> None:
    """Raise ValueError if the rows of a Parquet file or a data set are damaged, or far larger than the file.

    A worker reads all rows once. See `_arrow_worker`.
    """
    files = [file for file in path.glob("*.arrow") if file.is_file()] if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    max_bytes = max(_FREE_BYTES, _MAX_EXPANSION * size)
    cpu_s = _CPU_S + size // _BYTES_PER_S
    limits = (max_bytes, min(max_bytes + _WORKER_BYTES, _MAX_WORKER_BYTES), cpu_s)
    command = [sys.executable, "-I", str(_WORKER), str(path), *map(str, limits)]
    result = _run(command, cpu_s)
    if "problem" in result:
        raise ValueError(f"{path} has {size} bytes, and {result['problem']}. Write its tasks as JSONL")
    if result["bytes"] > max_bytes:
        raise ValueError(
            f"{path} has {size} bytes, and its rows have more than {result['bytes']}. Expected at most "
            f"{_MAX_EXPANSION} times as many. Write its tasks as JSONL"
        )


def _run(command: list[str], cpu_s: int) -> dict[str, Any]:
    timeout_s = _WALL_PER_CPU * cpu_s
    try:
        worker = subprocess.run(command, env=_environment(), capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": f"reading its rows takes more than {timeout_s} s"}
    try:
        result: dict[str, Any] = json.loads(worker.stdout)
    except ValueError:  # ended by a limit, or by a fault in the library
        end = worker.stderr[-200:].decode(errors="replace").strip()
        return {"problem": f"its rows cannot be read within {cpu_s} s (exit code {worker.returncode}. {end})"}
    return result


def _environment() -> dict[str, str]:
    """Variables of the worker, without credentials. Arrow's own allocators would reserve memory in advance."""
    names = ("LD_LIBRARY_PATH", "PATH")
    return {**{name: os.environ[name] for name in names if name in os.environ}, "ARROW_DEFAULT_MEMORY_POOL": "system"}


def check_files(folder: Path) -> None:
    """Raise ValueError if a file of a data set from ``Dataset.save_to_disk`` is not in its folder."""
    state = folder / "state.json"
    if (folder / "dataset_dict.json").exists() or not state.is_file():
        raise ValueError(f"{folder} is not a data set without splits. Give the folder of one split, with a state.json")
    check_dense(state)
    try:
        names = [entry["filename"] for entry in bounded_json(state.read_bytes())["_data_files"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"{state} is damaged. Save the data set again with save_to_disk") from None
    if len(set(map(str, names))) < len(names):
        raise ValueError(f"{state} names a file more than once. Save the data set again with save_to_disk")
    for name in names:
        file = folder / str(name)
        if file.name != name or file.suffix != ".arrow" or file.is_symlink():
            raise ValueError(f"{state} names {name!r:.200}. Expected an .arrow file in the same folder")
