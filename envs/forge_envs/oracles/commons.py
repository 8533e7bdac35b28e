"""The oracle of `forge_envs.teams.commons`.

In: what the lake has and holds, and the seasons left. Out: how many fish to take. Waits for nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from forge_agents.envs.oracles import Player

_LAKE = re.compile(r"Seasons left: (\d+). The lake has (\d+) fish and holds (\d+) \((\d+) seats\)")


def oracle(agent: str, settings: Mapping[str, Any], rng: random.Random) -> Player:
    """Leaves what grows back to all that the lake holds, which is the best that seats alike can do."""
    return leaving(1 / settings["regrowth"])


def leaving(share: float) -> Player:
    """With others alike, leaves such a share of what the lake holds, and nothing in the last season."""

    def take(seen: str) -> str:
        left, stock, holds, seats = lake(seen)
        return f"take {int((stock if left == 1 else max(0, stock - share * holds)) / seats)}"

    return take


def lake(seen: str) -> tuple[int, ...]:
    """Seasons left, fish in the lake, fish that it holds, seats; what others say of it stands before."""
    if not (told := _LAKE.findall(seen)):
        raise ValueError(f"no lake in {seen!r:.300}")
    return tuple(map(int, told[-1]))
