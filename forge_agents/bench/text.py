"""A benchmark's report as text: for a terminal, and as Markdown.

In: a `Report`. Out: text. Waits for nothing.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_agents.bench.costs import priced
from forge_agents.bench.statistics import CONFIDENCE, POWER, gap_found, smallest_p

if TYPE_CHECKING:
    from forge_agents.bench.report import Report
    from forge_agents.bench.statistics import Interval
    from forge_agents.bench.summary import Cell, Pair

_WIDEST = 160
_RATES = ("success", "invalid", "forfeit", "cut off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table of a report, the same in every form."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int
    """How many first columns hold names."""
    note: str = ""


def sections(report: Report, *, brief: bool = False) -> list[Section]:
    """The report's tables that have something to say; `brief` ones fit a terminal."""
    environments = _brief_environments(report) if brief else [_environments(report)]
    differences = [_overall_pairs(report), _pairs(report)]
    found = [_players(report), *environments, _passes(report), *differences, *_meetings(report), _exploits(report)]
    return [section for section in (*found, _bounds(report), _spent(report)) if section.rows]


def _players(report: Report) -> Section:
    summary = report.summary
    return Section(
        title="Players",
        heads=("player", "what it is", "success", "rating", "games"),
        rows=tuple(
            (name, _what(report, name), interval(summary.overall[name]), *_rating(report, name))
            for name in report.players
        ),
        names=2,
        note="Success is the mean over environments, each seed of each a unit of its own; a rival's forfeit is no "
        "success. Ratings (Bradley-Terry, mean 1000, 400 points are odds of ten to one) come from "
        "games of players against each other, with a draw added to each pair. A game is a deal in all its line-ups, "
        "won by who earned more over them together; deals that a forfeit ended are left out.",
    )


def _environments(report: Report) -> Section:
    return Section(
        title="Environments",
        heads=("environment", "player", "reward", *_RATES, "turns", "tokens", "n"),
        rows=tuple(
            (cell.env, cell.player, interval(cell.reward), *map(interval, _rates(cell)), *_counts(cell))
            for cell in report.summary.cells
        ),
        names=2,
        note="With 95 % intervals over seeds: rewards, turns and tokens by BCa bootstrap, rates by Wilson. Invalid and "
        "cut off are rates of decisions, success and forfeit of seats; turns and tokens are per seat and episode; n "
        "counts episodes, and after a plus those that failed. Alone in games of one seat or one goal, else against the "
        "other players.",
    )


def _brief_environments(report: Report) -> list[Section]:
    """One table an environment, intervals where they matter most."""
    return [
        Section(
            title=world.id,
            heads=("player", "reward", *_RATES, "turns", "tokens", "n"),
            rows=tuple(
                (
                    cell.player,
                    interval(cell.reward, digits=2),
                    interval(cell.success, digits=2),
                    *(number(rate.value, 2) for rate in _rates(cell)[1:]),
                    *_counts(cell),
                )
                for cell in report.summary.cells
                if cell.env == world.id
            ),
            names=1,
        )
        for world in report.worlds
    ]


def _passes(report: Report) -> Section:
    rows = [(c.env, c.player, str(k), interval(v)) for c in report.summary.cells for k, v in c.pass_at_k.items()]
    return Section(title="pass@k", heads=("environment", "player", "k", "pass@k"), rows=tuple(rows), names=2)


def _overall_pairs(report: Report) -> Section:
    pairs = report.summary.overall_pairs
    return Section(
        title="Differences over all environments",
        heads=("player", "minus", "success", "p", "adjusted"),
        rows=tuple((p.first, p.second, *_gap(p)) for p in pairs),
        names=2,
        note="p: sign flips over environments and seeds, two-sided; adjusted by Holm for all pairs shown. "
        f"{_told_apart(pairs)}.",
    )


def _pairs(report: Report) -> Section:
    pairs = report.summary.pairs
    return Section(
        title="Differences on the same seeds",
        heads=("environment", "player", "minus", "reward", "p", "adjusted"),
        rows=tuple((p.env, p.first, p.second, *_gap(p)) for p in pairs),
        names=3,
        note=f"p: sign flips over seeds, two-sided; adjusted by Holm for all pairs shown. {_told_apart(pairs)}.",
    )


