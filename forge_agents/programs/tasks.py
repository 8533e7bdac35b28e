"""Tasks of a program: a list, a file, a data set or a function, split into training and evaluation."""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import json
import os
import re
import threading
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any, TypeAlias
from uuid import UUID

import numpy as np

from forge_agents.envs.seeds import index_of_seed, is_held_out
from forge_agents.errors import ForgeError
from forge_agents.files import check_dense, user_path
from forge_agents.jsonl import UnreadableJsonError, json_values
from forge_agents.programs.arrow_files import check_files, check_rows
from forge_agents.programs.running import describe_error
from forge_agents.settings import check_call

AnyTasks: TypeAlias = Any
"""Anything with a length and numbered items, the path of a file, or a function ``rng -> task``."""
HELD_OUT = 0.2
"""Fraction of a list that is held out for evaluation."""
MIN_TASKS = 10
"""Minimum length of a list of which a part is held out."""
_MAX_COMPARED = 100_000
"""Maximum length of a list whose tasks are compared by content."""
_MAX_CACHED_SPLITS = 16
"""Number of lists whose split is cached: environments are created again for each group of episodes."""
_ROW_NUMBER = re.compile(
    r"(.*[./])?(_*((row|task|item|example|sample|question|problem|instance|record|entry|prompt|query|q)[ _-]?)?"
    r"(id|idx|index|uid|uuid|guid)_*|(row|task|item|example|sample|question|problem|q)[ _-]?(no|nr|num|number)"
    r"|__index_level_\d+__|(unnamed: 0[.\d]*)?)",
    re.IGNORECASE,
)
"""Names of fields that number the rows of a data set, also nested ones. Rows that differ only in them are equal tasks.
pandas writes an index without a name."""
_MAX_WORD = 500
"""Maximum length of a word whose Unicode form is normalized: the time grows with its square."""
_VALUES = (bytes, complex, date, time, timedelta, Decimal, Enum, Fraction, PurePath, UUID)
"""Types that JSON does not support and whose `repr` is their content."""
_MIN_DISTINCT = 0.05
"""Minimum fraction of tasks that must stay distinct without row numbers for the numbers to be ignored. Below, the
number is probably the task itself, such as an index into a data set that the program opens."""
_JSON, _TABLES = (".json", ".jsonl", ".ndjson"), (".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class _Split:
    """Indices of training and evaluation tasks. Both contain all tasks if the list is too short."""

    training: Sequence[int]
    held_out: Sequence[int]


class Tasks:
    """Selects the task of an episode by its seed.

    The seeds of training and demonstrations select from one part of the tasks, the seeds of evaluations and benchmarks
    from the other: from ``eval_tasks``, or from a fifth of the list, chosen by a digest of each task. Equal tasks are
    in the same part, even if a field such as ``id`` numbers the rows. A function gets different seeds for both, but
    nothing prevents it from generating the same task.

    Args:
        tasks: A list, the path of a JSON, JSONL, CSV or Parquet file or of a folder that ``Dataset.save_to_disk``
            wrote, a data set, or a function ``rng -> task``.
        eval_tasks: The same, for evaluation. None: a part of `tasks`. The same object as `tasks` evaluates on the
            training tasks.
    """

    def __init__(self, tasks: AnyTasks, eval_tasks: AnyTasks | None = None) -> None:
        self._training = _load(tasks, "tasks")
        self._held_out = None if eval_tasks is None else _load(eval_tasks, "eval_tasks")
        if self._held_out is not None:
            _warn_of_common_tasks(self._training, self._held_out)

    @property
    def num_training(self) -> int | None:
        """Number of training tasks. None if a function generates them."""
        if callable(self._training):
            return None
        return len(self._training if self._held_out is not None else _split(self._training).training)

    def of(self, seed: int, rng: np.random.Generator, name: str) -> Any:
        """Return the task of an episode of the environment `name`. Raises ForgeError if reading it fails."""
        held_out = is_held_out(seed)
        tasks = self._held_out if held_out and self._held_out is not None else self._training
        if callable(tasks):
            return tasks(rng)
        if self._held_out is not None:
            return _get(tasks, index_of_seed(seed, len(tasks)), name)
        split = _split(tasks)
        if held_out and split.held_out is split.training and not (len(tasks) == 1 and tasks[0] is None):
            warnings.warn(
                f"an evaluation of {name} plays tasks that are also trained on: its {len(tasks)} tasks are too few, or "
                f"too many are equal, to hold some out. Give at least {MIN_TASKS} different tasks, or other tasks as "
                "eval_tasks=. eval_tasks=tasks evaluates on the training tasks without this warning",
                RuntimeWarning,
                stacklevel=2,
            )
        part = split.held_out if held_out else split.training
        return _get(tasks, part[index_of_seed(seed, len(part))], name)


def _get(tasks: Any, index: int, name: str) -> Any:
    try:
        return tasks[int(index)]
    except Exception as error:
        advice = "give a list of tasks; of a table, frame.to_dict('records')"
        kind = type(tasks).__name__
        reason = describe_error(error)
        raise ForgeError(f"tasks[{index}] of {name}, a {kind}, failed with {reason}; {advice}") from error


# ---- sources


def _load(source: AnyTasks, name: str) -> Any:
    tasks = _read(user_path(source), name) if isinstance(source, str | os.PathLike) else source
    if callable(tasks):
        check_call(tasks, name, "rng")
        return tasks
    kind = type(tasks).__name__
    if isinstance(tasks, Mapping):
        splits = ", ".join(map(str, list(tasks)[:8]))
        raise TypeError(
            f"{name} is a {kind} with the keys {splits}. Give a list of tasks. For a data set with splits give "
            "tasks=data['train'], eval_tasks=data['test']"
        )
    if not all(hasattr(tasks, f"__{method}__") for method in ("len", "getitem")):
        raise TypeError(
            f"{name} is a {kind}. Give a list of tasks, a file of them, a data set that has a length (of a stream "
            "list(data.take(1000))), or a function rng -> task"
        )
    if not len(tasks):
        raise ValueError(f"{name} is empty. Give at least one task, or a function rng -> task")
    return tasks


def _read(path: Path, name: str) -> Any:
    if not path.exists():
        advice = "Give the path of a file of tasks, or a list of them"
        if not path.is_absolute():
            advice = f"The current folder is {Path.cwd()}. Next to a module use Path(__file__).with_name({path.name!r})"
        raise ValueError(f"{name}={str(path)!r} does not exist. {advice}")
    if not path.is_dir() and not (path.is_file() and path.suffix.lower() in {*_JSON, *_TABLES}):
        suffixes = ", ".join((*_JSON, *_TABLES))
        raise ValueError(f"{name}={str(path)!r} is not a file of tasks. Give one that ends in {suffixes}")
    stat = path.stat()
    return _read_rows(path.absolute(), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(_MAX_CACHED_SPLITS)
def _read_rows(path: Path, modified_ns: int, size: int) -> Any:
    """Return the rows of a file. The cache key includes the file's time and size, so a changed file is read again."""
    if path.suffix.lower() in _JSON and not path.is_dir():
        rows = []
        for line, value in json_values(path):
            if isinstance(value, UnreadableJsonError):
                raise ValueError(f"{path}:{line} is not JSON ({value}). Write one task per line")  # noqa: TRY004  # content of a file
            rows.append(value)
        return rows[0] if len(rows) == 1 and (isinstance(rows[0], list) or _are_splits(rows[0])) else rows
    if path.suffix.lower() == ".csv" and not path.is_dir():
        return _read_csv(path)
    try:
        import datasets  # type: ignore[import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ImportError(f"{path} is read by the package datasets. Install it, or write JSONL") from None
    if path.is_dir():
        check_files(path)
        check_rows(path)
        data = datasets.load_from_disk(str(path))
    else:
        check_rows(path)
        # `Dataset.from_parquet` would copy the rows into a cache whose lock any user who can read it may hold for ever
        data = datasets.Dataset(pyarrow.parquet.read_table(path))
    _check_columns(path, data)
    return data


def _read_csv(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file. Texts such as "007" and "NA" stay as they are, and empty cells are None."""
    check_dense(path)
    csv.field_size_limit(max(csv.field_size_limit(), path.stat().st_size + 1))  # of the process: the user reads, too
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file, strict=True) if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not CSV ({error}). Write a header and one task per line") from error
    if not rows:
        raise ValueError(f"{path} is empty. Write a header and one task per line")
    header = _unique_names(rows.pop(0), path)
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise ValueError(
                f"{path}: row {number} has {len(row)} cells, and the header {len(header)}. Give each row a cell for "
                "each column"
            )
    columns = [_convert_cells(list(cells)) for cells in zip(*rows, strict=True)]
    return [dict(zip(header, row, strict=True)) for row in zip(*columns, strict=True)]


def _unique_names(header: list[str], path: Path) -> list[str]:
    """Return names of columns as pandas reads them: without a name ``Unnamed: 0``, the second ``a`` is ``a.1``."""
    named = [name or f"Unnamed: {number}" for number, name in enumerate(header)]
    earlier = Counter[str]()
    names = []
    for name in named:
        names.append(f"{name}.{earlier[name]}" if earlier[name] else name)
        earlier[name] += 1
    if len(set(names)) < len(names):
        twice = ", ".join(name for name, count in earlier.items() if count > 1)
        raise ValueError(f"{path} has several columns named {twice}. Give each its own name")
    return names


def _convert_cells(cells: list[str]) -> list[Any]:
    """Return numbers or bools if Python writes them exactly as all the cells of a column, otherwise texts."""
    for convert in (_number, {"True": True, "False": False}.__getitem__):
        with contextlib.suppress(ValueError, KeyError):
            return [convert(cell) if cell else None for cell in cells]
    return [cell or None for cell in cells]


def _number(cell: str) -> int | float:
    number = int(cell) if cell.lstrip("-").isdecimal() else float(cell)
    if str(number) != cell or cell in {"nan", "inf", "-inf"}:
        raise ValueError(f"{cell!r} is another form of {number}")
    return number


def _check_columns(path: Path, data: Any) -> None:
    """Refuse columns whose values the package datasets would open: files and addresses that the rows name."""
    from datasets.features.features import require_decoding  # type: ignore[import-untyped,unused-ignore]

    features = getattr(data, "features", {})  # data sets by split are refused later
    if opened := [name for name, feature in features.items() if require_decoding(feature)]:
        raise ValueError(
            f"{path}: the rows of {', '.join(opened)} are images, sounds or other files, which may name files of this "
            "machine or addresses. Remove these columns, or load the data set yourself and give it as tasks"
        )


def _are_splits(value: Any) -> bool:
    """Return whether a JSON value contains lists of tasks by name, such as ``{"train": [...], "test": [...]}``."""
    return isinstance(value, dict) and bool(value) and all(isinstance(part, list) for part in value.values())


# ---- the split


_splits: dict[int, tuple[Any, int, _Split]] = {}
"""List, length and split by the list's id. The reference keeps the list alive, so no other list gets its id."""
_lock = threading.Lock()


def _split(tasks: Any) -> _Split:
    with _lock:  # environments are reset in threads
        cached = _splits.get(id(tasks))
        if cached is not None and cached[1] == len(tasks):
            return cached[2]
        split = _compute_split(tasks)
        while len(_splits) >= _MAX_CACHED_SPLITS:
            _splits.pop(next(iter(_splits)))
        _splits[id(tasks)] = tasks, len(tasks), split
        return split


def _compute_split(tasks: Any) -> _Split:
    every = range(len(tasks))
    keys = _digests(tasks) or [_digest(index) for index in every]
    order = sorted(every, key=lambda index: (keys[index], index))
    count = round(HELD_OUT * len(order))
    while 0 < count < len(order) and keys[order[count]] == keys[order[count - 1]]:
        count += 1  # equal tasks stay in one part
    if len(order) < MIN_TASKS or count == len(order):
        return _Split(every, every)
    return _Split(sorted(order[count:]), sorted(order[:count]))


def _digests(tasks: Any) -> list[bytes] | None:
    """Return a digest of each task without row numbers, blanks and the form of Unicode.

    None if tasks are too many, or hold objects whose content is unknown.
    """
    if not _are_listed(tasks) or len(tasks) > _MAX_COMPARED:
        return None
    try:
        plain = [json.loads(json.dumps(task, default=_as_plain)) for task in tasks]
    except (TypeError, ValueError, RecursionError):
        return None
    whole = [_digest(task) for task in plain]
    try:
        bare = [_digest(_normal(task)) for task in plain]
    except RecursionError:
        return whole
    return bare if len(set(bare)) >= max(MIN_TASKS, _MIN_DISTINCT * len(set(whole))) else whole


def _are_listed(tasks: Any) -> bool:
    return isinstance(tasks, list | tuple | range | np.ndarray) or type(tasks).__module__.split(".")[0] == "datasets"


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        words = value.split()
        return " ".join(unicodedata.normalize("NFC", word) if len(word) <= _MAX_WORD else word for word in words)
    if isinstance(value, list):
        return [_normal(item) for item in value]
    if isinstance(value, dict):
        return {
            key: _normal(item)
            for key, item in value.items()
            if isinstance(item, dict | list) or not _ROW_NUMBER.fullmatch(key)
        }
    return value


def _digest(task: Any) -> bytes:
    return hashlib.blake2b(json.dumps(task, sort_keys=True).encode(), digest_size=16).digest()


def _as_plain(value: Any) -> Any:
    """Return plain data for a value that JSON does not support. Raises TypeError if its content cannot be compared."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    dump: Callable[[Any], Any] | None = getattr(type(value), "model_dump", None)  # of pydantic
    if dump is not None:
        return dump(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, _VALUES):
        return repr(value)
    raise TypeError(f"{type(value).__name__} is not plain data")


def _warn_of_common_tasks(training: Any, held_out: Any) -> None:
    """Warn if some evaluation tasks are also trained on. The same list for both is the user's choice."""
    if held_out is training or not (_are_listed(training) and _are_listed(held_out)):
        return
    if len(training) + len(held_out) > _MAX_COMPARED:
        return
    digests = _digests([*training, *held_out])  # together, so that row numbers are treated equally
    if digests is None:
        return
    first, second = digests[: len(training)], digests[len(training) :]
    if first == second:
        return
    if common := len(set(first) & set(second)):
        warnings.warn(
            f"{common} of the {len(second)} tasks of eval_tasks are in tasks, too, so that an evaluation plays tasks "
            "that are trained on. Remove them from one of the two",
            RuntimeWarning,
            stacklevel=4,
        )
