"""Folders of runs and benchmarks as plain values for the page: curves, settings, tables, episodes and stop reason."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import threading
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from forge_agents import safe_yaml
from forge_agents.bench.report import Report, ReportError
from forge_agents.episodes.stored import finite, whole_lines
from forge_agents.errors import RunFolderError, did_you_mean
from forge_agents.files import check_plain_files, is_shallow, open_plain, user_path
from forge_agents.http_body import too_many_values
from forge_agents.jsonl import number
from forge_agents.viewer.episodes import Pieces, shown_episode
from forge_agents.viewer.index import EpisodeIndex

T = TypeVar("T")
_log = logging.getLogger(__name__)
_Point: TypeAlias = tuple[int, dict[str, float | None]]
"""Step and values by curve."""
_Row: TypeAlias = "tuple[array[int], array[float]]"
"""Numbers of the curves of a row, and their values."""
MAX_POINTS = 1000
"""Maximum number of points of a curve. Longer curves are thinned evenly and keep their ends."""
_MAX_ROWS = 4 * MAX_POINTS
"""Number of rows of a file above which they are thinned: every second, fourth, ... stays, see `_thinned`."""
_MAX_SERIES = 10_000
"""Maximum number of curves of a file."""
_MAX_GAPS = 20
"""Maximum number of points per value, beyond the first 10,000, so that a small file does not make a large page."""
_MAX_PROBLEMS = 5
"""Number of unreadable lines of a file that are shown."""
_MAX_OPPONENTS, _MAX_HEADS = 1000, 50
"""Maximum number of rows and columns of a league's table."""
_MAX_TEXT = 1000
"""Maximum number of characters in a cell of a league's table."""
_MAX_COMPUTED = 8
"""Maximum number of reports of a run whose tables or pages are kept. Computing one may take 10 s."""
_FILES = (
    "config.yaml", "metrics.jsonl", "episodes.jsonl", "verifiers.jsonl", "warnings.jsonl", "league.json", "board.json",
)  # fmt: skip
_VERIFIER_CURVES = ("weight", "accuracy", "tpr", "fpr")
_LEAGUE = (
    "Ratings are OpenSkill's mean and standard deviation. Win rate is that of the trained policy against the opponent. "
    "Margin is its reward minus the opponent's, mean of recent games. Chance is the probability that the opponent is "
    "drawn next."
)


