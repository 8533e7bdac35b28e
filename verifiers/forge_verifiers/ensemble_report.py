"""What an ensemble believes of its verifiers, as data and as a table.

In: numbers. Out: `EnsembleReport`. Waits for nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from forge_verifiers.verifier import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierReport:
    """One verifier of an ensemble."""

    name: str
    family: str | None
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
    """Trajectories it gave none, for whatever reason."""
    errors: int
    """Calls that raised."""
    timeouts: int
    """Calls that outlived the deadline, and calls left out because an earlier one still hangs."""
    last_error: str
    """The last failure in words; empty where there was none."""


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

    def rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per verifier, ready for a data frame or JSON."""
        return [dataclasses.asdict(verifier) for verifier in self.verifiers]

    def table(self) -> str:
        """The report as fixed-width text, one verifier per line."""
        width = max(len("verifier"), *(len(v.name) for v in self.verifiers))
        lines = [f"{'verifier':<{width}}  accuracy    TPR    FPR  weight   scored  abstained  errors  timeouts"]
        lines += [
            f"{v.name:<{width}}  {v.accuracy:8.3f}  {v.tpr:5.3f}  {v.fpr:5.3f}  {v.weight:6.3f}  {v.scored:7d}  "
            f"{v.abstained:9d}  {v.errors:6d}  {v.timeouts:8d}"
            for v in self.verifiers
        ]
        lines.append(
            f"{self.name}: combiner {self.combiner} version {self.version}, {self.window_rows} rows, "
            f"class balance {self.class_balance:.3f}, effective number {self.effective_number:.2f}"
        )
        lines += [f"  last failure of {v.name}: {v.last_error}" for v in self.verifiers if v.last_error]
        return "\n".join(lines)
