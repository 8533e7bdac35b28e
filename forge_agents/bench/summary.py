"""Summary of a benchmark's records: cells by environment and player, differences, cross-play, teamwork, ratings."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forge_agents.bench import statistics
from forge_agents.bench.plan import TEAMS, SuiteEnv
from forge_agents.bench.records import AgentRecord, Record
from forge_agents.bench.statistics import Difference, Game, Interval, Rating, rate_players
from forge_agents.bench.verdicts import failing_players, is_won_or_lost, is_zero_sum, judged, tolerance_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One player in one environment: alone with one agent or one goal, otherwise against the other players.

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
    p_adjusted: float
    """p-value adjusted by Holm for all pairs of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One entry of the cross-play matrix."""

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
    """One player with partners in a cooperative or mixed game."""

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
    p_adjusted: float
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


def summarize(
    records: Sequence[Record], environments: Sequence[SuiteEnv], players: Sequence[str], partners: Sequence[str] = ()
) -> Summary:
    """Summarize records. The same records give the same numbers."""
    cells, meetings, bounds, pairs, games, undefined = [], [], [], [], list[Game](), []
    teamwork = list[Teamwork]()
    strata: dict[str, list[tuple[list[float], list[float]]]] = {player: [] for player in players}
    successes: dict[str, dict[tuple[str, int], float]] = {player: {} for player in players}
    records_of: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        records_of[record.env].append(record)
    failing = {env: names for env, of_env in records_of.items() if (names := failing_players(of_env))}
    for environment in environments:
        of_env, left_out = records_of[environment.id], failing.get(environment.id, {})
        measured = [record for record in of_env if left_out.keys().isdisjoint(record.lineup.values())]
        played = judged(measured, environment)
        defined = all(agent.success is not None for record in played for agent in record.seats.values())
        undefined += [] if defined else [environment.id]
        rewards: dict[str, dict[int, float]] = {}
        for player in players:
            selected = _scored(played, environment, player, players)
            failed = sum(bool(record.error) for record in _scored(of_env, environment, player, players))
            cells.append(_cell(environment.id, player, selected, failed=failed, defined=defined))
            rewards[player] = {seed: _mean(values) for seed, values in _by_seed(selected, player, _reward).items()}
            if defined:
                strata[player].append(_stratum(selected, player, _success))
                by_seed = _by_seed(selected, player, _success)
                successes[player] |= {(environment.id, seed): _mean(values) for seed, values in by_seed.items()}
        pairs += [
            (environment.id, first, second, statistics.difference(rewards[first], rewards[second]))
            for first, second in itertools.combinations(players, 2)
        ]
        env_meetings = list(_meetings(environment, players, played)) if len(environment.seats) > 1 else []
        meetings += env_meetings
        if environment.kind in TEAMS:
            teamwork += _teamwork(environment, players, partners, played)
        if environment.kind == "competitive" and len(environment.sides) == 2 and is_zero_sum(played, environment):
            bounds += _bounds(environment, players, played, env_meetings)
        if environment.kind == "competitive" and is_won_or_lost(played, environment):
            games += _games(played)
    for player in {name for names in failing.values() for name in names}:
        strata[player] = []  # the mean over the other environments would be of those in which it did not fail
    overall_pairs = [
        ("", first, second, statistics.difference(successes[first], successes[second]))
        for first, second in (itertools.combinations(players, 2) if len(environments) > 1 else ())
    ]
    adjusted = statistics.holm([row.p_value for row in teamwork])
    return Summary(
        overall={player: statistics.mean_rate(strata[player]) for player in players},
        cells=cells,
        overall_pairs=_adjusted(overall_pairs),
        pairs=_adjusted(pairs),
        meetings=meetings,
        teamwork=[replace(row, p_adjusted=p) for row, p in zip(teamwork, adjusted, strict=True)],
        bounds=bounds,
        ratings=rate_players(games, players),
        undefined=tuple(undefined),
        failing=failing,
    )


def _scored(records: Sequence[Record], environment: SuiteEnv, player: str, players: Sequence[str]) -> list[Record]:
    """Return the records of a player's cell, including failed ones."""
    alone = environment.kind in ("single", "cooperative") or len(players) == 1
    names_of = [(record, set(record.lineup.values())) for record in records]
    return [record for record, names in names_of if player in names and (names == {player}) == alone]


def _results(record: Record, player: str) -> list[AgentRecord]:
    """Return the results of a player's agents. Empty if the episode failed.

    If only an opponent forfeited, the player's agents did not succeed.
    """
    results = [] if record.error else [result for result in record.seats.values() if result.player == player]
    opponent_forfeited = any(result.forfeit for result in record.seats.values() if result.player != player)
    if opponent_forfeited and not any(result.forfeit for result in results):
        return [replace(result, success=False) for result in results]
    return results


