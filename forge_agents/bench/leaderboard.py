"""Several benchmarks as one: a leaderboard of players that were measured alike.

In: reports. Out: one report with all their players, or an error that names what differs. Waits for the disk.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forge_agents.bench.records import Record
from forge_agents.bench.report import Report, ReportError

_ALONE = ("single", "cooperative")
_ALIKE = ("suite", "episodes", "seed", "swap_seats", "samples")
"""Settings that must be the same: those that say what was played."""


def leaderboard(*reports: Report | str | os.PathLike[str]) -> Report:
    """One report with the players of all.

    Reports are comparable where they have the same suite, environments (arguments and code included), seeds, samples,
    seat rule and version of this package. In games of players against each other a result depends on the opponents:
    there, all reports must share a player, and only games with a shared player, and of a player with itself, count.

    Args:
        reports: Reports, or files that `Report.save` wrote.

    Raises:
        ReportError: A file is no whole report; or the reports differ in what must be the same (each difference is
            named); or two different players have one name; or the reports share no player where they must.
    """
    if not reports:
        raise ReportError("no reports were given; name one or more files that report.save(...) wrote")
    named: dict[str, Report] = {}
    for place, report in enumerate(reports, 1):
        label = f"report {place}" if isinstance(report, Report) else Path(report).name
        label = f"{label} ({place})" if label in named else label
        named[label] = report if isinstance(report, Report) else Report.load(report)
    for (one, first), (two, second) in itertools.combinations(named.items(), 2):
        _check_comparable(one, first, two, second)
    return _merged(named) if len(named) > 1 else next(iter(named.values()))


def _check_comparable(one: str, first: Report, two: str, second: Report) -> None:
    mine, other = _conditions(first), _conditions(second)
    gaps = [
        f"{name}: {mine[name]} in {one}, {other[name]} in {two}"
        for name in mine
        if name in other and mine[name] != other[name]
    ]
    ids, others = [{world.id for world in report.worlds} for report in (first, second)]
    gaps += [f"{id_}: only in {one if id_ in ids else two}" for id_ in sorted(ids ^ others)]
    gaps += [
        f"player {name!r}: fingerprint {facts['fingerprint']} in {one}, {second.players[name]['fingerprint']} in {two}"
        " (give different players different names)"
        for name, facts in first.players.items()
        if name in second.players and second.players[name]["fingerprint"] != facts["fingerprint"]
    ]
    if gaps:
        raise ReportError("the reports cannot be compared; they differ in\n  " + "\n  ".join(gaps))


def _conditions(report: Report) -> dict[str, Any]:
    """What must be the same, by a name to show."""
    found: dict[str, Any] = {name: report.settings[name] for name in _ALIKE}
    for world in report.worlds:
        for name, value in asdict(world).items():
            found[f"{world.id} {name}"] = value
    found["version of forge-agents-rl"] = report.provenance["packages"].get("forge-agents-rl", "unknown")
    return found


def _merged(named: Mapping[str, Report]) -> Report:
    reports = list(named.values())
    first = reports[0]
    common = {name for name in first.players if all(name in report.players for report in reports)}
    rivals = [world.id for world in first.worlds if world.kind not in _ALONE]
    different = any(set(report.players) != set(first.players) for report in reports)
    if rivals and different and not common:
        raise ReportError(
            f"the reports share no player, and in {', '.join(rivals)} a result depends on the opponents; benchmark one "
            'player, such as "random", in all of them'
        )
    records: dict[str, Record] = {}
    for report in reports:
        for record in report.records:
            met = set(record.lineup.values())
            if record.env not in rivals or not different or len(met) == 1 or met & common:
                records.setdefault(record.key, record)
    missing = sum(report.missing for report in reports)
    players = {name: facts for report in reports for name, facts in report.players.items()}
    drawn = [number for report in reports if (number := _drawn(report))]
    return replace(
        first,
        settings={**first.settings, "exploitability_samples": min(drawn, default=0)},
        players=players,
        provenance=_all_versions([report.provenance for report in reports]),
        records=tuple(records.values()),
        planned=len(records) + missing,
        stopped="; ".join(f"{label}: {report.stopped}" for label, report in named.items() if report.stopped),
        exploitability=_all_exploitabilities(reports, tuple(players)),
        timing={"date": max(str(report.timing.get("date", "")) for report in reports), "reports": len(reports)},
    )


def _all_versions(provenances: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each version that was used, joined where they differ."""
    names = sorted({name for p in provenances for name in p["packages"]})
    return {
        "python": " and ".join(sorted({str(p["python"]) for p in provenances})),
        "packages": {
            name: " and ".join(sorted({str(p["packages"][name]) for p in provenances if name in p["packages"]}))
            for name in names
        },
    }


def _all_exploitabilities(reports: Sequence[Report], players: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of a player that several measured, the number from the most answers."""
    found: dict[str, dict[str, float]] = {}
    for report in sorted(reports, key=_drawn):
        for env, values in report.exploitability.items():
            found.setdefault(env, {}).update(values)
    return {env: {name: values[name] for name in players if name in values} for env, values in found.items()}


def _drawn(report: Report) -> int:
    """Answers of each model at every information set."""
    return int(report.settings.get("exploitability_samples", 0))
