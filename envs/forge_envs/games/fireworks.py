"""Fireworks: cards that everybody sees but who holds them, few hints, one common score; after Hanabi.

In: "play 2", "discard 1", "hint ben red". Out: the same reward for all seats. Waits for nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv

COLOURS = ("red", "blue", "green", "white", "amber")
NAMES = ("ann", "ben", "cat", "dan")
"""What the texts call ``player_0``, ``player_1``, ..."""
COPIES = {1: 3, 2: 2, 3: 2, 4: 2, 5: 1}
"""Cards of each colour by rank; of the highest rank in the game there is one."""
Card: TypeAlias = tuple[str, int]
_MOVE = re.compile(
    r"\b(?:(play|discard)\W{1,5}(?:(?:my|the)\W{1,5})?(?:card\W{1,5})?(\d{1,2})"
    rf"|(hint)\W{{1,5}}(?:to\W{{1,5}})?({'|'.join(NAMES)})\W{{1,5}}({'|'.join(COLOURS)}|\d{{1,2}}))\b",
    re.ASCII,
)


@dataclass(slots=True)
class Held:
    """A card in a hand, and what hints have left open of it."""

    card: Card
    colours: set[str]
    ranks: set[int]

    def fits(self, card: Card) -> bool:
        """Whether hints allow it to be `card`."""
        return card[0] in self.colours and card[1] in self.ranks


class Fireworks(TurnEnv):
    """Two to four seats that share one score; after Bauza's Hanabi.

    Cards have a colour and a rank. Each seat holds some, which all others see and it does not. Seats move in turn:
    "play N" puts the own card N on its colour's pile if it is the next rank there, otherwise it is lost and costs a
    fuse; "discard N" puts it away and regains a hint; "hint NAME COLOUR" or "hint NAME RANK" tells a seat which of its
    cards are of that colour or rank, at least one, and uses up a hint. A complete pile regains one, too. What leaves a
    hand is replaced from the deck, as the hand's last card. Discarding is allowed while a hint can be regained.

    The game ends when all piles are complete, when the last fuse has burnt, or when each seat had one more move after
    the deck was empty. All get the cards on the piles over all that could be there, and 0 if the last fuse has burnt.
    A text that is not exactly one allowed move costs a fuse, and infos say so under ``illegal``. At the end infos hold
    ``score``, ``most``, ``fuses`` and ``success``: whether all piles are complete.

    Args:
        num_players: 2 to 4.
        colours: 1 to 5.
        ranks: 2 to 5.
        hand: Cards of a seat, 1 to 5; the deck must hold as many for each seat.
        hints: At the start, and the most there are; 1 to 9.
        fuses: 1 to 9.
    """

    max_reward = 1.0

    def __init__(
        self, *, num_players: int = 2, colours: int = 3, ranks: int = 3, hand: int = 3, hints: int = 6, fuses: int = 3
    ) -> None:
        super().__init__()
        limits = {"num_players": (2, len(NAMES)), "colours": (1, len(COLOURS)), "ranks": (2, len(COPIES))}
        limits |= {"hand": (1, 5), "hints": (1, 9), "fuses": (1, 9)}
        given = {"num_players": num_players, "colours": colours, "ranks": ranks, "hand": hand}
        given |= {"hints": hints, "fuses": fuses}
        for name, (least, most) in limits.items():
            if not least <= given[name] <= most:
                raise ValueError(f"{name}={given[name]} must be {least} to {most}")
        self.possible_agents = tuple(f"player_{number}" for number in range(num_players))
        self._names = dict(zip(self.possible_agents, NAMES, strict=False))
        self._colours, self._ranks = COLOURS[:colours], range(1, ranks + 1)
        self._deck = [(c, r) for c in self._colours for r in self._ranks for _ in range(COPIES[r] if r < ranks else 1)]
        if num_players * hand > len(self._deck):
            raise ValueError(
                f"{len(self._deck)} cards are too few for {num_players} hands of {hand}; set more colours or ranks"
            )
        self._hand, self._most_hints, self._most_fuses = hand, hints, fuses

    def setup(self, rng: np.random.Generator) -> None:
        self.deck = [self._deck[int(place)] for place in rng.permutation(len(self._deck))]
        self.hands: dict[str, list[Held]] = {seat: [] for seat in self.possible_agents}
        for _ in range(self._hand):
            for hand in self.hands.values():
                self._draw(hand)
        self.piles = dict.fromkeys(self._colours, 0)
        self.hints, self.fuses = self._most_hints, self._most_fuses
        self.gone: list[Card] = []
        self.moves: list[str] = []
        self.after_deck = 0

    def _draw(self, hand: list[Held]) -> None:
        if self.deck:
            hand.append(Held(self.deck.pop(), set(self._colours), set(self._ranks)))

    # ---- what seats read

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
        since = self.moves[-(len(self.possible_agents) - 1) :]
        piles = ", ".join(f"{colour} {height}" for colour, height in self.piles.items())
        others = [self._shown(seat) for seat in self.possible_agents if seat != agent]
        own = ", ".join(f"{place} {self._open(held)}" for place, held in enumerate(self.hands[agent], 1))
        return "\n".join(
            (
                *since,
                f"Piles: {piles}. Hints: {self.hints}. Fuses: {self.fuses}. Deck: {len(self.deck)}.",
                f"Gone: {_listed(sorted(self.gone)) or 'nothing'}.",
                *others,
                f"Your cards: {own or 'none'}.",
            )
        )

    def _shown(self, seat: str) -> str:
        """A hand as the others see it, each card with what its holder knows."""
        cards = (f"{held.card[0]} {held.card[1]} (knows {self._open(held)})" for held in self.hands[seat])
        return f"{self._names[seat]}: {', '.join(cards)}"

    def _open(self, held: Held) -> str:
        """What hints have left open of a card."""
        colours = "/".join(colour for colour in self._colours if colour in held.colours)
        ranks = "/".join(str(rank) for rank in self._ranks if rank in held.ranks)
        some = [text for text, left, of in ((colours, held.colours, self._colours), (ranks, held.ranks, self._ranks))
                if len(left) < len(of)]  # fmt: skip
        return " ".join(some) or "?"

    def legal_actions(self, agent: str) -> tuple[str, ...]:
        places = range(1, len(self.hands[agent]) + 1)
        found = [f"play {place}" for place in places]
        if self.hints < self._most_hints:
            found += [f"discard {place}" for place in places]
        for seat in self.possible_agents if self.hints else ():
            if seat != agent:
                there = {part for held in self.hands[seat] for part in held.card}
                parts = (part for part in (*self._colours, *self._ranks) if part in there)
                found += [f"hint {self._names[seat]} {part}" for part in parts]
        return tuple(found)

    # ---- what seats must not read

    def secrets(self, agent: str) -> tuple[str, ...]:
        """The own hand, as the others read it."""
        return (self._shown(agent),) if self.hands[agent] else ()

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Other cards in the own hand and the deck, such as the hints allow."""
        hand = self.hands[agent]
        for _ in range(20):
            pool = [*self.deck, *(held.card for held in hand)]
            pool = [pool[int(place)] for place in rng.permutation(len(pool))]
            dealt: list[Card] = []
            for held in hand:
                if (card := next((card for card in pool if held.fits(card)), None)) is not None:
                    pool.remove(card)
                    dealt.append(card)
            if len(dealt) == len(hand):  # a card that fits two places may leave the second without
                self.deck = pool
                for held, card in zip(hand, dealt, strict=True):
                    held.card = card
                return

    # ---- the game

    def act(self, agent: str, action: str) -> Outcome:
        asked = {" ".join(filter(None, parts)) for parts in _MOVE.findall(action.casefold())}
        move = asked.pop() if len(asked) == 1 else ""
        legal = move in self.legal_actions(agent)
        self.after_deck += not self.deck
        if not legal:
            self.fuses -= 1
            self._tell(agent, "made no allowed move: a fuse burns")
        elif move.startswith("hint "):
            self._hint(agent, *move.split()[1:])
        else:
            self._lay(agent, *move.split())
        info = {agent: {} if legal else {"illegal": "not one allowed move"}}
        complete = all(height == self._ranks[-1] for height in self.piles.values())
        if self.fuses and not complete and self.after_deck < len(self.possible_agents):
            return Outcome(info=info)
        score, most = sum(self.piles.values()), len(self._colours) * len(self._ranks)
        facts = {"score": score, "most": most, "fuses": self.fuses, "success": complete, "forfeits": []}
        told = {seat: {**info.get(seat, {}), **facts} for seat in self.agents}
        reward = score / most if self.fuses else 0.0
        return Outcome(rewards=dict.fromkeys(self.agents, reward), done=True, info=told)

    def _hint(self, agent: str, name: str, what: str) -> None:
        self.hints -= 1
        seat = next(player for player, known in self._names.items() if known == name)
        touched = []
        for place, held in enumerate(self.hands[seat], 1):
            hit = what in (held.card[0], str(held.card[1]))
            if what.isdecimal():
                held.ranks = {rank for rank in held.ranks if (rank == int(what)) == hit}
            else:
                held.colours = {colour for colour in held.colours if (colour == what) == hit}
            touched += [str(place)] * hit
        self._tell(agent, f"told {name}: {what} is card {', '.join(touched)}")

    def _lay(self, agent: str, verb: str, place: str) -> None:
        colour, rank = self.hands[agent].pop(int(place) - 1).card
        fits = verb == "play" and self.piles[colour] == rank - 1
        if fits:
            self.piles[colour] = rank
        else:
            self.gone.append((colour, rank))
        self.fuses -= verb == "play" and not fits
        if verb == "discard" or (fits and rank == self._ranks[-1]):
            self.hints = min(self._most_hints, self.hints + 1)
        result = "" if verb == "discard" else ", which fits" if fits else ", which does not fit: a fuse burns"
        self._tell(agent, f"{'played' if verb == 'play' else 'discarded'} {colour} {rank}{result}")
        self._draw(self.hands[agent])

    def _tell(self, agent: str, what: str) -> None:
        self.moves.append(f"{self._names[agent]} {what}.")


def _listed(cards: list[Card]) -> str:
    return ", ".join(f"{colour} {rank}" for colour, rank in cards)
