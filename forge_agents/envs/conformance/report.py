"""What `forge-agents check` prints: a table for people, a JSON object per id for programs.

In: ids. Out: records and tables. Waits for `check_env`, which has a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge_agents.envs.conformance.env import ConformanceReport, Finding, check_env
from forge_agents.errors import UnknownIdError


def report_all(
    ids: Sequence[str], *, as_json: bool, brief: bool, episodes: int | None, seed: int, timeout_s: float
) -> int:
    """Check and print one id after another. Returns how many failed.

    Args:
        ids: Environment ids.
        as_json: Whether each id is a line of JSON: id, ok, level, seconds, checks, findings (those that failed or say
            something).
        brief: Whether a table has one row per id instead of one per check.
        episodes: As in `check_env`.
        seed: As in `check_env`.
        timeout_s: Seconds for each id.
    """
    failed, table = 0, Table("environment", "level", "result", "seconds", "finding")
    for env_id in ids:
        report = examine(env_id, episodes=episodes, seed=seed, timeout_s=timeout_s)
        failed += not report.ok
        if as_json:
            sys.stdout.write(json.dumps(record(report)) + "\n")
            sys.stdout.flush()
        elif brief:
            worst = report.failures[0] if report.failures else None
            table.add_row(Text(env_id), report.level, _verdict(report.ok), f"{report.seconds:.1f}", _told(worst))
        else:
            Console().print(table_of(report))
    if brief and not as_json:
        Console().print(table)
        sys.stdout.write(f"{len(ids) - failed} of {len(ids)} environments keep the contract\n")
    return failed


def examine(env_id: str, *, episodes: int | None, seed: int, timeout_s: float) -> ConformanceReport:
    """The report of an id; one that cannot be made is a finding, so that the others are checked as well.

    Raises:
        UnknownIdError: Nothing is registered under the id.
    """
    started = time.perf_counter()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # an environment that prints must not spoil the report
            return check_env(env_id, episodes=episodes, seed=seed, timeout_s=timeout_s, raise_on_failure=False)
    except UnknownIdError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever keeps an environment from being made is a finding about it
        fix = "mend what raises, or install what is missing"
        finding = Finding(check="made", ok=False, message=f"{type(error).__name__}: {error}", fix=fix)
        seconds = round(time.perf_counter() - started, 3)
        return ConformanceReport(name=env_id, findings=(finding,), seconds=seconds)


def record(report: ConformanceReport) -> dict[str, object]:
    """A report as JSON."""
    told = [dataclasses.asdict(f) for f in report.findings if not f.ok or f.message]
    return {
        "id": report.name,
        "ok": report.ok,
        "level": report.level,
        "seconds": report.seconds,
        "checks": len(report.findings),
        "findings": told,
    }


def table_of(report: ConformanceReport) -> Table:
    """A row per check."""
    table = Table("check", "result", "finding", title=f"{report.name}, {report.seconds:.1f} s", title_justify="left")
    for finding in report.findings:
        table.add_row(finding.check, _verdict(finding.ok), _told(finding))
    return table


def _verdict(ok: bool) -> Text:
    return Text("ok", "green") if ok else Text("FAIL", "bold red")


def _told(finding: Finding | None) -> Text:
    """What was seen, where, and what to do; never markup, for some of it was written by models."""
    if finding is None:
        return Text()
    lines = (finding.message, finding.where and f"at {finding.where}", finding.fix and f"fix: {finding.fix}")
    return Text("\n".join(line for line in lines if line))
