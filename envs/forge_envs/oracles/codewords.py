"""The oracle of `forge_envs.games.codewords`.

In: for a master the board and whose its words are, for a guesser the board and the clue. Out: clues, words. Waits for
nothing.
"""

from __future__ import annotations

from forge_envs.games.codewords import KINDS
from forge_envs.oracles.script import Script, read

KIND = {word: kind for kinds in KINDS.values() for kind, words in kinds.items() for word in words.split()}
THEME = {word: theme for theme, kinds in KINDS.items() for words in kinds.values() for word in words.split()}


class Oracle(Script):
    """The master names the kind that most of its words are of, the guesser the words of that kind or theme."""

    sorts = KIND
    """What the master's clues are made of."""

    def master(self, seen: str) -> str:
        """A clue."""
        sorts = [self.sorts[word] for word in read(r"Your words: (.+)\.", seen).split(", ")]
        best = max(sorted(set(sorts)), key=sorts.count)
        return f"{best} {sorts.count(best)}"

    def guesser(self, seen: str) -> str:
        """The words that go with the clue."""
        board, clue = read(r"Board: (.+)\.", seen).split(", "), seen.rpartition("Clue: ")[2].split()[0]
        return ", ".join(word for word in board if clue in (KIND[word], THEME[word]))
