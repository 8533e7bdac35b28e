"""Treasure hunt: each of two seats sees half of the map, and they only move together.

In: a direction and a message, in one text. Out: the same reward for both seats. Waits for nothing.
"""

from __future__ import annotations

import re
from collections import deque

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv
from forge_envs.teams.generated import ended

DIRECTIONS = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
"""Row and column steps; the map's first row is its north."""
_MOVE = re.compile(r"\bgo\W{0,9}(?:to\W{1,5})?(?:the\W{1,5})?(north|south|west|east)\b(?!-)", re.IGNORECASE)


class TreasureHunt(TurnEnv):
    """Two seats that share one reward and walk as one team, ``T``, over a square map.

    The map has rocks ``#``, free squares ``.`` and one treasure ``X``, which can be reached. ``left`` sees the western
    half and ``right`` the eastern half of the map; the other half reads ``?``. The team's place is known to both.

    In each round first left, then right writes a text. "go north" (south, west, east) anywhere in it is its move, the
    last one counts; the whole text, cut to `max_message_chars`, is read by the other. The team takes a step if both
    name the same direction and no rock and no edge is in the way; otherwise the round is lost. With an odd `size`
    the middle column is the eastern half's.

    When the team stands on the treasure, both get ``shortest / rounds``: the length of the shortest path from the start
    over the rounds used, in (0, 1]. If it is not found in `max_rounds`, both get ``partial_credit * max(0, 1 - left /
    shortest)``, where ``left`` is the length of the shortest path that is left. At the end infos hold ``found``,
    ``rounds`` and ``shortest``.

    Args:
        size: Rows and columns, 2 to 12.
        rocks: Share of the squares that are rocks, 0 to 0.5; fewer where the treasure could not be reached otherwise.
        max_rounds: Rounds until the hunt is over; None for four times `size`.
        max_message_chars: Longer messages are cut.
        partial_credit: Reward of having come all but there, 0 to 1.
    """

    possible_agents = ("left", "right")

    def __init__(
        self,
        *,
        size: int = 4,
        rocks: float = 0.2,
        max_rounds: int | None = None,
        max_message_chars: int = 200,
        partial_credit: float = 0.0,
    ) -> None:
        super().__init__()
        if not 2 <= size <= 12 or not 0 <= rocks <= 0.5 or not 0 <= partial_credit <= 1:
            raise ValueError(
                f"size={size} must be 2 to 12, rocks={rocks} 0 to 0.5 and partial_credit={partial_credit} 0 to 1"
            )
        if max_message_chars < 1 or (max_rounds is not None and max_rounds < 2 * size):
            raise ValueError(
                f"max_message_chars={max_message_chars} must be >= 1 and max_rounds={max_rounds} >= {2 * size}, or None"
            )
        self._size, self._rocks, self._partial = size, rocks, partial_credit
        self._rounds = 4 * size if max_rounds is None else max_rounds
        self._max_message_chars = max_message_chars

    def setup(self, rng: np.random.Generator) -> None:
        """Draw rocks, the start and a treasure, until there is a way that fits into the rounds."""
        squares = self._squares()
        while True:
            order = [squares[i] for i in rng.permutation(len(squares))]
            self.treasure, self.place = order[:2]
            self.rocks = frozenset(order[2 : 2 + int(self._rocks * len(squares))])
            found = self.distance(self.place)
            if found is not None and found <= self._rounds:
                break
        self.shortest: int = found
        self.rounds = 0
        self.said = dict.fromkeys(self.possible_agents, "")
        self.moves: dict[str, str] = {}

    def instructions(self, agent: str) -> str:
        return (
            "You and your partner walk as one team T to the treasure X. You see only the "
            f"{'western' if agent == 'left' else 'eastern'} half of the map; # are rocks, ? is seen by your partner. "
            "Each round both write a message with a move, such as: go north. The team steps only if both name the same "
            "move."
        )

    def observe_text(self, agent: str) -> str:
        partner = next(seat for seat in self.possible_agents if seat != agent)
        said = self.said[partner] or "(nothing yet)"
        return f"{self._half(agent)}\nPartner: {said}\nRounds left: {self._rounds - self.rounds}"

    def secrets(self, agent: str) -> tuple[str, ...]:
        """What `agent` must not read: the rows of the other half, from the first to the last."""
        partner = next(seat for seat in self.possible_agents if seat != agent)
        return (self._half(partner),)

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Shuffle the squares that `agent` cannot see, the team's own apart."""
        hidden = [s for s in self._squares() if not self._sees(agent, s) and s != self.place]
        moved = dict(zip(hidden, [hidden[i] for i in rng.permutation(len(hidden))], strict=True))
        self.rocks = frozenset(moved.get(square, square) for square in self.rocks)
        self.treasure = moved.get(self.treasure, self.treasure)

    def act(self, agent: str, action: str) -> Outcome:
        named = _MOVE.findall(action)
        self.moves[agent] = named[-1].casefold() if named else ""
        self.said[agent] = " ".join(action.split())[: self._max_message_chars]
        if agent == "left":
            return Outcome()
        self.rounds += 1
        if self.moves["left"] and self.moves["left"] == self.moves["right"]:
            step = DIRECTIONS[self.moves["left"]]
            ahead = (self.place[0] + step[0], self.place[1] + step[1])
            self.place = ahead if self._free(ahead) else self.place
        found = self.place == self.treasure
        if not found and self.rounds < self._rounds:
            return Outcome()
        left = self.distance(self.place)
        near = 0.0 if left is None else max(0.0, 1 - left / self.shortest)
        reward = self.shortest / self.rounds if found else self._partial * near
        facts = {"found": found, "rounds": self.rounds, "shortest": self.shortest}
        return ended(self.possible_agents, reward, facts)

    def distance(self, start: tuple[int, int]) -> int | None:
        """Steps of the shortest path from `start` to the treasure; None where there is no path."""
        steps, queue = {start: 0}, deque([start])
        while queue:
            row, column = queue.popleft()
            if (row, column) == self.treasure:
                return steps[row, column]
            for down, across in DIRECTIONS.values():
                ahead = (row + down, column + across)
                if ahead not in steps and self._free(ahead):
                    steps[ahead] = steps[row, column] + 1
                    queue.append(ahead)
        return None

    def _free(self, square: tuple[int, int]) -> bool:
        return min(square) >= 0 and max(square) < self._size and square not in self.rocks

    def _sees(self, agent: str, square: tuple[int, int]) -> bool:
        return (square[1] < self._size // 2) == (agent == "left")

    def _squares(self) -> list[tuple[int, int]]:
        return [(row, column) for row in range(self._size) for column in range(self._size)]

    def _half(self, agent: str) -> str:
        signs = [
            "T" if square == self.place
            else "?" if not self._sees(agent, square)
            else "#" if square in self.rocks
            else "X" if square == self.treasure
            else "."
            for square in self._squares()
        ]
        return "\n".join("".join(signs[i : i + self._size]) for i in range(0, len(signs), self._size))
