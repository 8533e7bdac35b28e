"""The oracle of `forge_envs.teams.treasure_hunt`.

In: half of the map, and what the partner wrote. Out: that half, for the partner, and a move. Waits for nothing.
"""

from __future__ import annotations

from collections import deque

from forge_envs.oracles.script import Script, read
from forge_envs.teams.treasure_hunt import DIRECTIONS


class Oracle(Script):
    """Tells its half of the map; from the second round on both know all of it and walk the same shortest way."""

    heard: tuple[str, ...] = ()
    """The partner's rows."""

    def answer(self, seen: str) -> str:
        rows = seen.partition("\nPartner: ")[0].split("\n")
        told = read(r"Partner: (.*)", seen).partition(" ")[0].split("/")
        like = [len(row) for row in told] == [len(row) for row in rows]
        self.heard = tuple(told) if like else self.heard or tuple("?" * len(row) for row in rows)
        whole = [
            [sign if sign != "?" else other.replace("T", ".") for sign, other in zip(*pair, strict=True)]
            for pair in zip(rows, self.heard, strict=True)
        ]
        return f"{'/'.join(rows)} go {_way(whole)}"


def _way(rows: list[list[str]]) -> str:
    """The first step of a shortest way from T to X, over what may be free; east where X is not known or not reached."""
    signs = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
    start = next(square for square, sign in signs.items() if sign == "T")
    queue, seen = deque([(start, "")]), {start}
    while queue:
        (row, column), first = queue.popleft()
        if signs[row, column] == "X":
            return first
        for name, (down, across) in DIRECTIONS.items():
            ahead = (row + down, column + across)
            if signs.get(ahead, "#") != "#" and ahead not in seen:
                seen.add(ahead)
                queue.append((ahead, first or name))
    return "east"
