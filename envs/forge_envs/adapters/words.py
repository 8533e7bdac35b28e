"""Word lists for TextArena's word games, where NLTK's own are not downloaded.

In: TextArena's Hunspell dictionary. Out: a folder on NLTK's search path. Waits for nothing; nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

WORD_GAMES = frozenset(
    "Codenames DontSayIt Hangman LetterAuction SpellingBee WordChains WordLadder WordSearch Wordle".split()  # noqa: SIM905
)
"""The games that ask NLTK for its corpus ``words``, some also for its tagger."""

_TAGGER = "averaged_perceptron_tagger_eng"


@contextlib.contextmanager
def words_offered() -> Iterator[None]:
    """Inside, NLTK finds a word list and a tagger, and `nltk.download` does nothing."""
    _offer()
    with mock.patch("nltk.download", return_value=False):
        yield


@cache
def _offer() -> None:
    """Put a stand-in for what is missing on NLTK's path; what is installed comes first.

    The stand-in of ``words/en`` holds the lower-case words of TextArena's American dictionary, that of
    ``words/en-basic`` its nouns of three to eight letters. A word is a noun where the dictionary gives it a possessive
    and a plural; the tagger calls nouns NN and all else JJ.
    """
    import nltk

    if all(_is_there(resource) for resource in ("corpora/words", f"taggers/{_TAGGER}")):
        return
    spec = importlib.util.find_spec("textarena")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("no package 'textarena'")
    dictionary = Path(spec.origin).parent / "envs" / "utils" / "data" / "en_US.dic"
    entries = dict(line.partition("/")[::2] for line in dictionary.read_text().splitlines()[1:])
    words = sorted(word for word in entries if word.isascii() and word.isalpha() and word.islower())
    short = range(3, 9)
    nouns = {word for word in words if {"M", "S"} <= set(entries[word])}
    folder = Path(tempfile.mkdtemp(prefix="forge-words-"))
    _write(folder / "corpora/words/README", "Words of TextArena's dictionary en_US, in the place of NLTK's corpus.\n")
    _write(folder / "corpora/words/en", "\n".join(words))
    _write(folder / "corpora/words/en-basic", "\n".join(word for word in words if word in nouns and len(word) in short))
    tags = {word: "NN" if word in nouns else "JJ" for word in words}
    for part, content in (("weights", {}), ("tagdict", tags), ("classes", ["JJ", "NN"])):
        _write(folder / f"taggers/{_TAGGER}/{_TAGGER}.{part}.json", json.dumps(content))
    nltk.data.path.append(str(folder))


def _is_there(resource: str) -> bool:
    import nltk

    try:
        nltk.data.find(resource)
    except LookupError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
