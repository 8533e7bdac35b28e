"""What the records of a benchmark say: one cell for each environment and player, pairs, cross-play, ratings.

In: records. Out: estimates with intervals. Waits for nothing.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from forge_agents.bench import statistics
from forge_agents.bench.plan import TEAMS, World
from forge_agents.bench.records import Record, SeatRecord
from forge_agents.bench.statistics import Difference, Game, Interval, Rating, rate_players
from forge_agents.bench.verdicts import is_won_or_lost, is_zero_sum, judged


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
    """Rate of seats that did what was asked, see `forge_agents.bench.verdicts.judged`; a rival's forfeit is no success.
    NaN where no success is defined."""
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
    """In the remaining seats, or holding one side against `player` in the rest; `player` itself for self-play."""
    reward: Interval
    """Of `player`, mean of a seat."""
    seats: Mapping[str, Interval]
    """By seat, the reward of `player` in it while `other` held all the rest, its side's excepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teamwork:
    """One player with partners, in a game that is not all against each other."""

    env: str
    player: str
    partners: tuple[str, ...]
    """Those that it met, in each seat of some seed."""
    alone: Interval
    """Reward with itself in all seats, mean of a seat, on the seeds of `gap`."""
    crossed: Interval
    """Reward of its one seat among partners, each of whom counts alike, on the seeds of `gap`."""
    gap: Interval
    """`alone` minus `crossed`, on the seeds that it played both with itself and in each seat with all `partners`."""
    p_value: float
    """Of the gap: two-sided, of sign flips over seeds."""
    p_adjusted: float
    """The same, adjusted by Holm for all rows of its table."""
    share: Interval
    """`crossed` over what the partners earn each with itself, the ad-hoc teamwork score; NaN where that may be 0."""


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
    """Success by player, mean over the environments that define it, interval over the seeds of each."""
    cells: Sequence[Cell]
    overall_pairs: Sequence[Pair]
    """In success; empty where there is one environment."""
    pairs: Sequence[Pair]
    """In reward, by environment."""
    meetings: Sequence[Meeting]
    teamwork: Sequence[Teamwork]
    """Of players that met partners."""
    bounds: Sequence[Bound]
    """Lower bounds of exploitability."""
    ratings: Mapping[str, Rating]
    """Of players who met in games that are won or lost, best first; empty where nobody did."""
    undefined: Sequence[str] = ()
    """Environments in which no success is defined."""


def summarise(
    records: Sequence[Record], worlds: Sequence[World], players: Sequence[str], partners: Sequence[str] = ()
) -> Summary:
    """Everything from the records; the same records give the same numbers, to the bit.

    Args:
        partners: Those whose partnership the others are measured by; empty: all, each by all the others.
    """
    by_env = _judged(records, worlds)
    undefined = _undefined(by_env)
    cells, meetings, bounds, pairs = [], [], [], []
    teamwork: list[Teamwork] = []
    scored: dict[tuple[str, str], list[Record]] = {}
    for world in worlds:
        played, met = by_env[world.id], []
        rewards: dict[str, dict[int, float]] = {}
        for player in players:
            chosen = scored[world.id, player] = _scored(played, world, player, players)
            cells.append(_cell(world.id, player, chosen, defined=world.id not in undefined))
            rewards[player] = {seed: _mean(paid) for seed, paid in _by_seed(chosen, player, _reward).items()}
            for other in players if len(world.seats) > 1 else ():
                both = [record for record in played if set(record.lineup.values()) == {player, other}]
                earned = _mean_over_seeds(both, player, _reward)
                if earned.n:
                    seats = _by_seat(both, player, world)
                    met.append(Meeting(env=world.id, player=player, other=other, reward=earned, seats=seats))
        meetings += met
        if world.kind in TEAMS:
            teamwork += _teamwork(world, players, partners, played)
        if world.kind == "competitive" and len(world.sides) == 2 and is_zero_sum(played, world):
            bounds += _bounds(world, players, played, met)
        pairs += [
            (world.id, first, second, statistics.difference(rewards[first], rewards[second]))
            for first, second in itertools.combinations(players, 2)
        ]

    def successes(player: str) -> dict[tuple[str, int], float]:
        found = {
            world.id: _by_seed(scored[world.id, player], player, _success)
            for world in worlds
            if world.id not in undefined
        }
        return {(env, seed): _mean(hits) for env, by_seed in found.items() for seed, hits in by_seed.items()}

    overall_pairs = [
        ("", first, second, statistics.difference(successes(first), successes(second)))
        for first, second in (itertools.combinations(players, 2) if len(worlds) > 1 else ())
    ]
    rated = [w for w in worlds if w.kind == "competitive" and is_won_or_lost(by_env[w.id], w)]
    games = [game for world in rated for game in _games(by_env[world.id])]
    return Summary(
        overall=_overall(scored, [world for world in worlds if world.id not in undefined], players),
        cells=cells,
        overall_pairs=_adjusted(overall_pairs),
        pairs=_adjusted(pairs),
        meetings=meetings,
        teamwork=[
            replace(row, p_adjusted=p)
            for row, p in zip(teamwork, statistics.holm([row.p_value for row in teamwork]), strict=True)
        ],
        bounds=bounds,
        ratings=rate_players(games, players),
        undefined=undefined,
    )