def _gap(pair: Pair) -> tuple[str, ...]:
    return interval(pair.reward, sign=True), number(pair.p_value, 4), number(pair.p_adjusted, 4)


def _told_apart(pairs: Sequence[Pair]) -> str:
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


def _meetings(report: Report) -> list[Section]:
    names = tuple(report.players)
    found = []
    for world in report.worlds:
        met = {(m.player, m.other): m.reward for m in report.summary.meetings if m.env == world.id}
        rows = tuple((a, *(interval(met[a, b]) if (a, b) in met else "" for b in names)) for a in names)
        if len(names) > 1 and met:
            heads = ("reward of", *(f"with {name}" for name in names))
            note = "Mean reward of the row's player with the column's; on the diagonal with itself."
            found.append(Section(title=f"Cross-play in {world.id}", heads=heads, rows=rows, names=1, note=note))
    return found


def _exploits(report: Report) -> Section:
    rows = [(env, p, number(v, 6)) for env, values in report.exploitability.items() for p, v in values.items()]
    samples = report.settings.get("exploitability_samples", 0)
    exact = "Mean over both seats, 0 at an equilibrium. Exact for random and scripted players."
    drawn = (
        f" Of models from at least {samples} answers at every information set, illegal ones left out; the best "
        "opponent answers their noise, too, so it is a little less than shown. Exact for models that may only write "
        "legal actions."
    )
    return Section(
        title="Exploitability",
        heads=("environment", "player", "reward of the best opponent"),
        rows=tuple(rows),
        names=2,
        note=exact + (drawn if samples else ""),
    )


