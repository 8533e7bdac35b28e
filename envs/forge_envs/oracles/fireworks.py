"""The oracle of `forge_envs.games.fireworks`.

In: the piles, the others' cards, what hints say of one's own. Out: a move. Waits for nothing.
"""

from __future__ import annotations

import re

from forge_envs.games.fireworks import NAMES
from forge_envs.oracles.script import Script, read

_CARD = re.compile(r"(\w+) (\d) \(knows")


class Oracle(Script):
    """A hint means: play the first card that it shows, unless that cannot fit."""

    def answer(self, seen: str) -> str:
        piles = {colour: int(rank) for colour, rank in re.findall(r"(\w+) (\d)", read(r"Piles: (.+?)\.", seen))}
        hints = int(read(r"Hints: (\d)", seen))
        own = [part.split(" ", 1)[1] for part in seen.rpartition("Your cards: ")[2].rstrip(".").split(", ")]
        fits = [_fits(known, piles) for known in own]
        name = NAMES[int(self.agent.removeprefix("player_"))]
        told = re.findall(rf"told {name}: \w+ is card (\d)", seen)
        if told and any(fits[int(told[-1]) - 1]):
            return f"play {told[-1]}"
        if (sure := next((place for place, each in enumerate(fits, 1) if all(each)), None)) is not None:
            return f"play {sure}"
        others = {seat: _CARD.findall(cards) for seat, cards in re.findall(r"^(\w+): (.+)$", seen, re.MULTILINE)}
        options = [
            (seat, what, next(card for card in cards if what in card))  # the first card that the hint shows
            for seat, cards in others.items()
            for what in dict.fromkeys(part for card in cards for part in card)
        ]
        good = [(seat, what) for seat, what, (colour, rank) in options if piles[colour] == int(rank) - 1]
        if good and hints:
            return "hint {} {}".format(*good[0])
        if hints < self.settings["hints"]:
            return f"discard {next((place for place, each in enumerate(fits, 1) if not any(each)), 1)}"
        idle = [(seat, what) for seat, what, _ in options if not any(_fits(what, piles))]
        return "hint {} {}".format(*(idle or [options[0][:2]])[0])


def _fits(known: str, piles: dict[str, int]) -> list[bool]:
    """Of each card that `known` allows, such as ``"red/blue 1"``, whether it fits onto a pile now."""
    words = known.replace("?", "").split()
    colours = next((word.split("/") for word in words if not word[0].isdigit()), list(piles))
    ranks = next((word.split("/") for word in words if word[0].isdigit()), list("12345"))
    return [piles[colour] == int(rank) - 1 for colour in colours for rank in ranks]
