"""Which seats of a benchmark's episodes succeeded, and which games are won or lost at all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from forge_agents.bench.plan import World
from forge_agents.bench.records import Record

_SAME = 1e-6
"""Rewards that differ by less are the same."""
_FULL_MARK = 1.0
"""The most that a task or a team can earn where its environment does not say."""


def judged(records: Sequence[Record], world: World) -> list[Record]:
    """Records of one environment in which every seat succeeded, failed, or has no success because none is defined.

    What the environment said of a seat stands. Of the other seats:

    * alone or in a team, a seat succeeded with the largest reward: the environment's ``max_reward``, or 1. Without a
      ``max_reward``, success is undefined in an environment that has paid more than 1;
    * among rivals, a seat succeeded if it earned more than every seat of the other players (in self-play, of the other
      sides), provided that the game is one of winning and losing, see `is_won_or_lost`. Otherwise it is undefined.
    """
    seats = [seat for record in records for seat in record.seats.values()]
    if all(seat.success is not None for seat in seats):
        return list(records)
    if world.kind in ("single", "cooperative"):
        most = _FULL_MARK if world.max_reward is None else world.max_reward
        if world.max_reward is None and any(seat.reward > most + _SAME for seat in seats):
            return list(records)
        return [_completed(record, dict.fromkeys(record.seats, most)) for record in records]
    if not is_won_or_lost(records, world):
        return list(records)
    return [_completed(record, {seat: _to_beat(record, seat, world) for seat in record.seats}) for record in records]


def is_zero_sum(records: Iterable[Record], world: World) -> bool:
    """Whether what one side wins the others lose: by the environment's tag, or by the rewards of all episodes.

    Rewards tell so if they differ within an episode and add up to the same in each. Episodes that failed, or that a
    forfeit ended, are left out.
    """
    if world.kind in ("single", "cooperative"):
        return False
    if world.zero_sum:
        return True
    paid = list(_whole(records))
    totals = [math.fsum(rewards) for rewards in paid]
    differ = any(max(rewards) - min(rewards) > _SAME for rewards in paid)
    return differ and max(totals) - min(totals) <= _SAME * max(1.0, *map(abs, totals))


def is_won_or_lost(records: Sequence[Record], world: World) -> bool:
    """Whether a game of rivals is zero-sum, or pays one reward for a win, one for a loss and one for a draw."""
    if is_zero_sum(records, world):
        return True
    if world.kind in ("single", "cooperative"):
        return False
    kinds: dict[str, set[float]] = {"win": set(), "loss": set(), "draw": set()}
    for record in records:
        if record.error or any(seat.forfeit for seat in record.seats.values()):
            continue
        sides = [{round(record.seats[a].reward, 6) for a in side if a in record.seats} for side in world.sides]
        paid = [next(iter(rewards)) for rewards in sides if len(rewards) == 1]
        if len(paid) < sum(map(bool, sides)) or not paid:
            return False
        best, rest = max(paid), sorted(paid)[:-1]
        if all(reward == best for reward in paid):
            kinds["draw"].add(best)
        elif len(set(rest)) == 1 and rest[0] < best:
            kinds["win"].add(best)
            kinds["loss"].add(rest[0])
        else:
            return False
    one_each = len(kinds["win"]) == len(kinds["loss"]) == 1 and len(kinds["draw"]) <= 1
    return one_each and all(max(kinds["loss"]) <= draw <= max(kinds["win"]) for draw in kinds["draw"])


def _whole(records: Iterable[Record]) -> Iterable[list[float]]:
    """Rewards of all seats, of episodes that neither failed nor ended by a forfeit."""
    for record in records:
        if not record.error and not any(seat.forfeit for seat in record.seats.values()):
            yield [seat.reward for seat in record.seats.values()]


def _to_beat(record: Record, seat: str, world: World) -> float:
    """The least that is more than every rival of a seat earned."""
    own = next((side for side in world.sides if seat in side), (seat,))
    against = [other for other, by in record.lineup.items() if by != record.lineup[seat] and other in record.seats]
    rivals = against or [other for other in record.seats if other not in own]
    return max((record.seats[other].reward for other in rivals), default=-math.inf) + 2 * _SAME


def _completed(record: Record, enough: dict[str, float]) -> Record:
    """The record, in which seats of which nothing was said succeeded with `enough` reward."""
    seats = {
        name: replace(seat, success=seat.reward >= enough[name] - _SAME) if seat.success is None else seat
        for name, seat in record.seats.items()
    }
    return replace(record, seats=seats)