def overall(records: Sequence[Record], worlds: Sequence[World], players: Sequence[str]) -> dict[str, Interval]:
    """Success by player, as in `Summary`."""
    by_env = _judged(records, worlds)
    undefined = _undefined(by_env)
    scored = {(w.id, player): _scored(by_env[w.id], w, player, players) for w in worlds for player in players}
    return _overall(scored, [world for world in worlds if world.id not in undefined], players)


def _judged(records: Iterable[Record], worlds: Sequence[World]) -> dict[str, list[Record]]:
    """The records by environment, with success where it is defined."""
    by_env: dict[str, list[Record]] = {world.id: [] for world in worlds}
    for record in records:
        by_env[record.env].append(record)
    return {world.id: judged(by_env[world.id], world) for world in worlds}


def _undefined(by_env: Mapping[str, Sequence[Record]]) -> tuple[str, ...]:
    """Environments with a seat of which nobody can tell whether it succeeded."""
    return tuple(
        env
        for env, records in by_env.items()
        if any(seat.success is None for record in records for seat in record.seats.values())
    )


def _overall(
    scored: Mapping[tuple[str, str], Sequence[Record]], worlds: Sequence[World], players: Sequence[str]
) -> dict[str, Interval]:
    return {
        player: statistics.mean_rate([_stratum(scored[world.id, player], player, _success) for world in worlds])
        for player in players
    }


def _scored(records: Sequence[Record], world: World, player: str, players: Sequence[str]) -> list[Record]:
    """The records that a player's cell is made of, failed ones included."""
    alone = world.kind in ("single", "cooperative") or len(players) == 1
    met = [(record, set(record.lineup.values())) for record in records]
    return [record for record, names in met if player in names and (names == {player}) == alone]


def _seats(record: Record, player: str) -> list[SeatRecord]:
    """What a player's seats came to; none of an episode that failed.

    Where a rival alone ended the episode by an illegal decision, nothing was won.
    """
    held = [] if record.error else [seat for seat in record.seats.values() if seat.player == player]
    given = any(seat.forfeit for seat in record.seats.values() if seat.player != player)
    if given and not any(seat.forfeit for seat in held):
        return [replace(seat, success=False) for seat in held]
    return held


def _by_seed(
    records: Iterable[Record], player: str, value: Callable[[SeatRecord], float]
) -> dict[int, list[float]]:
    """A value of each of a player's seats."""
    found: dict[int, list[float]] = {}
    for record in records:
        for seat in _seats(record, player):
            found.setdefault(record.seed, []).append(value(seat))
    return found


_reward, _success, _decisions = map(operator.attrgetter, ("reward", "success", "decisions"))


def _stratum(
    records: Sequence[Record],
    player: str,
    hits: Callable[[SeatRecord], float],
    trials: Callable[[SeatRecord], float] = lambda _: 1.0,
) -> tuple[list[float], list[float]]:
    """Hits and trials by seed."""
    found = (_by_seed(records, player, value).values() for value in (hits, trials))
    hit, trial = (list(map(math.fsum, by_seed)) for by_seed in found)
    return hit, trial


def _mean_over_seeds(records: Iterable[Record], player: str, value: Callable[[SeatRecord], float]) -> Interval:
    return statistics.mean([_mean(values) for values in _by_seed(records, player, value).values()])


