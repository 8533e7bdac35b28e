"""Oracle of `forge_envs.games.fireworks`."""

from __future__ import annotations

import re

from forge_envs.games.fireworks import NAMES
from forge_envs.oracles.script import Script, read

_CARD = re.compile(r"(\w+) (\d) \(knows")


class Oracle(Script):
    """A hint means: play the first card that it shows, unless that card cannot fit."""

    def answer(self, seen: str) -> str:
        piles = {colour: int(rank) for colour, rank in re.findall(r"(\w+) (\d)", read(r"Piles: (.+?)\.", seen))}
        hints = int(read(r"Hints: (\d)", seen))
        hand = [part.split(" ", 1)[1] for part in seen.rpartition("Your cards: ")[2].rstrip(".").split(", ")]
        fits = [_fits(knowledge, piles) for knowledge in hand]
        name = NAMES[int(self.agent.removeprefix("player_"))]
        hinted = re.findall(rf"told {name}: \w+ is card (\d)", seen)
        if hinted and any(fits[int(hinted[-1]) - 1]):
            return f"play {hinted[-1]}"
        certain = next((number for number, options in enumerate(fits, 1) if all(options)), None)
        if certain is not None:
            return f"play {certain}"
        others = {other: _CARD.findall(cards) for other, cards in re.findall(r"^(\w+): (.+)$", seen, re.MULTILINE)}
        options = [
            (other, what, next(card for card in cards if what in card))  # the first card that the hint shows
            for other, cards in others.items()
            for what in dict.fromkeys(part for card in cards for part in card)
        ]
        useful = [(other, what) for other, what, (colour, rank) in options if piles[colour] == int(rank) - 1]
        if useful and hints:
            return "hint {} {}".format(*useful[0])
        if hints < self.settings["hints"]:
            return f"discard {next((number for number, possible in enumerate(fits, 1) if not any(possible)), 1)}"
        idle = [(other, what) for other, what, _ in options if not any(_fits(what, piles))]
        return "hint {} {}".format(*(idle or [options[0][:2]])[0])


def _fits(knowledge: str, piles: dict[str, int]) -> list[bool]:
    """For each card that `knowledge` allows, such as ``"red/blue 1"``, return whether it fits onto a pile now."""
    words = knowledge.replace("?", "").split()
    colours = next((word.split("/") for word in words if not word[0].isdigit()), list(piles))
    ranks = next((word.split("/") for word in words if word[0].isdigit()), list("12345"))
    return [piles[colour] == int(rank) - 1 for colour in colours for rank in ranks]
