"""The oracle of `forge_envs.games.village`.

In: who lives, what was said, and what the own role knows. Out: names, and by day what was looked up. Waits for nothing.
"""

from __future__ import annotations

import re

from forge_envs.games.village import NAMES
from forge_envs.oracles.script import Script, read

_LOOKED = re.compile(r"\w+ is (?:a|no) wolf")


class Oracle(Script):
    """Wolves play at random; the others vote by what was told.

    The seer tells what it looked up; whom it cleared, and itself, nobody suspects, and the rest are voted out in turn.
    """

    def answer(self, seen: str) -> str:
        own = NAMES[int(self.agent.removeprefix("player_"))]
        others = [name for name in read(r"Alive: (.+?)\.\n", seen).split(", ") if name != own]
        asked = seen.rpartition("\n")[2]
        if "Speak" in asked:
            return f"I looked: {', '.join(_LOOKED.findall(seen.rpartition('You are')[2]))}"
        if wolves := re.search(rf"^You are {own}, a wolf. Wolves: (.+?)\.", seen, re.MULTILINE):
            return self.rng.choice([name for name in others if name not in wolves[1]])
        return self.villager(seen, asked, others)

    def villager(self, seen: str, asked: str, others: list[str]) -> str:
        """Of the seer, the healer and all without a role."""
        if "nature" in asked:
            return self.rng.choice([name for name in others if f"{name} is" not in seen] or others)
        if "guard" in asked:
            return self.rng.choice(others)
        told = re.findall(r"(\w+): I looked: (.+)", seen)
        looked = sorted({each for _, what in told for each in _LOOKED.findall(what)})
        wolves = [each.split()[0] for each in looked if each.endswith("a wolf")]
        clear = {*(name for name, _ in told), *(each.split()[0] for each in looked)}
        suspects = [*wolves, *(name for name in others if name not in clear)]
        return next((name for name in suspects if name in others), "nobody")
