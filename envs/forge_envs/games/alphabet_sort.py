"""AlphabetSort: sort a list of names that grows in every turn."""

from __future__ import annotations

import re
import string

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv
from forge_envs.shared import check_ranges

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
    """Single-agent game of several turns.

    The first turn shows `num_names` names in random order, and each later turn adds `num_added` names. The answer is
    the whole list in alphabetical order, separated by newlines, commas or semicolons. Numbering, bullets, quotes,
    whitespace and letter case are ignored.

    The reward of a turn is ``(LCS / max(number of expected names, number of given names)) ** sharpness``, where LCS is
    the length of the longest common subsequence of the answer and the correct list. The rewards of an episode sum to
    at most `turns`. After each turn, infos contain ``answer`` (the correct list, joined by newlines), ``similarity``,
    and ``success`` (True in the last turn if every list was correct).

    Args:
        num_names: Number of names in the first turn. At least 2.
        num_added: Number of names that each later turn adds.
        turns: Number of turns.
        sharpness: Exponent. Larger values lower the reward of partially sorted lists.
    """

    possible_agents = ("sorter",)

    def __init__(self, *, num_names: int = 4, num_added: int = 2, turns: int = 3, sharpness: float = 1.0) -> None:
        super().__init__()
        total = num_names + num_added * (turns - 1)
        check_ranges(num_names=(num_names, 2, None), num_added=(num_added, 1, None), turns=(turns, 1, None))
        if sharpness <= 0 or total > len(NAMES):
            raise ValueError(f"sharpness={sharpness} must be > 0, and the number of names, {total}, <= {len(NAMES)}")
        self.max_turns, self.max_reward = turns, float(turns)
        self._sizes = [num_names] + [num_added] * (turns - 1)
        self._sharpness = sharpness

    def setup(self, rng: np.random.Generator) -> None:
        """Draw the names of all turns. The first list is never sorted."""
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
        """Return the sorted list, in both possible formats."""
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
    """Return the names in an answer, in order, in lower case."""
    entries = (_NUMBERING.sub("", entry.strip()) for entry in _LINES.split(text))
    names = (entry.lstrip(_AROUND).rstrip(_AROUND + ".").casefold() for entry in entries)
    return [name for name in names if name]


def list_similarity(answer: list[str], gold: list[str]) -> float:
    """Return the longest common subsequence over the length of the longer list, in [0, 1]. `gold` is distinct."""
    index_of = {name: index for index, name in enumerate(gold)}
    best = [0] * (len(gold) + 1)  # best[k]: longest match that uses only the first k entries of gold
    for name in answer:
        if name in index_of:
            k = index_of[name]
            best[k + 1] = max(best[k + 1], best[k] + 1)
            for later in range(k + 2, len(best)):
                best[later] = max(best[later], best[later - 1])
    return best[-1] / max(len(answer), len(gold), 1)
