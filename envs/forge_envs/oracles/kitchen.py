"""Oracle of `forge_envs.teams.kitchen`."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from forge_envs.oracles.script import Script
from forge_envs.teams.kitchen import NAMES, STEPS

Square: TypeAlias = "tuple[int, int]"
_FLOOR = ".AB"


class Oracle(Script):
    """Walks to what is needed next, and sometimes at random, because two equal cooks could block each other forever."""

    slips = 0.0
    """Probability of a random step."""
    past: tuple[str, ...] = ()
    """The last three maps, with the items held."""

    def answer(self, seen: str) -> str:
        rows = seen.partition("\nann holds")[0].split("\n")
        self.map = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
        at = {sign: square for square, sign in self.map.items() if sign in "AB"}
        me, other = ("A", "B") if self.agent == "cook_0" else ("B", "A")
        free = [way for way, step in STEPS.items() if self.map.get(_neighbor(at[me], step)) == "."]
        scene = seen.partition("Pot:")[0]
        stuck, self.past = scene in self.past, (*self.past[-2:], scene)
        if free and self.rng.random() < max(self.slips, 0.3 * stuck):
            return self.rng.choice(free)
        goals = self.goals(seen, self.reach(at[me]), self.reach(at[other]))
        way = self.way(at[me], goals, {at[other]}) or self.way(at[me], goals, set())
        if way and (self.map[_neighbor(at[me], STEPS[way])] != other or not free):
            return way
        return self.rng.choice([*free, "wait"])

    def goals(self, seen: str, near: AbstractSet[Square], far: AbstractSet[Square]) -> set[Square]:
        """Return the squares to use next: of those in reach of this cook, `near`, and of the other one, `far`."""
        items = dict(re.findall(r"(ann|ben) holds (\w+)", seen))
        mine, partner = items.pop(NAMES[self.agent]), next(iter(items.values()))
        pot = re.search(r"Pot: (\d) of (\d) onions", seen)
        in_pot, capacity = (int(pot[1]), int(pot[2])) if pot else (0, 0)
        full = pot is None
        at = {sign: {square for square in near if self.map[square] == sign} for sign in "ODSP=ods"}
        if mine == "nothing":
            separate = not at["P"]  # this cook cannot reach the pot
            first_goes = self.agent == "cook_1" and partner == "nothing" and not separate and at["P"] <= far
            lying = sum(sign == "o" for sign in self.map.values()) * separate
            if not full and in_pot + lying + (partner == "onion" or first_goes) < capacity:
                return at["O"] if separate else at["o"] or at["O"]  # onions on counters are for the cook at the pot
            if not full and not separate:
                return set()
            ready = partner in ("dish", "soup") or first_goes or (separate and "d" in self.map.values())
            return set() if ready else at["d"] or at["D"]
        if mine == "soup" and at["S"]:
            return at["S"]
        if at["P"] and mine in ("onion", "dish"):
            return at["P"] if (mine == "dish") == full else at["="]
        return {square for square in at["="] if square in far} or at["="]

    def reach(self, start: Square) -> set[Square]:
        """Return the squares that can be walked to or used from a square, ignoring cooks."""
        seen, queue = {start}, deque([start])
        while queue:
            square = queue.popleft()
            for step in STEPS.values():
                ahead = _neighbor(square, step)
                if ahead in self.map and ahead not in seen:
                    seen.add(ahead)
                    queue.extend([ahead] * (self.map[ahead] in _FLOOR))
        return seen

    def way(self, start: Square, goals: AbstractSet[Square], blocked: AbstractSet[Square]) -> str:
        """Return the first step of a shortest path to one of `goals`. Empty if there is none."""
        queue, seen = deque([(start, "")]), {start, *blocked}
        while queue:
            square, first = queue.popleft()
            for name, step in STEPS.items():
                ahead = _neighbor(square, step)
                if ahead in goals:
                    return first or name
                if self.map.get(ahead, "#") in _FLOOR and ahead not in seen:
                    seen.add(ahead)
                    queue.append((ahead, first or name))
        return ""


def _neighbor(square: Square, step: Square) -> Square:
    return square[0] + step[0], square[1] + step[1]
