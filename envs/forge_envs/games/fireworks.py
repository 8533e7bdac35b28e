"""Fireworks: players see all cards but their own and give few hints, after Hanabi."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv
from forge_envs.shared import check_ranges

COLOURS = ("red", "blue", "green", "white", "amber")
NAMES = ("ann", "ben", "cat", "dan")
"""Names of ``player_0``, ``player_1``, ... in texts."""
COPIES = {1: 3, 2: 2, 3: 2, 4: 2, 5: 1}
"""Number of cards of each colour, by rank. There is only one of the highest rank in the game."""
Card: TypeAlias = tuple[str, int]
_MOVE = re.compile(
    r"\b(?:(play|discard)\W{1,5}(?:(?:my|the)\W{1,5})?(?:card\W{1,5})?(\d{1,2})"
    rf"|(hint)\W{{1,5}}(?:to\W{{1,5}})?({'|'.join(NAMES)})\W{{1,5}}({'|'.join(COLOURS)}|\d{{1,2}}))\b",
    re.ASCII,
)


@dataclass(slots=True)
class Slot:
    """A slot of a hand: a card, with the colours and ranks that hints allow."""

    card: Card
    colours: set[str]
    ranks: set[int]

    def fits(self, card: Card) -> bool:
        """Whether the hints are consistent with `card`."""
        return card[0] in self.colours and card[1] in self.ranks


class Fireworks(TurnEnv):
    """Two to four players with a common score, after Bauza's Hanabi.

    Every card has a colour and a rank. Players see all cards except their own, and move in turn:

    - "play N" places card N of the own hand on the pile of its colour. If it is not the next rank, the card is lost and
      a fuse burns.
    - "discard N" removes card N and regains a hint. Allowed only if a hint has been used.
    - "hint NAME COLOUR" or "hint NAME RANK" shows a player which of its cards have this colour or rank, at least one,
      and uses a hint.

    Completing a pile regains a hint. Removed cards are replaced from the deck.

    The game ends when all piles are complete, when the last fuse has burnt, or when every player has moved once after
    the deck ran out. All players get the number of cards on the piles over the maximum, and 0 if the last fuse has
    burnt. A text that is not exactly one legal move burns a fuse and sets ``illegal`` in infos. At the end infos
    contain ``score``, ``most`` (the maximum score), ``fuses`` and ``success`` (all piles complete).

    Args:
        num_players: 2 to 4.
        colours: Number of colours, 1 to 5.
        ranks: Number of ranks, 2 to 5.
        hand: Number of cards per player, 1 to 5. The deck must have enough for all players.
        hints: Initial and maximum number of hints, 1 to 9.
        fuses: Number of fuses, 1 to 9.
    """

    max_reward = 1.0

    def __init__(
        self, *, num_players: int = 2, colours: int = 3, ranks: int = 3, hand: int = 3, hints: int = 6, fuses: int = 3
    ) -> None:
        super().__init__()
        check_ranges(num_players=(num_players, 2, len(NAMES)), colours=(colours, 1, len(COLOURS)))
        check_ranges(ranks=(ranks, 2, len(COPIES)), hand=(hand, 1, 5), hints=(hints, 1, 9), fuses=(fuses, 1, 9))
        self.possible_agents = tuple(f"player_{number}" for number in range(num_players))
        self._names = dict(zip(self.possible_agents, NAMES, strict=False))
        self._colours, self._ranks = COLOURS[:colours], range(1, ranks + 1)
        self._deck = [(c, r) for c in self._colours for r in self._ranks for _ in range(COPIES[r] if r < ranks else 1)]
        if num_players * hand > len(self._deck):
            raise ValueError(
                f"{len(self._deck)} cards are too few for {num_players} hands of {hand}. Set more colours or ranks"
            )
        self._hand, self._max_hints, self._max_fuses = hand, hints, fuses

    def setup(self, rng: np.random.Generator) -> None:
        self.deck = [self._deck[int(index)] for index in rng.permutation(len(self._deck))]
        self.hands: dict[str, list[Slot]] = {player: [] for player in self.possible_agents}
        for _ in range(self._hand):
            for hand in self.hands.values():
                self._draw(hand)
        self.piles = dict.fromkeys(self._colours, 0)
        self.hints, self.fuses = self._max_hints, self._max_fuses
        self.gone: list[Card] = []
        self.moves: list[str] = []
        self.after_deck = 0
        """Number of moves since the deck ran out."""

    def _draw(self, hand: list[Slot]) -> None:
        if self.deck:
            hand.append(Slot(self.deck.pop(), set(self._colours), set(self._ranks)))

    # ---- texts

    def instructions(self, agent: str) -> str:
        return (
            f"You are {self._names[agent]} and play Fireworks together. For each colour ({', '.join(self._colours)}) a "
            f"pile is built from 1 to {self._ranks[-1]}, in order. You see the others' cards and not your own. Your "
            "move is one of: play N (your card N onto its pile; a wrong card burns a fuse, and without fuses all is "
            "lost), discard N (regains a hint, and is not allowed while none is used up), hint NAME COLOUR or hint "
            "NAME RANK (shows a seat which of its cards these are; uses up a hint). Write the move alone, such as: "
            f"hint {next(name for player, name in self._names.items() if player != agent)} 1"
        )

    def observe_text(self, agent: str) -> str:
        recent_moves = self.moves[-(len(self.possible_agents) - 1) :]
        piles = ", ".join(f"{colour} {height}" for colour, height in self.piles.items())
        removed = ", ".join(f"{colour} {rank}" for colour, rank in sorted(self.gone))
        others = [self._describe_hand(player) for player in self.possible_agents if player != agent]
        hand = ", ".join(f"{number} {self._knowledge(slot)}" for number, slot in enumerate(self.hands[agent], 1))
        return "\n".join(
            (
                *recent_moves,
                f"Piles: {piles}. Hints: {self.hints}. Fuses: {self.fuses}. Deck: {len(self.deck)}.",
                f"Gone: {removed or 'nothing'}.",
                *others,
                f"Your cards: {hand or 'none'}.",
            )
        )

    def _describe_hand(self, player: str) -> str:
        """Return a hand as the other players see it, with the holder's knowledge of each card."""
        cards = (f"{slot.card[0]} {slot.card[1]} (knows {self._knowledge(slot)})" for slot in self.hands[player])
        return f"{self._names[player]}: {', '.join(cards)}"

    def _knowledge(self, slot: Slot) -> str:
        """Return the colours and ranks that hints allow for a card."""
        colours = "/".join(colour for colour in self._colours if colour in slot.colours)
        ranks = "/".join(str(rank) for rank in self._ranks if rank in slot.ranks)
        parts = [colours] * (len(slot.colours) < len(self._colours)) + [ranks] * (len(slot.ranks) < len(self._ranks))
        return " ".join(parts) or "?"

    def legal_actions(self, agent: str) -> tuple[str, ...]:
        numbers = range(1, len(self.hands[agent]) + 1)
        moves = [f"play {number}" for number in numbers]
        if self.hints < self._max_hints:
            moves += [f"discard {number}" for number in numbers]
        for player in self.possible_agents if self.hints else ():
            if player != agent:
                in_hand = {part for slot in self.hands[player] for part in slot.card}
                parts = (part for part in (*self._colours, *self._ranks) if part in in_hand)
                moves += [f"hint {self._names[player]} {part}" for part in parts]
        return tuple(moves)

    def secrets(self, agent: str) -> tuple[str, ...]:
        """Return the agent's hand, as the other players see it."""
        return (self._describe_hand(agent),) if self.hands[agent] else ()

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Redistribute the agent's cards and the deck, consistently with the hints."""
        hand = self.hands[agent]
        for _ in range(20):
            pool = [*self.deck, *(slot.card for slot in hand)]
            pool = [pool[int(index)] for index in rng.permutation(len(pool))]
            dealt: list[Card] = []
            for slot in hand:
                if (card := next((card for card in pool if slot.fits(card)), None)) is not None:
                    pool.remove(card)
                    dealt.append(card)
            if len(dealt) == len(hand):  # the greedy choice may leave a later card without a match
                self.deck = pool
                for slot, card in zip(hand, dealt, strict=True):
                    slot.card = card
                return

    # ---- rules

    def act(self, agent: str, action: str) -> Outcome:
        moves = {" ".join(filter(None, parts)) for parts in _MOVE.findall(action.casefold())}
        move = moves.pop() if len(moves) == 1 else ""
        legal = move in self.legal_actions(agent)
        self.after_deck += not self.deck
        if not legal:
            self.fuses -= 1
            self._announce(agent, "made no allowed move: a fuse burns")
        elif move.startswith("hint "):
            self._hint(agent, *move.split()[1:])
        else:
            self._play_card(agent, *move.split())
        info = {agent: {} if legal else {"illegal": "not one allowed move"}}
        complete = all(height == self._ranks[-1] for height in self.piles.values())
        if self.fuses and not complete and self.after_deck < len(self.possible_agents):
            return Outcome(info=info)
        score, maximum = sum(self.piles.values()), len(self._colours) * len(self._ranks)
        facts = {"score": score, "most": maximum, "fuses": self.fuses, "success": complete, "forfeits": []}
        final = {player: {**info.get(player, {}), **facts} for player in self.agents}
        reward = score / maximum if self.fuses else 0.0
        return Outcome(rewards=dict.fromkeys(self.agents, reward), done=True, info=final)

    def _hint(self, agent: str, name: str, what: str) -> None:
        self.hints -= 1
        player = self.possible_agents[NAMES.index(name)]
        matching = []
        for number, slot in enumerate(self.hands[player], 1):
            match = what in (slot.card[0], str(slot.card[1]))
            if what.isdecimal():
                slot.ranks = {rank for rank in slot.ranks if (rank == int(what)) == match}
            else:
                slot.colours = {colour for colour in slot.colours if (colour == what) == match}
            matching += [str(number)] * match
        self._announce(agent, f"told {name}: {what} is card {', '.join(matching)}")

    def _play_card(self, agent: str, verb: str, number: str) -> None:
        colour, rank = self.hands[agent].pop(int(number) - 1).card
        fits = verb == "play" and self.piles[colour] == rank - 1
        if fits:
            self.piles[colour] = rank
        else:
            self.gone.append((colour, rank))
        self.fuses -= verb == "play" and not fits
        if verb == "discard" or (fits and rank == self._ranks[-1]):
            self.hints = min(self._max_hints, self.hints + 1)
        result = "" if verb == "discard" else ", which fits" if fits else ", which does not fit: a fuse burns"
        self._announce(agent, f"{'played' if verb == 'play' else 'discarded'} {colour} {rank}{result}")
        self._draw(self.hands[agent])

    def _announce(self, agent: str, event: str) -> None:
        self.moves.append(f"{self._names[agent]} {event}.")
