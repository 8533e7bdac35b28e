"""Report of a benchmark: results that can be saved, loaded and shown."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt

from forge_agents.bench import sections, tables
from forge_agents.bench.plan import SuiteEnv, is_planned
from forge_agents.bench.records import Record
from forge_agents.bench.summary import Results
from forge_agents.bench.tables import Document
from forge_agents.display import PAGE_MARK, visible_error
from forge_agents.errors import ForgeError
from forge_agents.files import MAX_BYTES, is_shallow, user_path, write_atomic
from forge_agents.http_body import bounded_json
from forge_agents.types import read_stored

FORMAT = 3
"""Version of the JSON file. Raised when the meaning of a field changes."""
_KIND = "forge-agents benchmark"
_MAX_SEEDS = 1_000_000
"""Maximum number of seeds of all environments together. A merge draws them again, in a few seconds."""
_MAX_PAIRS = 20_000
"""Maximum number of players, squared, times environments: each pair has a bootstrap and a test per environment. An
environment of many agents counts several times, because a merge lists all line-ups. With 10 agents and sides it counts
once."""
_MAX_BRACKETS, _MAX_COMMAS = 1_000_000, 10_000_000
"""Maximum numbers of brackets and commas in a report: an episode of two agents has 5 and 30."""
COMPARED_SETTINGS = ("suite", "episodes", "seed", "swap_agents", "samples")
"""Settings that comparable reports share."""


@dataclass(frozen=True, kw_only=True)
class _Settings:
    suite: str
    episodes: StrictInt
    seed: Annotated[int, Field(strict=True, ge=0)]
    swap_agents: StrictBool
    samples: StrictInt
    exploitability_samples: StrictInt = 0
    partners: Sequence[str] = ()
    suite_defaults: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _Player:
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class _Provenance:
    python: str
    packages: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """Types of the values in a report's mappings that are compared."""

    settings: _Settings
    players: Mapping[str, _Player]
    provenance: _Provenance


class ReportError(ForgeError, ValueError):
    """A file that is no complete report of a known version, or reports that cannot be compared."""

    def __init__(self, message: str) -> None:
        super().__init__(visible_error(message))  # reports of strangers are quoted


