"""Kuhn poker: three cards, one bet, the smallest game in which bluffing pays.

In: "check", "bet", "call" or "fold", somewhere in a text. Out: chips won or lost. Waits for nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv

CARDS = ("Jack", "Queen", "King")
"""Lowest first."""
_WORD = re.compile(r"\b(check|bet|call|fold)\b", re.IGNORECASE)


class KuhnPoker(TurnEnv):
    """Two seats, zero-sum; the rules of Kuhn, "A Simplified Two-Person Poker" (1950).

    Each player pays an ante of 1 chip and gets one of three cards. p0 may check or bet 1 chip. Facing a bet, a player
    calls (pays 1 chip, the higher card wins the pot) or folds. After a check p1 may check, too (the higher card wins),
    or bet, and then p0 calls or folds. Rewards are chips won: +-1 after two checks or a fold, +-2 after a call. The
    value of the game for p0 is -1/18 chip.

    A text is the move whose word it contains. A text with no move's word, with words of several moves, or with a move
    that is not allowed now is illegal: the player loses the ante, as by folding, and its info says ``"illegal": true``.

    When the game is over, infos hold both ``cards`` by seat and the ``moves``.
    """

    possible_agents = ("p0", "p1")
    max_turns = 3

    def setup(self, rng: np.random.Generator) -> None:
        dealt = rng.permutation(len(CARDS))[:2]
        self.cards = {agent: int(card) for agent, card in zip(self.possible_agents, dealt, strict=True)}
        self.moves: list[str] = []
        self.over = False

    def instructions(self, agent: str) -> str:
        return (
            "You play Kuhn poker. Three cards: Jack < Queen < King. Each player holds one and has paid 1 chip. "
            "Check or bet 1 chip; facing a bet, call (pay 1 chip) or fold. The higher card wins the pot. "
            "Answer with one word."
        )

    def observe_text(self, agent: str) -> str:
        told = ", ".join(f"{'you' if who == agent else 'opponent'} {move}" for who, move in self._history())
        text = f"Your card: {CARDS[self.cards[agent]]}. Moves: {told or 'none'}."
        return f"{text} Your move: {' or '.join(self._options())}?" if self._options() else text

    def legal_actions(self, agent: str) -> tuple[str, ...]:
        return self._options()

    def secrets(self, agent: str) -> tuple[str, ...]:
        """What `agent` must not read: the opponent's card, as observations write cards."""
        return tuple(f"card: {CARDS[card]}" for seat, card in self.cards.items() if seat != agent)

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Give the opponent the card that nobody holds."""
        self.cards[self._other(agent)] = next(n for n in range(len(CARDS)) if n not in self.cards.values())

    def openings(self) -> Iterator[tuple[float, KuhnPoker]]:
        """All six deals with their probability, each a game of its own before the first move."""
        for dealt in itertools.permutations(range(len(CARDS)), 2):
            game = KuhnPoker()
            game.reset(seed=0)
            game.cards = dict(zip(self.possible_agents, dealt, strict=True))
            yield 1 / 6, game

    def act(self, agent: str, action: str) -> Outcome:
        named = {word.casefold() for word in _WORD.findall(action)}
        move = named.pop() if len(named) == 1 else ""
        if move not in self._options():
            return self._end(winner=self._other(agent), chips=1, illegal=agent)
        self.moves.append(move)
        if move == "fold":
            return self._end(winner=self._other(agent), chips=1)
        if move == "call" or self.moves == ["check", "check"]:
            winner = max(self.possible_agents, key=lambda seat: self.cards[seat])
            return self._end(winner=winner, chips=2 if move == "call" else 1)
        return Outcome()

    def _options(self) -> tuple[str, ...]:
        if self.over:
            return ()
        return ("call", "fold") if self.moves[-1:] == ["bet"] else ("check", "bet")

    def _history(self) -> list[tuple[str, str]]:
        return [(self.possible_agents[index % 2], move) for index, move in enumerate(self.moves)]

    def _other(self, agent: str) -> str:
        return self.possible_agents[1 - self.possible_agents.index(agent)]

    def _end(self, *, winner: str, chips: int, illegal: str | None = None) -> Outcome:
        self.over = True
        public = {"cards": {seat: CARDS[card] for seat, card in self.cards.items()}, "moves": list(self.moves)}
        return Outcome(
            rewards={winner: float(chips), self._other(winner): -float(chips)},
            done=True,
            info={seat: {**public, "illegal": seat == illegal} for seat in self.possible_agents},
        )
