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
from forge_agents.bench.statistics import Difference, Interval


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
    """Rate of seats that did what was asked, see `success_of`; a rival's forfeit is no success."""
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
    """Two players: what the first earned minus what the second did, on the same seeds."""

    env: str
    """Empty: all, each with each seed a unit of its own."""
    first: str
    second: str
    reward: Interval
    """Of all environments success, which has the same scale in each."""
    p_value: float
    """Two-sided, of sign flips over seeds."""
    p_adjusted: float
    """The same, adjusted by Holm for all pairs of its table."""


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
    """Success by player, mean over environments, interval over the seeds of each."""
    cells: Sequence[Cell]
    overall_pairs: Sequence[Pair]
    """In success; empty where there is one environment."""
    pairs: Sequence[Pair]
    """In reward, by environment."""
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
    cells, meetings, bounds, rewards, successes = [], [], [], {}, {}
    for world in worlds:
        played = by_env[world.id]
        for player in players:
            chosen = scored(played, world, player, players)
            cells.append(_cell(world.id, player, chosen))
            rewards[world.id, player] = _seed_means(chosen, player, lambda seat: seat.reward)
            successes[world.id, player] = _successes(chosen, player)
            if len(world.seats) > 1:
                meetings += [_meeting(world.id, player, other, played) for other in players]
        if world.kind == "competitive" and len(world.seats) == 2:
            bounds += _bounds(world, players, played, [m for m in meetings if m.env == world.id])
    games = [game for world in worlds if world.kind == "competitive" for game in _games(by_env[world.id])]
    return Summary(
        overall={
            player: statistics.mean_rate([_stratum(successes[world.id, player]) for world in worlds])
            for player in players
        },
        cells=cells,
        overall_pairs=_overall_pairs(successes, worlds, players) if len(worlds) > 1 else [],
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


def _given_away(record: Record, player: str) -> bool:
    """Whether a rival ended the episode by an illegal decision and `player` did not: nothing was won."""
    held = [(seat.player == player, seat.forfeit) for seat in record.seats.values()]
    return (False, True) in held and (True, True) not in held


def _successes(records: Iterable[Record], player: str) -> dict[int, tuple[float, float]]:
    """Successes and trials by seed."""
    found: dict[int, tuple[float, float]] = {}
    for record in records:
        if not record.error and (held := _seats(record, player)):
            hits, trials = found.get(record.seed, (0.0, 0.0))
            won = 0 if _given_away(record, player) else sum(seat.success for seat in held)
            found[record.seed] = hits + won, trials + len(held)
    return found


def _stratum(found: Mapping[int, tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [hits for hits, _ in found.values()], [trials for _, trials in found.values()]


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
        success=statistics.rate(*_stratum(_successes(whole, player))),
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


def _overall_pairs(
    successes: Mapping[tuple[str, str], Mapping[int, tuple[float, float]]],
    worlds: Sequence[World],
    players: Sequence[str],
) -> list[Pair]:
    def of(player: str) -> dict[tuple[str, int], float]:
        by_world = {world.id: successes[world.id, player] for world in worlds}
        return {(env, seed): hit / n for env, found in by_world.items() for seed, (hit, n) in found.items() if n}

    return _adjusted(
        ("", first, second, statistics.difference(of(first), of(second)))
        for first, second in itertools.combinations(players, 2)
    )


def _pairs(
    rewards: Mapping[tuple[str, str], Mapping[int, float]], worlds: Sequence[World], players: Sequence[str]
) -> list[Pair]:
    return _adjusted(
        (world.id, first, second, statistics.difference(rewards[world.id, first], rewards[world.id, second]))
        for world in worlds
        for first, second in itertools.combinations(players, 2)
    )


def _adjusted(compared: Iterable[tuple[str, str, str, Difference]]) -> list[Pair]:
    found = list(compared)
    adjusted = statistics.holm([gap.p_value for *_, gap in found])
    return [
        Pair(env=env, first=first, second=second, reward=gap.interval, p_value=gap.p_value, p_adjusted=p)
        for (env, first, second, gap), p in zip(found, adjusted, strict=True)
        if gap.interval.n
    ]


def _games(records: Iterable[Record]) -> Iterable[Game]:
    """One game for every deal that two players met in: who earned more over all its line-ups has won.

    The line-ups of a deal count together, because a good hand or seat is no merit: with seats swapped, both had it. A
    deal without swapped seats, or of which an episode is missing, failed, or was ended by somebody's illegal decision,
    is no game.
    """
    deals: dict[tuple[int, int, frozenset[str]], list[Record]] = {}
    for record in records:
        names = frozenset(record.lineup.values())
        if len(names) == 2:
            deals.setdefault((record.seed, record.sample, names), []).append(record)
    whole: dict[frozenset[str], int] = {}
    for (_, _, names), played in deals.items():
        whole[names] = max(len(played), whole.get(names, 0))
    for (seed, _, names), played in deals.items():
        first, second = dict.fromkeys(played[0].lineup.values())
        spoilt = len(played) < whole[names] or any(
            record.error or any(seat.forfeit for seat in record.seats.values()) for record in played
        )
        held = [[seat.reward for record in played for seat in _seats(record, name)] for name in (first, second)]
        places = [
            {seat for record in played for seat, by in record.lineup.items() if by == name} for name in (first, second)
        ]
        if not spoilt and places[0] == places[1] and all(held):  # a seat that took no part has no record
            mine, other = map(_mean, held)
            yield Game(seed, first, second, 0.5 if math.isclose(mine, other, abs_tol=1e-9) else float(mine > other))


def _pass_at_k(records: Iterable[Record], player: str) -> dict[int, Interval]:
    """For k = 1, 2, 4, ... up to the number of samples, over all tasks that have so many."""
    right: dict[tuple[int, tuple[str, ...]], list[bool]] = {}
    for record in records:
        held = _seats(record, player)
        if held:
            task = record.seed, tuple(record.lineup.values())
            right.setdefault(task, []).append(all(seat.success for seat in held) and not _given_away(record, player))
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
