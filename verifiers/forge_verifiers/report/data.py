"""What an ensemble believes of its verifiers, as data, as a table and as a page.

In: numbers. Out: `EnsembleReport`. Waits for nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from forge_agents.errors import RunFolderError
from forge_verifiers.core.verifier import Cost

if TYPE_CHECKING:
    from forge_verifiers.report.evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierReport:
    """One verifier of an ensemble."""

    name: str
    family: str | None
    """The one it was given, or that the ensemble found by likeness; None = unrelated to the others."""
    cost: Cost
    accuracy: float
    """Estimated P(its verdict is right), in [0, 1]; NaN before the first fit or where the combiner estimates none."""
    tpr: float
    """Estimated P(says yes | correct)."""
    fpr: float
    """Estimated P(says yes | wrong); above `tpr` the verifier is inverted."""
    weight: float
    """Share of its own evidence that counts; NaN before the first fit."""
    scored: int
    """Trajectories it gave a score."""
    abstained: int
    """Trajectories of which it said that it cannot tell."""
    errors: int
    """Calls that raised."""
    timeouts: int
    """Calls that outlived the deadline, and calls left out because an earlier one still hangs."""
    last_error: str
    """The last failure in words; empty where there was none."""
    failed: int = 0
    """Trajectories without a score because a question or the whole call failed, which says nothing of them."""
    cached: int = 0
    """Trajectories whose score was remembered or given to an equal one, so that nobody was asked."""
    skipped: int = 0
    """Trajectories about which it was not asked because cheaper verifiers had decided them."""
    note: str = ""
    """Why it abstains, where it counts that: gold answers that it cannot read; empty where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleReport:
    """All verifiers of an ensemble, and what holds for them together."""

    name: str
    combiner: str
    version: int
    """How often the combiner was fitted."""
    window_rows: int
    """Trajectories the next fit would learn from, new ones aside."""
    class_balance: float
    """Estimated share of correct trajectories, in [0, 1]."""
    effective_number: float
    """How many independent verifiers the ensemble is worth."""
    verifiers: tuple[VerifierReport, ...]
    alarms: Sequence[str] = ()
    """Suspicions of reward hacking so far, with their evidence."""
    notes: Sequence[str] = ()
    """What the combiner found besides the numbers, such as two camps of verifiers that disagree."""
    evidence: Evidence | None = field(default=None, compare=False, repr=False)
    """The score rows of the last fit; None before it, and where only the numbers were kept."""

    @property
    def spared(self) -> float:
        """Share of verdicts, in [0, 1], that nobody had to be asked for: skipped by a cascade, or remembered."""
        spared = sum(v.cached + v.skipped for v in self.verifiers)
        return spared / max(sum(v.scored + v.abstained + v.failed + v.skipped for v in self.verifiers), 1)

    def rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per verifier, ready for a data frame or JSON."""
        return [dataclasses.asdict(verifier) for verifier in self.verifiers]

    def row(self) -> dict[str, Any]:
        """All numbers without the score rows, JSON-safe: NaN is None. A run's ``verifiers.jsonl`` holds one by step."""
        own = dataclasses.asdict(dataclasses.replace(self, evidence=None))
        del own["evidence"]
        return {**_null(own), "verifiers": [_null(row) for row in own["verifiers"]]}

    @classmethod
    def from_row(cls, row: Mapping[str, Any], evidence: Evidence | None = None) -> Self:
        """The report that `row` was made of; keys that it does not know are left out.

        Raises:
            ValueError: a key is missing.
        """
        try:
            verifiers = tuple(_build(VerifierReport, verifier) for verifier in row["verifiers"])
            report: Self = _build(cls, {**row, "verifiers": verifiers, "evidence": evidence})
        except (KeyError, TypeError) as cause:
            raise ValueError(f"incomplete report ({cause}); send what EnsembleReport.row() returned") from cause
        return report

    def table(self) -> str:
        """The report as text, one verifier per line."""
        from forge_verifiers.report.table import as_text

        return as_text(self)

    def html(self, path: str | os.PathLike[str], history: Sequence[Snapshot] = ()) -> Path:
        """Write the report as one HTML file that needs nothing else: tables, plots and what they mean.

        Args:
            path: The file; folders on the way are made.
            history: Reports of this ensemble by step, for the plots of drift; fewer than two show none.

        Raises:
            RunFolderError: The file cannot be written.
        """
        from forge_verifiers.report.html import page

        target, text = Path(path), page(self, history)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as cause:
            raise RunFolderError(f"the report cannot be written to {target} ({cause}); choose another file") from cause
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An ensemble at one step of a run."""

    step: int
    report: EnsembleReport
    reward: float = math.nan
    """Mean reward of the step; NaN where it is not known."""


def _null(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _build(kind: Any, row: Mapping[str, Any]) -> Any:
    """An instance of dataclass `kind` from a row; None where a float belongs is NaN, lists are tuples."""
    known = {f.name: f.type for f in dataclasses.fields(kind)}
    values = {k: math.nan if v is None and known[k] == "float" else v for k, v in row.items() if k in known}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
