"""Oracles of the environments in `forge_envs.games`, and of tic-tac-toe."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping
from typing import Any

from forge_agents.envs.oracles import ActionFunction
from forge_envs.games import codewords, fireworks, village
from forge_envs.oracles.script import Script, read

_BOLD = {"bet": {"Jack": 1 / 3, "King": 1.0}, "call": {"Queen": 1 / 3, "King": 1.0}}
"""Probability by card to bet after the opponent's check, and to call a bet. 0 for cards that are not listed."""


class KuhnPoker(Script):
    """The equilibrium of Kuhn, "A Simplified Two-Person Poker" (1950), in which the first player never bets."""

    def answer(self, seen: str) -> str:
        moves = chances(seen)
        return self.rng.choices(list(moves), list(moves.values()))[0]


def chances(observation: str) -> dict[str, float]:
    """Return the probability of each move."""
    bold, meek = ("call", "fold") if "opponent bet" in observation else ("bet", "check")
    chance = 0.0 if "Moves: none" in observation else _BOLD[bold].get(read(r"card: (\w+)", observation), 0.0)
    return {bold: chance, meek: 1 - chance}


_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def tic_tac_toe(agent: str, settings: Mapping[str, Any], rng: random.Random) -> ActionFunction:
    """Return a player that draws one of the best moves and never loses."""

    def play(observation: str) -> str:
        columns = zip(*(row.split() for row in observation.split("\n")[:3]), strict=True)
        board = "".join(sign if sign in "XO" else "." for column in columns for sign in column)
        values = {square: -value(_after(board, square)) for square in range(9) if board[square] == "."}
        return str(rng.choice([square for square, worth in values.items() if worth == max(values.values())]))

    return play


@functools.cache
def value(board: str) -> int:
    """Return 1 if X, who moves next, can win, 0 if X can draw, else -1. Squares column by column, free ones a dot."""
    if any(board[a] == board[b] == board[c] == "O" for a, b, c in _LINES):
        return -1
    return max((-value(_after(board, square)) for square in range(9) if board[square] == "."), default=0)


def _after(board: str, square: int) -> str:
    """Return the board from the opponent's view, after X has taken a square."""
    return (board[:square] + "X" + board[square + 1 :]).translate(str.maketrans("XO", "OX"))


def alphabet_sort(agent: str, settings: Mapping[str, Any], rng: random.Random) -> ActionFunction:
    """Sort all names of this and earlier turns."""
    names: list[str] = []

    def sort(observation: str) -> str:
        names.extend(observation.rpartition(": ")[2].split(", "))
        return "\n".join(sorted(names))

    return sort


KIND = {word: kind for kinds in codewords.KINDS.values() for kind, words in kinds.items() for word in words.split()}
THEME = {word: theme for theme, kinds in codewords.KINDS.items() for words in kinds.values() for word in words.split()}


class Codewords(Script):
    """The master gives the most frequent kind of its words, and the guesser the words of that kind or theme."""

    sorts = KIND
    """Clue by word."""

    def master(self, seen: str) -> str:
        """Return a clue."""
        sorts = [self.sorts[word] for word in read(r"Your words: (.+)\.", seen).split(", ")]
        best = max(sorted(set(sorts)), key=sorts.count)
        return f"{best} {sorts.count(best)}"

    def guesser(self, seen: str) -> str:
        """Return the words that match the clue."""
        board, clue = read(r"Board: (.+)\.", seen).split(", "), seen.rpartition("Clue: ")[2].split()[0]
        return ", ".join(word for word in board if clue in (KIND[word], THEME[word]))


_CARD = re.compile(r"(\w+) (\d) \(knows")


class Fireworks(Script):
    """A hint means: play the first card that it shows, unless that card cannot fit."""

    def answer(self, seen: str) -> str:
        piles = {colour: int(rank) for colour, rank in re.findall(r"(\w+) (\d)", read(r"Piles: (.+?)\.", seen))}
        hints = int(read(r"Hints: (\d)", seen))
        hand = [part.split(" ", 1)[1] for part in seen.rpartition("Your cards: ")[2].rstrip(".").split(", ")]
        fits = [_fits(knowledge, piles) for knowledge in hand]
        name = fireworks.NAMES[int(self.agent.removeprefix("player_"))]
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


_LOOKED = re.compile(r"\w+ is (?:a|no) wolf")


class Village(Script):
    """Wolves play at random. The seer announces its findings, and the village votes by them.

    The village suspects found wolves first, then all players except the seer and those it has cleared.
    """

    def answer(self, seen: str) -> str:
        own_name = village.NAMES[int(self.agent.removeprefix("player_"))]
        others = [name for name in read(r"Alive: (.+?)\.\n", seen).split(", ") if name != own_name]
        question = seen.rpartition("\n")[2]
        if "Speak" in question:
            return f"I looked: {', '.join(_LOOKED.findall(seen.rpartition('You are')[2]))}"
        if wolves := re.search(rf"^You are {own_name}, a wolf. Wolves: (.+?)\.", seen, re.MULTILINE):
            return self.rng.choice([name for name in others if name not in wolves[1]])
        return self.villager(seen, question, others)

    def villager(self, seen: str, question: str, others: list[str]) -> str:
        """Return the action of a seer, healer or villager."""
        if "nature" in question:
            return self.rng.choice([name for name in others if f"{name} is" not in seen] or others)
        if "guard" in question:
            return self.rng.choice(others)
        announcements = re.findall(r"(\w+): I looked: (.+)", seen)
        findings = sorted({finding for _, text in announcements for finding in _LOOKED.findall(text)})
        wolves = [finding.split()[0] for finding in findings if finding.endswith("a wolf")]
        clear = {*(name for name, _ in announcements), *(finding.split()[0] for finding in findings)}
        suspects = [*wolves, *(name for name in others if name not in clear)]
        return next((name for name in suspects if name in others), "nobody")
