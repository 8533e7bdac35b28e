"""Kitchen: two cooks on a small map make soups, moving at the same time; after Overcooked.

In: "north", "south", "west", "east" or "wait". Out: the same reward for both seats. Waits for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from forge_agents.envs.env import Outcome, ParallelTurnEnv
from forge_agents.errors import did_you_mean

NAMES = {"cook_0": "ann", "cook_1": "ben"}
"""What the texts call the cooks; the map has the initials."""
LAYOUTS = {
    "booth": "O.1P / D.2S",
    "room": "=O=P= / D.1.S / =.2.=",
    "ring": "=OP= / 1..2 / .==. / .... / =DS=",
    "wall": "O.=.P / 1.=.2 / D.=.S",
    "hatch": "O.#.P / 1.=.2 / D.#.S",
}
"""Maps, row by row: cooks ``1`` and ``2``, floor ``.``, counters ``=``, walls ``#``, one pot ``P`` each."""
STEPS = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
"""Rows and columns; the first row is the north."""
Square: TypeAlias = tuple[int, int]
_WORD = re.compile(rf"\b({'|'.join(STEPS)}|wait)\b", re.IGNORECASE)
_SIGNS = {"onion": "o", "dish": "d", "soup": "s"}


class Kitchen(ParallelTurnEnv):
    """Two cooks who share one reward; after Overcooked as Carroll et al. (arXiv:1910.05789) play it.

    Both see the whole map and move at once, one step in a round. Walking into something uses it, with one thing in hand
    at most: onions ``O`` and dishes ``D`` give one; the pot ``P`` takes onions until it has enough, cooks for
    `cooking` rounds, and then fills a dish; the window ``S`` takes soups; a counter ``=`` takes a thing, or gives what
    lies there. Two cooks who step onto one square, or change places, both stay. If both use the same thing in one
    round, ``cook_0`` is first.

    Both get the soups served over `orders`. A text that does not hold exactly one of the five words waits, and infos
    say so under ``illegal``. At the end infos hold ``served``, ``rounds`` and ``success``: whether all orders were
    served.

    Args:
        layout: One of `LAYOUTS`, or a map of your own as there, with one each of ``1``, ``2`` and ``P``, and at least
            one each of ``O``, ``D`` and ``S``.
        onions: Of a soup, 1 to 3.
        orders: Soups to serve, 1 to 9.
        rounds: After which the game is over, 1 to 200.
        cooking: Rounds that a soup takes, 0 to 20.
        swap: Whether it is drawn which way round the map lies, who begins on which side, and where of what can be
            reached from there; otherwise ``cook_0`` begins at ``1`` and ``cook_1`` at
            ``2``.
    """

    possible_agents = ("cook_0", "cook_1")
    max_reward = 1.0

    def __init__(
        self,
        *,
        layout: str = "room",
        onions: int = 2,
        orders: int = 1,
        rounds: int = 50,
        cooking: int = 2,
        swap: bool = True,
    ) -> None:
        super().__init__()
        if not 1 <= onions <= 3 or not 1 <= orders <= 9 or not 1 <= rounds <= 200 or not 0 <= cooking <= 20:
            raise ValueError(
                f"onions={onions} must be 1 to 3, orders={orders} 1 to 9, rounds={rounds} 1 to 200 and "
                f"cooking={cooking} 0 to 20"
            )
        self._layout = _read_map(layout)
        self._onions, self._orders, self._rounds, self._cooking, self._swap = onions, orders, rounds, cooking, swap

    def setup(self, rng: np.random.Generator) -> None:
        flips = rng.integers(2, size=2).tolist() if self._swap else [0, 0]
        self._map = _flipped(self._layout, *flips)
        starts = [next(square for square, found in self._map.items() if found == sign) for sign in "12"]
        if self._swap:
            starts = [starts[place] for place in rng.permutation(2)]
            first, second = (_floor(self._map, start) for start in starts)
            starts[0] = first[rng.integers(len(first))]
            free = [square for square in second if square != starts[0]]
            starts[1] = free[rng.integers(len(free))]
        self.places = dict(zip(self.possible_agents, starts, strict=True))
        self.hands = dict.fromkeys(self.possible_agents, "")
        self.counters: dict[Square, str] = {}
        self.in_pot, self.cooks_for = 0, 0
        self.served = self.round = 0

    # ---- what seats read

    def instructions(self, agent: str) -> str:
        return (
            f"You are {NAMES[agent]}, one of two cooks, {' and '.join(NAMES.values())}; on the map you are "
            f"{NAMES[agent][0].upper()}. Walk into a thing to use it. O gives an onion, D a dish. P is the pot: bring "
            f"it {self._onions}, wait until it is ready, and fetch the soup with a dish. S is where soups are served. "
            "= is a counter: put a thing there, or take it. Hands hold one thing. Answer with one word: north (up), "
            "south (down), west (left), east (right) or wait."
        )

    def observe_text(self, agent: str) -> str:
        at = {place: NAMES[seat][0].upper() for seat, place in self.places.items()}
        rows: dict[int, str] = {}
        for square, sign in self._map.items():
            shown = at.get(square) or _SIGNS.get(self.counters.get(square, "")) or (sign if sign not in "12" else ".")
            rows[square[0]] = rows.get(square[0], "") + shown
        hands = ", ".join(f"{name} holds {self.hands[cook] or 'nothing'}" for cook, name in NAMES.items())
        pot = f"{self.in_pot} of {self._onions} onions"
        if self.in_pot == self._onions:
            pot = f"cooks for {self.cooks_for} more" if self.cooks_for else "ready"
        told = f"Pot: {pot}. Served: {self.served} of {self._orders}. Rounds left: {self._rounds - self.round}."
        return "\n".join((*rows.values(), f"{hands}. {told}"))

    def legal_actions(self, agent: str) -> tuple[str, ...]:
        return (*STEPS, "wait")

    # ---- the game

    def act_all(self, actions: dict[str, str]) -> Outcome:
        words = {seat: {word.casefold() for word in _WORD.findall(text)} for seat, text in actions.items()}
        info: dict[str, dict[str, Any]] = {
            seat: {} if len(named) == 1 else {"illegal": "not exactly one of the five words"}
            for seat, named in words.items()
        }
        moves = {seat: named.pop() if len(named) == 1 else "wait" for seat, named in words.items()}
        self.cooks_for = max(0, self.cooks_for - 1)
        self.round += 1
        ahead = {seat: self._ahead(seat, move) for seat, move in moves.items()}
        walked = {seat: square if self._map.get(square, "#") in ".12" else self.places[seat]
                  for seat, square in ahead.items()}  # fmt: skip
        first, second = self.possible_agents
        swapped = (walked[first], walked[second]) == (self.places[second], self.places[first])
        if walked[first] != walked[second] and not swapped:
            self.places = walked
        for seat, square in ahead.items():
            if self._map.get(square, "#") not in ".12":
                self.hands[seat] = self._use(square, self.hands[seat])
        if self.served < self._orders and self.round < self._rounds:
            return Outcome(info=info)
        success = self.served == self._orders
        facts = {"served": self.served, "rounds": self.round, "success": success, "forfeits": []}
        told = {seat: {**info[seat], **facts} for seat in self.agents}
        return Outcome(rewards=dict.fromkeys(self.agents, self.served / self._orders), done=True, info=told)

    def _ahead(self, seat: str, move: str) -> Square:
        row, column = self.places[seat]
        down, across = STEPS.get(move, (0, 0))
        return row + down, column + across

    def _use(self, square: Square, held: str) -> str:
        """Use what stands on a square; returns what is in the hand then."""
        thing = self._map.get(square, "#")
        if thing in "OD" and not held:
            return "onion" if thing == "O" else "dish"
        if thing == "S" and held == "soup":
            self.served += 1
            return ""
        if thing == "=" and held and square not in self.counters:
            self.counters[square] = held
            return ""
        if thing == "=" and not held:
            return self.counters.pop(square, "")
        if thing == "P" and held == "onion" and self.in_pot < self._onions:
            self.in_pot += 1
            self.cooks_for = self._cooking if self.in_pot == self._onions else 0
            return ""
        if thing == "P" and held == "dish" and self.in_pot == self._onions and not self.cooks_for:
            self.in_pot = 0
            return "soup"
        return held


