"""What the records of a benchmark say: one cell for each environment and player, pairs, cross-play, ratings.

In: records. Out: estimates with intervals. Waits for nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from forge_agents.bench import statistics
from forge_agents.bench.ratings import Game, Rating, rate_players
from forge_agents.bench.records import Record, SeatRecord
from forge_agents.bench.schedule import World
from forge_agents.bench.statistics import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One player in one environment: alone where there is one seat or one goal, else against the other players.

    Where no other player was there to play against, against itself.
    """

    env: str
    player: str
    episodes: int
    """Episodes that did not fail."""
    failed: int
    reward: Interval
    """Mean reward of a seat."""
    success: Interval
    """Rate of seats that did what was asked, see `success_of`."""
    invalid: Interval
    """Rate of decisions that the environment called illegal."""
    forfeit: Interval
    """Rate of seats whose episode ended by an illegal decision of theirs."""
    cut_off: Interval
    """Rate of decisions cut short by `max_tokens` or the context."""
    decisions: Interval
    """Mean per seat and episode."""
    tokens: Interval
    """Mean number of tokens sampled per seat and episode."""
    pass_at_k: Mapping[int, Interval]
    """By k, mean over seeds and line-ups; empty for one sample a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two players in one environment: reward of the first minus reward of the second, on the same seeds."""

    env: str
    first: str
    second: str
    reward: Interval
    p_value: float
    """Two-sided, of sign flips over seeds."""
    p_adjusted: float
    """The same, adjusted by Holm for all pairs of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One entry of the cross-play matrix."""

    env: str
    player: str
    other: str
    """In the remaining seats, or holding one seat against `player` in the rest; `player` itself for self-play."""
    reward: Interval
    """Of `player`, mean of a seat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What the best opponent of a player earns at least, in a game of two: what the best one here earned."""

    env: str
    player: str
    opponent: str
    """Who earned most against `player`, of all other players that met it in both seats."""
    reward: Interval
    """Of `opponent`, mean over both seats; its interval is that of one meeting and knows nothing of the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All that a report shows."""

    overall: Mapping[str, Interval]
    """Success by player, mean over environments, interval over seeds."""
    cells: Sequence[Cell]
    pairs: Sequence[Pair]
    meetings: Sequence[Meeting]
    bounds: Sequence[Bound]
    """Lower bounds of exploitability."""
    ratings: Mapping[str, Rating]
    """Of players who met in games of seats against each other, best first; empty where nobody did."""


def summarise(records: Sequence[Record], worlds: Sequence[World], players: Sequence[str]) -> Summary:
    """Everything from the records; the same records give the same numbers, to the bit."""
    by_env: dict[str, list[Record]] = {world.id: [] for world in worlds}
    for record in records:
        by_env[record.env].append(record)
    cells, meetings, bounds, rewards = [], [], [], {}
    for world in worlds:
        played = by_env[world.id]
        for player in players:
            chosen = scored(played, world, player, players)
            cells.append(_cell(world.id, player, chosen))
            rewards[world.id, player] = _seed_means(chosen, player, lambda seat: seat.reward)
            if len(world.seats) > 1:
                meetings += [_meeting(world.id, player, other, played) for other in players]
        if world.kind == "competitive" and len(world.seats) == 2:
            bounds += _bounds(world, players, played, [m for m in meetings if m.env == world.id])
    games = [game for world in worlds if world.kind == "competitive" for game in _games(by_env[world.id])]
    return Summary(
        overall={player: _overall(by_env, worlds, player, players) for player in players},
        cells=cells,
        pairs=_pairs(rewards, worlds, players),
        meetings=[meeting for meeting in meetings if meeting.reward.n],
        bounds=bounds,
        ratings=rate_players(games, players),
    )


def scored(records: Sequence[Record], world: World, player: str, players: Sequence[str]) -> list[Record]:
    """The records that a player's cell is made of, failed ones included."""
    own = [record for record in records if player in record.lineup.values()]
    alone = [record for record in own if set(record.lineup.values()) == {player}]
    if world.kind in ("single", "cooperative") or len(players) == 1:
        return alone
    return [record for record in own if set(record.lineup.values()) != {player}]


def _seats(record: Record, player: str) -> list[SeatRecord]:
    return [seat for seat in record.seats.values() if seat.player == player]


def _cell(env: str, player: str, records: Sequence[Record]) -> Cell:
    whole = [record for record in records if not record.error]

    def mean(value: Callable[[SeatRecord], float]) -> Interval:
        return statistics.mean(list(_seed_means(whole, player, value).values()))

    def rate(hits: Callable[[SeatRecord], float], trials: Callable[[SeatRecord], float]) -> Interval:
        hit: defaultdict[int, float] = defaultdict(float)
        trial: defaultdict[int, float] = defaultdict(float)
        for record in whole:
            for seat in _seats(record, player):
                hit[record.seed] += hits(seat)
                trial[record.seed] += trials(seat)
        return statistics.rate([hit[seed] for seed in trial], list(trial.values()))

    def one(seat: SeatRecord) -> float:
        return 1.0

    def decisions(seat: SeatRecord) -> float:
        return seat.decisions

    return Cell(
        env=env,
        player=player,
        episodes=len(whole),
        failed=len(records) - len(whole),
        reward=mean(lambda seat: seat.reward),
        success=rate(lambda seat: seat.success, one),
        invalid=rate(lambda seat: seat.invalid, decisions),
        forfeit=rate(lambda seat: seat.forfeit, one),
        cut_off=rate(lambda seat: seat.cut_off, decisions),
        decisions=mean(decisions),
        tokens=mean(lambda seat: seat.tokens),
        pass_at_k=_pass_at_k(whole, player),
    )


