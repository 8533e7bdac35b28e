"""The oracle of `forge_envs.teams.kitchen`.

In: the map, what both hold, the pot. Out: a direction, or wait. Waits for nothing.
"""

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
    """Walks to what is needed next, and now and then anywhere where all is as it was a moment ago.

    Two of a kind would stand in each other's way for ever.
    """

    slips = 0.0
    """How often it goes anywhere without need."""
    past: tuple[str, ...] = ()
    """The last three maps, with what was held."""

    def answer(self, seen: str) -> str:
        rows = seen.partition("\nann holds")[0].split("\n")
        self.map = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
        at = {sign: square for square, sign in self.map.items() if sign in "AB"}
        me, other = ("A", "B") if self.agent == "cook_0" else ("B", "A")
        free = [way for way, step in STEPS.items() if self.map.get(_beside(at[me], step)) == "."]
        scene = seen.partition("Pot:")[0]
        stuck, self.past = scene in self.past, (*self.past[-2:], scene)
        if free and self.rng.random() < max(self.slips, 0.3 * stuck):
            return self.rng.choice(free)
        goals = self.goals(seen, self.reach(at[me]), self.reach(at[other]))
        way = self.way(at[me], goals, {at[other]}) or self.way(at[me], goals, set())
        if way and (self.map[_beside(at[me], STEPS[way])] != other or not free):
            return way
        return self.rng.choice([*free, "wait"])

    def goals(self, seen: str, near: AbstractSet[Square], far: AbstractSet[Square]) -> set[Square]:
        """What to walk into next, of what one reaches oneself, `near`, and the other, `far`; empty: nothing."""
        held = dict(re.findall(r"(ann|ben) holds (\w+)", seen))
        mine, its = held.pop(NAMES[self.agent]), next(iter(held.values()))
        pot = re.search(r"Pot: (\d) of (\d) onions", seen)
        in_pot, wanted = (int(pot[1]), int(pot[2])) if pot else (0, 0)
        full = pot is None
        at = {sign: {square for square in near if self.map[square] == sign} for sign in "ODSP=ods"}
        if mine == "nothing":
            apart = not at["P"]
            ann_goes = self.agent == "cook_1" and its == "nothing" and not apart and at["P"] <= far
            lying = sum(sign == "o" for sign in self.map.values()) * apart
            if not full and in_pot + lying + (its == "onion" or ann_goes) < wanted:
                return at["O"] if apart else at["o"] or at["O"]  # what lies there is for who reaches the pot
            if not full and not apart:
                return set()
            ready = its in ("dish", "soup") or ann_goes or (apart and "d" in self.map.values())
            return set() if ready else at["d"] or at["D"]
        if mine == "soup" and at["S"]:
            return at["S"]
        if at["P"] and mine in ("onion", "dish"):
            return at["P"] if (mine == "dish") == full else at["="]
        return {square for square in at["="] if square in far} or at["="]

    def reach(self, start: Square) -> set[Square]:
        """What can be walked to from a square, cooks aside, and what can be used from there."""
        seen, queue = {start}, deque([start])
        while queue:
            square = queue.popleft()
            for step in STEPS.values():
                ahead = _beside(square, step)
                if ahead in self.map and ahead not in seen:
                    seen.add(ahead)
                    queue.extend([ahead] * (self.map[ahead] in _FLOOR))
        return seen

    def way(self, start: Square, goals: AbstractSet[Square], blocked: AbstractSet[Square]) -> str:
        """The first step of a shortest way to use one of `goals`; empty where there is none."""
        queue, seen = deque([(start, "")]), {start, *blocked}
        while queue:
            square, first = queue.popleft()
            for name, step in STEPS.items():
                ahead = _beside(square, step)
                if ahead in goals:
                    return first or name
                if self.map.get(ahead, "#") in _FLOOR and ahead not in seen:
                    seen.add(ahead)
                    queue.append((ahead, first or name))
        return ""


def _beside(square: Square, step: Square) -> Square:
    return square[0] + step[0], square[1] + step[1]
