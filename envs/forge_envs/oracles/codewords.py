"""Oracle of `forge_envs.games.codewords`."""

from __future__ import annotations

from forge_envs.games.codewords import KINDS
from forge_envs.oracles.script import Script, read

KIND = {word: kind for kinds in KINDS.values() for kind, words in kinds.items() for word in words.split()}
THEME = {word: theme for theme, kinds in KINDS.items() for words in kinds.values() for word in words.split()}


class Oracle(Script):
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
