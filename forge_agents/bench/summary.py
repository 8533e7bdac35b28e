"""Results of a benchmark, and their summary: cells by environment and player, differences, teamwork, ratings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias, TypeVar

from pydantic import StrictFloat, StrictInt

from forge_agents.bench import statistics
from forge_agents.bench.plan import TEAMS, SuiteEnv
from forge_agents.bench.records import AgentRecord, Record, Spent, spent_by_player
from forge_agents.bench.statistics import Game, Interval, Rating, rate_players
from forge_agents.bench.verdicts import failing_players, is_won_or_lost, is_zero_sum, judged, tolerance_of

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Stratum: TypeAlias = tuple[list[float], list[float]]
"""Successes and trials by seed in one environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A player in one environment: alone with one agent or one goal, otherwise against the other players.

    Without other players, the player meets itself.
    """

    env: str
    player: str
    episodes: int
    """Successful episodes."""
    failed: int
    """Failed episodes."""
    reward: Interval
    """Mean reward of an agent."""
    success: Interval
    """Rate of successful agents, see `forge_agents.bench.verdicts.judged`. An opponent's forfeit is no success. NaN if
    success is undefined."""
    invalid: Interval
    """Rate of illegal decisions."""
    forfeit: Interval
    """Rate of agents whose illegal decision ended the episode."""
    cut_off: Interval
    """Rate of decisions cut short by `max_tokens` or the context."""
    decisions: Interval
    """Mean number of decisions per agent and episode."""
    tokens: Interval
    """Mean number of sampled tokens per agent and episode."""
    pass_at_k: Mapping[int, Interval]
    """pass@k by k, mean over seeds and line-ups. Empty for a single sample per seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Difference of two players (first minus second) on the same seeds."""

    env: str
    """Empty: all environments, with each seed of each environment as a unit."""
    first: str
    second: str
    reward: Interval
    """Difference in reward. Over all environments, in success, because its scale is the same everywhere."""
    p_value: float
    """Two-sided p-value of sign flips over seeds."""
    p_adjusted: float = math.nan
    """p-value adjusted by Holm for all pairs of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """An entry of the cross-play matrix."""

    env: str
    player: str
    other: str
    """Player of the other side. `player` itself for self-play."""
    reward: Interval
    """Mean reward of an agent of `player`."""
    seats: Mapping[str, Interval]
    """Reward of `player` by agent, while `other` had all other sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teamwork:
    """A player with partners in a cooperative or mixed game."""

    env: str
    player: str
    partners: tuple[str, ...]
    """Partners that it met in each role on some seed."""
    alone: Interval
    """Mean reward of an agent with itself as partner, on the seeds of `gap`."""
    crossed: Interval
    """Reward of its agent among partners with equal weights, on the seeds of `gap`."""
    gap: Interval
    """`alone` minus `crossed`, on seeds that it played with itself and in each role with all `partners`."""
    p_value: float
    """Two-sided p-value of the gap, by sign flips over seeds."""
    p_adjusted: float = math.nan
    """p-value adjusted by Holm for all rows of the table."""
    share: Interval
    """`crossed` divided by what the partners earn with themselves (ad-hoc teamwork score). NaN if that may be 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Lower bound of a player's exploitability in a two-player game: the reward of its best opponent here."""

    env: str
    player: str
    opponent: str
    """Player with the highest reward against `player`, among those that met it in both roles."""
    reward: Interval
    """Reward of `opponent`, mean over both roles. The interval ignores that the best opponent was selected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All estimates of a report."""

    overall: Mapping[str, Interval]
    """Success by player, mean over the environments that define it."""
    cells: Sequence[Cell]
    overall_pairs: Sequence[Pair]
    """Differences in success. Empty for a single environment."""
    pairs: Sequence[Pair]
    """Differences in reward by environment."""
    meetings: Sequence[Meeting]
    teamwork: Sequence[Teamwork]
    bounds: Sequence[Bound]
    """Lower bounds of exploitability."""
    ratings: Mapping[str, Rating]
    """Ratings from games that are won or lost, best first."""
    undefined: Sequence[str] = ()
    """Environments in which success is undefined."""
    failing: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Players that failed in too many games, by environment, see `forge_agents.bench.verdicts.failing_players`."""


R = TypeVar("R", Pair, Teamwork)


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of a benchmark. The same players, suite and seed give the same results, except for `timing`."""

    __pydantic_config__: ClassVar = {"allow_inf_nan": False}

    settings: Mapping[str, Any]
    """``suite``, ``episodes``, ``seed``, ``swap_agents``, ``samples``, ``exploitability_samples``, and ``partners`` if
    some were named. A registered suite adds its ``suite_defaults``."""
    environments: tuple[SuiteEnv, ...] = field(repr=False)
    """Environments, whose arguments are those of `forge_agents.bench.sections.public_arguments`."""
    players: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """Facts by player: type, model, sampling, hash of the weights. ``fingerprint`` is the hash of all."""
    provenance: Mapping[str, Any] = field(repr=False)
    """Versions of Python and packages, and the commit of a checkout."""
    records: tuple[Record, ...] = field(repr=False)
    """Records of the episodes, in the order of the plan."""
    planned: StrictInt
    """Number of planned episodes."""
    stopped: str = ""
    """Why the benchmark stopped early. Empty if it did not."""
    exploitability: Mapping[str, Mapping[str, StrictFloat]] = field(default_factory=dict)
    """Exploitability by environment and player, see `forge_agents.bench.exploitability`."""
    timing: Mapping[str, Any] = field(default_factory=dict)
    """Date, seconds (in total, and of play without the startup of engines), and numbers of played and reused
    episodes."""

    @property
    def complete(self) -> bool:
        """Whether every planned episode was played and none failed."""
        return not self.missing and not any(record.error for record in self.records)

    @property
    def missing(self) -> int:
        """Number of planned episodes that were not played."""
        return self.planned - len(self.records)

    @cached_property
    def summary(self) -> Summary:
        """Estimates with intervals, computed from the records."""
        return summarize(self.records, self.environments, tuple(self.players), self.settings.get("partners", ()))

    @property
    def spent(self) -> dict[str, Spent]:
        """Tokens and cost by player, over all successful episodes of the report."""
        return spent_by_player(self.records, self.players)


