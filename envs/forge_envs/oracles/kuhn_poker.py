"""The oracle of `forge_envs.games.poker.KuhnPoker`.

In: a card and the moves so far. Out: a move. Waits for nothing.
"""

from __future__ import annotations

from forge_envs.oracles.script import Script, read

_BOLD = {"bet": {"Jack": 1 / 3, "King": 1.0}, "call": {"Queen": 1 / 3, "King": 1.0}}
"""How often a card bets after the other's check, and calls a bet; never where it is not named."""


class Oracle(Script):
    """An equilibrium of Kuhn, "A Simplified Two-Person Poker" (1950): the one in which who begins never bets."""

    def answer(self, seen: str) -> str:
        moves = chances(seen)
        return self.rng.choices(list(moves), list(moves.values()))[0]


def chances(seen: str) -> dict[str, float]:
    """The probability of each move, given what a seat reads."""
    bold, meek = ("call", "fold") if "opponent bet" in seen else ("bet", "check")
    chance = 0.0 if "Moves: none" in seen else _BOLD[bold].get(read(r"card: (\w+)", seen), 0.0)
    return {bold: chance, meek: 1 - chance}
