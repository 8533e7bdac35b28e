"""Kitchen: two cooks on a small map make soups, after Overcooked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from forge_agents.envs.env import Outcome, ParallelTurnEnv
from forge_agents.errors import did_you_mean
from forge_envs.shared import check_ranges

NAMES = {"cook_0": "ann", "cook_1": "ben"}
"""Names of the cooks in texts. The map shows their initials."""
LAYOUTS = {
    "booth": "O.1P / D.2S",
    "room": "=O=P= / D.1.S / =.2.=",
    "ring": "=OP= / 1..2 / .==. / .... / =DS=",
    "wall": "O.=.P / 1.=.2 / D.=.S",
    "hatch": "O.#.P / 1.=.2 / D.#.S",
}
"""Maps, row by row: start squares ``1`` and ``2``, floor ``.``, counters ``=``, walls ``#``, and a pot ``P``."""
STEPS = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
"""Row and column steps. The first row is in the north."""
Square: TypeAlias = tuple[int, int]
_WORD = re.compile(rf"\b({'|'.join(STEPS)}|wait)\b", re.IGNORECASE)
_SIGNS = {"onion": "o", "dish": "d", "soup": "s"}


class Kitchen(ParallelTurnEnv):
    """Cooperative game of two cooks, after Overcooked as in Carroll et al. (arXiv:1910.05789).

    The cooks see the whole map and move simultaneously, one step per round. A cook uses a thing by walking into it and
    holds at most one item. Onions ``O`` and dishes ``D`` are sources. The pot ``P`` takes onions until it has enough,
    cooks for `cooking` rounds, and then fills a dish. The window ``S`` takes soups. A counter ``=`` stores one item.
    Cooks who would enter the same square or swap squares stay. If both use the same thing in a round, ``cook_0`` is
    first.

    The cooks get the number of soups served over `orders`. A text that does not contain exactly one of the five words
    waits and sets ``illegal`` in infos. At the end infos contain ``served``, ``rounds`` and ``success`` (all orders
    served).

    Args:
        layout: Name in `LAYOUTS`, or a map in the same format with one each of ``1``, ``2`` and ``P`` and at least one
            each of ``O``, ``D`` and ``S``.
        onions: Number of onions per soup, 1 to 3.
        orders: Number of soups to serve, 1 to 9.
        rounds: Maximum number of rounds, 1 to 200.
        cooking: Number of rounds to cook a soup, 0 to 20.
        swap: Whether to draw the orientation of the map, the cooks' sides and their start squares within reach.
            Otherwise ``cook_0`` starts at ``1`` and ``cook_1`` at ``2``.
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
        check_ranges(onions=(onions, 1, 3), orders=(orders, 1, 9), rounds=(rounds, 1, 200), cooking=(cooking, 0, 20))
        self._layout = _read_map(layout)
        self._onions, self._orders, self._rounds, self._cooking, self._swap = onions, orders, rounds, cooking, swap

    def setup(self, rng: np.random.Generator) -> None:
        flips = rng.integers(2, size=2).tolist() if self._swap else [0, 0]
        self._map = _flipped(self._layout, *flips)
        starts = [next(square for square, content in self._map.items() if content == sign) for sign in "12"]
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

    # ---- texts

    def instructions(self, agent: str) -> str:
        return (
            f"You are {NAMES[agent]}, one of two cooks, {' and '.join(NAMES.values())}; on the map you are "
            f"{NAMES[agent][0].upper()}. Walk into a thing to use it. O gives an onion, D a dish. P is the pot: bring "
            f"it {self._onions}, wait until it is ready, and fetch the soup with a dish. S is where soups are served. "
            "= is a counter: put a thing there, or take it. Hands hold one thing. Answer with one word: north (up), "
            "south (down), west (left), east (right) or wait."
        )

    def observe_text(self, agent: str) -> str:
        at = {place: NAMES[cook][0].upper() for cook, place in self.places.items()}
        rows: dict[int, str] = {}
        for square, sign in self._map.items():
            floor = "." if sign in "12" else sign
            visible = at.get(square) or _SIGNS.get(self.counters.get(square, "")) or floor
            rows[square[0]] = rows.get(square[0], "") + visible
        hands = ", ".join(f"{name} holds {self.hands[cook] or 'nothing'}" for cook, name in NAMES.items())
        pot = f"{self.in_pot} of {self._onions} onions"
        if self.in_pot == self._onions:
            pot = f"cooks for {self.cooks_for} more" if self.cooks_for else "ready"
        status = f"Pot: {pot}. Served: {self.served} of {self._orders}. Rounds left: {self._rounds - self.round}."
        return "\n".join((*rows.values(), f"{hands}. {status}"))

    def legal_actions(self, agent: str) -> tuple[str, ...]:
        return (*STEPS, "wait")

    # ---- rules

    def act_all(self, actions: dict[str, str]) -> Outcome:
        words = {cook: {word.casefold() for word in _WORD.findall(text)} for cook, text in actions.items()}
        info: dict[str, dict[str, Any]] = {
            cook: {} if len(named) == 1 else {"illegal": "not exactly one of the five words"}
            for cook, named in words.items()
        }
        moves = {cook: named.pop() if len(named) == 1 else "wait" for cook, named in words.items()}
        self.cooks_for = max(0, self.cooks_for - 1)
        self.round += 1
        ahead = {cook: self._ahead(cook, move) for cook, move in moves.items()}
        walked = {cook: square if self._map.get(square, "#") in ".12" else self.places[cook]
                  for cook, square in ahead.items()}  # fmt: skip
        first, second = self.possible_agents
        swapped = (walked[first], walked[second]) == (self.places[second], self.places[first])
        if walked[first] != walked[second] and not swapped:
            self.places = walked
        for cook, square in ahead.items():
            if self._map.get(square, "#") not in ".12":
                self.hands[cook] = self._use(square, self.hands[cook])
        if self.served < self._orders and self.round < self._rounds:
            return Outcome(info=info)
        success = self.served == self._orders
        facts = {"served": self.served, "rounds": self.round, "success": success, "forfeits": []}
        final = {cook: {**info[cook], **facts} for cook in self.agents}
        return Outcome(rewards=dict.fromkeys(self.agents, self.served / self._orders), done=True, info=final)

    def _ahead(self, cook: str, move: str) -> Square:
        row, column = self.places[cook]
        down, across = STEPS.get(move, (0, 0))
        return row + down, column + across

    def _use(self, square: Square, item: str) -> str:
        """Use the thing on a square with the item in hand. Returns the item in hand afterwards."""
        thing = self._map.get(square, "#")
        if thing in "OD" and not item:
            return "onion" if thing == "O" else "dish"
        if thing == "S" and item == "soup" and self.served < self._orders:  # both cooks may come in one round
            self.served += 1
            return ""
        if thing == "=" and item and square not in self.counters:
            self.counters[square] = item
            return ""
        if thing == "=" and not item:
            return self.counters.pop(square, "")
        if thing == "P" and item == "onion" and self.in_pot < self._onions:
            self.in_pot += 1
            self.cooks_for = self._cooking if self.in_pot == self._onions else 0
            return ""
        if thing == "P" and item == "dish" and self.in_pot == self._onions and not self.cooks_for:
            self.in_pot = 0
            return "soup"
        return item


def _flipped(squares: Mapping[Square, str], rows: bool, columns: bool) -> dict[Square, str]:
    """Return a map flipped vertically, horizontally or both, sorted by row."""
    last = max(squares)
    turned = {(last[0] - r if rows else r, last[1] - c if columns else c): sign for (r, c), sign in squares.items()}
    return dict(sorted(turned.items()))


def _floor(squares: Mapping[Square, str], start: Square) -> list[Square]:
    """Return the squares that can be reached from a square, including itself."""
    reached = [start]
    for row, column in reached:  # grows during the loop
        neighbors = ((row + down, column + across) for down, across in STEPS.values())
        reached += [square for square in neighbors if squares.get(square, "#") in ".12" and square not in reached]
    return reached


def _read_map(layout: str) -> dict[Square, str]:
    """Return the signs of a map by square. Raises ValueError for neither the name of a layout nor a valid map."""
    if "/" not in layout and layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}.{did_you_mean(layout, LAYOUTS)}")
    rows = [row.strip() for row in LAYOUTS.get(layout, layout).split("/")]
    signs = "".join(rows)
    fits = all(signs.count(sign) == 1 for sign in "12P") and all(sign in signs for sign in "ODS")
    if not fits or set(signs) - set("12PODS.=#") or len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"layout={layout!r} is no map: use rows of one length separated by '/', one each of 1, 2 and P, at least "
            "one each of O, D and S, and otherwise only '.', '=' and '#'"
        )
    return {(row, column): sign for row, signs in enumerate(rows) for column, sign in enumerate(signs)}