def _seed_means(records: Iterable[Record], player: str, value: Callable[[SeatRecord], float]) -> dict[int, float]:
    """Mean over the seats of a player, by seed."""
    found: dict[int, list[float]] = {}
    for record in records:
        found.setdefault(record.seed, []).extend(value(seat) for seat in _seats(record, player))
    return {seed: _mean(values) for seed, values in found.items() if values}


def _meeting(env: str, player: str, other: str, records: Sequence[Record]) -> Meeting:
    met = [record for record in records if set(record.lineup.values()) == {player, other} and not record.error]
    rewards = _seed_means(met, player, lambda seat: seat.reward)
    return Meeting(env=env, player=player, other=other, reward=statistics.mean(list(rewards.values())))


def _bounds(
    world: World, players: Sequence[str], records: Sequence[Record], meetings: Sequence[Meeting]
) -> list[Bound]:
    """Of all players that somebody met in both seats."""
    first: defaultdict[frozenset[str], set[str]] = defaultdict(set)
    for record in records:
        if not record.error:
            first[frozenset(record.lineup.values())].add(record.lineup[world.seats[0]])
    found = []
    for player in players:
        known = [m for m in meetings if m.other == player and m.reward.n]
        met = [m for m in known if len(first[frozenset((m.player, player))]) == 2]
        if met:
            best = max(met, key=lambda meeting: meeting.reward.value)
            found.append(Bound(env=world.id, player=player, opponent=best.player, reward=best.reward))
    return found


def _overall(
    by_env: Mapping[str, Sequence[Record]], worlds: Sequence[World], player: str, players: Sequence[str]
) -> Interval:
    """Mean success over environments, on the seeds that were played in all of them."""
    by_world = []
    for world in worlds:
        whole = [record for record in scored(by_env[world.id], world, player, players) if not record.error]
        by_world.append(_seed_means(whole, player, lambda seat: float(seat.success)))
    common = [seed for seed in by_world[0] if all(seed in found for found in by_world)]
    by_seed = [_mean(found[seed] for found in by_world) for seed in common]
    return statistics.rate(by_seed, [1.0] * len(by_seed))


def _pairs(
    rewards: Mapping[tuple[str, str], Mapping[int, float]], worlds: Sequence[World], players: Sequence[str]
) -> list[Pair]:
    found = [
        (world.id, first, second, statistics.difference(rewards[world.id, first], rewards[world.id, second]))
        for world in worlds
        for first, second in itertools.combinations(players, 2)
    ]
    adjusted = statistics.holm([gap.p_value for _, _, _, gap in found])
    return [
        Pair(env=env, first=first, second=second, reward=gap.interval, p_value=gap.p_value, p_adjusted=p)
        for (env, first, second, gap), p in zip(found, adjusted, strict=True)
        if gap.interval.n
    ]


def _games(records: Iterable[Record]) -> Iterable[Game]:
    """One game for every episode in which two players met."""
    for record in records:
        names = list(dict.fromkeys(record.lineup.values()))
        held = [_seats(record, name) for name in names]
        if len(names) == 2 and not record.error and all(held):
            mine, other = (_mean(seat.reward for seat in seats) for seats in held)
            score = 0.5 if math.isclose(mine, other, abs_tol=1e-9) else float(mine > other)
            yield Game(record.seed, names[0], names[1], score)


def _pass_at_k(records: Iterable[Record], player: str) -> dict[int, Interval]:
    """For k = 1, 2, 4, ... up to the number of samples, over all tasks that have so many."""
    right: dict[tuple[int, tuple[str, ...]], list[bool]] = {}
    for record in records:
        held = _seats(record, player)
        if held:
            task = record.seed, tuple(record.lineup.values())
            right.setdefault(task, []).append(all(seat.success for seat in held))
    most = max(map(len, right.values()), default=1)
    if most < 2:
        return {}
    wanted = sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})

    def estimate(k: int) -> Interval:
        by_seed: dict[int, list[float]] = {}
        for (seed, _), found in right.items():
            if len(found) >= k:
                by_seed.setdefault(seed, []).append(statistics.pass_at_k(len(found), sum(found), k))
        return statistics.mean([_mean(values) for values in by_seed.values()])

    return {k: estimate(k) for k in wanted}


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return math.fsum(known) / len(known) if known else math.nan