def _bounds(report: Report) -> Section:
    known = report.exploitability
    rows = [
        (bound.env, bound.player, bound.opponent, interval(bound.reward))
        for bound in report.summary.bounds
        if bound.player not in known.get(bound.env, {})
    ]
    return Section(
        title="Exploitability, lower bounds",
        heads=("environment", "player", "best opponent here", "its reward"),
        rows=tuple(rows),
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


def headline(report: Report) -> str:
    """One line that says what this is."""
    s = report.settings
    seats = "seats swapped" if s["swap_seats"] else "seats not swapped"
    return (
        f"{s['suite']}: {len(report.worlds)} environments, {s['episodes']} seeds (seed {s['seed']}), "
        f"{s['samples']} samples, {seats}, {len(report.records)} episodes{_departures(report)}"
    )


def _departures(report: Report) -> str:
    """Where the suite's own settings were not used; nothing is known of reports of other versions."""
    own = report.settings.get("suite_defaults") or {}
    found = {name: str(report.settings[name]) for name in own if name in report.settings}
    gaps = [f"{name} {value} instead of {own[name]}" for name, value in found.items() if value != str(own[name])]
    longest: dict[int, list[str]] = {}
    for name, facts in report.players.items():
        if "sampling" in facts and "max_tokens" in own:
            longest.setdefault(facts["sampling"]["max_tokens"], []).append(name)
    gaps += [
        f"max_tokens {value} instead of {own['max_tokens']} for {', '.join(names)}"
        for value, names in longest.items()
        if value != own["max_tokens"]
    ]
    return f". Not as the suite says: {'; '.join(gaps)}" if gaps else ""


def warnings(report: Report) -> list[str]:
    """What a reader must know before trusting the numbers."""
    found, s = [], report.summary
    if report.missing:
        found.append(
            f"INCOMPLETE: {report.missing} of {report.planned} episodes were not played"
            + (f": {report.stopped}" if report.stopped else "")
        )
    failed = [record for record in report.records if record.error]
    if failed:
        found.append(f"{len(failed)} episodes failed and count in no mean; the first: {failed[0].error}")
    fixed = [
        world.id
        for world in report.worlds
        if world.kind in ("competitive", "mixed") and len(report.players) > 1 and not report.settings["swap_seats"]
    ]
    if fixed:
        found.append(
            f"SEATS ARE NOT SWAPPED in {', '.join(fixed)}: differences between players there may be those between "
            "their seats, so nobody is rated by them"
        )
    for where, pairs in (("Over all environments", s.overall_pairs), ("In single environments", s.pairs)):
        told = _told_apart(pairs)
        if told.startswith("NO PAIR"):
            found.append(f"{where}: {told}")
    return found


def show(report: Report) -> str:
    """Print the report, in colour where there is a terminal; returns it as plain text."""
    from rich.console import Console

    screen = Console()
    (screen if screen.is_terminal else Console(width=_WIDEST, color_system=None)).print(*_renderables(report), sep="\n")
    plain = io.StringIO()
    Console(file=plain, width=_WIDEST, color_system=None).print(*_renderables(report), sep="\n")
    return "\n".join(line.rstrip() for line in plain.getvalue().splitlines())


def as_markdown(report: Report) -> str:
    """The report as Markdown."""
    lines = [f"# Benchmark: {_md(str(report.settings['suite']))}", "", _md(headline(report)) + "."]
    for warning in warnings(report):
        lines += ["", f"> **{_md(warning)}**"]
    for section in sections(report):
        lines += ["", f"## {_md(section.title)}", "", _md_row(section.heads)]
        lines.append("|" + "|".join(["---"] * section.names + ["---:"] * (len(section.heads) - section.names)) + "|")
        lines += [_md_row(row) for row in section.rows]
        if section.note:
            lines += ["", section.note]
    lines += ["", "## Where it comes from", ""]
    lines += [f"- {_md(fact)}" for fact in origins(report)]
    return "\n".join(lines) + "\n"


def origins(report: Report) -> list[str]:
    """Versions and fingerprints, one a line."""
    packages = ", ".join(f"{name} {version}" for name, version in report.provenance["packages"].items())
    found = [
        f"Python {report.provenance['python']}; {packages}",
        f"played {report.timing.get('date', 'at no known time')}",
    ]
    for name, facts in report.players.items():
        told = ", ".join(f"{key} {value}" for key, value in facts.items())
        found.append(f"player {name}: {told}")
    found += [f"environment {world.id}: code {world.code}, arguments {dict(world.kwargs)}" for world in report.worlds]
    return found


def number(value: float, digits: int = 3) -> str:
    """A number; a dash where it is not known."""
    return "\N{EN DASH}" if math.isnan(value) else f"{value:.{digits}f}"


def interval(found: Interval, *, digits: int = 3, sign: bool = False) -> str:
    """An estimate and its interval."""
    if math.isnan(found.value):
        return "\N{EN DASH}"
    value = f"{found.value:+.{digits}f}" if sign else f"{found.value:.{digits}f}"
    return value if math.isnan(found.low) else f"{value} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def printable(text: str, longest: int = 300) -> str:
    """A text on one line, without control or direction characters."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))
    return text if len(text) <= longest else f"{text[:longest]} \N{HORIZONTAL ELLIPSIS}"


def _rates(cell: Cell) -> tuple[Interval, ...]:
    return cell.success, cell.invalid, cell.forfeit, cell.cut_off


def _counts(cell: Cell) -> tuple[str, str, str]:
    count = f"{cell.episodes}+{cell.failed}" if cell.failed else str(cell.episodes)
    return interval(cell.decisions, digits=1), interval(cell.tokens, digits=1), count


def _rating(report: Report, name: str) -> Sequence[str]:
    rating = report.summary.ratings.get(name)
    if rating is None:
        return "\N{EN DASH}", "\N{EN DASH}"
    ends = "" if math.isnan(rating.low) else f" [{rating.low:.0f}, {rating.high:.0f}]"
    return f"{rating.value:.0f}{ends}", str(rating.games)


def _what(report: Report, name: str) -> str:
    facts = report.players[name]
    return " ".join(str(facts[key]) for key in ("type", "model", "function") if key in facts)


def _renderables(report: Report) -> list[object]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    parts: list[object] = [Text(printable(headline(report)), style="bold")]
    parts += [Text(printable(warning), style="bold red") for warning in warnings(report)]
    for section in sections(report, brief=True):
        table = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            title=Text(printable(section.title)),
            title_justify="left",
        )
        for place, head in enumerate(section.heads):
            table.add_column(Text(printable(head)), justify="left" if place < section.names else "right")
        for row in section.rows:
            table.add_row(*(Text(printable(value)) for value in row))  # Text: no markup in names
        parts.append(table)
    return parts


def _md_row(values: Sequence[str]) -> str:
    return "| " + " | ".join(map(_md, values)) + " |"


def _md(text: str) -> str:
    """Text that Markdown shows as it is."""
    plain = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|~#!" else c for c in plain)
