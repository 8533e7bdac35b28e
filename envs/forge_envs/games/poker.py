"""Kuhn poker, the smallest game with bluffing, and Leduc poker, with two rounds and a public card."""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv

CARDS = ("Jack", "Queen", "King")
"""Ranks, lowest first. Leduc poker has two cards of each."""
BETS = (2, 4)
"""Chips of a raise in the first and second round of Leduc poker."""
MAX_RAISES = 2
"""Maximum number of raises per round of Leduc poker, of both players together."""
_KUHN_WORD = re.compile(r"\b(check|bet|call|fold)\b", re.IGNORECASE)
_LEDUC_WORD = re.compile(r"\b(fold|call|check|raise|bet)\b", re.IGNORECASE)
_LEDUC_DECK = [rank for rank in range(len(CARDS)) for _ in range(2)]
_SAME = {"check": "call", "bet": "raise"}


class _Poker(TurnEnv):
    """Common part of the two games."""

    possible_agents = ("player_0", "player_1")
    cards: dict[str, int]
    over: bool

    def _other(self, agent: str) -> str:
        return "player_1" if agent == "player_0" else "player_0"

    def _describe_moves(self, agent: str, moves: Sequence[str]) -> str:
        """Return the moves of a round that player_0 began, from an agent's view."""
        return ", ".join(
            f"{'you' if self.possible_agents[number % 2] == agent else 'opponent'} {move}"
            for number, move in enumerate(moves)
        )

    def _question(self, agent: str) -> str:
        options = self.legal_actions(agent)
        return f" Your move: {' or '.join(options)}?" if options else ""

    def _end(self, winner: str | None, chips: int, illegal: str | None, cards: dict[str, str], moves: Any) -> Outcome:
        self.over = True
        info = {agent: {"cards": cards, "moves": moves, "illegal": agent == illegal} for agent in self.possible_agents}
        rewards = {winner: float(chips), self._other(winner): -float(chips)} if winner else {}
        return Outcome(rewards=rewards, done=True, info=info)


