"""Leduc poker: six cards, two rounds of betting, a public card between them.

In: "fold", "call" or "raise", somewhere in a text. Out: chips won or lost. Waits for nothing.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv

RANKS = ("Jack", "Queen", "King")
"""Lowest first; there are two cards of each."""
BETS = (2, 4)
"""Chips of a raise in the first and in the second round."""
MAX_RAISES = 2
"""Per round, by both players together."""
_WORD = re.compile(r"\b(fold|call|check|raise|bet)\b", re.IGNORECASE)
_SAME = {"check": "call", "bet": "raise"}


class LeducPoker(TurnEnv):
    """Two seats, zero-sum; the rules of Southey et al., "Bayes' Bluff" (arXiv:1207.1411).

    Each player pays an ante of 1 chip and gets one of six cards, two of each rank. In each of two rounds p0 speaks
    first: call (pay what the other has paid more; nothing to pay is a check), raise (call and pay 2 chips more, 4 in
    the second round; at most two raises a round) or, facing a raise, fold. A round ends when a raise is called or both
    check; then a public card is shown. After the second round a player whose card pairs with the public card wins, else
    the higher card; equal ranks share the pot.

    Rewards are chips won, -13 to 13: the winner gets what the other has paid, and the other loses it. The value of the
    game for p0 is -0.0856 chips.

    A text is the move whose word it contains; "check" and "call" are one word, and so are "bet" and "raise". A text
    with no such word, with words of two moves, or with a move that is not allowed now is illegal: it folds, and the
    player's info says ``"illegal": true``. When the game is over, infos hold all ``cards`` and the ``moves``.
    """

    possible_agents = ("p0", "p1")
    max_turns = 8

    def setup(self, rng: np.random.Generator) -> None:
        deck = [rank for rank in range(len(RANKS)) for _ in range(2)]
        a, b, public = (deck[i] for i in rng.permutation(len(deck))[:3])
        self.cards = {"p0": a, "p1": b}
        self.public = public
        self.paid = {"p0": 1, "p1": 1}
        self.rounds: list[list[str]] = [[]]
        self.over = False

    def instructions(self, agent: str) -> str:
        return (
            "You play Leduc poker. Six cards: two each of Jack < Queen < King. Each player holds one and has paid "
            "1 chip. Two rounds: call, raise (2 chips, then 4; at most two raises a round) or fold. After the first "
            "round a public card is shown. At the end a pair with it wins, else the higher card. Answer with one word."
        )

    def observe_text(self, agent: str) -> str:
        public = RANKS[self.public] if len(self.rounds) == 2 else "hidden"
        text = f"Your card: {RANKS[self.cards[agent]]}. Public card: {public}."
        for number, moves in enumerate(self.rounds, 1):
            told = [f"{'you' if self._seat(i) == agent else 'opponent'} {move}" for i, move in enumerate(moves)]
            text += f" Round {number}: {', '.join(told) or 'no moves'}."
        text += f" Paid: you {self.paid[agent]}, opponent {self.paid[self._other(agent)]}."
        return f"{text} Your move: {' or '.join(self._options())}?" if self._options() else text

    def legal_actions(self, agent: str) -> tuple[str, ...]:
        return self._options()

    def secrets(self, agent: str) -> tuple[str, ...]:
        """What `agent` must not read: the other's card, and the public card before it is shown."""
        hidden = [f"your card: {RANKS[self.cards[self._other(agent)]]}"]
        if self.cards[agent] == self.cards[self._other(agent)]:
            hidden = []  # the same words describe the own card
        return (*hidden, *([f"public card: {RANKS[self.public]}"] if len(self.rounds) == 1 else []))

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Deal what `agent` does not know anew."""
        if self.over:
            return
        deck = [rank for rank in range(len(RANKS)) for _ in range(2)]
        deck.remove(self.cards[agent])
        if len(self.rounds) == 2:
            deck.remove(self.public)
        other, public = (deck[i] for i in rng.permutation(len(deck))[:2])
        self.cards[self._other(agent)] = other
        self.public = self.public if len(self.rounds) == 2 else public

    def openings(self) -> Iterator[tuple[float, LeducPoker]]:
        """All different deals with their probability, each a game of its own before the first move."""
        deck = [rank for rank in range(len(RANKS)) for _ in range(2)]
        deals = Counter(itertools.permutations(deck, 3))
        for (first, second, public), count in deals.items():
            game = LeducPoker()
            game.reset(seed=0)
            game.cards, game.public = {"p0": first, "p1": second}, public
            yield count / deals.total(), game

    def act(self, agent: str, action: str) -> Outcome:
        named = {_SAME.get(word, word) for word in map(str.casefold, _WORD.findall(action))}
        move = named.pop() if len(named) == 1 else ""
        if move not in self._options():
            return self._end(self._other(agent), illegal=agent)
        moves = self.rounds[-1]
        moves.append(move)
        if move == "fold":
            return self._end(self._other(agent))
        self.paid[agent] = self.paid[self._other(agent)]
        if move == "raise":
            self.paid[agent] += BETS[len(self.rounds) - 1]
            return Outcome()
        if len(moves) == 1:
            return Outcome()
        if len(self.rounds) == 2:
            return self._end(self._winner())
        self.rounds.append([])
        return Outcome(next="p0")

    def _options(self) -> tuple[str, ...]:
        if self.over:
            return ()
        raises = self.rounds[-1].count("raise")
        return ("call", *(["raise"] if raises < MAX_RAISES else []), *(["fold"] if raises else []))

    def _winner(self) -> str | None:
        worth = {seat: (card == self.public, card) for seat, card in self.cards.items()}
        return None if worth["p0"] == worth["p1"] else max(worth, key=lambda seat: worth[seat])

    def _seat(self, place: int) -> str:
        return self.possible_agents[place % 2]

    def _other(self, agent: str) -> str:
        return "p1" if agent == "p0" else "p0"

    def _end(self, winner: str | None, *, illegal: str | None = None) -> Outcome:
        self.over = True
        chips = float(self.paid[self._other(winner)]) if winner else 0.0
        cards = {**{seat: RANKS[card] for seat, card in self.cards.items()}, "public": RANKS[self.public]}
        facts = {"cards": cards, "moves": [list(moves) for moves in self.rounds]}
        rewards = {winner: chips, self._other(winner): -chips} if winner else {}
        return Outcome(
            rewards=rewards,
            done=True,
            info={seat: {**facts, "illegal": seat == illegal} for seat in self.possible_agents},
        )
