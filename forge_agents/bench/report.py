"""What `benchmark` returns: results, where they come from, and how they are shown and kept.

In: records, or a file that `save` wrote. Out: a table, JSON, Markdown, HTML. Waits for the disk.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from forge_agents.bench.costs import Spent, spent_by_player
from forge_agents.bench.records import Record
from forge_agents.bench.schedule import World
from forge_agents.bench.summary import Summary, summarise
from forge_agents.errors import ForgeError

FORMAT = 2
"""Of the JSON file. Raised whenever what a field means changes."""
_READABLE = (1, FORMAT)
"""In 1, the summary's decisions, tokens and pass@k have no intervals; what is read is the same."""
_KIND = "forge-agents benchmark"


class ReportError(ForgeError, ValueError):
    """A file that is no whole report of this format, or reports that cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A benchmark's results. The same players, suite and seed give the same report, `timing` aside."""

    settings: Mapping[str, Any]
    """``suite``, ``episodes``, ``seed``, ``swap_seats``, ``samples``, ``exploitability_samples``; of a registered suite
    also ``suite_defaults``, what it says itself."""
    worlds: tuple[World, ...]
    players: Mapping[str, Mapping[str, Any]]
    """By name: type, model, sampling, hash of the weights; ``fingerprint`` stands for all of it."""
    provenance: Mapping[str, Any]
    """Versions of Python and packages."""
    records: tuple[Record, ...]
    """One an episode, in the order of the plan."""
    planned: int
    """Episodes of the whole plan."""
    stopped: str = ""
    """Why not all was played; empty where all was."""
    exploitability: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By environment and player, in games that can be searched whole: see `forge_agents.bench.exploitability`."""
    timing: Mapping[str, Any] = field(default_factory=dict)
    """Date, seconds (of play alone, too: without the start of engines), episodes played now and reused: the only part
    that differs from run to run."""

    @property
    def complete(self) -> bool:
        """Whether every planned episode was played and none failed."""
        return not self.missing and not any(record.error for record in self.records)

    @property
    def missing(self) -> int:
        """Planned episodes that were not played."""
        return self.planned - len(self.records)

    @cached_property
    def summary(self) -> Summary:
        """Estimates with their intervals, computed from the records."""
        return summarise(self.records, self.worlds, tuple(self.players))

    @property
    def spent(self) -> dict[str, Spent]:
        """Tokens and money by player, of all episodes here that did not fail, whichever call played them."""
        return spent_by_player(self.records, self.players)

    def as_json(self) -> dict[str, Any]:
        """Plain values; NaN is None."""
        facts = {
            "kind": _KIND,
            "format": FORMAT,
            "complete": self.complete,
            "planned": self.planned,
            "stopped": self.stopped,
            "settings": self.settings,
            "environments": [asdict(world) for world in self.worlds],
            "players": self.players,
            "provenance": self.provenance,
            "summary": asdict(self.summary),
            "exploitability": self.exploitability,
            "spent": {name: asdict(spent) for name, spent in self.spent.items()},
            "episodes": [record.as_json(timing=False) for record in self.records],
            "timing": self.timing,
        }
        return {name: _strict(value) for name, value in facts.items()}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as JSON, all or nothing. Read it again with `load`."""
        return write(path, json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote. The summary is computed anew from the episodes.

        Raises:
            ReportError: The file is missing, empty, half-written, no report, or of another format.
        """
        return _from_json(_read(Path(path)), Path(path))

    def table(self) -> str:
        """Print the report to the terminal, if there is one, and return it as text."""
        from forge_agents.bench.text import show

        return show(self)

    def markdown(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as Markdown; with `path` also written there."""
        from forge_agents.bench.text import as_markdown

        text = as_markdown(self)
        if path is not None:
            write(path, text)
        return text

    def html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one HTML file that loads nothing from elsewhere and runs no script."""
        from forge_agents.bench.html import page

        return write(path, page(self))


def write(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text file by rename, so that nobody ever reads half of it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read as a report: {error}") from None
    if not text.strip():
        raise ReportError(
            f"{path} is empty; a report is written by `forge-agents bench --json FILE` or report.save(...)"
        )
    try:
        return json.loads(text)
    except ValueError as error:
        advice = " It looks like a log of episodes: run the benchmark again with its folder as out_dir."
        hint = advice if path.suffix == ".jsonl" else ""
        raise ReportError(f"{path} is no whole JSON file ({error}); it may be cut off.{hint}") from None


def _from_json(facts: Any, path: Path) -> Report:
    if not isinstance(facts, dict) or facts.get("kind") != _KIND:
        raise ReportError(f"{path} is JSON, but no benchmark report")
    if facts.get("format") not in _READABLE:
        raise ReportError(
            f"{path} has report format {facts.get('format')}, this version of forge_agents reads "
            f"{' and '.join(map(str, _READABLE))}; run the "
            "benchmark again, or read it with the version that wrote it: "
            f"{facts.get('provenance', {}).get('packages', {}).get('forge-agents-rl', 'unknown')}"
        )
    try:
        worlds = tuple(World(**{**world, "seats": tuple(world["seats"])}) for world in facts["environments"])
        report = Report(
            settings=facts["settings"],
            worlds=worlds,
            players=facts["players"],
            provenance=facts["provenance"],
            records=tuple(Record.from_json(row) for row in facts["episodes"]),
            planned=facts["planned"],
            stopped=facts["stopped"],
            exploitability=facts["exploitability"],
            timing=facts["timing"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(f"{path} is a damaged report: {type(error).__name__}: {error}") from None
    known = {world.id for world in worlds}
    strange = next((record for record in report.records if record.env not in known), None)
    if strange is not None:
        raise ReportError(f"{path} is a damaged report: it has an episode of {strange.env}, which is not in its suite")
    return report


def _strict(value: Any) -> Any:
    """JSON without NaN, keys as text."""
    if isinstance(value, Mapping):
        return {str(name): _strict(entry) for name, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str | None) else repr(value)
