"""The oracle of `forge_envs.games.alphabet_sort`.

In: names. Out: all of them so far, sorted. Waits for nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from forge_agents.envs.oracles import Player


def oracle(agent: str, settings: Mapping[str, Any], rng: random.Random) -> Player:
    """Remembers the names of earlier turns."""
    names: list[str] = []

    def sort(seen: str) -> str:
        names.extend(seen.rpartition(": ")[2].split(", "))
        return "\n".join(sorted(names))

    return sort
