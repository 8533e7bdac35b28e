"""Oracle of `forge_envs.games.poker.KuhnPoker`."""

from __future__ import annotations

from forge_envs.oracles.script import Script, read

_BOLD = {"bet": {"Jack": 1 / 3, "King": 1.0}, "call": {"Queen": 1 / 3, "King": 1.0}}
"""Probability by card to bet after the opponent's check, and to call a bet. 0 for cards that are not listed."""


class Oracle(Script):
    """The equilibrium of Kuhn, "A Simplified Two-Person Poker" (1950), in which the first player never bets."""

    def answer(self, seen: str) -> str:
        moves = chances(seen)
        return self.rng.choices(list(moves), list(moves.values()))[0]


def chances(observation: str) -> dict[str, float]:
    """Return the probability of each move."""
    bold, meek = ("call", "fold") if "opponent bet" in observation else ("bet", "check")
    chance = 0.0 if "Moves: none" in observation else _BOLD[bold].get(read(r"card: (\w+)", observation), 0.0)
    return {bold: chance, meek: 1 - chance}
