"""Oracle of tic-tac-toe, `forge_envs.adapters.pettingzoo.tic_tac_toe`."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any

from forge_agents.envs.oracles import Player

_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def oracle(agent: str, settings: Mapping[str, Any], rng: random.Random) -> Player:
    """Return a player that draws one of the best moves and never loses."""

    def play(observation: str) -> str:
        columns = zip(*(row.split() for row in observation.split("\n")[:3]), strict=True)
        board = "".join(sign if sign in "XO" else "." for column in columns for sign in column)
        values = {square: -value(_after(board, square)) for square in range(9) if board[square] == "."}
        return str(rng.choice([square for square, worth in values.items() if worth == max(values.values())]))

    return play


@functools.cache
def value(board: str) -> int:
    """Return 1 if X, who moves next, can win, 0 if X can draw, else -1. Squares column by column, free ones a dot."""
    if any(board[a] == board[b] == board[c] == "O" for a, b, c in _LINES):
        return -1
    return max((-value(_after(board, square)) for square in range(9) if board[square] == "."), default=0)


def _after(board: str, square: int) -> str:
    """Return the board from the opponent's view, after X has taken a square."""
    return (board[:square] + "X" + board[square + 1 :]).translate(str.maketrans("XO", "OX"))
