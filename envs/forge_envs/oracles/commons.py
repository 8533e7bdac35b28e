"""Oracle of `forge_envs.teams.commons`."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from forge_agents.envs.oracles import Player

_LAKE = re.compile(r"Seasons left: (\d+). The lake has (\d+) fish and holds (\d+) \((\d+) seats\)")


def oracle(agent: str, settings: Mapping[str, Any], rng: random.Random) -> Player:
    """Leave as much as grows back to a full lake, the optimum if all agents do the same."""
    return leaving(1 / settings["regrowth"])


def leaving(share: float) -> Player:
    """Return a player that leaves a share of the capacity, and nothing in the last season, if all do the same."""

    def take(observation: str) -> str:
        left, stock, capacity, agents = lake(observation)
        return f"take {int((stock if left == 1 else max(0, stock - share * capacity)) / agents)}"

    return take


def lake(observation: str) -> tuple[int, ...]:
    """Return seasons left, fish, capacity and number of agents. The last match, because players may quote others."""
    if not (matches := _LAKE.findall(observation)):
        raise ValueError(f"no lake in {observation!r:.300}")
    return tuple(map(int, matches[-1]))