def _flipped(squares: Mapping[Square, str], rows: bool, columns: bool) -> dict[Square, str]:
    """A map upside down, the other way round, or both, row by row."""
    last = max(squares)
    turned = {(last[0] - r if rows else r, last[1] - c if columns else c): sign for (r, c), sign in squares.items()}
    return dict(sorted(turned.items()))


def _floor(squares: Mapping[Square, str], start: Square) -> list[Square]:
    """Where one can walk from a square, itself included."""
    found = [start]
    for row, column in found:  # which grows
        beside = ((row + down, column + across) for down, across in STEPS.values())
        found += [square for square in beside if squares.get(square, "#") in ".12" and square not in found]
    return found


def _read_map(layout: str) -> dict[Square, str]:
    """Signs by square.

    Raises:
        ValueError: It is no layout's name and no map.
    """
    if "/" not in layout and layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; known are {', '.join(LAYOUTS)}.{did_you_mean(layout, LAYOUTS)}")
    rows = [row.strip() for row in LAYOUTS.get(layout, layout).split("/")]
    signs = "".join(rows)
    fits = all(signs.count(sign) == 1 for sign in "12P") and all(sign in signs for sign in "ODS")
    if not fits or set(signs) - set("12PODS.=#") or len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"layout={layout!r} is no map: rows of one length with '/' between them, one each of 1, 2 and P, at least "
            "one each of O, D and S, and else only '.', '=' and '#'"
        )
    return {(row, column): sign for row, signs in enumerate(rows) for column, sign in enumerate(signs)}
