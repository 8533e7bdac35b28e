"""Library: one agent searches a generated corpus, and the other answers a multi-hop question with citations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forge_agents.envs.env import Outcome
from forge_agents.tools import Tool, ToolFormat, tool
from forge_agents.tools.env import ToolEnv
from forge_envs.shared import PEOPLE, Database, check_ranges, choose, end_for_all, sample

_TOWN = "Al Bor Cas Der Elm Far Gre Hol Is Kam Lor Mar Nor Os Pel Rin Sal Tor Ul Vel"
_ENDING = "berg ford stad wick ton"
_RIVERS = "Aube Brenta Clyde Drava Eder Foyle Genil Havel Inn Jiu Kura Loire Mures Neva Oder Pruth Rega Save Tisza Yser"
_GOODS = "bells boats bricks brooms candles chairs clocks drums flutes gloves kites lamps locks maps nails ropes shoes"
RIVERS, GOODS = tuple(_RIVERS.split()), tuple(_GOODS.split())
_TOWNS = [start + end for start in _TOWN.split() for end in _ENDING.split()]
_BEST = "SELECT rowid FROM pages WHERE pages MATCH ? ORDER BY bm25(pages, 10.0, 1.0), rowid LIMIT ?"
_WORD = re.compile(r"\w+")
_PAGES = r"\s{0,9}(?:pages?\s{1,9}|p\.\s{0,9})?(\d{1,9}(?:\s{0,9}(?:,|;|and|&)\s{0,9}\d{1,9}){0,31})\s{0,9}"
_CITED, _CITED_ROUND = (re.compile(form, re.ASCII | re.IGNORECASE) for form in (rf"\[{_PAGES}\]", rf"\({_PAGES}\)"))
_MARKUP = str.maketrans(dict.fromkeys('*_`()"\u201c\u201d\u2018\u2019', " "))
_BEFORE = re.compile(r"^(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s+)(?=\S)", re.IGNORECASE)
_AFTER = re.compile(r"(?:\s(?:sources?|pages?|from|and)[\s,;.:]*)+$", re.IGNORECASE)
_POINTS = " .,;:!'"
_ARTICLES = re.compile(r"^(?:(?:in|on)\s+)?(?:the\s+)?(?:(?:river|year)\s+)?(?=\S)|(?<=\S)\s+river$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the corpus about one thing."""

    number: int
    text: str
    facts: dict[str, str]
    """Values by relation: ``river``, ``born``, ``year``, ``makes``, ``founded``, ``founder``, ``seat``, ``mayor``."""


_STEPS = {"person": ("born", "founded"), "company": ("founder", "seat"), "town": ("mayor",)}
"""Relations to another page, by kind."""
_LAST_STEPS = {"person": "year", "company": "makes", "town": "river"}
"""Last relation of a question, by kind."""
PHRASES = {
    "born": "the town where {} was born",
    "founded": "the company that {} founded",
    "founder": "the founder of {}",
    "seat": "the town where {} has its seat",
    "mayor": "the mayor of {}",
    "year": "In which year was {} born?",
    "makes": "What does {} make?",
    "river": "On which river does {} lie?",
}
"""Nested words of each step of a question."""