@dataclass(frozen=True, kw_only=True)
class Report(Results):
    """Results of a benchmark that can be saved, loaded and shown."""

    def __str__(self) -> str:
        return tables.as_text(self.document(brief=True))

    def as_json(self) -> dict[str, Any]:
        """Return plain values. NaN becomes None."""
        facts = {
            "kind": _KIND,
            "format": FORMAT,
            "complete": self.complete,
            "planned": self.planned,
            "stopped": self.stopped,
            "settings": self.settings,
            "environments": [asdict(env) for env in self.environments],
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
        """Write the report as JSON, atomically. `load` reads it."""
        text = json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"
        return write_atomic(path, text, replaces=f'"kind": "{_KIND}"')

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a saved report. The summary is computed again from the episodes.

        Raises:
            ReportError: The file is missing, empty, truncated, no report, or of another version.
        """
        file = user_path(path)
        facts = _read(file)
        if not isinstance(facts, dict) or facts.get("kind") != _KIND:
            raise ReportError(f"{file} is JSON, but no benchmark report")
        if facts.get("format") != FORMAT:
            raise ReportError(
                f"{file} has report format {facts.get('format')!s:.50}, and this version of forge_agents reads format "
                f"{FORMAT}. Run the benchmark again, or read it with the version that wrote it, which is in its "
                "provenance"
            )
        try:
            return _from_json(facts)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ReportError(f"{file} is a damaged report: {type(error).__name__}: {error}") from None

    def document(self, *, brief: bool = False) -> Document:
        """Return everything that is shown. `brief` fits a terminal."""
        return sections.document(self, brief=brief)

    def table(self) -> str:
        """Print the report to the terminal, if there is one, and return it as text."""
        return tables.show(self.document(brief=True))

    def markdown(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as Markdown, and write it to `path` if given."""
        text = tables.as_markdown(self.document())
        if path is not None:
            write_atomic(path, text, replaces=text.partition(":")[0].partition("\n")[0])
        return text

    def html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one HTML file that loads nothing and runs no script."""
        return write_atomic(path, tables.as_html(self.document()), replaces=PAGE_MARK)


def _read(path: Path) -> Any:
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:  # a pipe would block, a sparse file fill the memory
            path.lstat()
            raise ReportError(f"{path} cannot be read as a report: it must be a file of at most {MAX_BYTES >> 20} MiB")
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read as a report: {error}") from None
    if not text.strip():
        raise ReportError(
            f"{path} is empty. A report is written by `forge-agents bench --json FILE` or report.save(...)"
        )
    try:
        facts = bounded_json(text, _MAX_BRACKETS, _MAX_COMMAS)
    except (ValueError, RecursionError) as error:
        log = " It looks like a log of episodes: run the benchmark again with its folder as out_dir."
        hint = log if path.suffix == ".jsonl" else ""
        raise ReportError(f"{path} is not a complete JSON file ({error}). It may be truncated.{hint}") from None
    if not is_shallow(facts):
        raise ReportError(f"{path} holds values nested more than 100 deep. A report has fewer levels")
    return facts


def _from_json(facts: Mapping[str, Any]) -> Report:
    read_stored(_Contents, facts)
    names = ("settings", "environments", "players", "provenance", "planned", "stopped", "exploitability", "timing")
    report = read_stored(Report, {name: facts.get(name) for name in names} | {"records": facts.get("episodes")})
    _check(report)
    report.document()  # values that cannot be shown or counted are found here, not by a reader of the page
    return report


def check_size(players: int, environments: Sequence[SuiteEnv]) -> None:
    """Raise ReportError if a report has too many pairs of players, or too many line-ups of agents."""
    size = sum(max(1.0, len(environment.seats) * len(environment.sides) / 100) for environment in environments)
    if players**2 * size > _MAX_PAIRS:
        raise ReportError(
            f"{sections.count(players, 'player')} and {sections.count(environments, 'environment')}. Expected at most "
            f"{_MAX_PAIRS} as the square of players times environments. An environment counts as agents times sides "
            "divided by 100, at least once"
        )


def _check(report: Report) -> None:
    """Raise ValueError if a report has other episodes than a benchmark with its settings."""
    settings, environments = report.settings, {environment.id: environment for environment in report.environments}
    if len(environments) < len(report.environments):
        raise ValueError("its suite has an environment more than once")
    check_size(len(report.players), report.environments)
    played = {record.played for record in report.records}
    if len({record.key for record in report.records}) < len(report.records) or len(played) < len(report.records):
        raise ValueError("it holds an episode more than once")
    if not 0 <= (seeds := settings["episodes"] * len(environments)) <= _MAX_SEEDS:
        raise ValueError(f"its environments have {seeds} seeds together. Expected at most {_MAX_SEEDS}")
    if problem := next(filter(None, (_problem(report, environments, record) for record in report.records)), ""):
        raise ValueError(problem)
    seeds_of: dict[tuple[Any, ...], set[int]] = {}
    for record in report.records:
        seeds_of.setdefault((record.env, *sorted(record.lineup.items())), set()).add(record.seed)
    if any(len(seeds) > settings["episodes"] for seeds in seeds_of.values()):
        raise ValueError(f"it has episodes of more than the {settings['episodes']} seeds that its settings plan")
    if report.planned < (least := len(seeds_of) * settings["episodes"] * settings["samples"]):
        raise ValueError(f"planned must be at least {least}, the episodes of its line-ups, got {report.planned}")
    for env, values in report.exploitability.items():
        if env not in environments or values.keys() - report.players.keys():
            raise ValueError(f"it has the exploitability of a player or environment that it does not have, in {env}")


def _problem(report: Report, environments: Mapping[str, SuiteEnv], record: Record) -> str:
    """Return why a record is of no episode that the settings of its report plan. Empty if it is of one."""
    if record.env not in environments:
        return f"it has an episode of {record.env}, which is not in its suite"
    if record.sample >= (samples := report.settings["samples"]):
        return f"it has an episode of sample {record.sample}. Its settings plan {samples}"
    if missing := sorted({*record.lineup.values()} - report.players.keys()):
        return f"it has episodes of {', '.join(missing)}, but no such player"
    if not is_planned(record.lineup, environments[record.env], report.settings):
        return f"episode {record.key:.20} of {record.env} has agents or players that its settings do not plan"
    return ""


def _strict(value: Any) -> Any:
    """Return a JSON value without NaN, with text keys."""
    if isinstance(value, Mapping):
        return {str(name): _strict(entry) for name, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str | None) else repr(value)
