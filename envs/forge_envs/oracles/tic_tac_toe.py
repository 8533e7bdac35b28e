"""The oracle of tic-tac-toe, `forge_envs.adapters.pettingzoo.tic_tac_toe`.

In: a board, one's own signs X, free squares by their numbers. Out: a square. Waits for nothing.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any

from forge_agents.envs.oracles import Player

_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def oracle(agent: str, settings: Mapping[str, Any], rng: random.Random) -> Player:
    """Draws a move from the best: it never loses."""

    def play(seen: str) -> str:
        columns = zip(*(row.split() for row in seen.split("\n")[:3]), strict=True)
        board = "".join(sign if sign in "XO" else "." for column in columns for sign in column)
        worth = {square: -value(_after(board, square)) for square in range(9) if board[square] == "."}
        return str(rng.choice([square for square, each in worth.items() if each == max(worth.values())]))

    return play


@functools.cache
def value(board: str) -> int:
    """1 where X, who is to move, can win, 0 where it can draw, else -1; squares column by column, free ones a dot."""
    if any(board[a] == board[b] == board[c] == "O" for a, b, c in _LINES):
        return -1
    return max((-value(_after(board, square)) for square in range(9) if board[square] == "."), default=0)


def _after(board: str, square: int) -> str:
    """The board as the other sees it, after X has taken a square."""
    return (board[:square] + "X" + board[square + 1 :]).translate(str.maketrans("XO", "OX"))
