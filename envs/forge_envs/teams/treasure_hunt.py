"""Treasure hunt: two agents who each see half of a map, and move only together."""

from __future__ import annotations

import re
from collections import deque

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv
from forge_envs.shared import check_ranges, end_for_all

DIRECTIONS = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
"""Row and column steps. The first row is in the north."""
_MOVE = re.compile(r"\bgo\W{0,9}(?:to\W{1,5})?(?:the\W{1,5})?(north|south|west|east)\b(?!-)", re.IGNORECASE)


class TreasureHunt(TurnEnv):
    """Cooperative game of two agents who walk as one team, ``T``, on a square map.

    The map has rocks ``#``, free squares ``.`` and a reachable treasure ``X``. ``left`` sees the western half and
    ``right`` the eastern half, which includes the middle column if `size` is odd. The other half reads ``?``. Both see
    the team.

    In each round left and then right writes a text, which the other reads. The last "go north" (south, west, east) in
    it is the move. The team takes a step if both moves agree and the square is free.

    At the treasure both get ``shortest / rounds``, the length of the shortest path from the start over the number of
    rounds used, in (0, 1]. After `max_rounds` both get ``partial_credit * max(0, 1 - remaining / shortest)``, where
    ``remaining`` is the length of the remaining shortest path. At the end infos contain ``found``, ``rounds`` and
    ``shortest``.

    Args:
        size: Number of rows and columns, 2 to 12.
        rocks: Fraction of squares that are rocks, 0 to 0.5.
        max_rounds: Maximum number of rounds. None uses four times `size`.
        max_message_chars: Maximum length of a text as the other reads it. Longer ones are cut.
        partial_credit: Reward for almost reaching the treasure, in [0, 1].
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
        rounds = 4 * size if max_rounds is None else max_rounds
        check_ranges(size=(size, 2, 12), rocks=(rocks, 0, 0.5), partial_credit=(partial_credit, 0, 1))
        check_ranges(max_message_chars=(max_message_chars, 1, None), max_rounds=(rounds, 2 * size, None))
        self._size, self._rocks, self._partial, self._rounds = size, rocks, partial_credit, rounds
        self._max_message_chars = max_message_chars

    def setup(self, rng: np.random.Generator) -> None:
        """Draw rocks, start and treasure until a path is short enough for the rounds."""
        squares = self._squares()
        while True:
            order = [squares[i] for i in rng.permutation(len(squares))]
            self.treasure, self.place = order[:2]
            self.rocks = frozenset(order[2 : 2 + int(self._rocks * len(squares))])
            distance = self.distance(self.place)
            if distance is not None and distance <= self._rounds:
                break
        self.shortest: int = distance
        self.rounds = 0
        self.messages = dict.fromkeys(self.possible_agents, "")
        self.moves: dict[str, str] = {}

    def instructions(self, agent: str) -> str:
        return (
            "You and your partner walk as one team T to the treasure X. You see only the "
            f"{'western' if agent == 'left' else 'eastern'} half of the map; # are rocks, ? is seen by your partner. "
            "Each round both write a message with a move, such as: go north. The team steps only if both name the same "
            "move."
        )

    def observe_text(self, agent: str) -> str:
        message = self.messages[_partner(agent)] or "(nothing yet)"
        return f"{self._half(agent)}\nPartner: {message}\nRounds left: {self._rounds - self.rounds}"

    def secrets(self, agent: str) -> tuple[str, ...]:
        """Return the other half of the map."""
        return (self._half(_partner(agent)),)

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Shuffle the squares that `agent` cannot see, except the team's."""
        hidden = [s for s in self._squares() if not self._sees(agent, s) and s != self.place]
        moved = dict(zip(hidden, [hidden[i] for i in rng.permutation(len(hidden))], strict=True))
        self.rocks = frozenset(moved.get(square, square) for square in self.rocks)
        self.treasure = moved.get(self.treasure, self.treasure)

    def act(self, agent: str, action: str) -> Outcome:
        moves = _MOVE.findall(action)
        self.moves[agent] = moves[-1].casefold() if moves else ""
        self.messages[agent] = " ".join(action.split())[: self._max_message_chars]
        if agent == "left":
            return Outcome()
        self.rounds += 1
        if self.moves["left"] and self.moves["left"] == self.moves["right"]:
            step = DIRECTIONS[self.moves["left"]]
            ahead = (self.place[0] + step[0], self.place[1] + step[1])
            self.place = ahead if self._free(ahead) else self.place
        arrived = self.place == self.treasure
        if not arrived and self.rounds < self._rounds:
            return Outcome()
        remaining = self.distance(self.place)
        progress = 0.0 if remaining is None else max(0.0, 1 - remaining / self.shortest)
        reward = self.shortest / self.rounds if arrived else self._partial * progress
        facts = {"found": arrived, "rounds": self.rounds, "shortest": self.shortest}
        return end_for_all(self.possible_agents, reward, facts)

    def distance(self, start: tuple[int, int]) -> int | None:
        """Return the length of the shortest path from `start` to the treasure, or None if there is no path."""
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
        ]  # fmt: skip
        return "\n".join("".join(signs[i : i + self._size]) for i in range(0, len(signs), self._size))


def _partner(agent: str) -> str:
    return "right" if agent == "left" else "left"
