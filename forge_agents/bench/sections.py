"""Sections of a benchmark report: tables, warnings and notes as text."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from forge_agents.bench.code import described
from forge_agents.bench.fingerprints import digest, with_content
from forge_agents.bench.plan import TEAMS
from forge_agents.bench.records import Record, priced
from forge_agents.bench.statistics import CONFIDENCE, POWER, detectable_difference, smallest_p
from forge_agents.bench.summary import Pair, Results, partners_of
from forge_agents.bench.tables import Document, Section, interval
from forge_agents.bench.verdicts import is_won_or_lost
from forge_agents.credentials import HIDDEN, is_secret, redact, secret_items
from forge_agents.display import decimals

SPENT = ("prompt tokens", "sampled tokens", "cost")
"""Heads of the columns that `spent` fills."""


def document(report: Results, *, brief: bool) -> Document:
    """Return all that a report shows. `brief` fits a terminal."""
    settings = report.settings
    headline = (
        f"{settings['suite']}: {count(report.environments, 'environment')}, {count(settings['episodes'], 'seed')} "
        f"(seed {settings['seed']}), {count(settings['samples'], 'sample')}, {swapped(settings)}, "
        f"{count(report.records, 'episode')}{departures(report)}"
    )
    sections = [_players(report), *_environments(report, brief), _passes(report), *_differences(report)]
    sections += [_teamwork(report), *_meetings(report, brief), *_exploitability(report), _spent(report)]
    packages = ", ".join(f"{name} {version}" for name, version in report.provenance["packages"].items())
    commit = report.provenance.get("commit")
    facts = [f"Python {report.provenance['python']}; {packages}{f'; commit {commit}' if commit else ''}"]
    facts += [f"played {report.timing.get('date', 'at an unknown time')}"]
    for name, player in report.players.items():
        for agent, policy in {"": player, **player.get("agents", {})}.items():
            details = ", ".join(f"{key} {value}" for key, value in policy.items() if key != "agents")
            facts.append(f"player {name}{f', agent {agent}' if agent else ''}: {details}")
    for env in report.environments:
        facts.append(f"environment {env.id}: code {env.code}, arguments {dict(env.kwargs)}")
    return Document(
        title=f"Benchmark: {settings['suite']}",
        headline=headline,
        warnings=[*_warnings(report)],
        bars=report.summary.overall,
        sections=[section for section in sections if section.rows],
        facts=facts,
    )


def count(items: int | Sequence[Any], unit: str) -> str:
    """Return a number with its unit."""
    total = items if isinstance(items, int) else len(items)
    return f"{total} {unit}{'s' * (total != 1)}"


def swapped(settings: Mapping[str, Any]) -> str:
    """Return whether players exchanged their agents."""
    return "agents swapped" if settings["swap_agents"] else "agents not swapped"


def departures(report: Results) -> str:
    """Return where the settings differ from the suite's. Empty if they do not."""
    defaults = report.settings.get("suite_defaults") or {}
    values = {name: str(report.settings[name]) for name in defaults if name in report.settings}
    gaps = [
        f"{name} {value} instead of {defaults[name]}" for name, value in values.items() if value != str(defaults[name])
    ]
    lengths: dict[int, list[str]] = {}
    for name, facts in report.players.items():
        for policy in facts.get("agents", {"": facts}).values():
            if "sampling" in policy and "max_tokens" in defaults:
                lengths.setdefault(policy["sampling"]["max_tokens"], []).append(name)
    gaps += [
        f"max_tokens {value} instead of {defaults['max_tokens']} for {', '.join(dict.fromkeys(names))}"
        for value, names in lengths.items()
        if value != defaults["max_tokens"]
    ]
    return f". Differs from the suite: {'; '.join(gaps)}" if gaps else ""


def player_type(facts: Mapping[str, Any]) -> str:
    """Return a player's type, and its model or function. A team has those of each agent."""
    if agents := facts.get("agents"):
        return f"{facts['type']}: " + "; ".join(f"{agent} {player_type(policy)}" for agent, policy in agents.items())
    return " ".join(str(facts[key]) for key in ("type", "model", "function") if key in facts)


