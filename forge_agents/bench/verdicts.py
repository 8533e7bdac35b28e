"""Success of each agent in the episodes of a benchmark, and which games are won or lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from forge_agents.bench.plan import SuiteEnv
from forge_agents.bench.records import Record
from forge_agents.types import reward_scale

_TOLERANCE = 1e-6
"""Rewards that differ by less are equal, in units of `reward_scale`."""
_FULL_REWARD = 1.0
"""Maximum reward of a task or a team if its environment does not define it."""


def tolerance_of(records: Iterable[Record]) -> float:
    """Return the difference up to which rewards of an environment are equal. A game may pay 1e-9 for a win."""
    played = (agent for record in records if not is_spoiled(record) for agent in record.seats.values())
    return _TOLERANCE * reward_scale(agent.reward for agent in played)


def judged(records: Sequence[Record], environment: SuiteEnv) -> list[Record]:
    """Complete the records of one environment with the success of each agent, where it is defined.

    A success that the environment reported is kept. Otherwise:

    - alone or in a team, an agent succeeds with the maximum reward: the environment's ``max_reward``, or 1. Without
      ``max_reward``, success is undefined if a reward above 1 was paid;
    - against opponents, an agent succeeds if it earned more than every agent of the other players (in self-play, of the
      other sides), provided that the game is won or lost, see `is_won_or_lost`. Otherwise success is undefined.
    """
    agents = [agent for record in records for agent in record.seats.values()]
    if all(agent.success is not None for agent in agents):
        return list(records)
    if environment.kind in ("single", "cooperative"):
        full = _FULL_REWARD if environment.max_reward is None else environment.max_reward
        tolerance = _TOLERANCE * reward_scale([full, *(agent.reward for agent in agents)])
        if environment.max_reward is None and any(agent.reward > full + tolerance for agent in agents):
            return list(records)
        return [_completed(record, dict.fromkeys(record.seats, full - tolerance)) for record in records]
    if not is_won_or_lost(records, environment):
        return list(records)
    tolerance = tolerance_of(records)
    return [_completed(record, _winning_rewards(record, environment, tolerance)) for record in records]


_MAX_FAILED = 0.05
"""Largest part of its games in an environment that a measured player may fail in."""


def failing_players(records: Iterable[Record]) -> dict[str, str]:
    """Return the players that failed in too many of their games in an environment, with the numbers as text.

    Such a player has no results there, nor have its opponents against it: it could choose the games that count by
    failing in the others, or an opponent could by texts that it fails on. So a failure after a decision counts also if
    the game was played again, and so does a failure of the environment on an answer.
    """
    games = Counter(name for record in records for name in set(record.lineup.values()))
    failed = Counter(
        name for record in records for name in {*record.leavers, *([record.fault] if record.error else [])}
    )
    return {name: f"{failed[name]} of {count}" for name, count in games.items() if failed[name] > _MAX_FAILED * count}


def is_zero_sum(records: Sequence[Record], environment: SuiteEnv) -> bool:
    """Return whether one side wins what the others lose: by the environment's tag, or by the rewards of all episodes.

    By rewards, a game is zero-sum if they differ within an episode and add up to the same in each. Episodes that failed
    or ended by a forfeit or a full context are left out.
    """
    if environment.kind in ("single", "cooperative"):
        return False
    if environment.zero_sum:
        return True
    rewards = [[agent.reward for agent in record.seats.values()] for record in records if not is_spoiled(record)]
    totals, tolerance = [math.fsum(values) for values in rewards], tolerance_of(records)
    differ = any(max(values) - min(values) > tolerance for values in rewards)
    return differ and max(totals) - min(totals) <= max(tolerance, *(_TOLERANCE * abs(total) for total in totals))


def is_won_or_lost(records: Sequence[Record], environment: SuiteEnv) -> bool:
    """Return whether a game is zero-sum, or pays one reward for a win, one for a loss and one for a draw."""
    if is_zero_sum(records, environment):
        return True
    if environment.kind in ("single", "cooperative"):
        return False
    tolerance = tolerance_of(records) or 1.0  # rewards that are all 0 have no unit
    rewards: dict[str, set[int]] = {"win": set(), "loss": set(), "draw": set()}
    for record in records:
        if is_spoiled(record):
            continue
        sides = [
            {round(record.seats[a].reward / tolerance) for a in side if a in record.seats} for side in environment.sides
        ]
        paid = [next(iter(values)) for values in sides if len(values) == 1]
        if len(paid) < sum(map(bool, sides)) or not paid:
            return False
        best, rest = max(paid), sorted(paid)[:-1]
        if all(reward == best for reward in paid):
            rewards["draw"].add(best)
        elif len(set(rest)) == 1 and rest[0] < best:
            rewards["win"].add(best)
            rewards["loss"].add(rest[0])
        else:
            return False
    unique = len(rewards["win"]) == len(rewards["loss"]) == 1 and len(rewards["draw"]) <= 1
    return unique and all(max(rewards["loss"]) <= draw <= max(rewards["win"]) for draw in rewards["draw"])


def is_spoiled(record: Record) -> bool:
    """Return whether an episode failed, or ended by a forfeit or a full context. Its rewards then show no winner."""
    return bool(record.error) or record.end == "context" or any(agent.forfeit for agent in record.seats.values())


def _winning_rewards(record: Record, environment: SuiteEnv, tolerance: float) -> dict[str, float]:
    """Return for each agent the smallest reward that is more than every opponent earned."""
    group_of = {agent: record.lineup[agent] for agent in record.seats}
    if len({*group_of.values()}) < 2:  # self-play
        group_of = {agent: str(number) for number, side in enumerate(environment.sides) for agent in side}
    highest: dict[str, float] = {}
    for agent, result in record.seats.items():
        highest[group_of[agent]] = max(result.reward, highest.get(group_of[agent], -math.inf))
    ranked = sorted(highest, key=lambda group: -highest[group])[:2]
    rewards = {}
    for agent in record.seats:
        opponents = next((highest[group] for group in ranked if group != group_of[agent]), -math.inf)
        rewards[agent] = math.nextafter(opponents + tolerance, math.inf)
    return rewards


def _completed(record: Record, required: dict[str, float]) -> Record:
    """Set the success of agents without a reported one, given the reward that each needs."""
    agents = {
        name: replace(agent, success=agent.reward >= required[name]) if agent.success is None else agent
        for name, agent in record.seats.items()
    }
    return replace(record, seats=agents)
