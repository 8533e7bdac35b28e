"""Oracle of `forge_envs.games.village`."""

from __future__ import annotations

import re

from forge_envs.games.village import NAMES
from forge_envs.oracles.script import Script, read

_LOOKED = re.compile(r"\w+ is (?:a|no) wolf")


class Oracle(Script):
    """Wolves play at random. The seer announces its findings, and the village votes by them.

    The village suspects found wolves first, then all players except the seer and those it has cleared.
    """

    def answer(self, seen: str) -> str:
        own_name = NAMES[int(self.agent.removeprefix("player_"))]
        others = [name for name in read(r"Alive: (.+?)\.\n", seen).split(", ") if name != own_name]
        question = seen.rpartition("\n")[2]
        if "Speak" in question:
            return f"I looked: {', '.join(_LOOKED.findall(seen.rpartition('You are')[2]))}"
        if wolves := re.search(rf"^You are {own_name}, a wolf. Wolves: (.+?)\.", seen, re.MULTILINE):
            return self.rng.choice([name for name in others if name not in wolves[1]])
        return self.villager(seen, question, others)

    def villager(self, seen: str, question: str, others: list[str]) -> str:
        """Return the action of a seer, healer or villager."""
        if "nature" in question:
            return self.rng.choice([name for name in others if f"{name} is" not in seen] or others)
        if "guard" in question:
            return self.rng.choice(others)
        announcements = re.findall(r"(\w+): I looked: (.+)", seen)
        findings = sorted({finding for _, text in announcements for finding in _LOOKED.findall(text)})
        wolves = [finding.split()[0] for finding in findings if finding.endswith("a wolf")]
        clear = {*(name for name, _ in announcements), *(finding.split()[0] for finding in findings)}
        suspects = [*wolves, *(name for name in others if name not in clear)]
        return next((name for name in suspects if name in others), "nobody")
