"""Negotiation: two seats share out items whose worth to the other neither knows.

In: "take 2 books, 1 hat", "accept", or talk. Out: a share of what could have been gained. Waits for nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv

ITEMS = ("book", "hat", "ball")
TOTAL = 10
"""What all items together are worth to each seat, in points."""
Counts: TypeAlias = tuple[int, ...]
_TAKE = re.compile(r"\btake\b", re.IGNORECASE)
_CLAUSE = re.compile(r"[.,;:!?\n\u2013\u2014]|\s-+\s")
_SUBJECT = re.compile(r"\b(?:i|we|you|partner|player_[01])\b", re.IGNORECASE)
_ITEM = re.compile(rf"(?<![\w.,-])(\d{{1,3}})\s+({'|'.join(ITEMS)})s?\b", re.IGNORECASE | re.ASCII)
_ACCEPT = re.compile(r"\baccept\b", re.IGNORECASE)
_NO_ACCEPT = re.compile(
    r"(?:(?:\b(?:not|never|cannot)|n['\u2019]t)\s+(?:(?!(?:and|so|but|then)\b)\S+\s+){0,4}"
    r"|\b(?:you|partner|player_[01])\s+(?:(?!(?:and|so|but|then|i)\b)\S+\s+){0,2})$",
    re.IGNORECASE,
)
"""Before "accept": said of what is not accepted, or of what the other should do."""
_OTHER = re.compile(r"\b(?:you|your|partner|player_[01])\b", re.IGNORECASE)


class Negotiation(TurnEnv):
    """Two seats, alternating offers, private values; after Lewis et al., "Deal or No Deal?" (arXiv:1706.05125).

    There are books, hats and balls, 1 to 4 of each and 5 to 9 in all. Each seat has its own whole-numbered values, with
    which all items together are worth 10 points to it; every kind is worth something to somebody, and the seats differ.
    A text with "take" followed by numbers of items, such as "I take 2 books and 1 hat", is an offer: the seat would
    have these, and the other seat the rest. "accept" closes on the other's last offer. Any other text, and an offer of
    more than there is, is talk. The other reads the text, cut to `max_message_chars`, and the offer if it is one.

    The score of a deal is its share of the Pareto surplus: the points of both seats together over the most that a deal
    on the Pareto frontier gives them together, 0 to 1. Both seats get ``(1 - selfish) * score + selfish * own / 10``,
    and 0 without a deal in `max_rounds`. From the start, infos hold the own ``values``; at the end also ``deal`` (the
    items of each seat, or None), ``points`` by seat, ``score``, and ``on_frontier``: whether no other deal would have
    been better for one seat and no worse for the other.

    Args:
        selfish: Weight of the own points against the common score, 0 to 1.
        max_rounds: Texts that each seat may write.
        max_message_chars: Longer messages are cut.
    """

    possible_agents = ("player_0", "player_1")

    def __init__(self, *, selfish: float = 0.0, max_rounds: int = 5, max_message_chars: int = 200) -> None:
        super().__init__()
        if not 0 <= selfish <= 1 or max_rounds < 1 or max_message_chars < 1:
            raise ValueError(
                f"selfish={selfish} must be 0 to 1, max_rounds={max_rounds} and max_message_chars={max_message_chars} "
                ">= 1"
            )
        self._selfish, self._texts, self._max_message_chars = selfish, 2 * max_rounds, max_message_chars

    def setup(self, rng: np.random.Generator) -> None:
        while True:
            self.items: Counts = tuple(int(n) for n in rng.integers(1, 5, size=len(ITEMS)))
            values = possible_values(self.items)
            pairs = [pair for pair in itertools.permutations(values, 2) if all(map(any, zip(*pair, strict=True)))]
            if 5 <= sum(self.items) <= 9 and pairs:
                break
        self.values = dict(zip(self.possible_agents, pairs[int(rng.integers(len(pairs)))], strict=True))
        self.offer: tuple[str, Counts] | None = None
        self.said = ""
        self.count = 0
        for agent in self.possible_agents:
            self.infos[agent] = {"values": list(self.values[agent])}

    def instructions(self, agent: str) -> str:
        return (
            "You share out items with a partner whose values differ from yours and are hidden. Talk, and make offers "
            "that name what you would have: take 2 books, 1 hat. Your partner would have the rest. Write accept to "
            "take your partner's last offer. Without a deal both get nothing."
        )

    def observe_text(self, agent: str) -> str:
        text = f"Items: {_listed(self.items)}. {self._worth(agent)} Partner: {self.said or '(nothing yet)'}"
        if self.offer and self.offer[0] != agent:
            text += f"\nPartner's offer: partner has {_listed(self.offer[1])}; you have {_listed(self._rest())}."
        return f"{text}\nTexts left, both together: {self._texts - self.count}"

    def secrets(self, agent: str) -> tuple[str, ...]:
        """What `agent` must not read: the other's values, as the other reads them."""
        return tuple(self._worth(seat) for seat in self.possible_agents if seat != agent)

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Give the other seat other values."""
        other = next(seat for seat in self.possible_agents if seat != agent)
        choices = [values for values in possible_values(self.items) if values != self.values[agent]]
        self.values[other] = choices[int(rng.integers(len(choices)))]

    def act(self, agent: str, action: str) -> Outcome:
        self.count += 1
        self.said = " ".join(action.split())[: self._max_message_chars]
        taken = read_offer(action, self.items)
        if taken is not None:
            self.offer = (agent, taken)
        elif accepts(action) and self.offer and self.offer[0] != agent:
            return self._end({self.offer[0]: self.offer[1], agent: self._rest()})
        return self._end(None) if self.count == self._texts else Outcome()

    def _end(self, deal: Mapping[str, Counts] | None) -> Outcome:
        first, second = self.possible_agents
        frontier = pareto_frontier(self.items, self.values[first], self.values[second])
        points = {seat: points_of(deal[seat], self.values[seat]) if deal else 0 for seat in self.possible_agents}
        score = sum(points.values()) / max(map(sum, frontier))
        facts = {
            "deal": {seat: list(deal[seat]) for seat in self.possible_agents} if deal else None,
            "points": points,
            "score": score,
            "on_frontier": (points[first], points[second]) in frontier,
        }
        rewards = {seat: (1 - self._selfish) * score + self._selfish * own / TOTAL for seat, own in points.items()}
        return Outcome(rewards=rewards, done=True, info=dict.fromkeys(self.possible_agents, facts))

    def _rest(self) -> Counts:
        assert self.offer is not None
        return tuple(all_ - taken for all_, taken in zip(self.items, self.offer[1], strict=True))

    def _worth(self, agent: str) -> str:
        worth = ", ".join(f"{item} {value}" for item, value in zip(ITEMS, self.values[agent], strict=True))
        return f"Your points for each: {worth}."


def possible_values(items: Counts) -> list[Counts]:
    """All whole-numbered values with which `items` together are worth `TOTAL` points."""
    ranges = (range(TOTAL // count + 1) for count in items)
    return [values for values in itertools.product(*ranges) if points_of(items, values) == TOTAL]


def points_of(taken: Counts, values: Counts) -> int:
    """What the items taken are worth, in points."""
    return sum(number * value for number, value in zip(taken, values, strict=True))


def pareto_frontier(items: Counts, first: Counts, second: Counts) -> set[tuple[int, int]]:
    """Points of both seats at all ways to share `items` out that no other way betters for one and worsens for none."""
    shares = itertools.product(*(range(count + 1) for count in items))
    points = {(points_of(share, first), TOTAL - points_of(share, second)) for share in shares}
    return {p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)}


def read_offer(text: str, items: Sequence[int]) -> Counts | None:
    """The items that a text takes; None if it takes none, or more than there are. A kind named twice is no offer.

    What the other seat is said to take, as in "you could take 1 hat", and what follows a word for it, is the other's.
    """
    own = next((place.end() for place in _TAKE.finditer(text) if not _of_another(_clause(text, place.start()))), None)
    pairs = _ITEM.findall(_OTHER.split(text[own:], maxsplit=1)[0]) if own is not None else []
    named = [(ITEMS.index(item.casefold()), int(number)) for number, item in pairs]
    taken = dict(named)
    if not named or len(taken) < len(named) or any(number > items[kind] for kind, number in named):
        return None
    return tuple(taken.get(kind, 0) for kind in range(len(ITEMS)))


def accepts(text: str) -> bool:
    """Whether a text takes the other's offer: it says "accept" of itself."""
    return any(not _NO_ACCEPT.search(_clause(text, place.start())) for place in _ACCEPT.finditer(text))


def _clause(text: str, end: int) -> str:
    """What stands before a place in its clause."""
    return _CLAUSE.split(text[max(0, end - 200) : end])[-1]


def _of_another(clause: str) -> bool:
    """Whether the other seat is whom the end of a clause is about."""
    named = _SUBJECT.findall(clause)
    return bool(named) and named[-1].casefold() not in ("i", "we")


def _listed(counts: Counts) -> str:
    return ", ".join(f"{count} {item}{'' if count == 1 else 's'}" for count, item in zip(counts, ITEMS, strict=True))