def _by_seed(records: Iterable[Record], player: str, value: Callable[[AgentRecord], float]) -> dict[int, list[float]]:
    """Return a value of each of a player's agents, by seed."""
    values: dict[int, list[float]] = {}
    for record in records:
        for result in _results(record, player):
            values.setdefault(record.seed, []).append(value(result))
    return values


_reward, _success, _decisions = map(operator.attrgetter, ("reward", "success", "decisions"))


def _stratum(
    records: Sequence[Record],
    player: str,
    hits: Callable[[AgentRecord], float],
    trials: Callable[[AgentRecord], float] = lambda _: 1.0,
) -> tuple[list[float], list[float]]:
    """Return the sums of hits and of trials by seed."""
    hit_sums, trial_sums = (
        [math.fsum(values) for values in _by_seed(records, player, value).values()] for value in (hits, trials)
    )
    return hit_sums, trial_sums


def _mean_over_seeds(records: Iterable[Record], player: str, value: Callable[[AgentRecord], float]) -> Interval:
    return statistics.mean([_mean(values) for values in _by_seed(records, player, value).values()])


def _cell(env: str, player: str, records: Sequence[Record], *, failed: int, defined: bool) -> Cell:
    return Cell(
        env=env,
        player=player,
        episodes=sum(not record.error for record in records),
        failed=failed,
        reward=_mean_over_seeds(records, player, _reward),
        success=statistics.rate(*_stratum(records if defined else (), player, _success)),
        invalid=statistics.rate(*_stratum(records, player, operator.attrgetter("invalid"), _decisions)),
        forfeit=statistics.rate(*_stratum(records, player, operator.attrgetter("forfeit"))),
        cut_off=statistics.rate(*_stratum(records, player, operator.attrgetter("cut_off"), _decisions)),
        decisions=_mean_over_seeds(records, player, _decisions),
        tokens=_mean_over_seeds(records, player, operator.attrgetter("tokens")),
        pass_at_k=_pass_at_k(records, player) if defined else {},
    )


def _meetings(environment: SuiteEnv, players: Sequence[str], records: Sequence[Record]) -> Iterator[Meeting]:
    records_of = _by_players(records)
    for player, other in itertools.product(players, players):
        both = records_of[frozenset((player, other))]
        reward = _mean_over_seeds(both, player, _reward)
        if reward.n:
            agents = _by_agent(both, player, environment)
            yield Meeting(env=environment.id, player=player, other=other, reward=reward, seats=agents)


def _by_players(records: Iterable[Record]) -> defaultdict[frozenset[str], list[Record]]:
    """Return the records of each group of players."""
    groups: defaultdict[frozenset[str], list[Record]] = defaultdict(list)
    for record in records:
        groups[frozenset(record.lineup.values())].append(record)
    return groups


def _by_agent(records: Sequence[Record], player: str, environment: SuiteEnv) -> dict[str, Interval]:
    """Return the reward of a player by agent, from episodes in which it had only that agent's side, or all sides."""
    rewards_of = {}
    for agent in environment.seats:
        side = next(set(side) for side in environment.sides if agent in side)
        rewards: dict[int, list[float]] = {}
        for record in records:
            agents = {name for name, by in record.lineup.items() if by == player}
            if agent in record.seats and agents in (side, set(record.lineup)):
                rewards.setdefault(record.seed, []).append(record.seats[agent].reward)
        rewards_of[agent] = statistics.mean([_mean(values) for values in rewards.values()])
    return {agent: reward for agent, reward in rewards_of.items() if reward.n}


def partners_of(player: str, players: Sequence[str], partners: Sequence[str]) -> list[str]:
    """Return the players that a player is measured with: `partners`, or all others. Empty for a partner."""
    return [] if player in partners else [name for name in partners or players if name != player]


def _teamwork(
    environment: SuiteEnv, players: Sequence[str], partners: Sequence[str], records: Sequence[Record]
) -> Iterator[Teamwork]:
    records_of = _by_players(records)
    rewards = {
        (a, b): _team_rewards(environment, records_of[frozenset((a, b))], a, b) for a in players for b in players
    }

    for player in players:
        with_partner = {o: rewards[player, o] for o in partners_of(player, players, partners) if rewards[player, o]}
        if not with_partner:
            continue
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
                p_adjusted=gap.p_value,
                share=statistics.ratio(crossed, _mean_by_seed([rewards[other, other] for other in with_partner])),
            )