def _cell(env: str, player: str, records: Sequence[Record], *, defined: bool) -> Cell:
    failed = sum(bool(record.error) for record in records)
    return Cell(
        env=env,
        player=player,
        episodes=len(records) - failed,
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


def _by_seat(records: Sequence[Record], player: str, world: World) -> dict[str, Interval]:
    """What a player earned in each seat while it held its side alone, or with itself in all."""
    found = {}
    for seat in world.seats:
        side = next(set(each) for each in world.sides if seat in each)
        paid: dict[int, list[float]] = {}
        for record in records:
            held = [at for at, name in record.lineup.items() if name == player]
            if seat in record.seats and set(held) in (side, set(record.lineup)):
                paid.setdefault(record.seed, []).append(record.seats[seat].reward)
        found[seat] = statistics.mean([_mean(rewards) for rewards in paid.values()])
    return {seat: earned for seat, earned in found.items() if earned.n}


def partners_of(player: str, players: Sequence[str], partners: Sequence[str]) -> list[str]:
    """Whom a player is measured with, none where it is a partner itself; `partners` empty: with all the others."""
    return [] if player in partners else [name for name in partners or players if name != player]


def _teamwork(
    world: World, players: Sequence[str], partners: Sequence[str], records: Sequence[Record]
) -> Iterable[Teamwork]:
    """Of every player that is measured and met somebody."""
    sides = [set(side) for side in world.sides]

    def earned(player: str, other: str) -> dict[int, float]:
        """By seed, with itself, or of its one side: where it had each, because seats are not worth the same."""
        found, held = [], defaultdict(set)
        for record in records:
            seats = [seat for seat, name in record.lineup.items() if name == player]
            whole = player == other or set(seats) in sides
            if set(record.lineup.values()) == {player, other} and whole and not record.error:
                found.append(record)
                held[record.seed].update(seats)
        paid = _by_seed(found, player, _reward).items()
        return {seed: _mean(rewards) for seed, rewards in paid if held[seed] >= set(world.seats)}

    def together(each: Sequence[Mapping[int, float]]) -> dict[int, float]:
        return {seed: _mean([one[seed] for one in each]) for seed in each[0] if all(seed in one for one in each)}

    for player in players:
        met = {other: paid for other in partners_of(player, players, partners) if (paid := earned(player, other))}
        if not met:
            continue
        own, others = earned(player, player), together(list(met.values()))
        alone = {seed: paid for seed, paid in own.items() if seed in others}
        crossed = {seed: paid for seed, paid in others.items() if seed in own}
        gap = statistics.difference(alone, crossed)
        if gap.interval.n:
            yield Teamwork(
                env=world.id,
                player=player,
                partners=tuple(met),
                alone=statistics.mean(list(alone.values())),
                crossed=statistics.mean(list(crossed.values())),
                gap=gap.interval,
                p_value=gap.p_value,
                p_adjusted=gap.p_value,
                share=statistics.ratio(crossed, together([earned(other, other) for other in met])),
            )


def _bounds(
    world: World, players: Sequence[str], records: Sequence[Record], meetings: Sequence[Meeting]
) -> list[Bound]:
    """Of all players that somebody met in both seats."""
    first: defaultdict[frozenset[str], set[str]] = defaultdict(set)
    for record in records:
        if not record.error:
            first[frozenset(record.lineup.values())].add(record.lineup[world.seats[0]])
    best: dict[str, Meeting] = {}
    for met in meetings:
        swapped = len(first[frozenset((met.player, met.other))]) == 2
        if swapped and (met.other not in best or met.reward.value > best[met.other].reward.value):
            best[met.other] = met
    return [
        Bound(env=world.id, player=player, opponent=best[player].player, reward=best[player].reward)
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
    whole: Counter[frozenset[str]] = Counter()
    for (_, _, names), played in deals.items():
        whole[names] = max(len(played), whole[names])
    for (seed, _, names), played in deals.items():
        spoilt = any(record.error or any(seat.forfeit for seat in record.seats.values()) for record in played)
        first, second = both = tuple(dict.fromkeys(played[0].lineup.values()))
        places = [{seat for record in played for seat, by in record.lineup.items() if by == name} for name in both]
        held = [[seat.reward for record in played for seat in _seats(record, name)] for name in both]
        if not spoilt and len(played) == whole[names] and places[0] == places[1] and all(held):  # all took part
            mine, other = map(_mean, held)
            score = 0.5 if math.isclose(mine, other, abs_tol=1e-9) else float(mine > other)
            yield Game((played[0].env, seed), first, second, score)


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
    wanted = sorted({*(2**i for i in range(most.bit_length())), most})

    def estimate(k: int) -> Interval:
        by_seed: dict[int, list[float]] = {}
        for (seed, _), found in right.items():
            if len(found) >= k:
                by_seed.setdefault(seed, []).append(statistics.pass_at_k(len(found), sum(found), k))
        return statistics.mean([_mean(values) for values in by_seed.values()])

    return {k: estimate(k) for k in wanted}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
