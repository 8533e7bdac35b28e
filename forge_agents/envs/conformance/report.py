"""Report of the checks of an environment or verifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from forge_agents.errors import ForgeError

Level: TypeAlias = Literal["full", "adapter"]
"""Set of checks: "full" for environments written for this framework, "adapter" for unchanged code of libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check."""

    check: str
    ok: bool
    """False if the check failed."""
    skipped: bool = False
    """Whether the check did not apply."""
    message: str = ""
    """Observed behavior, or the reason why the check was skipped."""
    where: str = ""
    """``file:line name`` of the code at fault, if known."""
    fix: str = ""
    """Remedy. Empty if the check passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceReport:
    """Results of all checks of one environment or verifier."""

    name: str
    """Id or class of the environment, or name of the verifier."""
    findings: tuple[Finding, ...]
    level: Level = "full"
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def passed(self) -> tuple[Finding, ...]:
        """Checks that passed."""
        return tuple(f for f in self.findings if f.ok and not f.skipped)

    @property
    def skipped(self) -> tuple[Finding, ...]:
        """Checks that did not apply."""
        return tuple(f for f in self.findings if f.skipped)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Checks that failed."""
        return tuple(f for f in self.findings if not f.ok)

    def grouped(self) -> list[tuple[tuple[str, ...], Finding]]:
        """Return the findings with the names of their checks. Identical failures are merged."""
        groups: dict[tuple[str, ...], list[Finding]] = {}
        for finding in self.findings:
            key = (finding.check,) if finding.ok else (finding.message, finding.where, finding.fix)
            groups.setdefault(key, []).append(finding)
        return [(tuple(finding.check for finding in group), group[0]) for group in groups.values()]

    def lines(self, *, failures_only: bool = False) -> list[str]:
        """Return the report as lines of text: a heading, then the findings with location and remedy."""
        counts = f"{len(self.passed)} passed, {len(self.failures)} failed, {len(self.skipped)} skipped"
        lines = [f"{self.name}: {len(self.findings)} checks, {counts}"]
        for checks, finding in self.grouped():
            if failures_only and finding.ok:
                continue
            check = ", ".join(checks) + f" ({len(checks)} checks)" * (len(checks) > 1)
            outcome = "skip" if finding.skipped else "ok" if finding.ok else "FAIL"
            lines.append(f"  {outcome:<4} {check:<20} {finding.message}".rstrip())
            lines += [f"       at:  {finding.where}"] * bool(finding.where)
            lines += [f"       fix: {finding.fix}"] * bool(finding.fix)
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


class ConformanceError(ForgeError, AssertionError):
    """An environment or verifier failed a check. `report` has the findings."""

    def __init__(self, report: ConformanceReport) -> None:
        super().__init__(str(report))
        self.report = report
