"""Sort names alphabetically, then sort them again with new names among them, turn after turn.

In: lists of names as text. Out: a reward per turn for how well they are sorted. Waits for nothing.
"""

from __future__ import annotations

import re
import string

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv

_NAMES = """
Abel Ada Adrian Agnes Aisha Alan Alba Amir Amos Anna Arun Astrid Basil Beata Bella Boris Bruno Carla Cecil Celia
Chen Clara Cyrus Dalia Daniel Daria Dora Edgar Edith Elena Elias Emil Emma Enzo Erik Esther Felix Fiona Flora Frida
Gary Gemma Gilda Gregor Greta Hana Hector Helga Henry Hugo Ida Igor Ines Irene Ivan Jana Jasper Joan Jonas Julia
Karl Kenji Kira Klaus Laila Lars Laura Leon Lina Lucas Lydia Mabel Malik Mara Marco Maya Mila Milo Mona Nadia Nils
Nina Noah Nora Olga Oscar Otto Pablo Petra Pia Quentin Rahel Ralf Ramon Rita Rosa Rufus Sara Selma Simon Sonja
Stella Sven Tara Theo Tilda Tomas Ugo Ulla Uma Vera Victor Viola Walter Wanda Wilma Xenia Yara Yusuf Zara Zeno
"""
NAMES = tuple(_NAMES.split())
_LINES = re.compile(r"[\n,;]+")
_NUMBERING = re.compile(r"\A[*_`\s]{0,9}(?:\(?\d{1,6}[.):]|[-*\u2022](?!\*))", re.ASCII)
_AROUND = string.whitespace + "\"'*_`"


class AlphabetSort(TurnEnv):
    """One seat, several turns.

    The first turn shows `num_names` names in random order; each later turn adds `num_added` names. Every turn asks for
    the whole list in alphabetical order. A text is read as names between newlines, commas or semicolons, without
    numbering, bullets, quotes and surrounding blanks, letter case ignored.

    The reward of a turn is ``(LCS / max(number of names asked for, number of names given)) ** sharpness``, where LCS is
    the length of the longest common subsequence of the answer and the right order: 1.0 for exactly the right list,
    less for names that are missing, invented, repeated or out of place. The rewards of an episode add up to at most
    `turns`. After each turn infos hold ``answer``, the right list joined by newlines, ``similarity``, and ``success``:
    whether this was the last turn and every list was right.

    Args:
        num_names: Names of the first turn, at least 2.
        num_added: Names that each later turn adds.
        turns: Number of turns.
        sharpness: Exponent; larger values make half-sorted lists worth less.
    """

    possible_agents = ("sorter",)

    def __init__(self, *, num_names: int = 4, num_added: int = 2, turns: int = 3, sharpness: float = 1.0) -> None:
        super().__init__()
        total = num_names + num_added * (turns - 1)
        if num_names < 2 or num_added < 1 or turns < 1 or sharpness <= 0 or total > len(NAMES):
            raise ValueError(
                f"num_names={num_names} must be >= 2, num_added={num_added} and turns={turns} >= 1, "
                f"sharpness={sharpness} > 0, and all names together, {total}, at most {len(NAMES)}"
            )
        self.max_turns, self.max_reward = turns, float(turns)
        self._sizes = [num_names] + [num_added] * (turns - 1)
        self._sharpness = sharpness

    def setup(self, rng: np.random.Generator) -> None:
        """Draw the names of all turns. The first list is never sorted already."""
        drawn = [NAMES[i] for i in rng.choice(len(NAMES), size=sum(self._sizes), replace=False)]
        first = self._sizes[0]
        if drawn[:first] == sorted(drawn[:first]):
            drawn[:first] = reversed(drawn[:first])
        ends = np.cumsum(self._sizes).tolist()
        self.batches = [drawn[end - size : end] for end, size in zip(ends, self._sizes, strict=True)]
        self.turn, self.perfect = 0, True

    def instructions(self, agent: str) -> str:
        return "Sort names alphabetically. Reply with the names only, one per line."

    def observe_text(self, agent: str) -> str:
        if self.turn == len(self.batches):
            return "Done."
        names = ", ".join(self.batches[self.turn])
        return f"Names: {names}" if self.turn == 0 else f"Add these names and give the full sorted list: {names}"

    def secrets(self, agent: str) -> tuple[str, ...]:
        """The sorted list, in the two forms in which it could be read."""
        gold = self._gold()
        return ("\n".join(gold), ", ".join(gold))

    def act(self, agent: str, action: str) -> Outcome:
        gold = self._gold()
        similarity = list_similarity(read_names(action), [name.casefold() for name in gold])
        self.turn += 1
        self.perfect &= similarity == 1
        done = self.turn == len(self.batches)
        facts = {"answer": "\n".join(gold), "similarity": similarity, "success": done and self.perfect}
        return Outcome(rewards={agent: similarity**self._sharpness}, done=done, info={agent: facts})

    def _gold(self) -> list[str]:
        return sorted(name for batch in self.batches[: self.turn + 1] for name in batch)


def read_names(text: str) -> list[str]:
    """The names in an answer, in order, in lower case."""
    entries = (_NUMBERING.sub("", entry.strip()) for entry in _LINES.split(text))
    names = (entry.lstrip(_AROUND).rstrip(_AROUND + ".").casefold() for entry in entries)
    return [name for name in names if name]


def list_similarity(given: list[str], gold: list[str]) -> float:
    """Length of the longest common subsequence over the length of the longer list, 0 to 1; 0 for an empty answer.

    Args:
        given: Any entries.
        gold: Different entries.
    """
    place = {name: index for index, name in enumerate(gold)}
    best = [0] * (len(gold) + 1)  # best[k]: longest match that uses only the first k entries of gold
    for name in given:
        if name in place:
            k = place[name]
            best[k + 1] = max(best[k + 1], best[k] + 1)
            for later in range(k + 2, len(best)):
                best[later] = max(best[later], best[later - 1])
    return best[-1] / max(len(given), len(gold), 1)
