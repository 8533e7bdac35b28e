"""Oracle of `forge_envs.games.alphabet_sort`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from forge_agents.envs.oracles import Player


def oracle(agent: str, settings: Mapping[str, Any], rng: random.Random) -> Player:
    """Sort all names of this and earlier turns."""
    names: list[str] = []

    def sort(observation: str) -> str:
        names.extend(observation.rpartition(": ")[2].split(", "))
        return "\n".join(sorted(names))

    return sort
