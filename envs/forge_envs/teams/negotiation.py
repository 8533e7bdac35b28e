"""Negotiation: two players with private values divide items."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv
from forge_envs.shared import check_ranges

ITEMS = ("book", "hat", "ball")
TOTAL = 10
"""Total value of all items to each player, in points."""
Counts: TypeAlias = tuple[int, ...]
_TAKE = re.compile(r"\btake\b", re.IGNORECASE)
_CLAUSE = re.compile(r"[.,;:!?\n\u2013\u2014]|\s-+\s")
_SUBJECT = re.compile(r"\b(?:i|we|you|partner|player_[01])\b", re.IGNORECASE)
_ITEM = re.compile(rf"(?<![\w.,-])(\d{{1,3}})\s+({'|'.join(ITEMS)})s?\b", re.IGNORECASE | re.ASCII)
_ACCEPT = re.compile(r"\baccept\b", re.IGNORECASE)
_AFFIRMED = re.compile(
    r"\W*(?:(?:i|we|i['\u2019](?:ll|m|d)|we['\u2019](?:ll|re)|will|shall|am|are|do|can|could|happy|glad|pleased|gladly|happily|to|just|hereby"
    r"|ok|okay|yes|sure|fine|great|good|deal|alright|agreed|agree|thanks|thank|then|and|so|but|now|well|therefore|thus"
    r"|let['\u2019]?s|let|me|action|my|answer|is)\b\W*)*",
    re.IGNORECASE,
)
"""Text of a clause before the "accept" of a player who accepts."""
_CONDITION = re.compile(
    r"\s+(?:my|mine|our)\b|[^.,;:!\n]*(?:\b(?:if|unless|only|provided|when|once|until|after)\b|\?)", re.IGNORECASE
)
"""Text after the "accept" of a player who asks for it or sets a condition."""
_JOINED = re.compile(r"\b(?:and|so|but|then)\b", re.IGNORECASE)
_REFUSED = re.compile(r"\b(?:not|never|cannot|refuse|unable)\b|n['\u2019]t\b", re.IGNORECASE)
_OTHER = re.compile(r"\b(?:you|your|partner|player_[01])\b", re.IGNORECASE)


class Negotiation(TurnEnv):
    """Two players with alternating offers, after Lewis et al., "Deal or No Deal?" (arXiv:1706.05125).

    There are books, hats and balls, 1 to 4 of each and 5 to 9 in total. Each player has private integer values, by
    which all items together are worth 10 points. The players' values differ, and every kind is worth something to at
    least one of them. A text with "take" followed by numbers of items, such as "I take 2 books and 1 hat", is an offer:
    the other player would get the rest. "accept" accepts the other's last offer, without a condition, question or
    refusal. Other texts, and offers of more items than there are, are talk. The other player reads the text and the
    offer.

    The score of a deal, in [0, 1], is the sum of both players' points over the maximum sum on the Pareto frontier. Each
    player gets ``(1 - selfish) * score + selfish * own points / 10``, and 0 without a deal in `max_rounds`. Infos
    contain the own ``values`` from the start, and at the end ``deal`` (items by agent, or None), ``points`` (by agent),
    ``score`` and ``on_frontier`` (whether the deal is Pareto optimal).

    Args:
        selfish: Weight of the own points against the common score, in [0, 1].
        max_rounds: Maximum number of texts per player.
        max_message_chars: Maximum length of a text as the other reads it. Longer ones are cut.
    """

    possible_agents = ("player_0", "player_1")

    def __init__(self, *, selfish: float = 0.0, max_rounds: int = 5, max_message_chars: int = 200) -> None:
        super().__init__()
        check_ranges(selfish=(selfish, 0, 1), max_rounds=(max_rounds, 1, None))
        check_ranges(max_message_chars=(max_message_chars, 1, None))
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
        self.message = ""
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
        text = f"Items: {_list_items(self.items)}. {self._worth(agent)} Partner: {self.message or '(nothing yet)'}"
        if self.offer and self.offer[0] != agent:
            partner, agent_items = _list_items(self.offer[1]), _list_items(self._rest())
            text += f"\nPartner's offer: partner has {partner}; you have {agent_items}."
        return f"{text}\nTexts left, both together: {self._texts - self.count}"

    def secrets(self, agent: str) -> tuple[str, ...]:
        """Return the other player's values, as it reads them."""
        return tuple(self._worth(other) for other in self.possible_agents if other != agent)

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Replace the other player's values."""
        other = next(name for name in self.possible_agents if name != agent)
        choices = [values for values in possible_values(self.items) if values != self.values[agent]]
        self.values[other] = choices[int(rng.integers(len(choices)))]

    def act(self, agent: str, action: str) -> Outcome:
        self.count += 1
        self.message = " ".join(action.split())[: self._max_message_chars]
        offer = read_offer(action, self.items)
        if offer is not None:
            self.offer = (agent, offer)
        elif accepts(action) and self.offer and self.offer[0] != agent:
            return self._end({self.offer[0]: self.offer[1], agent: self._rest()})
        return self._end(None) if self.count == self._texts else Outcome()

    def _end(self, deal: Mapping[str, Counts] | None) -> Outcome:
        first, second = self.possible_agents
        frontier = pareto_frontier(self.items, self.values[first], self.values[second])
        points = {agent: points_of(deal[agent], self.values[agent]) if deal else 0 for agent in self.possible_agents}
        score = sum(points.values()) / max(map(sum, frontier))
        facts = {
            "deal": {agent: list(deal[agent]) for agent in self.possible_agents} if deal else None,
            "points": points,
            "score": score,
            "on_frontier": (points[first], points[second]) in frontier,
        }
        rewards = {agent: (1 - self._selfish) * score + self._selfish * gain / TOTAL for agent, gain in points.items()}
        return Outcome(rewards=rewards, done=True, info=dict.fromkeys(self.possible_agents, facts))

    def _rest(self) -> Counts:
        assert self.offer is not None
        return tuple(all_ - offered for all_, offered in zip(self.items, self.offer[1], strict=True))

    def _worth(self, agent: str) -> str:
        worth = ", ".join(f"{item} {value}" for item, value in zip(ITEMS, self.values[agent], strict=True))
        return f"Your points for each: {worth}."