def public_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an environment as JSON values, without credentials. An object is a name and a hash.

    So they are the same in each run, and in a report that was saved and loaded.
    """
    return {str(name): HIDDEN if is_secret(name, value) else _public(value) for name, value in arguments.items()}


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return public_arguments(value)
    if isinstance(value, list | tuple):
        return [HIDDEN if hidden else _public(each) for hidden, each in zip(secret_items(value), value, strict=True)]
    if isinstance(value, str | os.PathLike):
        return redact(str(value))
    if isinstance(value, np.generic):
        return _public(value.item())
    if value is None or isinstance(value, int | float):
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{name} {digest(described(with_content(value)))}"


# ---- warnings


def incomplete(report: Results) -> Iterator[str]:
    """Yield warnings about missing, failed and unfinished episodes."""
    if report.missing:
        reason = f": {report.stopped}" if report.stopped else ""
        yield f"INCOMPLETE: {report.missing} of {report.planned} episodes were not played{reason}"
    if failed := [record for record in report.records if record.error]:
        faults = Counter(record.fault for record in failed if record.fault).most_common()
        by = f", by failures of {', '.join(f'{name} ({number})' for name, number in faults)}" if faults else ""
        yield f"{len(failed)} episodes failed{by} and are not counted. The first: {failed[0].error}"
    for env, names in report.summary.failing.items():
        for name, games in names.items():
            yield (
                f"NO RESULTS OF {name} IN {env}: it failed, or the environment on its answer, in {games} games. "
                "Another call repeats failed games, but failures after a player's first decision in a game still count"
            )
    if full := [record for record in report.records if record.end == "context"]:
        yield (
            f"{len(full)} episodes ended because the context of a player was full. No rating counts them. The first: "
            f"{full[0].env} with {', '.join(dict.fromkeys(full[0].lineup.values()))}"
        )


def _unrated(report: Results) -> list[str]:
    """Return the competitive environments that give no ratings, because rewards do not decide who won."""
    records: dict[str, list[Record]] = {}
    for record in report.records:
        records.setdefault(record.env, []).append(record)
    played = [env for env in report.environments if env.kind == "competitive" and env.id in records]
    return [env.id for env in played if not is_won_or_lost(records[env.id], env)]


def _warnings(report: Results) -> Iterator[str]:
    summary = report.summary
    yield from incomplete(report)
    competitive = [env.id for env in report.environments if env.kind in ("competitive", "mixed")]
    if competitive and len(report.players) > 1 and not report.settings["swap_agents"]:
        yield (
            f"AGENTS ARE NOT SWAPPED in {', '.join(competitive)}: differences between players may be differences "
            "between their agents, so these games give no ratings"
        )
    elif len(report.players) > 1 and (unrated := _unrated(report)):
        yield (
            f"NO RATINGS COME FROM {', '.join(unrated)}: compare rewards there. Ratings need zero-sum rewards, or one "
            "reward each for a win, a loss and a draw"
        )
    if summary.undefined:
        yield (
            f"NO SUCCESS IS DEFINED in {', '.join(summary.undefined)}: compare rewards there. An environment defines "
            "success by info['success'] or info['outcome'] at its end. A game of one agent or of partners may define "
            "it by max_reward, and a competitive game by wins and losses"
        )
    if unpaid := _unpaid(report):
        yield (
            f"EVERY REWARD IS 0 in {', '.join(unpaid)}: no player solved anything there, or the environment pays "
            "nothing, such as a program without reward= whose result is no number"
        )
    yield from _unmet(report)
    for scope, pairs in (("Over all environments", summary.overall_pairs), ("In single environments", summary.pairs)):
        if (power := _power(pairs)).startswith("NO PAIR"):
            yield f"{scope}: {power}"


def _unpaid(report: Results) -> list[str]:
    """Return environments without any reward or success."""
    played = {record.env for record in report.records if record.seats}
    paid = {
        record.env
        for record in report.records
        if any(result.reward or result.success is not None for result in record.seats.values())
    }
    return [env.id for env in report.environments if env.id in played - paid]


def _unmet(report: Results) -> Iterator[str]:
    """Yield warnings about partners that a player was not measured with."""
    if len(report.players) < 2:
        return
    teams = [env.id for env in report.environments if env.kind in TEAMS]
    if teams and not report.settings["swap_agents"]:
        yield (
            f"AGENTS ARE NOT SWAPPED in {', '.join(teams)}: the player that is named first has the first agent, so no "
            "player is measured with partners. Set swap_agents=True"
        )
        return
    rows = {(row.env, row.player): row.partners for row in report.summary.teamwork}
    partners, players = report.settings.get("partners", ()), tuple(report.players)
    for env in teams:
        gaps = []
        for player in players:
            lost = [name for name in partners_of(player, players, partners) if name not in rows.get((env, player), ())]
            gaps += [f"{player} with {', '.join(lost)}"] if lost else []
        if gaps:
            yield f"WITH PARTNERS in {env}, no common seed is complete, so this is left out: {'; '.join(gaps)}"


def _power(pairs: Sequence[Pair]) -> str:
    """Return which difference the seeds can show."""
    if not pairs:
        return ""
    seeds, alpha = max(pair.reward.n for pair in pairs), 1 - CONFIDENCE
    least = smallest_p(seeds) * len(pairs)
    if least > alpha:
        enough = next((n for n in range(2, 64) if smallest_p(n) * len(pairs) <= alpha), None)
        advice = f"{enough} would suffice" if enough else "compare fewer players or environments"
        return (
            f"NO PAIR CAN DIFFER: with {seeds} seeds none of {len(pairs)} can have an adjusted p below "
            f"{min(1.0, least):.2g}; {advice}"
        )
    return (
        f"With {seeds} seeds a difference is detected in {POWER:.0%} of cases if it is at least "
        f"{detectable_difference(seeds, len(pairs)):.2g} standard deviations of a seed's difference"
    )


# ---- tables


def _players(report: Results) -> Section:
    faults = Counter(name for record in report.records for name in {record.fault, *record.leavers})
    rows = []
    for name, facts in report.players.items():
        strength = games = "\N{EN DASH}"
        if rating := report.summary.ratings.get(name):
            ends = "" if math.isnan(rating.low) else f" [{rating.low:.0f}, {rating.high:.0f}]"
            strength, games = f"{rating.value:.0f}{ends}", str(rating.games)
        success = interval(report.summary.overall[name])
        rows.append((name, player_type(facts), success, strength, games, *([str(faults[name])] if any(faults) else [])))
    note = (
        "Success is the mean over the environments that define it, with each seed of each as a unit. An opponent's "
        "forfeit is no success. Ratings (Bradley-Terry, mean 1000, 400 points are odds of ten to one) come from games "
        "that are zero-sum or pay one reward each for a win, a loss and a draw, with a draw added to each pair. A game "
        "is a deal in all its line-ups. The player with the higher total reward wins it. A player that forfeits "
        "loses it. Deals with a full context or forfeits of both are left out."
    )
    heads = ("player", "type", "success", "rating", "games", *(["failures"] if any(faults) else []))
    return Section("Players", heads, rows, names=2, note=note)


def _environments(report: Results, brief: bool) -> list[Section]:
    """Return one table, or in brief one per environment with fewer intervals."""
    heads = ("player", "reward", "success", "invalid", "forfeit", "cut off", "turns", "tokens", "n")
    rows: dict[str, list[tuple[str, ...]]] = {}
    for cell in report.summary.cells:
        digits, rates = 2 if brief else 3, (cell.invalid, cell.forfeit, cell.cut_off)
        row = (
            cell.player,
            interval(cell.reward, digits=digits),
            interval(cell.success, digits=digits),
            *(decimals(rate.value, 2) if brief else interval(rate) for rate in rates),
            interval(cell.decisions, digits=1),
            interval(cell.tokens, digits=1),
            f"{cell.episodes}+{cell.failed}" if cell.failed else str(cell.episodes),
        )
        rows.setdefault(cell.env, []).append(row)
    if brief:
        return [Section(env, heads, group, names=1) for env, group in rows.items()]
    note = (
        "With 95 % intervals over seeds: rewards, turns and tokens by BCa bootstrap, rates by Wilson. Invalid and cut "
        "off are rates of decisions. Success and forfeit are rates of agents. Turns and tokens are per agent and "
        "episode; n counts episodes, and after a plus the failed ones. Players are alone in games of one agent or one "
        "goal, and otherwise play against the other players."
    )
    all_rows = [(env, *row) for env, group in rows.items() for row in group]
    return [Section("Environments", ("environment", *heads), all_rows, names=2, note=note)]


def _passes(report: Results) -> Section:
    rows = [(c.env, c.player, str(k), interval(v)) for c in report.summary.cells for k, v in c.pass_at_k.items()]
    return Section("pass@k", ("environment", "player", "k", "pass@k"), rows, names=2)


def _differences(report: Results) -> Iterator[Section]:
    overall = "Differences over all environments", ("player", "minus", "success"), "environments and seeds"
    single = "Differences on the same seeds", ("environment", "player", "minus", "reward"), "seeds"
    for (title, heads, units), pairs in ((overall, report.summary.overall_pairs), (single, report.summary.pairs)):
        rows = []
        for pair in pairs:
            names = (pair.env, pair.first, pair.second)[4 - len(heads) :]
            rows.append(
                (*names, interval(pair.reward, sign=True), decimals(pair.p_value, 4), decimals(pair.p_adjusted, 4))
            )
        note = f"p: sign flips over {units}, two-sided; adjusted by Holm over the table. {_power(pairs)}."
        yield Section(title, (*heads, "p", "adjusted"), rows, names=len(heads) - 1, note=note)


def _teamwork(report: Results) -> Section:
    rows = [
        (
            *(row.env, row.player, str(len(row.partners))),
            *(interval(row.alone), interval(row.crossed), interval(row.gap, sign=True)),
            *(decimals(row.p_value, 4), decimals(row.p_adjusted, 4), interval(row.share)),
        )
        for row in report.summary.teamwork
    ]
    partners = ", ".join(report.settings.get("partners", ())) or "all other players"
    heads = ("environment", "player", "partners", "with itself", "with partners", "gap", "p", "adjusted", "share")
    note = (
        f"Rewards of the player's agents, and of one agent at a time with partners. Partners: {partners}, with equal "
        "weights. Gap: with itself minus with partners, on the same seeds; p as for differences. Share: with partners, "
        "divided by what the partners earn with themselves (ad-hoc teamwork). Empty if that may be 0."
    )
    return Section("With partners", heads, rows, names=2, note=note)


def _meetings(report: Results, brief: bool) -> Iterator[Section]:
    """Yield the cross-play matrix of each environment, and unless `brief` by agent as well."""
    names = tuple(report.players)
    for env in report.environments:
        meetings = {(m.player, m.other): m for m in report.summary.meetings if m.env == env.id}
        if len(names) < 2 or not meetings:
            continue
        title, heads = f"Cross-play in {env.id}", tuple(f"with {name}" for name in names)
        rewards = {(m.player, m.other): interval(m.reward) for m in meetings.values()}
        rows = [(a, *(rewards.get((a, b), "") for b in names)) for a in names]
        note = (
            "Mean reward of the row's player per agent, with itself on the diagonal. In the other line-ups, the row's "
            "or the column's player has one side, and the other player has the rest."
        )
        yield Section(title, ("reward of", *heads), rows, names=1, note=note)
        if brief:
            continue
        by_agent = {(m.player, m.other, agent): interval(r) for m in meetings.values() for agent, r in m.seats.items()}
        rows = [(a, agent, *(by_agent.get((a, b, agent), "") for b in names)) for a in names for agent in env.seats]
        note = "Reward of the row's player as that agent. The column's player has all other sides."
        yield Section(f"{title}, by agent", ("reward of", "as agent", *heads), rows, names=2, note=note)


def _exploitability(report: Results) -> Iterator[Section]:
    measured = report.exploitability
    note = "Mean over both agents, 0 at an equilibrium. Exact for random and scripted players."
    if samples := report.settings.get("exploitability_samples", 0):
        note += (
            f" For models computed from at least {samples} answers per information set, illegal ones included "
            "unless the game goes on after them. It is slightly overestimated, because the best opponent also exploits "
            "the noise. Exact for models with constrained actions."
        )
    rows = [(env, name, decimals(value, 6)) for env, row in measured.items() for name, value in row.items()]
    heads = ("environment", "player", "reward of the best opponent")
    yield Section("Exploitability", heads, rows, names=2, note=note)
    bounds = [bound for bound in report.summary.bounds if bound.player not in measured.get(bound.env, {})]
    bound_rows = [(bound.env, bound.player, bound.opponent, interval(bound.reward)) for bound in bounds]
    note = (
        "The best possible opponent earns at least as much as the best opponent here, over both agents and up to "
        "chance. The reward is slightly overestimated, because the opponent was selected. A player that loses to no "
        "player here may still be exploitable."
    )
    bound_heads = ("environment", "player", "best opponent here", "its reward")
    yield Section("Exploitability, lower bounds", bound_heads, bound_rows, names=3, note=note)


def _spent(report: Results) -> Section:
    rows = [(name, *spent(report, name)) for name, used in report.spent.items() if used.prompt_tokens or used.tokens]
    note = "In all successful episodes of this report, also of earlier calls. Cost is in the unit of the prices."
    return Section("Spent", ("player", *SPENT), rows, names=1, note=note)


def spent(report: Results, player: str) -> tuple[str, str, str]:
    """Return the tokens and the cost of a player, with a dash if it has no price."""
    used = report.spent[player]
    cost = used.cost if priced(report.players[player]) else math.nan
    return f"{used.prompt_tokens:,}", f"{used.tokens:,}", decimals(cost, 4)