class KuhnPoker(_Poker):
    """Two players, zero-sum, with the rules of Kuhn, "A Simplified Two-Person Poker" (1950).

    Each player pays an ante of 1 chip and gets one of three cards. player_0 may check or bet 1 chip. Facing a bet, a
    player calls (pays 1 chip, the higher card wins the pot) or folds. After a check player_1 may also check (the higher
    card wins) or bet, and then player_0 calls or folds. Rewards are chips won: +-1 after two checks or a fold, +-2
    after a call. The value of the game for player_0 is -1/18 chip.

    A text must contain the word of exactly one legal move. Otherwise it is illegal: the player loses the ante, as by
    folding, and its info has ``"illegal": true``. At the end infos contain ``cards`` (by agent) and ``moves``.
    """

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
        moves = self._describe_moves(agent, self.moves) or "none"
        return f"Your card: {CARDS[self.cards[agent]]}. Moves: {moves}.{self._question(agent)}"

    def legal_actions(self, agent: str) -> tuple[str, ...]:
        if self.over:
            return ()
        return ("call", "fold") if self.moves[-1:] == ["bet"] else ("check", "bet")

    def secrets(self, agent: str) -> tuple[str, ...]:
        """Return the opponent's card, in the format of observations."""
        return (f"card: {CARDS[self.cards[self._other(agent)]]}",)

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Give the opponent the card that is not dealt."""
        self.cards[self._other(agent)] = next(n for n in range(len(CARDS)) if n not in self.cards.values())

    def openings(self) -> Iterator[tuple[float, KuhnPoker]]:
        """Yield all six deals with their probability, each as a separate game before the first move."""
        for first, second in itertools.permutations(range(len(CARDS)), 2):
            game = copy.deepcopy(self)
            game.reset(seed=0)
            game.cards = {"player_0": first, "player_1": second}
            yield 1 / 6, game

    def act(self, agent: str, action: str) -> Outcome:
        named = {word.casefold() for word in _KUHN_WORD.findall(action)}
        move = named.pop() if len(named) == 1 else ""
        if move not in self.legal_actions(agent):
            return self._over(self._other(agent), 1, illegal=agent)
        self.moves.append(move)
        if move == "fold":
            return self._over(self._other(agent), 1)
        if move == "call" or self.moves == ["check", "check"]:
            return self._over(max(self.cards, key=lambda agent: self.cards[agent]), 2 if move == "call" else 1)
        return Outcome()

    def _over(self, winner: str, chips: int, illegal: str | None = None) -> Outcome:
        cards = {agent: CARDS[card] for agent, card in self.cards.items()}
        return self._end(winner, chips, illegal, cards, list(self.moves))


class LeducPoker(_Poker):
    """Two players, zero-sum, with the rules of Southey et al., "Bayes' Bluff" (arXiv:1207.1411).

    Each player pays an ante of 1 chip and gets one of six cards, two of each rank. In both rounds player_0 speaks
    first: call (pay what the other has paid more; nothing to pay is a check), raise (call and pay 2 chips more, 4 in
    the second round; at most two raises a round) or, facing a raise, fold. A round ends when a raise is called or both
    check, then a public card is shown. After the second round a player whose card pairs with the public card wins, else
    the higher card. Equal ranks share the pot.

    Rewards are chips won, -13 to 13: the winner gets what the other has paid, and the other loses it. The value of the
    game for player_0 is -0.0856 chips.

    A text must contain the word of exactly one legal move. "check" means "call", and "bet" means "raise". An illegal
    text folds, and the player's info has ``"illegal": true``. At the end infos contain ``cards`` and ``moves``.
    """

    max_turns = 8

    def setup(self, rng: np.random.Generator) -> None:
        a, b, self.public = (_LEDUC_DECK[i] for i in rng.permutation(len(_LEDUC_DECK))[:3])
        self.cards = {"player_0": a, "player_1": b}
        self.paid = {"player_0": 1, "player_1": 1}
        self.rounds: list[list[str]] = [[]]
        self.over = False

    def instructions(self, agent: str) -> str:
        return (
            "You play Leduc poker. Six cards: two each of Jack < Queen < King. Each player holds one and has paid "
            "1 chip. Two rounds: call, raise (2 chips, then 4; at most two raises a round) or fold. After the first "
            "round a public card is shown. At the end a pair with it wins, else the higher card. Answer with one word."
        )

    def observe_text(self, agent: str) -> str:
        public = CARDS[self.public] if len(self.rounds) == 2 else "hidden"
        text = f"Your card: {CARDS[self.cards[agent]]}. Public card: {public}."
        for number, moves in enumerate(self.rounds, 1):
            text += f" Round {number}: {self._describe_moves(agent, moves) or 'no moves'}."
        return f"{text} Paid: you {self.paid[agent]}, opponent {self.paid[self._other(agent)]}.{self._question(agent)}"

    def legal_actions(self, agent: str) -> tuple[str, ...]:
        if self.over:
            return ()
        raises = self.rounds[-1].count("raise")
        return ("call", *(["raise"] if raises < MAX_RAISES else []), *(["fold"] if raises else []))

    def secrets(self, agent: str) -> tuple[str, ...]:
        """Return the opponent's card, and the public card before it is shown."""
        hidden = [f"your card: {CARDS[self.cards[self._other(agent)]]}"]
        if self.cards[agent] == self.cards[self._other(agent)]:
            hidden = []  # the agent's own observation has the same text
        return (*hidden, *([f"public card: {CARDS[self.public]}"] if len(self.rounds) == 1 else []))

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Deal the hidden cards again."""
        if self.over:
            return
        deck = [*_LEDUC_DECK]
        deck.remove(self.cards[agent])
        if len(self.rounds) == 2:
            deck.remove(self.public)
        other, public = (deck[i] for i in rng.permutation(len(deck))[:2])
        self.cards[self._other(agent)] = other
        self.public = self.public if len(self.rounds) == 2 else public

    def openings(self) -> Iterator[tuple[float, LeducPoker]]:
        """Yield all distinct deals with their probability, each as a separate game before the first move."""
        deals = Counter(itertools.permutations(_LEDUC_DECK, 3))
        for (first, second, public), count in deals.items():
            game = copy.deepcopy(self)
            game.reset(seed=0)
            game.cards, game.public = {"player_0": first, "player_1": second}, public
            yield count / deals.total(), game

    def act(self, agent: str, action: str) -> Outcome:
        named = {_SAME.get(word, word) for word in map(str.casefold, _LEDUC_WORD.findall(action))}
        move = named.pop() if len(named) == 1 else ""
        if move not in self.legal_actions(agent):
            return self._over(self._other(agent), illegal=agent)
        moves = self.rounds[-1]
        moves.append(move)
        if move == "fold":
            return self._over(self._other(agent))
        self.paid[agent] = self.paid[self._other(agent)]
        if move == "raise":
            self.paid[agent] += BETS[len(self.rounds) - 1]
            return Outcome()
        if len(moves) == 1:
            return Outcome()
        if len(self.rounds) == 2:
            return self._over(self._winner())
        self.rounds.append([])
        return Outcome(next="player_0")

    def _winner(self) -> str | None:
        worth = {agent: (card == self.public, card) for agent, card in self.cards.items()}
        return None if worth["player_0"] == worth["player_1"] else max(worth, key=lambda agent: worth[agent])

    def _over(self, winner: str | None, illegal: str | None = None) -> Outcome:
        chips = self.paid[self._other(winner)] if winner else 0
        cards = {**{agent: CARDS[card] for agent, card in self.cards.items()}, "public": CARDS[self.public]}
        return self._end(winner, chips, illegal, cards, [list(moves) for moves in self.rounds])