def possible_values(items: Counts) -> list[Counts]:
    """Return all integer values by which `items` together are worth `TOTAL` points."""
    ranges = (range(TOTAL // count + 1) for count in items)
    return [values for values in itertools.product(*ranges) if points_of(items, values) == TOTAL]


def points_of(counts: Counts, values: Counts) -> int:
    """Return the total value of items, in points."""
    return sum(number * value for number, value in zip(counts, values, strict=True))


def pareto_frontier(items: Counts, first: Counts, second: Counts) -> set[tuple[int, int]]:
    """Return the points of both players in all Pareto-optimal divisions of `items`."""
    shares = itertools.product(*(range(count + 1) for count in items))
    points = {(points_of(share, first), TOTAL - points_of(share, second)) for share in shares}
    return {p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)}


def read_offer(text: str, items: Sequence[int]) -> Counts | None:
    """Return the items that a text takes for its author, or None if it names a kind twice or more items than there are.

    Text about the other player, as in "you could take 1 hat", and refusals do not count.
    """
    before = {match.end(): _clause(text, match.start()) for match in _TAKE.finditer(text)}
    start = next((end for end, words in before.items() if not (_is_about_other(words) or _REFUSED.search(words))), None)
    pairs = _ITEM.findall(_OTHER.split(text[start:], maxsplit=1)[0]) if start is not None else []
    named = [(ITEMS.index(item.casefold()), int(number)) for number, item in pairs]
    counts = dict(named)
    if not named or len(counts) < len(named) or any(number > items[kind] for kind, number in named):
        return None
    return tuple(counts.get(kind, 0) for kind in range(len(ITEMS)))


def accepts(text: str) -> bool:
    """Whether the author of a text accepts the other's offer."""
    return any(
        _AFFIRMED.fullmatch(_JOINED.split(_clause(text, match.start()))[-1]) and not _CONDITION.match(text, match.end())
        for match in _ACCEPT.finditer(text)
    )


def _clause(text: str, end: int) -> str:
    """Return the part of a clause before position `end`."""
    return _CLAUSE.split(text[max(0, end - 200) : end])[-1]


def _is_about_other(clause: str) -> bool:
    """Whether the last subject of a clause is the other player."""
    subjects = _SUBJECT.findall(clause)
    return bool(subjects) and subjects[-1].casefold() not in ("i", "we")


def _list_items(counts: Counts) -> str:
    return ", ".join(f"{count} {item}{'' if count == 1 else 's'}" for count, item in zip(counts, ITEMS, strict=True))