def summarize(
    records: Sequence[Record], environments: Sequence[SuiteEnv], players: Sequence[str], partners: Sequence[str] = ()
) -> Summary:
    """Summarize records. The same records give the same numbers."""
    cells, meetings, teamwork, bounds = list[Cell](), list[Meeting](), list[Teamwork](), list[Bound]()
    games, undefined, pairs = list[Game](), list[str](), list[Pair]()
    strata: dict[str, list[Stratum]] = {player: [] for player in players}
    successes: dict[str, dict[tuple[str, int], float]] = {player: {} for player in players}
    records_of = _grouped((record.env, record) for record in records)
    failing = {env: names for env, of_env in records_of.items() if (names := failing_players(of_env))}
    for environment in environments:
        of_env, left_out = records_of.get(environment.id, []), failing.get(environment.id, {})
        measured = [record for record in of_env if left_out.keys().isdisjoint(record.lineup.values())]
        played = judged(measured, environment)
        defined = all(agent.success is not None for record in played for agent in record.seats.values())
        undefined += [] if defined else [environment.id]
        rewards: dict[str, dict[int, float]] = {}
        for player in players:
            scored = _scored(played, environment, player, players)
            failed = sum(bool(record.error) for record in _scored(of_env, environment, player, players))
            cells.append(_cell(environment.id, player, scored, failed=failed, defined=defined))
            rewards[player] = _means(_values(scored, player, "reward"))
            if defined:
                strata[player].append(_stratum(scored, player, "success"))
                of_seeds = _means(_values(scored, player, "success"))
                successes[player] |= {(environment.id, seed): value for seed, value in of_seeds.items()}
        pairs += _pairs(environment.id, rewards)
        env_meetings = list(_meetings(environment, players, played)) if len(environment.seats) > 1 else []
        meetings += env_meetings
        if environment.kind in TEAMS:
            teamwork += _teamwork(environment, players, partners, played)
        if environment.kind == "competitive" and len(environment.sides) == 2 and is_zero_sum(played, environment):
            bounds += _bounds(environment, players, env_meetings)
        if environment.kind == "competitive" and is_won_or_lost(played, environment):
            games += _games(played)
    for player in {name for names in failing.values() for name in names}:
        strata[player] = []  # the mean over the other environments would be of those in which it did not fail
    return Summary(
        overall={player: statistics.mean_rate(strata[player]) for player in players},
        cells=cells,
        overall_pairs=_adjusted(_pairs("", successes)) if len(environments) > 1 else [],
        pairs=_adjusted(pairs),
        meetings=meetings,
        teamwork=_adjusted(teamwork),
        bounds=bounds,
        ratings=rate_players(games, players),
        undefined=tuple(undefined),
        failing=failing,
    )


# ---- values of a player, by seed