class Run:
    """Folder of one run, which is never changed. New data of a running training appear at the next update.

    Args:
        name: Name on the page.
        number: Index among the runs of the page, used as id.
    """

    def __init__(self, folder: Path, *, name: str, number: int) -> None:
        self.folder, self.name, self.number = folder, name, number
        self.index = EpisodeIndex(folder / "episodes.jsonl")
        self._metric_lines = _Lines(folder / "metrics.jsonl", dict)
        self._verifier_lines = _Lines(folder / "verifiers.jsonl", _verifier_curves)
        self._update_problems: list[str] = []
        self._read: dict[str, tuple[tuple[int, int], Any]] = {}
        self._computed: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._computing = threading.Lock()  # requests come from several threads
        policies = self.settings().get("policies")
        policies = policies if isinstance(policies, Mapping) else {}
        models = {str(n): str(p.get("model", "")) for n, p in policies.items() if isinstance(p, Mapping)}
        self._pieces = Pieces(folder, models)

    def update(self, stop: threading.Event | None = None) -> None:
        """Index new episodes. Errors become problems of the run."""
        try:
            self.index.update(stop)
            self._update_problems = []
        except (RunFolderError, OSError) as cause:
            self._update_problems = [str(cause)]

    def status(self) -> dict[str, Any]:
        """Return counts, problems, the stop reason and a stamp that changes with the files. The page polls this."""
        metrics = self._metric_lines.read()
        problems = [*metrics.problems, *self._verifier_lines.read().problems]
        problems += self._cached("warnings.jsonl", _warnings) or []
        episodes = self.index.status()
        files = {name: self._stamp(name) for name in _FILES}
        if files["config.yaml"][0] and not self.settings():
            problems.append("config.yaml holds no settings. It may be incomplete or damaged")
        return {
            "id": self.number,
            "name": self.name,
            "folder": str(self.folder),
            "steps": metrics.total,
            "ending": self._ending(),
            "episodes": {key: episodes[key] for key in ("episodes", "bytes", "indexed")},
            "problems": list(dict.fromkeys([*self._update_problems, *problems, *episodes["problems"]])),
            "has": {
                "metrics": bool(metrics.total),
                "episodes": bool(episodes["bytes"]),
                "verifiers": bool(files["verifiers.jsonl"][0]),
                "tables": bool(files["league.json"][0] or self._boards()),
                "settings": bool(files["config.yaml"][0]),
            },
            "stamp": ".".join(str(part) for stamp in files.values() for part in stamp),
        }

    def metrics(self) -> dict[str, Any]:
        """Return ``step`` and ``series`` (values by metric, None where a step has none), with at most `MAX_POINTS`."""
        lines = self._metric_lines.read()
        return {"step": [step for step, _ in lines.points], "series": _series(lines.points), "every": lines.every}

    def settings(self) -> dict[str, Any]:
        """Return the settings in ``config.yaml``. Empty without the file."""
        settings = self._cached("config.yaml", _yaml)
        return finite(settings) if isinstance(settings, Mapping) else {}

    def verifiers(self) -> dict[str, Any]:
        """Return ``latest``, the newest report, and ``step`` and ``series`` with curves by ``QUANTITY/VERIFIER``."""
        lines = self._verifier_lines.read()
        steps = [step for step, _ in lines.points]
        return {"latest": finite(lines.latest), "step": steps, "series": _series(lines.points)}

    def tables(self) -> list[dict[str, Any]]:
        """Return league tables and benchmark reports as ``title``, ``heads``, ``rows``, ``note`` and ``names``."""
        league = [_league_table(self._cached("league.json", _json))] if (self.folder / "league.json").exists() else []
        boards = [
            self.computed((board.name, self._stamp(board.name)), partial(_board_tables, board))
            for board in self._boards()
        ]
        return [*league, *itertools.chain.from_iterable(boards)]

    def stamps(self) -> tuple[tuple[int, int], ...]:
        """Return sizes and times of change of the files that a report on verifiers depends on."""
        names = ("config.yaml", "metrics.jsonl", "verifiers.jsonl", "checkpoints")
        return tuple(self._stamp(name) for name in names)

    def computed(self, key: tuple[Any, ...], compute: Callable[[], T]) -> T:
        """Return what `compute` returned for this key, or returns now. The newest `_MAX_COMPUTED` results are kept."""
        with self._computing:
            if key not in self._computed:
                self._computed[key] = compute()
            self._computed.move_to_end(key)
            if len(self._computed) > _MAX_COMPUTED:
                self._computed.popitem(last=False)
            result: T = self._computed[key]
            return result

    def episode(self, n: int) -> dict[str, Any]:
        """Return episode `n`. Raises KeyError if there is none, and RunFolderError if another version wrote it."""
        row = self.index.row(n)
        try:
            return shown_episode(n, row, self._pieces.of)
        except (ArithmeticError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as cause:
            raise RunFolderError(
                f"episode {n} of {self.name} was written by another version ({type(cause).__name__}: {cause})"
            ) from cause

    def _ending(self) -> dict[str, Any] | None:
        """Return ``kind``, ``step`` and ``reason`` of an early stop, or None if the run did all steps or still runs."""
        ending = self._cached("ending.json", _json)
        if not isinstance(ending, Mapping) or not _is_step(ending.get("step")):
            return None
        return {"kind": str(ending.get("ending")), "step": ending["step"], "reason": str(ending.get("reason", ""))}

    def _boards(self) -> list[Path]:
        return [file for file in sorted(self.folder.glob("*.json")) if _is_board(file)]

    def _stamp(self, name: str) -> tuple[int, int]:
        try:
            status = (self.folder / name).stat()
        except OSError:
            return (0, 0)
        return (status.st_size, status.st_mtime_ns)

    def _cached(self, name: str, read: Callable[[Path], T]) -> T | None:
        """Return the result of `read` for a file, computed once per change, or None without the file."""
        stamp = self._stamp(name)
        if not stamp[1]:
            return None
        if name not in self._read or self._read[name][0] != stamp:
            self._read[name] = (stamp, read(self.folder / name))
        result: T = self._read[name][1]
        return result


class _Read(NamedTuple):
    """Rows of a file."""

    total: int
    """Number of rows."""
    every: int
    points: list[_Point]
    """Steps and numbers of every such row and of the last one, at most `MAX_POINTS` and one, and the values of other
    rows that `_thinned` keeps."""
    latest: dict[str, Any] | None
    """The whole last row."""
    problems: list[str]
    """Why other lines are left out."""


class _Lines:
    """Rows of a JSON-lines file in the order of steps. Another process appends to the file or replaces it.

    Only new lines are read. A row replaces all rows with the same or later steps, because a run that was killed between
    its metrics and its checkpoint repeats steps. Only the last row and the numbers of others are kept.

    Args:
        file: The file.
        values: Returns the values of a row by curve, or None if the row has none.
    """

    def __init__(self, file: Path, values: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> None:
        self._file, self._values = file, values
        self._reading = threading.Lock()  # requests come from several threads
        self._rows: dict[int, _Row] = {}
        self._max_rows = _MAX_ROWS
        self._steps = array("q")
        self._latest: dict[str, Any] | None = None
        self._problems: list[str] = []
        self._reset(0)

    def read(self) -> _Read:
        """Read new lines and return all rows so far, thinned."""
        with self._reading:
            try:
                with open_plain(self._file) as file:
                    status = os.fstat(file.fileno())
                    if status.st_ino != self._inode or status.st_size < self._at:
                        self._reset(status.st_ino)
                    file.seek(self._at)
                    for raw, row, problem in whole_lines(file):
                        if isinstance(row, dict) and _is_step(row.get("step")):
                            if (values := self._values(row)) is not None:
                                self._append(row, values)
                        elif row is not None or problem:
                            why = problem or "its step is not a whole number"
                            self._num_problems += 1
                            if self._num_problems <= _MAX_PROBLEMS:
                                self._problems.append(f"line {self._line + 1} of {self._file.name} is left out: {why}")
                        self._at += len(raw)
                        self._line += raw.endswith(b"\n")
            except FileNotFoundError:
                self._reset(0)
            except OSError as cause:
                self._reset(0)
                self._problems.append(f"{self._file.name} cannot be read: {cause.strerror or cause}")
            problems, name = list(self._problems), self._file.name
            if self._num_problems > _MAX_PROBLEMS:
                problems.append(f"... and {self._num_problems - _MAX_PROBLEMS} more lines of {name}")
            if self._replaced:
                problems.append(f"{self._replaced} rows of {name} are left out: later rows repeat their steps")
            if self._is_wide:
                problems.append(f"curves of {name} are left out: it has more than {_MAX_SERIES}")
            count, every = len(self._steps), self._every
            every *= max(1, math.ceil(count / MAX_POINTS / every))
            names = list(self._names)
            points = [self._point(n, row, names) for n, row in _thinned(self._rows, every, count - 1).items()]
            points, num_rare = _without_rare(points)
            problems += [f"{num_rare} curves of {name} are left out: they have too few values"] * (num_rare > 0)
            return _Read(count, every, points, self._latest, problems)

    def _point(self, number: int, row: _Row, names: Sequence[str]) -> _Point:
        pairs = zip(*row, strict=True)
        return self._steps[number], {names[at]: None if math.isnan(value) else value for at, value in pairs}

    def _append(self, row: dict[str, Any], values: Mapping[str, Any]) -> None:
        while self._steps and self._steps[-1] >= row["step"]:
            self._steps.pop()
            self._rows.pop(len(self._steps), None)
            self._replaced += 1
        number = len(self._steps)
        self._steps.append(row["step"])
        self._latest = row
        numbers = self._rows[number] = array("H"), array("d")
        for name in values:
            if name == "step":
                continue
            if name in self._names or len(self._names) < _MAX_SERIES:
                numbers[0].append(self._names.setdefault(name, len(self._names)))
                numbers[1].append(math.nan if (value := _short(values[name])) is None else value)
            else:
                self._is_wide = True
        if len(self._rows) > self._max_rows:
            while number / self._every > 3 * _MAX_ROWS // 4:
                self._every *= 2
            self._rows = _thinned(self._rows, self._every, number)
            self._max_rows = max(_MAX_ROWS, 2 * len(self._rows))  # so that thinning takes linear time in all

    def _reset(self, inode: int) -> None:
        self._inode, self._at, self._line, self._replaced = inode, 0, 0, 0
        self._steps, self._every, self._rows, self._problems, self._num_problems = array("q"), 1, {}, [], 0
        self._max_rows = _MAX_ROWS
        self._names: dict[str, int] = {}
        self._is_wide = False
        self._latest = None


def _thinned(rows: Mapping[int, _Row], every: int, last: int) -> dict[int, _Row]:
    """Return every `every`-th row and the last one, and of the rows between them what these lack.

    Not every row has all curves: evaluations come every `eval_every` steps, perhaps never in a row that stays. So the
    first value of a curve since the last row that stays is kept if that row has none.
    """
    thinned: dict[int, _Row] = {}
    present: set[int] = set()
    for n, row in rows.items():
        curves, values = row
        if n % every == 0:
            present = set(curves)
            thinned[n] = row
        elif n == last:
            thinned[n] = row
        elif not present.issuperset(curves):
            pairs = [pair for pair in zip(curves, values, strict=True) if pair[0] not in present]
            present.update(curves)
            thinned[n] = array("H", (curve for curve, _ in pairs)), array("d", (value for _, value in pairs))
    return thinned


def find_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Return the runs in `paths`: folders of runs, or folders with such folders.

    Raises:
        RunFolderError: A path does not exist, or holds no run.
    """
    folders: list[Path] = []
    for name in paths:
        path = user_path(name)
        if path.is_file() and (path.name in _FILES or _is_board(path)):
            path = path.parent
        if not path.is_dir():
            siblings = [other.name for other in path.parent.iterdir() if other.is_dir()] if path.parent.is_dir() else []
            raise RunFolderError(
                f"{path} is not a folder. Give the out_dir of a run.{did_you_mean(path.name, siblings)}"
            )
        inside = [*filter(_is_run, (path, *sorted(path.iterdir())))]
        if not inside:
            raise RunFolderError(
                f"{path} holds no run: neither it nor a folder in it has one of {', '.join(_FILES)}. Give the out_dir "
                "of a training run or a benchmark"
            )
        for folder in inside:
            check_plain_files(folder)
        folders += [folder for folder in inside if folder not in folders]
    names = _names([folder.absolute() for folder in folders])
    return [Run(folder, name=name, number=at) for at, (folder, name) in enumerate(zip(folders, names, strict=True))]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many as needed to differ."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _is_run(folder: Path) -> bool:
    try:
        return folder.is_dir() and (
            any((folder / name).is_file() for name in _FILES) or any(map(_is_board, folder.glob("*.json")))
        )
    except OSError as cause:  # another user's, next to runs
        _log.warning("%s is left out, because it cannot be read (%s)", folder, cause.strerror)
        return False


def _is_board(file: Path) -> bool:
    """Return whether a JSON file begins like a benchmark report. Links and pipes, which may block, are not opened."""
    try:
        with open_plain(file) as stream:
            return b'"kind": "forge-agents benchmark"' in stream.read(200)
    except OSError:  # also a folder, or another user's file
        return False


def _warnings(file: Path) -> list[str]:
    """Return the newest warnings of a run, with their steps."""
    try:
        with open_plain(file) as stream:
            rows = (row for _, row, _ in whole_lines(stream) if isinstance(row, dict) and _is_step(row.get("step")))
            texts = (f"step {row['step']}: {row.get('warning')}"[:_MAX_TEXT] for row in rows)
            return [*deque(texts, maxlen=_MAX_PROBLEMS)]
    except OSError as cause:
        return [f"{file.name} cannot be read: {cause.strerror or cause}"]


def _json(file: Path) -> Any:
    try:
        with open_plain(file) as stream:
            text = stream.read()
        value = None if too_many_values(text) else json.loads(text.decode(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if is_shallow(value) else None


def _yaml(file: Path) -> Any:
    try:
        with open_plain(file) as stream:
            return safe_yaml.read_stream(stream, name=str(file))
    except (OSError, ValueError):
        return None


def _series(points: Sequence[tuple[int, Mapping[str, float | None]]]) -> dict[str, list[float | None]]:
    """Return the values by name, None where a row has none."""
    names = dict.fromkeys(name for _, values in points for name in values)
    return {name: [values.get(name) for _, values in points] for name in names}


def _without_rare(points: list[_Point]) -> tuple[list[_Point], int]:
    """Leave out the curves with the fewest values if there are more than `_MAX_GAPS` points per value."""
    counts = Counter(name for _, values in points for name in values)
    num_curves = (_MAX_GAPS * counts.total() + 10_000) // max(1, len(points))
    if num_curves >= len(counts):
        return points, 0
    frequent = {name for name, _ in counts.most_common(num_curves)}
    points = [(step, {name: value for name, value in values.items() if name in frequent}) for step, values in points]
    return points, len(counts) - num_curves


def _verifier_curves(row: Mapping[str, Any]) -> dict[str, Any] | None:
    if not isinstance(row.get("verifiers"), list):
        return None
    verifiers = [verifier for verifier in row["verifiers"] if isinstance(verifier, Mapping)]
    curves = {f"{key}/{v.get('name')}": v.get(key) for v in verifiers for key in _VERIFIER_CURVES}
    return {**curves, "effective number": row.get("effective_number")}


def _short(value: Any) -> float | None:
    """Round to six digits, more than a curve shows."""
    value = number(value)
    return None if value is None else float(f"{value:.6g}")


def _is_step(value: Any) -> bool:
    """Return whether a value is a step number that a browser, whose numbers are floats, represents exactly."""
    return type(value) is int and abs(value) < 2**53


def _board_tables(file: Path) -> list[dict[str, Any]]:
    """Return the tables of a benchmark report, or one with the reason why it cannot be read."""
    try:
        report = Report.load(file)
    except ReportError as cause:
        return [_table(file.name, note=str(cause))]
    page = report.document()
    head = _table(f"Benchmark {report.settings['suite']}", note=" ".join([page.headline, *page.warnings]))
    return [head, *(_table(s.title, s.heads, s.rows, note=s.note, names=s.names) for s in page.sections)]


def _league_table(league: Any) -> dict[str, Any]:
    """Return the policy of a league and its opponents, the highest rating first."""
    if not isinstance(league, Mapping) or not isinstance(league.get("opponents"), list):
        return _table("League", note="league.json holds no league table. Another version may have written it")
    policy = {"name": league.get("policy"), "kind": "learns"} | {
        name: league[name] for name in ("rating", "rating_sigma") if name in league
    }
    rows = [policy, *(row for row in league["opponents"] if isinstance(row, Mapping))]
    rows.sort(key=lambda row: -(number(row.get("rating")) or 0.0))
    left_out, rows = len(rows) - _MAX_OPPONENTS, rows[:_MAX_OPPONENTS]
    heads = tuple(itertools.islice(dict.fromkeys(name for row in rows for name in row), _MAX_HEADS))
    note = _LEAGUE + (f" {left_out} more rows are left out." if left_out > 0 else "")
    return _table("League", heads, tuple(tuple(_text(row.get(head)) for head in heads) for row in rows), note=note)


def _table(
    title: str, heads: Sequence[str] = (), rows: Sequence[Sequence[str]] = (), *, note: str, names: int = 1
) -> dict[str, Any]:
    return {"title": title, "heads": heads, "rows": rows, "note": note, "names": names}


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)[:_MAX_TEXT]
