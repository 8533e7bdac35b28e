"""The tasks of a program: a list, a file, a data set or a function, in a part for training and one for evaluation."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from forge_agents.envs.seeds import index_of_seed, is_held_out
from forge_agents.errors import ForgeError
from forge_agents.files import user_path
from forge_agents.jsonl import UnreadableJsonError, json_values
from forge_agents.programs.running import takes, told

AnyTasks: TypeAlias = Any
"""Anything with a length and numbered items, the path of a file, or a function ``rng -> task``."""
HELD_OUT = 0.2
"""Share of a list that is kept for evaluation."""
MIN_TASKS = 10
"""Length of a list from which on a part of it is held out."""
_MAX_COMPARED = 100_000
"""Length of a list up to which tasks are compared by what they hold."""
_MAX_REMEMBERED = 16
"""Number of lists whose split is remembered: environments are made anew for each group of episodes."""
_ROW_NUMBERS = (
    *("id", "_id", "uid", "uuid", "guid", "idx", "index", "row_id", "task_id", "item_id", "example_id", "sample_id"),
    *("question_id", "problem_id", "instance_id", "__index_level_0__"),
)
"""Fields, in lower case, that number the rows of a data set: two rows that differ in them alone are the same task."""
_FEWEST_CONTENTS = 0.05
"""Number of different tasks without their row numbers, as a share of those with them, from which on row numbers are not
compared. With fewer the number seems to be the task, such as an index into a data set that the program opens."""
_JSON, _TABLES = (".json", ".jsonl", ".ndjson"), (".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class _Split:
    """Indices of the tasks of a list: those for training, and those for evaluation. The same if it is too short."""

    training: Sequence[int]
    held_out: Sequence[int]
    contents: Sequence[bytes] | None
    """Digest of each task; equal for equal tasks. None where tasks cannot be compared."""


class Tasks:
    """Chooses the task of an episode by its seed.

    The seeds of training and of demonstrations play one part of the tasks, those of evaluations and benchmarks the
    other: the tasks of ``eval_tasks``, or else a fifth of the list, chosen by a digest of each task. Equal tasks are in
    the same part, also where a field such as ``id`` numbers the rows. A function draws both from other seeds, but
    nothing keeps it from drawing the same task.

    Args:
        tasks: A list, the path of a JSON, JSONL, CSV or Parquet file or of a folder that ``Dataset.save_to_disk``
            wrote, a data set, or a function ``rng -> task``.
        eval_tasks: The same, for evaluation; None: a part of `tasks`. The same list as `tasks` evaluates on the tasks
            of training.

    Raises:
        TypeError, ValueError: There is no task in it, or it is something else.
    """

    def __init__(self, tasks: AnyTasks, eval_tasks: AnyTasks | None = None) -> None:
        self._training = _opened(tasks, "tasks")
        self._held_out = None if eval_tasks is None else _opened(eval_tasks, "eval_tasks")
        if self._held_out is not None:
            _warn_of_common_tasks(self._training, self._held_out)

    @property
    def num_training(self) -> int | None:
        """Number of tasks that training plays; None where a function draws them."""
        if callable(self._training):
            return None
        return len(self._training if self._held_out is not None else _split(self._training).training)

    def of(self, seed: int, rng: np.random.Generator, name: str) -> Any:
        """The task of an episode.

        Args:
            seed: The episode's.
            rng: Handed to a function that draws tasks.
            name: The environment's, for messages.

        Raises:
            ForgeError: The list failed to give the task.
        """
        held_out = is_held_out(seed)
        tasks = self._held_out if held_out and self._held_out is not None else self._training
        if callable(tasks):
            return tasks(rng)
        if self._held_out is not None:
            return _numbered(tasks, index_of_seed(seed, len(tasks)), name)
        split = _split(tasks)
        if held_out and split.held_out is split.training and not (len(tasks) == 1 and tasks[0] is None):
            warnings.warn(
                f"an evaluation of {name} plays tasks that are also trained on: its {len(tasks)} tasks are too few, or "
                f"too many are equal, to hold some out. Give at least {MIN_TASKS} different tasks, or other tasks as "
                "eval_tasks=; eval_tasks=tasks evaluates on the training tasks without this warning",
                RuntimeWarning,
                stacklevel=2,
            )
        part = split.held_out if held_out else split.training
        return _numbered(tasks, part[index_of_seed(seed, len(part))], name)


def _numbered(tasks: Any, number: int, name: str) -> Any:
    try:
        return tasks[int(number)]
    except Exception as error:
        advice = "give a list of tasks; of a table, frame.to_dict('records')"
        kind = type(tasks).__name__
        raise ForgeError(f"tasks[{number}] of {name}, a {kind}, failed with {told(error)}; {advice}") from error


# ---- where tasks come from


def _opened(given: AnyTasks, what: str) -> Any:
    """A list or a function."""
    tasks = _read(user_path(given), what) if isinstance(given, str | os.PathLike) else given
    if callable(tasks):
        takes(tasks, what, "rng")
        return tasks
    kind = type(tasks).__name__
    if isinstance(tasks, Mapping):
        splits = ", ".join(map(str, list(tasks)[:8]))
        raise TypeError(
            f"{what} is a {kind} with the keys {splits}; give a list of tasks. Of a data set with splits give "
            "tasks=data['train'], eval_tasks=data['test']"
        )
    if not all(hasattr(tasks, f"__{has}__") for has in ("len", "getitem")):
        raise TypeError(
            f"{what} is a {kind}; give a list of tasks, a file of them, a data set that has a length (of a stream "
            "list(data.take(1000))), or a function rng -> task"
        )
    if not len(tasks):
        raise ValueError(f"{what} is empty; give at least one task, or a function rng -> task")
    return tasks


def _read(path: Path, what: str) -> Any:
    if not path.exists():
        advice = "give the path of a file of tasks, or a list of them"
        if not path.is_absolute():
            advice = f"it is looked for in {Path.cwd()}; beside a module it is Path(__file__).with_name({path.name!r})"
        raise ValueError(f"{what}={str(path)!r} does not exist; {advice}")
    if path.suffix.lower() not in (*_JSON, *_TABLES) and not path.is_dir():
        known = ", ".join((*_JSON, *_TABLES))
        raise ValueError(f"{what}={str(path)!r} is no file of tasks; give one that ends in {known}")
    stat = path.stat()
    return _rows(path.absolute(), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(_MAX_REMEMBERED)
def _rows(path: Path, changed_ns: int, size: int) -> Any:
    """The rows of a file, which is read anew when it has changed."""
    if path.suffix.lower() in _JSON and not path.is_dir():
        rows = []
        for line, value in json_values(path):
            if isinstance(value, UnreadableJsonError):
                raise ValueError(f"{path}:{line} is not JSON ({value}); write one task per line")  # noqa: TRY004  # content of a file
            rows.append(value)
        return rows[0] if len(rows) == 1 and (isinstance(rows[0], list) or _are_splits(rows[0])) else rows
    try:
        import datasets  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ImportError(f"{path} is read by the package datasets; pip install datasets, or write JSONL") from None
    if path.is_dir():
        return datasets.load_from_disk(str(path))
    read = datasets.Dataset.from_csv if path.suffix.lower() == ".csv" else datasets.Dataset.from_parquet
    return read(str(path))


def _are_splits(value: Any) -> bool:
    """Whether a JSON value holds lists of tasks by name, such as ``{"train": [...], "test": [...]}``."""
    return isinstance(value, dict) and bool(value) and all(isinstance(part, list) for part in value.values())


# ---- the split


_splits: dict[int, tuple[Any, int, _Split]] = {}
"""By the id of a list, which is kept here so that no other list gets its id: the list, its length and its split."""
_lock = threading.Lock()


def _split(tasks: Any) -> _Split:
    with _lock:  # environments are reset in threads
        remembered = _splits.get(id(tasks))
        if remembered is not None and remembered[1] == len(tasks):
            return remembered[2]
        split = _new_split(tasks)
        while len(_splits) >= _MAX_REMEMBERED:
            _splits.pop(next(iter(_splits)))
        _splits[id(tasks)] = tasks, len(tasks), split
        return split


def _new_split(tasks: Any) -> _Split:
    contents, every = _contents(tasks), range(len(tasks))
    marks = contents or [_digest(str(index)) for index in every]
    order = sorted(every, key=lambda index: (marks[index], index))
    count = round(HELD_OUT * len(order))
    while 0 < count < len(order) and marks[order[count]] == marks[order[count - 1]]:
        count += 1  # equal tasks stay together
    if len(order) < MIN_TASKS or count == len(order):
        return _Split(every, every, contents)
    return _Split(sorted(order[count:]), sorted(order[:count]), contents)


def _contents(tasks: Any) -> list[bytes] | None:
    """A digest of what each task holds, without its row number; None where tasks are no plain data, or too many."""
    plain = isinstance(tasks, list | tuple | range) or type(tasks).__module__.partition(".")[0] == "datasets"
    if not plain or len(tasks) > _MAX_COMPARED:
        return None
    try:
        texts = [json.dumps(task, sort_keys=True, default=_as_data) for task in tasks]
        whole, bare = ([_digest(text) for text in each] for each in (texts, map(_without_row_number, texts)))
    except (TypeError, ValueError, RecursionError):
        return None
    different = len(set(bare))
    return bare if different >= max(MIN_TASKS, _FEWEST_CONTENTS * len(set(whole))) else whole


def _without_row_number(text: str) -> str:
    """A task in JSON without the fields that number it, if it is an object."""
    if not text.startswith("{"):
        return text
    return json.dumps({key: value for key, value in json.loads(text).items() if key.lower() not in _ROW_NUMBERS})


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _as_data(value: Any) -> Any:
    """Plain data of a task that JSON does not know. What has no content that can be compared raises TypeError."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    dump: Callable[[Any], Any] | None = getattr(type(value), "model_dump", None)  # of pydantic
    if dump is not None:
        return dump(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is no plain data")


def _warn_of_common_tasks(training: Any, held_out: Any) -> None:
    """Warn where some tasks of evaluation are also trained on. The same list for both is the user's choice."""
    if held_out is training or callable(training) or callable(held_out):
        return
    if _split(training).contents is None or _split(held_out).contents is None:
        return
    contents = _contents([*training, *held_out])  # at once, so that both are compared in the same fields
    if contents is None:
        return
    ours, theirs = contents[: len(training)], contents[len(training) :]
    if ours == theirs:
        return
    if common := len(set(ours) & set(theirs)):
        warnings.warn(
            f"{common} of the {len(theirs)} tasks of eval_tasks are in tasks, too, so that an evaluation plays tasks "
            "that are trained on; remove them from one of the two",
            RuntimeWarning,
            stacklevel=4,
        )