def _grouped(items: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key."""
    groups: dict[K, list[V]] = {}
    for key, value in items:
        groups.setdefault(key, []).append(value)
    return groups


def _means(values: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Return the mean of the values of each key."""
    return {key: _mean(group) for key, group in _grouped(values).items()}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _values(records: Iterable[Record], player: str, name: str) -> Iterator[tuple[int, float]]:
    """Yield a value of each of a player's agents, with its seed."""
    return ((record.seed, getattr(result, name)) for record in records for result in _results(record, player))


def _results(record: Record, player: str) -> list[AgentRecord]:
    """Return the results of a player's agents. Empty if the episode failed.

    If only an opponent forfeited, the player's agents did not succeed.
    """
    results = [] if record.error else [result for result in record.seats.values() if result.player == player]
    opponent_forfeited = any(result.forfeit for result in record.seats.values() if result.player != player)
    if opponent_forfeited and not any(result.forfeit for result in results):
        return [replace(result, success=False) for result in results]
    return results


def _stratum(records: Sequence[Record], player: str, hits: str, trials: str = "") -> Stratum:
    """Return the sums of hits and of trials by seed. Without a name of trials, each agent is one."""
    pairs = _grouped(
        (record.seed, (getattr(result, hits), getattr(result, trials) if trials else 1.0))
        for record in records
        for result in _results(record, player)
    )
    sums = [tuple(map(math.fsum, zip(*group, strict=True))) for group in pairs.values()]
    return [hit for hit, _ in sums], [trial for _, trial in sums]


def _mean_over_seeds(values: Iterable[tuple[int, float]]) -> Interval:
    return statistics.mean([*_means(values).values()])


# ---- parts of a summary


def _scored(records: Sequence[Record], environment: SuiteEnv, player: str, players: Sequence[str]) -> list[Record]:
    """Return the records of a player's cell, including failed ones."""
    alone = environment.kind in ("single", "cooperative") or len(players) == 1
    names_of = [(record, set(record.lineup.values())) for record in records]
    return [record for record, names in names_of if player in names and (names == {player}) == alone]


def _cell(env: str, player: str, records: Sequence[Record], *, failed: int, defined: bool) -> Cell:
    def mean(name: str) -> Interval:
        return _mean_over_seeds(_values(records, player, name))

    def rate(hits: str, trials: str = "") -> Interval:
        return statistics.rate(*_stratum(records, player, hits, trials))

    return Cell(
        env=env,
        player=player,
        episodes=sum(not record.error for record in records),
        failed=failed,
        reward=mean("reward"),
        success=rate("success") if defined else statistics.rate([], []),
        invalid=rate("invalid", "decisions"),
        forfeit=rate("forfeit"),
        cut_off=rate("cut_off", "decisions"),
        decisions=mean("decisions"),
        tokens=mean("tokens"),
        pass_at_k=_pass_at_k(records, player) if defined else {},
    )


def _pass_at_k(records: Iterable[Record], player: str) -> dict[int, Interval]:
    """Return pass@k for k = 1, 2, 4, ... up to the number of samples, over all tasks with that many samples."""
    successes = _grouped(
        ((record.seed, tuple(record.lineup.values())), all(result.success for result in results))
        for record in records
        if (results := _results(record, player))
    )
    most = max(map(len, successes.values()), default=1)
    if most < 2:
        return {}
    return {
        k: _mean_over_seeds(
            (seed, statistics.pass_at_k(len(samples), sum(samples), k))
            for (seed, _), samples in successes.items()
            if len(samples) >= k
        )
        for k in sorted({*(2**i for i in range(most.bit_length())), most})
    }


def _pairs(env: str, values: Mapping[str, Mapping[K, float]]) -> Iterator[Pair]:
    """Yield the differences of all players that share a seed."""
    for first, second in itertools.combinations(values, 2):
        gap = statistics.difference(values[first], values[second])
        if gap.interval.n:
            yield Pair(env=env, first=first, second=second, reward=gap.interval, p_value=gap.p_value)


def _adjusted(rows: Iterable[R]) -> list[R]:
    """Return the rows of a table with p-values adjusted by Holm."""
    rows = list(rows)
    adjusted = statistics.holm([row.p_value for row in rows])
    return [replace(row, p_adjusted=p) for row, p in zip(rows, adjusted, strict=True)]


def _by_players(records: Iterable[Record]) -> dict[frozenset[str], list[Record]]:
    """Return the records of each group of players."""
    return _grouped((frozenset(record.lineup.values()), record) for record in records)


def _agents_of(record: Record, player: str) -> set[str]:
    return {agent for agent, name in record.lineup.items() if name == player}


def _meetings(environment: SuiteEnv, players: Sequence[str], records: Sequence[Record]) -> Iterator[Meeting]:
    records_of = _by_players(records)
    for player, other in itertools.product(players, players):
        both = records_of.get(frozenset((player, other)), [])
        reward = _mean_over_seeds(_values(both, player, "reward"))
        if not reward.n:
            continue
        agents_of = [(record, _agents_of(record, player)) for record in both]
        rewards_of = {}
        for side in map(set, environment.sides):
            # of episodes in which the player had only that side, or all sides
            selected = [record for record, agents in agents_of if agents == side or len(agents) == len(record.lineup)]
            for agent in side:
                rewards_of[agent] = _mean_over_seeds(
                    (record.seed, record.seats[agent].reward) for record in selected if agent in record.seats
                )
        seats = {agent: rewards_of[agent] for agent in environment.seats if rewards_of[agent].n}
        yield Meeting(env=environment.id, player=player, other=other, reward=reward, seats=seats)


def _bounds(environment: SuiteEnv, players: Sequence[str], meetings: Sequence[Meeting]) -> Iterator[Bound]:
    """Yield the bounds of all players that met an opponent in both roles."""
    for player in players:
        opponents = [
            meeting
            for meeting in meetings
            if meeting.other == player != meeting.player and meeting.seats.keys() == {*environment.seats}
        ]
        if opponents:
            best = max(opponents, key=lambda meeting: meeting.reward.value)
            yield Bound(env=environment.id, player=player, opponent=best.player, reward=best.reward)


def partners_of(player: str, players: Sequence[str], partners: Sequence[str]) -> list[str]:
    """Return the players that a player is measured with: `partners`, or all others. Empty for a partner."""
    return [] if player in partners else [name for name in partners or players if name != player]


def _teamwork(
    environment: SuiteEnv, players: Sequence[str], partners: Sequence[str], records: Sequence[Record]
) -> Iterator[Teamwork]:
    records_of = _by_players(records)
    rewards = {
        (a, b): _team_rewards(environment, records_of.get(frozenset((a, b)), []), a, b)
        for a, b in itertools.product(players, players)
    }
    for player in players:
        with_partner = {o: rewards[player, o] for o in partners_of(player, players, partners) if rewards[player, o]}
        with_itself, with_partners = rewards[player, player], _mean_by_seed(list(with_partner.values()))
        alone = {seed: value for seed, value in with_itself.items() if seed in with_partners}
        crossed = {seed: value for seed, value in with_partners.items() if seed in with_itself}
        gap = statistics.difference(alone, crossed)
        if gap.interval.n:
            yield Teamwork(
                env=environment.id,
                player=player,
                partners=tuple(with_partner),
                alone=statistics.mean(list(alone.values())),
                crossed=statistics.mean(list(crossed.values())),
                gap=gap.interval,
                p_value=gap.p_value,
                share=statistics.ratio(crossed, _mean_by_seed([rewards[other, other] for other in with_partner])),
            )


def _mean_by_seed(group: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean by seed, on the seeds that all have."""
    means = _means(item for each in group for item in each.items())
    return {seed: mean for seed, mean in means.items() if all(seed in each for each in group)}


def _team_rewards(environment: SuiteEnv, records: Sequence[Record], player: str, other: str) -> dict[int, float]:
    """Return the mean reward of a player's agents by seed, with itself or as one side among agents of `other`.

    `records` are those of both players. Only seeds with every agent count, because agents can have different rewards.
    """
    sides = [set(side) for side in environment.sides]
    selected = [
        record for record in records if not record.error and (player == other or _agents_of(record, player) in sides)
    ]
    agents = _grouped((record.seed, agent) for record in selected for agent in _agents_of(record, player))
    rewards = _means(_values(selected, player, "reward"))
    return {seed: reward for seed, reward in rewards.items() if {*environment.seats} <= {*agents[seed]}}


def _games(records: Sequence[Record]) -> Iterator[Game]:
    """Yield one game per deal that two players met in. The player with the higher reward over all its line-ups wins.

    The line-ups of a deal count together, because with swapped agents both players had the better hand once. A deal is
    left out if agents were not swapped, or if an episode of it is missing, failed, or ended by a full context. A player
    that forfeits loses the deal, whatever the environment pays: it could otherwise choose the deals that count. A deal
    in which both forfeited is left out.
    """
    tolerance = tolerance_of(records)
    for names, of_players in _by_players(records).items():
        if len(names) != 2:
            continue
        deals = _grouped(((record.seed, record.sample), record) for record in of_players)
        complete = max(map(len, deals.values()))
        for (seed, _), played in deals.items():
            first, second = tuple(dict.fromkeys(played[0].lineup.values()))
            spoiled = len(played) < complete or any(record.error or record.end == "context" for record in played)
            agents = [{*itertools.chain(*(_agents_of(record, name) for record in played))} for name in (first, second)]
            mine, other = ([result for record in played for result in _results(record, n)] for n in (first, second))
            forfeits = [any(result.forfeit for result in results) for results in (mine, other)]
            if spoiled or agents[0] != agents[1] or not mine or not other or all(forfeits):
                continue
            lead = _mean([result.reward for result in mine]) - _mean([result.reward for result in other])
            score = 0.5 if abs(lead) <= tolerance else float(lead > 0)
            yield Game((played[0].env, seed), first, second, float(forfeits[1]) if any(forfeits) else score)