class Library(ToolEnv):
    """Cooperative game of two agents.

    ``searcher`` reads the question and searches. A search returns up to `hits` matching pages with their numbers. Any
    other text is its note. ``writer`` reads only the question and the note, and answers with a value and the numbers of
    the supporting pages in brackets, such as ``1911 [4] [17]``. Corpus and question are generated for every episode.
    The question follows a path of `hops` pages, each of which names the next.

    The agents get 1 for the correct value with citations of all pages of the path and at most two others, 0.5 for the
    correct value with other citations, else 0. At the end infos contain ``question``, ``answer``, ``given``,
    ``correct``, ``cited``, ``path`` (page numbers) and ``searches``.

    Args:
        hops: Number of pages on the path, 1 to 6.
        towns: Number of towns in the corpus, 4 to 60. There are as many companies and twice as many people.
        hits: Maximum number of pages per search. At least 1.
        max_searches: Maximum number of searches per episode. None uses ``hops + 2``.
        max_note_chars: Maximum length of the note. Longer ones are cut.
        tool_format: As in `ToolEnv`.
    """

    possible_agents = ("searcher", "writer")
    max_reward = 1.0

    def __init__(
        self,
        *,
        hops: int = 2,
        towns: int = 12,
        hits: int = 3,
        max_searches: int | None = None,
        max_note_chars: int = 120,
        tool_format: ToolFormat = "plain",
    ) -> None:
        check_ranges(hops=(hops, 1, 6), towns=(towns, 4, 60), hits=(hits, 1, None))
        check_ranges(max_note_chars=(max_note_chars, 1, None))
        searches = hops + 2 if max_searches is None else max_searches
        super().__init__(tool_format=tool_format, max_calls=searches, max_calls_per_episode=searches)
        self._hops, self._towns, self._hits, self._max_note_chars = hops, towns, hits, max_note_chars

    # ---- the corpus

    def setup(self, rng: np.random.Generator) -> None:
        kinds = self._write(rng)
        self._ask(rng, kinds)
        self.note: str | None = None
        self.searches = 0

    def _write(self, rng: np.random.Generator) -> dict[str, str]:
        """Generate the corpus. Returns the kind of each thing."""
        count = self._towns
        towns = sample(rng, _TOWNS, count)
        people = sample(rng, PEOPLE, 2 * count)
        companies = [f"{person.split()[1]} & {town}" for person, town in zip(people[:count], towns, strict=True)]
        facts: dict[str, dict[str, str]] = {}
        for town, mayor in zip(towns, sample(rng, people, count), strict=True):
            facts[town] = {"river": choose(rng, RIVERS), "mayor": mayor}
        for index, person in enumerate(people):
            born, year = choose(rng, towns), str(rng.integers(1850, 1990))
            founded = {"founded": companies[index]} if index < count else {}
            facts[person] = {"born": born, "year": year, **founded}
        for company, founder in zip(companies, people[:count], strict=True):
            seat, good = choose(rng, towns), choose(rng, GOODS)
            facts[company] = {"founder": founder, "seat": seat, "makes": good}
        names = sample(rng, list(facts), len(facts))
        self.pages = {name: Page(number, _text(name, facts[name]), facts[name]) for number, name in enumerate(names, 1)}
        table = {"pages USING fts5(title, text)": [(name, page.text) for name, page in self.pages.items()]}
        self._index = Database.of(table)  # row ids are page numbers
        return dict.fromkeys(towns, "town") | dict.fromkeys(people, "person") | dict.fromkeys(companies, "company")

    def _ask(self, rng: np.random.Generator, kinds: dict[str, str]) -> None:
        while True:  # until the path has no repeated page
            thing = choose(rng, list(self.pages))
            phrase, path = thing, [thing]
            while len(path) < self._hops:
                steps = [step for step in _STEPS[kinds[thing]] if step in self.pages[thing].facts]
                step = choose(rng, steps)
                thing = self.pages[thing].facts[step]
                phrase, path = PHRASES[step].format(phrase), [*path, thing]
            if len(set(path)) == self._hops:
                break
        last = _LAST_STEPS[kinds[thing]]
        self.question, self.answer = PHRASES[last].format(phrase), self.pages[thing].facts[last]
        self.path = [self.pages[name].number for name in path]

    # ---- tools

    @tool
    def search(self, words: str) -> str:
        """Search the library.

        Args:
            words: What to look for, such as a name.
        """
        self.searches += 1
        pages = self._best_matches(_WORD.findall(words))
        return "\n".join(f"[{page.number}] {page.text}" for page in pages) or "Nothing is found."

    def _best_matches(self, words: Sequence[str]) -> list[Page]:
        """Return the best pages by SQLite's BM25 ranking."""
        if not words:
            return []
        query = " OR ".join(f'"{word}"' for word in words[:64])
        by_number = {page.number: page for page in self.pages.values()}
        return [by_number[number] for (number,) in self._index.rows(_BEST, query, self._hits)]

    def tools(self, agent: str) -> Sequence[Tool]:
        return [self.search] if agent == "searcher" else []

    # ---- texts and rules

    def instructions(self, agent: str) -> str:
        if agent == "writer":
            return (
                "Answer the question from the note. Write the answer alone, then the numbers of the pages it is from "
                "in brackets, such as: 1911 [4] [17]"
            )
        return (
            "Find out what answers the question: search for one name after the other. Then write a short note for the "
            "writer, who sees no page: the answer, and the numbers of all pages that led to it."
            f"\n\n{self.tool_help(agent)}"
        )

    def observe_text(self, agent: str) -> str:
        return self.question if agent == "searcher" else f"{self.question}\nNote: {self.note or '(none yet)'}"

    def secrets(self, agent: str) -> tuple[str, ...]:
        """Return the texts of all pages, for the writer."""
        return () if agent == "searcher" else tuple(page.text for page in self.pages.values())

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Change the answer and the pages, for the writer."""
        if agent == "writer":
            self.answer = f"{self.answer} or {rng.integers(1000)}"
            self.pages = {name: Page(page.number, f"{page.text}!", page.facts) for name, page in self.pages.items()}

    def act(self, agent: str, action: str) -> Outcome:
        if agent == "searcher":
            self.note = " ".join(action.split())[: self._max_note_chars]
            return Outcome()
        answer, cited = read_answer(action)
        correct = answer == _normalize(self.answer)
        missing, extra = set(self.path) - set(cited), set(cited) - set(self.path)
        reward = (1.0 if not missing and len(extra) <= 2 else 0.5) if correct else 0.0
        facts = {
            "question": self.question, "answer": self.answer, "given": answer, "correct": correct, "cited": cited,
            "path": self.path, "searches": self.searches,
        }  # fmt: skip
        return end_for_all(self.possible_agents, reward, facts)


def _text(name: str, facts: Mapping[str, str]) -> str:
    """Return the text of a page."""
    if "river" in facts:
        return f"{name} lies on the river {facts['river']}. Its mayor is {facts['mayor']}."
    if "makes" in facts:
        return f"{name} makes {facts['makes']}. Its founder is {facts['founder']}, its seat is in {facts['seat']}."
    founded = f" The company that {name} founded is {facts['founded']}." if "founded" in facts else ""
    return f"{name} was born in {facts['born']} in {facts['year']}.{founded}"


def read_answer(text: str) -> tuple[str, list[int]]:
    """Return the normalized value of an answer and the pages that it cites, in square or else in round brackets."""
    form = _CITED if _CITED.search(text) or not _normalize(_CITED_ROUND.sub(" ", text)) else _CITED_ROUND
    pages = {int(number) for citation in form.findall(text) for number in re.findall(r"[0-9]+", citation)}
    return _normalize(form.sub(" ", text)), sorted(pages)


def _normalize(text: str) -> str:
    """Remove case, markup, punctuation, introductory words and articles from an answer."""
    value = " ".join(text.translate(_MARKUP).split()).strip(_POINTS)
    value = _AFTER.sub("", _BEFORE.sub("", value)).strip(_POINTS)
    return _ARTICLES.sub("", value).casefold()
