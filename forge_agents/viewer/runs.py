"""A run's folder as the page shows it: curves, settings, tables, episodes, and why it ended.

In: folders that training runs and benchmarks wrote. Out: plain values for JSON. Waits for the disk.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forge_agents import safe_yaml
from forge_agents.bench.report import Report, ReportError
from forge_agents.episodes.stored import finite, number, whole_lines
from forge_agents.errors import RunFolderError, did_you_mean
from forge_agents.files import check_plain_files, is_shallow, user_path
from forge_agents.viewer.episodes import Pieces, shown_episode
from forge_agents.viewer.index import EpisodeIndex

T = TypeVar("T")
MOST_POINTS = 1000
"""Of a curve; longer ones are thinned evenly, ends kept."""
_MOST_TEXT = 1000
"""Maximum number of characters in a cell of a league's table."""
_FILES = ("config.yaml", "metrics.jsonl", "episodes.jsonl", "verifiers.jsonl", "league.json", "board.json")
_VERIFIER_CURVES = ("weight", "accuracy", "tpr", "fpr")
_LEAGUE = (
    "Ratings are OpenSkill's mean and standard deviation. Win rate is the learning policy's against that opponent; "
    "chance is how likely the opponent is to be drawn next."
)


class Run:
    """One run's folder. Nothing in it is changed; what a running training appends is seen at the next look.

    Args:
        name: What the page calls it.
        number: Its place among the runs of the page, which is its id.
    """

    def __init__(self, folder: Path, *, name: str, number: int) -> None:
        self.folder, self.name, self.number = folder, name, number
        self.index = EpisodeIndex(folder / "episodes.jsonl")
        self._metric_lines = _Lines(folder / "metrics.jsonl")
        self._verifier_lines = _Lines(folder / "verifiers.jsonl")
        self._trouble: list[str] = []
        self._read: dict[str, tuple[tuple[int, int], Any]] = {}
        policies = self.settings().get("policies")
        policies = policies if isinstance(policies, Mapping) else {}
        models = {str(n): str(p.get("model", "")) for n, p in policies.items() if isinstance(p, Mapping)}
        self._pieces = Pieces(folder, models)

    def look(self, stop: threading.Event | None = None) -> None:
        """Take in episodes that were written meanwhile; what hinders it is shown as a problem of the run."""
        try:
            self.index.update(stop)
            self._trouble = []
        except (RunFolderError, OSError) as cause:
            self._trouble = [str(cause)]

    def status(self) -> dict[str, Any]:
        """What the page asks for again and again: counts, problems, its ending, and stamps of what has changed."""
        rows, wrong = self._metric_lines.read()
        wrong = [*wrong, *self._verifier_lines.read()[1]]
        try:
            episodes = self.index.status()
        except RunFolderError as cause:
            episodes = {"episodes": 0, "bytes": 0, "indexed": 0, "problems": [str(cause)]}
        files = {name: self._stamp(name) for name in _FILES}
        if files["config.yaml"][0] and not self.settings():
            wrong.append("config.yaml holds no settings; it may be half-written or damaged")
        return {
            "id": self.number,
            "name": self.name,
            "folder": str(self.folder),
            "steps": len(rows),
            "ending": self._ending(),
            "episodes": {key: episodes[key] for key in ("episodes", "bytes", "indexed")},
            "problems": list(dict.fromkeys([*self._trouble, *wrong, *episodes["problems"]])),
            "has": {
                "metrics": bool(rows),
                "episodes": bool(episodes["bytes"]),
                "verifiers": bool(files["verifiers.jsonl"][0]),
                "tables": bool(files["league.json"][0] or self._boards()),
                "settings": bool(files["config.yaml"][0]),
            },
            "stamp": ".".join(str(part) for stamp in files.values() for part in stamp),
        }

    def metrics(self) -> dict[str, Any]:
        """``step`` [points] and ``series``: [points] by metric, None where a step has none."""
        rows, _ = self._metric_lines.read()
        kept = _thinned(rows)
        names = dict.fromkeys(name for row in kept for name in row if name != "step")
        return {
            "step": [row["step"] for row in kept],
            "series": {name: [_short(row.get(name)) for row in kept] for name in names},
            "every": max(1, math.ceil(len(rows) / MOST_POINTS)),
        }

    def settings(self) -> dict[str, Any]:
        """``config.yaml``, resolved settings; empty where there is none."""
        found = self._cached("config.yaml", _yaml)
        return finite(found) if isinstance(found, Mapping) else {}

    def verifiers(self) -> dict[str, Any]:
        """``latest``: the newest report; ``step`` and ``series``: curves by ``WHAT/VERIFIER``."""
        rows = [row for row in self._verifier_lines.read()[0] if isinstance(row.get("verifiers"), list)]
        if not rows:
            return {"latest": None, "step": [], "series": {}}
        kept = _thinned(rows)
        series: dict[str, list[float | None]] = {}
        for place, row in enumerate(kept):
            named = [verifier for verifier in row["verifiers"] if isinstance(verifier, Mapping)]
            values = {f"{what}/{v.get('name')}": v.get(what) for v in named for what in _VERIFIER_CURVES}
            values["effective number"] = row.get("effective_number")
            for name, value in values.items():
                series.setdefault(name, [None] * len(kept))[place] = _short(value)
        return {"latest": finite(rows[-1]), "step": [row["step"] for row in kept], "series": series}

    def tables(self) -> list[dict[str, Any]]:
        """League tables and benchmark reports: ``title``, ``heads``, ``rows`` of texts, ``note``, ``names``."""
        league = [_league_table(self._cached("league.json", _json))] if (self.folder / "league.json").exists() else []
        return [*league, *(table for board in self._boards() for table in _board_tables(board))]

    def episode(self, n: int) -> dict[str, Any]:
        """Episode `n`, whole.

        Raises:
            KeyError: There is none.
            RunFolderError: Its row is of another version, or the file has changed.
        """
        row = self.index.row(n)
        try:
            return shown_episode(n, row, self._pieces.of)
        except (ArithmeticError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as cause:
            raise RunFolderError(
                f"episode {n} of {self.name} was written by another version ({type(cause).__name__}: {cause})"
            ) from cause

    def _ending(self) -> dict[str, Any] | None:
        """``kind`` (solved, plateau, flat, broken), ``step`` and ``reason``; None where all steps were done, or are."""
        said = self._cached("ending.json", _json)
        if not isinstance(said, Mapping) or not _is_step(said.get("step")):
            return None
        return {"kind": str(said.get("ending")), "step": said["step"], "reason": str(said.get("reason", ""))}

    def _boards(self) -> list[Path]:
        return [file for file in sorted(self.folder.glob("*.json")) if _is_board(file)]

    def _stamp(self, name: str) -> tuple[int, int]:
        try:
            stat = (self.folder / name).stat()
        except FileNotFoundError:
            return (0, 0)
        return (stat.st_size, stat.st_mtime_ns)

    def _cached(self, name: str, read: Callable[[Path], T]) -> T | None:
        """What `read` makes of a file, once per change; None where there is no file."""
        stamp = self._stamp(name)
        if not stamp[1]:
            return None
        if name not in self._read or self._read[name][0] != stamp:
            self._read[name] = (stamp, read(self.folder / name))
        found: T = self._read[name][1]
        return found


class _Lines:
    """The rows, by rising step, of a JSON-lines file that another process appends to, or replaces.

    Only what is new is read. A row takes the place of all whose steps are not below its own: a loop that was killed
    between its metrics and its checkpoint writes a step again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._reading = threading.Lock()  # requests come from several threads
        self._start_anew(0)

    def read(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows so far, and why other lines are left out."""
        with self._reading:
            try:
                with self._file.open("rb") as file:
                    stat = os.fstat(file.fileno())
                    if stat.st_ino != self._inode or stat.st_size < self._at:
                        self._start_anew(stat.st_ino)
                    file.seek(self._at)
                    for raw, row, wrong in whole_lines(file):
                        if isinstance(row, dict) and _is_step(row.get("step")):
                            while self._rows and self._rows[-1]["step"] >= row["step"]:
                                self._rows.pop()
                                self._again += 1
                            self._rows.append(row)
                        elif row is not None or wrong:
                            why = wrong or "its step is not a whole number"
                            self._wrong.append(f"line {self._line + 1} of {self._file.name} is left out: {why}")
                        self._at += len(raw)
                        self._line += raw.endswith(b"\n")
            except FileNotFoundError:
                self._start_anew(0)
            again = f"{self._again} rows of {self._file.name} are left out: later rows begin again at their steps"
            return list(self._rows), [*self._wrong, *([again] if self._again else [])]

    def _start_anew(self, inode: int) -> None:
        self._inode, self._at, self._line, self._again = inode, 0, 0, 0
        self._rows: list[dict[str, Any]] = []
        self._wrong: list[str] = []


def find_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The runs in `paths`: folders of runs, or folders that hold such folders.

    Raises:
        RunFolderError: A path does not exist, or holds no run.
    """
    folders: list[Path] = []
    for given in paths:
        path = user_path(given)
        if path.is_file() and (path.name in _FILES or _is_board(path)):
            path = path.parent
        if not path.is_dir():
            siblings = [other.name for other in path.parent.iterdir() if other.is_dir()] if path.parent.is_dir() else []
            raise RunFolderError(
                f"{path} is no folder; give the out_dir of a run.{did_you_mean(path.name, siblings)}"
            )
        inside = [path] if _is_run(path) else sorted(child for child in path.iterdir() if _is_run(child))
        if not inside:
            raise RunFolderError(
                f"{path} holds no run: neither it nor a folder in it has one of {', '.join(_FILES)}; give the out_dir "
                "of a training run or a benchmark"
            )
        for folder in inside:
            check_plain_files(folder)
        folders += [folder for folder in inside if folder not in folders]
    names = _names([folder.absolute() for folder in folders])
    return [Run(folder, name=name, number=at) for at, (folder, name) in enumerate(zip(folders, names, strict=True))]


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _is_run(folder: Path) -> bool:
    return folder.is_dir() and (
        any((folder / name).is_file() for name in _FILES)
        or any(file.is_file() and _is_board(file) for file in folder.glob("*.json"))
    )


def _is_board(file: Path) -> bool:
    """Whether a JSON file begins as a report that a benchmark saved."""
    with file.open("rb") as opened:
        return b'"kind": "forge-agents benchmark"' in opened.read(200)


def _json(file: Path) -> Any:
    try:
        value = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if is_shallow(value) else None


def _yaml(file: Path) -> Any:
    try:
        return safe_yaml.read(file)
    except ValueError:
        return None


def _thinned(rows: Sequence[T]) -> list[T]:
    every = max(1, math.ceil(len(rows) / MOST_POINTS))
    return [*rows[:-1:every], *rows[-1:]]


def _short(value: Any) -> float | None:
    """Six digits are more than a curve shows."""
    known = number(value)
    return None if known is None else float(f"{known:.6g}")


def _is_step(value: Any) -> bool:
    """Whether a value is the number of a step, exact also in a browser, whose numbers are floats."""
    return type(value) is int and abs(value) < 2**53


def _board_tables(file: Path) -> list[dict[str, Any]]:
    """The tables of a saved benchmark; where it cannot be read, one that says why."""
    try:
        report = Report.load(file)
    except ReportError as cause:
        return [_table(file.name, note=str(cause))]
    shown = report.document()
    head = _table(f"Benchmark {report.settings['suite']}", note=" ".join([shown.headline, *shown.warnings]))
    return [head, *(_table(s.title, s.heads, s.rows, note=s.note, names=s.names) for s in shown.sections)]


def _league_table(league: Any) -> dict[str, Any]:
    """The policy of a league and its opponents, by falling rating."""
    if not isinstance(league, Mapping) or not isinstance(league.get("opponents"), list):
        return _table("League", note="league.json is no league's table; another version may have written it")
    own = {"name": league.get("policy"), "kind": "learns"} | {
        name: league[name] for name in ("rating", "rating_sigma") if name in league
    }
    rows = [own, *(row for row in league["opponents"] if isinstance(row, Mapping))]
    rows.sort(key=lambda row: -(number(row.get("rating")) or 0.0))
    heads = tuple(dict.fromkeys(str(name) for row in rows for name in row))
    return _table("League", heads, tuple(tuple(_text(row.get(head)) for head in heads) for row in rows), note=_LEAGUE)


def _table(
    title: str, heads: Sequence[str] = (), rows: Sequence[Sequence[str]] = (), *, note: str, names: int = 1
) -> dict[str, Any]:
    return {"title": title, "heads": heads, "rows": rows, "note": note, "names": names}


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)[:_MOST_TEXT]