def _mean_by_seed(group: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean by seed, on the seeds that all have."""
    return {seed: _mean([each[seed] for each in group]) for seed in group[0] if all(seed in each for each in group)}


def _team_rewards(environment: SuiteEnv, records: Sequence[Record], player: str, other: str) -> dict[int, float]:
    """Return the mean reward of a player's agents by seed, with itself or as one side among agents of `other`.

    `records` are those of both players. Only seeds with every agent count, because agents can have different rewards.
    """
    sides = [set(side) for side in environment.sides]
    selected, agents_of = [], defaultdict(set)
    for record in records:
        agents = {agent for agent, name in record.lineup.items() if name == player}
        if (player == other or agents in sides) and not record.error:
            selected.append(record)
            agents_of[record.seed].update(agents)
    rewards = _by_seed(selected, player, _reward)
    return {seed: _mean(values) for seed, values in rewards.items() if agents_of[seed] >= set(environment.seats)}


def _bounds(
    environment: SuiteEnv, players: Sequence[str], records: Sequence[Record], meetings: Sequence[Meeting]
) -> list[Bound]:
    """Return the bounds of all players that met an opponent in both roles."""
    first: defaultdict[frozenset[str], set[str]] = defaultdict(set)
    for record in records:
        if not record.error:
            first[frozenset(record.lineup.values())].add(record.lineup[environment.seats[0]])
    best: dict[str, Meeting] = {}
    for meeting in meetings:
        swapped = len(first[frozenset((meeting.player, meeting.other))]) == 2
        if swapped and (meeting.other not in best or meeting.reward.value > best[meeting.other].reward.value):
            best[meeting.other] = meeting
    return [
        Bound(env=environment.id, player=player, opponent=best[player].player, reward=best[player].reward)
        for player in players
        if player in best
    ]


def _adjusted(compared: Sequence[tuple[str, str, str, Difference]]) -> list[Pair]:
    adjusted = statistics.holm([gap.p_value for *_, gap in compared])
    return [
        Pair(env=env, first=first, second=second, reward=gap.interval, p_value=gap.p_value, p_adjusted=p)
        for (env, first, second, gap), p in zip(compared, adjusted, strict=True)
        if gap.interval.n
    ]


def _games(records: Sequence[Record]) -> Iterator[Game]:
    """Yield one game per deal that two players met in. The player with the higher reward over all its line-ups wins.

    The line-ups of a deal count together, because with swapped agents both players had the better hand once. A deal is
    left out if agents were not swapped, or if an episode of it is missing, failed, or ended by a full context. A player
    that forfeits loses the deal, whatever the environment pays: it could otherwise choose the deals that count. A deal
    in which both forfeited is left out.
    """
    tolerance = tolerance_of(records)
    deals: dict[tuple[int, int, frozenset[str]], list[Record]] = {}
    for record in records:
        names = frozenset(record.lineup.values())
        if len(names) == 2:
            deals.setdefault((record.seed, record.sample, names), []).append(record)
    complete: Counter[frozenset[str]] = Counter()
    for (_, _, names), played in deals.items():
        complete[names] = max(len(played), complete[names])
    for (seed, _, names), played in deals.items():
        spoiled = any(record.error or record.end == "context" for record in played)
        first, second = both = tuple(dict.fromkeys(played[0].lineup.values()))
        agents = [{agent for record in played for agent, by in record.lineup.items() if by == name} for name in both]
        rewards = [[result.reward for record in played for result in _results(record, name)] for name in both]
        if not spoiled and len(played) == complete[names] and agents[0] == agents[1] and all(rewards):
            forfeits = [any(result.forfeit for record in played for result in _results(record, name)) for name in both]
            if all(forfeits):
                continue
            if any(forfeits):
                score = float(forfeits[1])
            else:
                mine, other = map(_mean, rewards)
                score = 0.5 if abs(mine - other) <= tolerance else float(mine > other)
            yield Game((played[0].env, seed), first, second, score)


def _pass_at_k(records: Iterable[Record], player: str) -> dict[int, Interval]:
    """Return pass@k for k = 1, 2, 4, ... up to the number of samples, over all tasks with that many samples."""
    successes: dict[tuple[int, tuple[str, ...]], list[bool]] = {}
    for record in records:
        results = _results(record, player)
        if results:
            task = record.seed, tuple(record.lineup.values())
            successes.setdefault(task, []).append(all(result.success for result in results))
    most = max(map(len, successes.values()), default=1)
    if most < 2:
        return {}

    def estimate(k: int) -> Interval:
        by_seed: dict[int, list[float]] = {}
        for (seed, _), samples in successes.items():
            if len(samples) >= k:
                by_seed.setdefault(seed, []).append(statistics.pass_at_k(len(samples), sum(samples), k))
        return statistics.mean([_mean(values) for values in by_seed.values()])

    return {k: estimate(k) for k in sorted({*(2**i for i in range(most.bit_length())), most})}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
