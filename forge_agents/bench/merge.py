"""Merging of benchmark reports: one report of comparable ones, and a page with a table per suite."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forge_agents.bench.plan import lineups_of, seeds_of
from forge_agents.bench.records import Record
from forge_agents.bench.report import COMPARED_SETTINGS, Report, ReportError, check_size
from forge_agents.bench.sections import SPENT, count, departures, incomplete, player_type, spent, swapped
from forge_agents.bench.tables import Document, Section, interval

_WITHOUT_OPPONENTS = ("single", "cooperative")


def leaderboard(*reports: Report | str | os.PathLike[str]) -> Report:
    """Merge the players of several reports into one report.

    Comparable reports share the suite, environments with arguments and code, seeds, samples, swapping of agents and
    version of this package. In games between players a result depends on the opponents. There, all reports must share a
    player, and only games with a shared player, or of a player with itself, count.

    Args:
        reports: Reports, or files that `Report.save` wrote.

    Raises:
        ReportError: A file is no complete report; reports differ in one of the above (each difference is named); two
            different players have one name; the reports share no player where they must; or they have too many players.
    """
    if not reports:
        raise ReportError("no reports were given. Name one or more files that report.save(...) wrote")
    named: dict[str, Report] = {}
    names = Counter(Path(report).name for report in reports if not isinstance(report, Report))
    for number, report in enumerate(reports, 1):
        if isinstance(report, Report):
            label = f"report {number}"
        else:
            label = Path(report).name if names[Path(report).name] == 1 else str(report)
        label = f"{label} ({number})" if label in named else label
        named[label] = report if isinstance(report, Report) else Report.load(report)
    if len(named) == 1:
        return next(iter(named.values()))
    _check_comparable(named)
    return _merged(named)


def board(*reports: Report | str | os.PathLike[str]) -> Document:
    """Return a page with a table per suite: success, number of episodes, code, tokens and cost of each player.

    Reports of one suite are merged as by `leaderboard`. Reports that cannot be merged have separate tables.

    Args:
        reports: Reports of any suites, or files that `Report.save` wrote.

    Raises:
        ReportError: A file is no complete report.
    """
    by_suite: dict[str, list[tuple[list[Report], Report]]] = {}  # reports of each table, and their merged report
    refusals = []
    for item in reports:
        report = item if isinstance(item, Report) else Report.load(item)
        suite, reason = report.settings["suite"], ""
        merged_tables = by_suite.setdefault(suite, [])
        for index, (group, _) in enumerate(merged_tables):
            try:
                merged_tables[index] = [*group, report], leaderboard(*group, report)
                break
            except ReportError as error:
                reason = reason or f"{suite} has several tables: {error}"
        else:
            merged_tables.append(([report], report))
            refusals += [reason] if reason else []
    merged = {
        f"{suite} ({number})" if number > 1 else suite: report
        for suite in sorted(by_suite)
        for number, (_, report) in enumerate(by_suite[suite], 1)
    }
    return Document(
        title="Leaderboard",
        headline=f"{count(len(by_suite), 'suite')}. Success is the mean over a suite's environments, with 95 % "
        "intervals over seeds. In competitive games a player meets the other players of the table"
        + (". Tables of one suite cannot be compared" if len(merged) > len(by_suite) else ""),
        warnings=refusals + [f"{title}: {text}" for title, report in merged.items() for text in incomplete(report)],
        bars={},
        sections=[_standings(title, report) for title, report in merged.items()],
        facts=[
            "This page: forge-agents bench merge REPORT.json ... --suites PAGE",
            "A report's tables of every environment: forge-agents bench merge REPORT.json --html PAGE",
        ],
    )


def _standings(title: str, report: Report) -> Section:
    """Return the players of a suite, the most successful first."""
    success = report.summary.overall
    episodes = Counter(player for record in report.records for player in set(record.lineup.values()))
    rows = []
    for name in sorted(success, key=lambda name: (math.isnan(success[name].value), -success[name].value)):
        facts, used = report.players[name], spent(report, name)
        rows.append(
            (name, player_type(facts), facts["fingerprint"], interval(success[name]), str(episodes[name]), *used)
        )
    settings, provenance = report.settings, report.provenance
    note = (
        f"{count(settings['episodes'], 'seed')} from seed {settings['seed']}, {count(settings['samples'], 'sample')}, "
        f"{swapped(settings)}{departures(report)}. forge-agents-rl "
        f"{provenance['packages'].get('forge-agents-rl', 'unknown')}, commit {provenance.get('commit') or 'unknown'}, "
        f"{str(report.timing.get('date', 'unknown date'))[:10]}."
    )
    return Section(title, ("player", "type", "fingerprint", "success", "episodes", *SPENT), rows, names=3, note=note)


def _conditions(report: Report) -> dict[str, Any]:
    """Return what comparable reports share, by a name to show."""
    conditions = {name: report.settings[name] for name in COMPARED_SETTINGS}
    conditions["partners"] = report.settings.get("partners", [])
    conditions |= {f"{env.id} {name}": value for env in report.environments for name, value in asdict(env).items()}
    conditions["version of forge-agents-rl"] = report.provenance["packages"].get("forge-agents-rl", "unknown")
    for name, facts in report.players.items():
        conditions[f"player {name!r} (give different players different names): fingerprint"] = facts["fingerprint"]
    return conditions


def _check_comparable(named: Mapping[str, Report]) -> None:
    """Raise ReportError with all differences that exclude a merge."""
    gaps = []
    conditions: dict[str, tuple[str, Any]] = {}
    labels: dict[str, list[str]] = {}
    for label, report in named.items():
        for name, value in _conditions(report).items():
            source, earlier = conditions.setdefault(name, (label, value))
            gaps += [f"{name}: {earlier} in {source}, {value} in {label}"] if value != earlier else []
        seeds: dict[str, set[int]] = {}
        for env in report.environments:
            labels.setdefault(env.id, []).append(label)
            seeds[env.id] = {*seeds_of(report.settings["seed"], report.settings["episodes"], env.id)}
        for env_id in sorted({record.env for record in report.records if record.seed not in seeds.get(record.env, ())}):
            gaps.append(f"seeds of {env_id}: {label} has other seeds than this version draws. Play it again")
    gaps += [f"{env_id}: only in {', '.join(of)}" for env_id, of in labels.items() if len(of) < len(named)]
    if gaps:
        raise ReportError("the reports cannot be compared. They differ in\n  " + "\n  ".join(gaps))


def _merged(named: Mapping[str, Report]) -> Report:
    reports = list(named.values())
    first = reports[0]
    check_size(len({name for report in reports for name in report.players}), first.environments)
    common = {name for name in first.players if all(name in report.players for report in reports)}
    competitive = [env.id for env in first.environments if env.kind not in _WITHOUT_OPPONENTS]
    different = any(set(report.players) != set(first.players) for report in reports)
    if competitive and different and not common:
        raise ReportError(
            f"the reports share no player, and in {', '.join(competitive)} results depend on opponents. Benchmark "
            'one player, such as "random", in all of them'
        )

    def counts(env_id: str, lineup: Mapping[str, str]) -> bool:
        names = set(lineup.values())
        return env_id not in competitive or not different or len(names) == 1 or bool(names & common)

    records = _merged_records(named, counts, common if different else ())
    planned = {(record.env, *sorted(record.lineup.items())) for record in records} | {
        (env.id, *sorted(lineup.items()))
        for report in reports
        for env in report.environments
        for lineup in lineups_of(env, tuple(report.players), report.settings)
        if counts(env.id, lineup)
    }
    total = len(planned) * first.settings["episodes"] * first.settings["samples"]
    samples = [report.settings.get("exploitability_samples", 0) for report in reports]
    players = _first_facts(named)
    return replace(
        first,
        settings={**first.settings, "exploitability_samples": min(filter(None, samples), default=0)},
        players={name: facts for name, (_, facts, _) in players.items()},
        provenance=_merged_provenance([report.provenance for report in reports]),
        records=records,
        planned=total,
        stopped="; ".join(f"{label}: {report.stopped}" for label, report in named.items() if report.stopped)
        if len(records) < total
        else "",
        exploitability={
            env.id: values
            for env in first.environments
            if (values := {name: of[env.id] for name, (*_, of) in players.items() if env.id in of})
        },
        timing={"date": max(str(report.timing.get("date", "")) for report in reports), "reports": len(reports)},
    )


def _first_facts(named: Mapping[str, Report]) -> dict[str, tuple[str, Mapping[str, Any], dict[str, float]]]:
    """Return label, facts and exploitability of the first report of each player. Warns if others differ."""
    values: dict[str, tuple[str, Mapping[str, Any], dict[str, float]]] = {}
    for label, report in named.items():
        for name, facts in report.players.items():
            of_player = {env: row[name] for env, row in report.exploitability.items() if name in row}
            source, first, exploitability = values.setdefault(name, (label, facts, of_player))
            if facts != first or any(of_player[env] != exploitability.get(env) for env in of_player):
                _warn(
                    f"player {name!r} has other facts or another exploitability in {label} than in {source}, whose "
                    "values count"
                )
    return values


def _merged_records(
    named: Mapping[str, Report], counts: Callable[[str, Mapping[str, str]], bool], shared: Collection[str]
) -> tuple[Record, ...]:
    """Return the episodes of all reports.

    Warns if an episode has another result in a later report, or if only a later report has an episode of a player in
    `shared`: its author may have invented it. With a single shared player, episodes with other players are expected.
    """
    records: dict[Any, tuple[str, Record]] = {}
    differing: Counter[tuple[str, str]] = Counter()
    for label, report in named.items():
        for record in report.records:
            if not counts(record.env, record.lineup):
                continue
            source, earlier = records.setdefault(record.played, (label, record))
            if earlier.error and not record.error:  # it may have failed in one report only
                records[record.played] = label, record.after(earlier)
            elif not record.error and (earlier.seats, earlier.leavers) != (record.seats, record.leavers):
                differing[source, label] += 1
    for (source, label), number in differing.items():
        _warn(
            f"{count(number, 'episode')} of the same players and seeds have other results in {label} than in {source}, "
            "whose results count. If both are your own, the players' answers differ between runs. Otherwise trust one"
        )
    first = next(iter(named))
    later = Counter(
        (label, player)
        for label, record in records.values()
        for player in {*record.lineup.values()}.intersection(shared)
        if label != first and (len(shared) > 1 or {*record.lineup.values()} <= {*shared})
    )
    for (label, player), number in sorted(later.items()):
        _warn(
            f"{count(number, 'episode')} of player {player!r} are in {label} and not in {first}. If they are not your "
            "own, trust the author, or merge reports that share one player only"
        )
    return tuple(record for _, record in records.values())


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=5)


def _merged_provenance(provenances: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one provenance, in which different values are joined."""
    values: dict[str, set[str]] = {}
    for provenance in provenances:
        for name, value in {**provenance["packages"], "": provenance["python"]}.items():
            values.setdefault(name, set()).add(str(value))
    joined = {name: " and ".join(sorted(values[name])) for name in sorted(values)}
    commits = {str(provenance.get("commit") or "unknown") for provenance in provenances}
    return {"python": joined.pop(""), "packages": joined, "commit": " and ".join(sorted(commits))}
