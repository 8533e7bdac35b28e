"""What `benchmark` returns: results, where they come from, how they are shown and kept, and several of them as one.

In: records, or files that `save` wrote. Out: tables, JSON, Markdown, HTML; a leaderboard of players that were measured
alike, or an error that names what differs. Waits for the disk.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from forge_agents.bench import tables
from forge_agents.bench.plan import TEAMS, World, seeds_of
from forge_agents.bench.records import Record, Spent, priced, spent_by_player
from forge_agents.bench.statistics import CONFIDENCE, POWER, gap_found, smallest_p
from forge_agents.bench.summary import Pair, Summary, overall, partners_of, summarise
from forge_agents.bench.tables import Document, Section, interval, number
from forge_agents.credentials import HIDDEN, is_secret, redact
from forge_agents.errors import ForgeError
from forge_agents.files import is_shallow, user_path, write_atomic

FORMAT = 3
"""Of the JSON file. Raised whenever what a field means changes."""
_READABLE = (1, 2, FORMAT)
"""In 1, the summary's decisions, tokens and pass@k have no intervals; up to 2, every seat has a success."""
_KIND = "forge-agents benchmark"


class ReportError(ForgeError, ValueError):
    """A file that is no whole report of this format, or reports that cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A benchmark's results. The same players, suite and seed give the same report, `timing` aside."""

    settings: Mapping[str, Any]
    """``suite``, ``episodes``, ``seed``, ``swap_seats``, ``samples``, ``exploitability_samples``; ``partners`` where
    some were named; of a registered suite also ``suite_defaults``, what it says itself."""
    worlds: tuple[World, ...] = field(repr=False)
    players: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """By name: type, model, sampling, hash of the weights; ``fingerprint`` stands for all of it."""
    provenance: Mapping[str, Any] = field(repr=False)
    """Versions of Python and packages, and the commit of a checkout."""
    records: tuple[Record, ...] = field(repr=False)
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

    def __str__(self) -> str:
        return tables.as_text(self.document(brief=True))

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
        return summarise(self.records, self.worlds, tuple(self.players), self.settings.get("partners", ()))

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
            "environments": [{**asdict(world), "kwargs": _public(world.kwargs)} for world in self.worlds],
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
        return write_atomic(path, json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote. The summary is computed anew from the episodes.

        Raises:
            ReportError: The file is missing, empty, half-written, no report, or of another format.
        """
        return _from_json(_read(user_path(path)), user_path(path))

    def document(self, *, brief: bool = False) -> Document:
        """All that is shown, in texts; `brief` fits a terminal."""
        s = self.settings
        seats = "seats swapped" if s["swap_seats"] else "seats not swapped"
        headline = (
            f"{s['suite']}: {_count(self.worlds, 'environment')}, {_count(s['episodes'], 'seed')} (seed {s['seed']}), "
            f"{_count(s['samples'], 'sample')}, {seats}, {_count(self.records, 'episode')}{_departures(self)}"
        )
        found = [_players(self), *_environments(self, brief), _passes(self), *_differences(self)]
        found += [_teamwork(self), *_meetings(self, brief), *_exploitability(self), _spent(self)]
        packages = ", ".join(f"{name} {version}" for name, version in self.provenance["packages"].items())
        commit = self.provenance.get("commit")
        facts = [f"Python {self.provenance['python']}; {packages}{f'; commit {commit}' if commit else ''}"]
        facts += [f"played {self.timing.get('date', 'at no known time')}"]
        for name, known in self.players.items():
            for agent, own in {"": known, **known.get("agents", {})}.items():
                shown = ", ".join(f"{key} {value}" for key, value in own.items() if key != "agents")
                facts.append(f"player {name}{f', agent {agent}' if agent else ''}: {shown}")
        for world in self.worlds:
            facts.append(f"environment {world.id}: code {world.code}, arguments {_public(world.kwargs)}")
        return Document(
            title=f"Benchmark: {s['suite']}",
            headline=headline,
            warnings=_warnings(self),
            bars=self.summary.overall,
            sections=[section for section in found if section.rows],
            facts=facts,
        )

    def table(self) -> str:
        """Print the report to the terminal, if there is one, and return it as text."""
        return tables.show(self.document(brief=True))

    def markdown(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as Markdown; with `path` also written there."""
        text = tables.as_markdown(self.document())
        if path is not None:
            write_atomic(path, text)
        return text

    def html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one HTML file that loads nothing from elsewhere and runs no script."""
        return write_atomic(path, tables.as_html(self.document()))


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
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        log = " It looks like a log of episodes: run the benchmark again with its folder as out_dir."
        hint = log if path.suffix == ".jsonl" else ""
        raise ReportError(f"{path} is no whole JSON file ({error}); it may be cut off.{hint}") from None
    if not is_shallow(facts):
        raise ReportError(f"{path} holds values nested more than 100 deep; a report has fewer levels")
    return facts


def _from_json(facts: Any, path: Path) -> Report:
    if not isinstance(facts, dict) or facts.get("kind") != _KIND:
        raise ReportError(f"{path} is JSON, but no benchmark report")
    try:
        if facts.get("format") not in _READABLE:
            raise ReportError(
                f"{path} has report format {facts.get('format')}, this version of forge_agents reads "
                f"{' and '.join(map(str, _READABLE))}; run the "
                "benchmark again, or read it with the version that wrote it: "
                f"{facts.get('provenance', {}).get('packages', {}).get('forge-agents-rl', 'unknown')}"
            )
        report = _report(facts)
        known = {world.id for world in report.worlds}
        strange = next((record for record in report.records if record.env not in known), None)
        if strange is not None:
            raise ReportError(
                f"{path} is a damaged report: it has an episode of {strange.env}, which is not in its suite"
            )
        report.document()  # a value that cannot be shown or counted is found here, and not by a reader of the page
    except ReportError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ReportError(f"{path} is a damaged report: {type(error).__name__}: {error}") from None
    return report


def _report(facts: Mapping[str, Any]) -> Report:
    same = ("settings", "players", "provenance", "planned", "stopped", "exploitability", "timing")
    report = Report(
        worlds=tuple(World(**{**world, "seats": tuple(world["seats"])}) for world in facts["environments"]),
        records=tuple(Record.from_json(row) for row in facts["episodes"]),
        **{name: facts[name] for name in same},
    )
    _check_whole(report)
    return report


def _check_whole(report: Report) -> None:
    """Raise KeyError, TypeError or ValueError where something that is shown or compared is missing, or no such."""
    partners = report.settings.get("partners", [])
    needed = [(f"settings.{name}", report.settings[name], kind) for name, kind in _ALIKE.items()]
    needed += [("settings.partners", partners, list), ("provenance.python", report.provenance["python"], str)]
    needed += [("provenance.packages", report.provenance["packages"], dict), ("timing", report.timing, dict)]
    needed += [(f"settings.partners: {name!r}", name, str) for name in (partners if isinstance(partners, list) else ())]
    needed += [(f"fingerprint of {name!r}", facts["fingerprint"], str) for name, facts in report.players.items()]
    for name, value, kind in needed:
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got a {type(value).__name__}")
    math.fsum(seat.reward for record in report.records for seat in record.seats.values())
    met = {name for record in report.records for name in record.lineup.values()}
    if strange := sorted(met - report.players.keys()):
        raise ValueError(f"it has episodes of {', '.join(strange)}, and no such player")


def _public(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an environment without credentials."""
    return {
        name: HIDDEN if is_secret(name, value) else redact(value) if isinstance(value, str) else value
        for name, value in arguments.items()
    }


def _strict(value: Any) -> Any:
    """JSON without NaN, keys as text."""
    if isinstance(value, Mapping):
        return {str(name): _strict(entry) for name, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str | None) else repr(value)


# ---- what is shown


def _departures(report: Report) -> str:
    """Where the suite's own settings were not used; nothing is known of reports of other versions."""
    own = report.settings.get("suite_defaults") or {}
    found = {name: str(report.settings[name]) for name in own if name in report.settings}
    gaps = [f"{name} {value} instead of {own[name]}" for name, value in found.items() if value != str(own[name])]
    longest: dict[int, list[str]] = {}
    for name, facts in report.players.items():
        for policy in facts.get("agents", {"": facts}).values():
            if "sampling" in policy and "max_tokens" in own:
                longest.setdefault(policy["sampling"]["max_tokens"], []).append(name)
    gaps += [
        f"max_tokens {value} instead of {own['max_tokens']} for {', '.join(dict.fromkeys(names))}"
        for value, names in longest.items()
        if value != own["max_tokens"]
    ]
    return f". Differs from the suite: {'; '.join(gaps)}" if gaps else ""


def _lacks(report: Report) -> list[str]:
    """What was not played, or failed."""
    found = []
    if report.missing:
        why = f": {report.stopped}" if report.stopped else ""
        found.append(f"INCOMPLETE: {report.missing} of {report.planned} episodes were not played{why}")
    failed = [record for record in report.records if record.error]
    if failed:
        found.append(f"{len(failed)} episodes failed and count in no mean; the first: {failed[0].error}")
    return found


def _warnings(report: Report) -> list[str]:
    found, s = _lacks(report), report.summary
    rivals = [world.id for world in report.worlds if world.kind in ("competitive", "mixed")]
    if rivals and len(report.players) > 1 and not report.settings["swap_seats"]:
        found.append(
            f"SEATS ARE NOT SWAPPED in {', '.join(rivals)}: differences between players there may be those between "
            "their seats, so nobody is rated by them"
        )
    if s.undefined:
        found.append(
            f"NO SUCCESS IS DEFINED in {', '.join(s.undefined)}: compare rewards there. An environment defines it by "
            "info['success'] or info['outcome'] at its end, or by max_reward; a game of rivals also by wins and losses"
        )
    if unpaid := _unpaid(report):
        found.append(
            f"EVERY REWARD IS 0 in {', '.join(unpaid)}: no player solved anything there, or the environment pays "
            "nothing, such as a program without reward= whose result is no number"
        )
    found += _unmet(report)
    for where, pairs in (("Over all environments", s.overall_pairs), ("In single environments", s.pairs)):
        if (power := _power(pairs)).startswith("NO PAIR"):
            found.append(f"{where}: {power}")
    return found


def _unpaid(report: Report) -> list[str]:
    """Environments that paid nobody anything and say of nobody whether it succeeded."""
    played = {record.env for record in report.records if record.seats}
    paid = {
        record.env
        for record in report.records
        if any(seat.reward or seat.success is not None for seat in record.seats.values())
    }
    return [world.id for world in report.worlds if world.id in played - paid]


def _unmet(report: Report) -> Iterator[str]:
    """Who is not measured with whom, though it was asked for, and why."""
    if len(report.players) < 2:
        return
    teams = [world.id for world in report.worlds if world.kind in TEAMS]
    if teams and not report.settings["swap_seats"]:
        yield (
            f"SEATS ARE NOT SWAPPED in {', '.join(teams)}: who is named first has the first seat there, so nobody is "
            "measured with partners; swap_seats=True does"
        )
        return
    rows = {(row.env, row.player): row.partners for row in report.summary.teamwork}
    asked, players = report.settings.get("partners", ()), tuple(report.players)
    for env in teams:
        gaps = []
        for player in players:
            lost = [name for name in partners_of(player, players, asked) if name not in rows.get((env, player), ())]
            gaps += [f"{player} with {', '.join(lost)}"] if lost else []
        if gaps:
            yield f"WITH PARTNERS in {env}, no common seed was played whole, so it does not count: {'; '.join(gaps)}"


def _power(pairs: Sequence[Pair]) -> str:
    """What so many seeds can show of so many pairs."""
    if not pairs:
        return ""
    seeds, alpha = max(pair.reward.n for pair in pairs), 1 - CONFIDENCE
    least = smallest_p(seeds) * len(pairs)
    if least > alpha:
        enough = next((n for n in range(2, 64) if smallest_p(n) * len(pairs) <= alpha), None)
        cure = f"{enough} would do" if enough else "compare fewer players or environments"
        return (
            f"NO PAIR CAN DIFFER: with {seeds} seeds none of {len(pairs)} can have an adjusted p below "
            f"{min(1.0, least):.2g}; {cure}"
        )
    return (
        f"With {seeds} seeds a pair is found apart in {POWER:.0%} of cases if it differs by "
        f"{gap_found(seeds, len(pairs)):.2g} standard deviations of a seed's difference"
    )


def _count(what: int | Sequence[Any], unit: str) -> str:
    number = what if isinstance(what, int) else len(what)
    return f"{number} {unit}{'s' * (number != 1)}"


def _players(report: Report) -> Section:
    rows = []
    for name, facts in report.players.items():
        what = _what(facts)
        strength = games = "\N{EN DASH}"
        if rating := report.summary.ratings.get(name):
            ends = "" if math.isnan(rating.low) else f" [{rating.low:.0f}, {rating.high:.0f}]"
            strength, games = f"{rating.value:.0f}{ends}", str(rating.games)
        rows.append((name, what, interval(report.summary.overall[name]), strength, games))
    return Section(
        title="Players",
        heads=("player", "what it is", "success", "rating", "games"),
        rows=tuple(rows),
        names=2,
        note="Success is the mean over the environments that define it, each seed of each a unit of its own; a rival's "
        "forfeit is no success. Ratings (Bradley-Terry, mean 1000, 400 points are odds of ten to one) come from "
        "games that are won or lost, with a draw added to each pair. A game is a deal in all its line-ups, "
        "won by who earned more over them together; deals that a forfeit ended are left out.",
    )


def _what(facts: Mapping[str, Any]) -> str:
    """A player's type, and its model or function; of a team those of each agent."""
    if agents := facts.get("agents"):
        return f"{facts['type']}: " + "; ".join(f"{agent} {_what(own)}" for agent, own in agents.items())
    return " ".join(str(facts[key]) for key in ("type", "model", "function") if key in facts)


def _environments(report: Report, brief: bool) -> list[Section]:
    """In brief one table an environment, with intervals where they matter most."""
    heads = ("player", "reward", "success", "invalid", "forfeit", "cut off", "turns", "tokens", "n")
    rows: dict[str, list[tuple[str, ...]]] = {}
    for cell in report.summary.cells:
        digits, rates = 2 if brief else 3, (cell.invalid, cell.forfeit, cell.cut_off)
        row = (
            cell.player,
            interval(cell.reward, digits=digits),
            interval(cell.success, digits=digits),
            *(number(rate.value, 2) if brief else interval(rate) for rate in rates),
            interval(cell.decisions, digits=1),
            interval(cell.tokens, digits=1),
            f"{cell.episodes}+{cell.failed}" if cell.failed else str(cell.episodes),
        )
        rows.setdefault(cell.env, []).append(row)
    if brief:
        return [Section(title=env, heads=heads, rows=tuple(found), names=1) for env, found in rows.items()]
    whole = Section(
        title="Environments",
        heads=("environment", *heads),
        rows=tuple((env, *row) for env, found in rows.items() for row in found),
        names=2,
        note="With 95 % intervals over seeds: rewards, turns and tokens by BCa bootstrap, rates by Wilson. Invalid and "
        "cut off are rates of decisions, success and forfeit of seats; turns and tokens are per seat and episode; n "
        "counts episodes, and after a plus those that failed. Alone in games of one seat or one goal, else against the "
        "other players.",
    )
    return [whole]


def _passes(report: Report) -> Section:
    rows = [(c.env, c.player, str(k), interval(v)) for c in report.summary.cells for k, v in c.pass_at_k.items()]
    return Section(title="pass@k", heads=("environment", "player", "k", "pass@k"), rows=tuple(rows), names=2)


def _differences(report: Report) -> Iterator[Section]:
    everywhere = "Differences over all environments", ("player", "minus", "success"), "environments and seeds"
    apart = "Differences on the same seeds", ("environment", "player", "minus", "reward"), "seeds"
    for (title, heads, units), pairs in ((everywhere, report.summary.overall_pairs), (apart, report.summary.pairs)):
        names = [(pair.env, pair.first, pair.second)[4 - len(heads) :] for pair in pairs]
        found = [(interval(p.reward, sign=True), number(p.p_value, 4), number(p.p_adjusted, 4)) for p in pairs]
        yield Section(
            title=title,
            heads=(*heads, "p", "adjusted"),
            rows=tuple((*who, *what) for who, what in zip(names, found, strict=True)),
            names=len(heads) - 1,
            note=f"p: sign flips over {units}, two-sided; adjusted by Holm for all pairs shown. {_power(pairs)}.",
        )


def _teamwork(report: Report) -> Section:
    rows = [
        (
            *(row.env, row.player, str(len(row.partners))),
            *(interval(row.alone), interval(row.crossed), interval(row.gap, sign=True)),
            *(number(row.p_value, 4), number(row.p_adjusted, 4), interval(row.share)),
        )
        for row in report.summary.teamwork
    ]
    named = ", ".join(report.settings.get("partners", ()))
    return Section(
        title="With partners",
        heads=("environment", "player", "partners", "with itself", "with partners", "gap", "p", "adjusted", "share"),
        rows=tuple(rows),
        names=2,
        note="Rewards of the player's seats, with partners of one seat, each in turn. "
        f"Partners: {named or 'all other players'}, each counting alike. Gap: with itself minus with partners, on the "
        "same seeds; p as for differences. Share: with partners, over what the "
        "partners earn each with itself (ad-hoc teamwork); none where that may be nothing.",
    )


def _meetings(report: Report, brief: bool) -> Iterator[Section]:
    """The matrix of each environment; unless `brief` by seat, too."""
    names = tuple(report.players)
    for world in report.worlds:
        met = {(m.player, m.other): m for m in report.summary.meetings if m.env == world.id}
        if len(names) < 2 or not met:
            continue
        heads = tuple(f"with {name}" for name in names)
        yield Section(
            title=f"Cross-play in {world.id}",
            heads=("reward of", *heads),
            rows=tuple((a, *(interval(met[a, b].reward) if (a, b) in met else "" for b in names)) for a in names),
            names=1,
            note="Mean reward of the row's player with the column's; on the diagonal with itself.",
        )
        seats = {(m.player, m.other, seat): interval(earned) for m in met.values() for seat, earned in m.seats.items()}
        if not brief:
            yield Section(
                title=f"Cross-play in {world.id}, by seat",
                heads=("reward of", "in seat", *heads),
                rows=tuple(
                    (a, seat, *(seats.get((a, b, seat), "") for b in names)) for a in names for seat in world.seats
                ),
                names=2,
                note="Reward of the row's player in that seat, the column's in all the rest.",
            )


def _exploitability(report: Report) -> Iterator[Section]:
    known = report.exploitability
    note = "Mean over both seats, 0 at an equilibrium. Exact for random and scripted players."
    if samples := report.settings.get("exploitability_samples", 0):
        note += (
            f" Of models from at least {samples} answers at every information set, illegal ones left out; the best "
            "opponent answers their noise, too, so it is a little less than shown. Exact for models that may only "
            "write legal actions."
        )
    yield Section(
        title="Exploitability",
        heads=("environment", "player", "reward of the best opponent"),
        rows=tuple((env, name, number(value, 6)) for env, row in known.items() for name, value in row.items()),
        names=2,
        note=note,
    )
    bounds = [bound for bound in report.summary.bounds if bound.player not in known.get(bound.env, {})]
    yield Section(
        title="Exploitability, lower bounds",
        heads=("environment", "player", "best opponent here", "its reward"),
        rows=tuple((bound.env, bound.player, bound.opponent, interval(bound.reward)) for bound in bounds),
        names=3,
        note="The best opponent that could be earns at least what the best one here earned, over both seats and up to "
        "chance: it was chosen among several, so its reward is a little high. Who loses to nobody here may still lose.",
    )


def _spent(report: Report) -> Section:
    rows = [
        (name, f"{s.prompt_tokens:,}", f"{s.tokens:,}", number(s.cost if priced(report.players[name]) else math.nan, 4))
        for name, s in report.spent.items()
        if s.prompt_tokens or s.tokens
    ]
    return Section(
        title="Spent",
        heads=("player", "tokens read", "tokens sampled", "cost"),
        rows=tuple(rows),
        names=1,
        note="In the episodes of this report, whenever they were played, failed ones left out; cost in the unit of the "
        "prices.",
    )


# ---- several reports as one

_ALONE = ("single", "cooperative")
_ALIKE: Mapping[str, type] = {"suite": str, "episodes": int, "seed": int, "swap_seats": bool, "samples": int}
"""Settings that must be the same: those that say what was played. By name, with their type."""


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
        label = str(report) if label in named else label
        label = f"{label} ({place})" if label in named else label
        named[label] = report if isinstance(report, Report) else Report.load(report)
    for (one, first), (two, second) in itertools.combinations(named.items(), 2):
        _check_comparable(one, first, two, second)
    return _merged(named) if len(named) > 1 else next(iter(named.values()))


def board(*reports: Report | str | os.PathLike[str]) -> Document:
    """A page of all suites: who did how well, on how many seeds, with which code, at what cost.

    Reports of one suite are merged as `leaderboard` does; those that it refuses to merge have tables of their own.

    Args:
        reports: Reports, or files that `Report.save` wrote, of any suites.

    Raises:
        ReportError: A file is no whole report.
    """
    by_suite: dict[str, list[tuple[list[Report], Report]]] = {}  # those of each table, and what they make together
    refusals = []
    for given in reports:
        found = given if isinstance(given, Report) else Report.load(given)
        suite, refused = found.settings["suite"], ""
        for place, (group, _) in enumerate(made := by_suite.setdefault(suite, [])):
            try:
                made[place] = [*group, found], leaderboard(*group, found)
                break
            except ReportError as error:
                refused = refused or f"{suite} has several tables: {error}"
        else:
            made.append(([found], found))
            refusals += [refused] if refused else []
    merged = {
        f"{suite} ({place})" if place > 1 else suite: report
        for suite in sorted(by_suite)
        for place, (_, report) in enumerate(by_suite[suite], 1)
    }
    return Document(
        title="Leaderboard",
        headline=f"{_count(len(by_suite), 'suite')}. Success is the mean over a suite's environments, with 95 % "
        "intervals over seeds. In competitive games a player meets the other players of the table"
        + (". Tables of one suite cannot be compared" if len(merged) > len(by_suite) else ""),
        warnings=refusals + [f"{title}: {lack}" for title, report in merged.items() for lack in _lacks(report)],
        bars={},
        sections=[_standings(title, report) for title, report in merged.items()],
        facts=[
            "This page: forge-agents bench merge REPORT.json ... --suites PAGE",
            "A report's tables of every environment: forge-agents bench merge REPORT.json --html PAGE",
        ],
    )


def _standings(title: str, report: Report) -> Section:
    """The players of a suite, the most successful first."""
    success = overall(report.records, report.worlds, tuple(report.players))
    met = Counter(player for record in report.records for player in set(record.lineup.values()))
    rows = []
    for name in sorted(success, key=lambda name: (math.isnan(success[name].value), -success[name].value)):
        facts, spent = report.players[name], report.spent[name]
        what = _what(facts)
        cost = number(spent.cost if priced(facts) else math.nan, 4)
        tokens = f"{spent.prompt_tokens:,}", f"{spent.tokens:,}"
        rows.append((name, what, facts["fingerprint"], interval(success[name]), str(met[name]), *tokens, cost))
    settings, made = report.settings, report.provenance
    seats = "seats swapped" if settings["swap_seats"] else "seats not swapped"
    return Section(
        title=title,
        heads=("player", "what it is", "fingerprint", "success", "episodes", "tokens read", "tokens sampled", "cost"),
        rows=tuple(rows),
        names=3,
        note=f"{_count(settings['episodes'], 'seed')} from seed {settings['seed']}, "
        f"{_count(settings['samples'], 'sample')}, {seats}{_departures(report)}. forge-agents-rl "
        f"{made['packages'].get('forge-agents-rl', 'unknown')}, commit {made.get('commit') or 'not known'}, "
        f"{str(report.timing.get('date', 'no known day'))[:10]}.",
    )


def _check_comparable(one: str, first: Report, two: str, second: Report) -> None:
    def conditions(report: Report) -> dict[str, Any]:
        """What must be the same, by a name to show."""
        found = {name: report.settings[name] for name in _ALIKE}
        found["partners"] = report.settings.get("partners", [])
        found |= {f"{world.id} {name}": value for world in report.worlds for name, value in asdict(world).items()}
        version = report.provenance["packages"].get("forge-agents-rl", "unknown")
        return found | {"version of forge-agents-rl": version}

    mine, other = conditions(first), conditions(second)
    gaps = [
        f"{name}: {mine[name]} in {one}, {other[name]} in {two}"
        for name in mine
        if name in other and mine[name] != other[name]
    ]
    for name, report in ((one, first), (two, second)):
        asked = report.settings["seed"], report.settings["episodes"]
        drawn = {world.id: set(seeds_of(*asked, world.id)) for world in report.worlds}
        strange = sorted({record.env for record in report.records if record.seed not in drawn.get(record.env, ())})
        gaps += [f"seeds of {id_}: those of {name} are not drawn by this version; play it again" for id_ in strange]
    ids, others = ({world.id for world in report.worlds} for report in (first, second))
    gaps += [f"{id_}: only in {one if id_ in ids else two}" for id_ in sorted(ids ^ others)]
    gaps += [
        f"player {name!r}: fingerprint {facts['fingerprint']} in {one}, {second.players[name]['fingerprint']} in {two}"
        " (give different players different names)"
        for name, facts in first.players.items()
        if name in second.players and second.players[name]["fingerprint"] != facts["fingerprint"]
    ]
    if gaps:
        raise ReportError("the reports cannot be compared; they differ in\n  " + "\n  ".join(gaps))


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
    drawn = [answers for report in reports if (answers := _drawn(report))]
    versions = [report.provenance for report in reports]

    def joined(found: Iterable[str]) -> str:
        return " and ".join(sorted(set(found)))

    packages = {
        name: joined(str(p["packages"][name]) for p in versions if name in p["packages"])
        for name in sorted({name for p in versions for name in p["packages"]})
    }
    return replace(
        first,
        settings={**first.settings, "exploitability_samples": min(drawn, default=0)},
        players=players,
        provenance={
            "python": joined(str(p["python"]) for p in versions),
            "packages": packages,
            "commit": joined(str(p.get("commit") or "not known") for p in versions),
        },
        records=tuple(records.values()),
        planned=len(records) + missing,
        stopped="; ".join(f"{label}: {report.stopped}" for label, report in named.items() if report.stopped),
        exploitability=_exploitability_of_all(reports, tuple(players)),
        timing={"date": max(str(report.timing.get("date", "")) for report in reports), "reports": len(reports)},
    )


def _exploitability_of_all(reports: Sequence[Report], players: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of a player that several measured, the number from the most answers."""
    found: dict[str, dict[str, float]] = {}
    for report in sorted(reports, key=_drawn):
        for env, values in report.exploitability.items():
            found.setdefault(env, {}).update(values)
    return {env: {name: values[name] for name in players if name in values} for env, values in found.items()}


def _drawn(report: Report) -> int:
    """Answers of each model at every information set."""
    return int(report.settings.get("exploitability_samples", 0))
