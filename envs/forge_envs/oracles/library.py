"""Oracle of `forge_envs.teams.library`."""

from __future__ import annotations

import re

from forge_envs.oracles.script import Script, read
from forge_envs.teams.library import PHRASES

_FORMS = {step: re.escape(phrase).replace(r"\{\}", "(.+)") for step, phrase in PHRASES.items()}
"""Pattern of each step of a question."""
_SAYS = {
    "born": r"was born in (\w+) in \d+",
    "year": r"was born in \w+ in (\d+)",
    "founded": r"founded is (.+)\.$",
    "founder": r"Its founder is (.+?),",
    "seat": r"its seat is in (\w+)\.",
    "makes": r"makes (\w+)\.",
    "mayor": r"Its mayor is (.+)\.$",
    "river": r"on the river (\w+)\.",
}
"""Pattern of the answer to each step in the text of a page."""


class Oracle(Script):
    """The searcher splits the question into look-ups and follows them, and the writer repeats the note."""

    def searcher(self, seen: str) -> str:
        """Return a search, and at the end the answer with the numbers of its pages."""
        if "\n[" not in f"\n{seen}" and seen.endswith("?"):
            self.steps, self.thing = split_question(seen)
            self.pages: list[str] = []
            return self.call("search", words=self.thing)
        pages = re.findall(r"\[(\d+)\] (.+)", seen)
        number, page = next((number, text) for number, text in pages if text.startswith(self.thing))
        self.pages.append(f"[{number}]")
        self.thing = read(_SAYS[self.steps.pop(0)], page)
        return self.call("search", words=self.thing) if self.steps else self.note()

    def note(self) -> str:
        """Return the answer and the numbers of all pages used."""
        return " ".join((self.thing, *self.pages))

    def writer(self, seen: str) -> str:
        """Return the note."""
        return seen.rpartition("Note: ")[2]


def split_question(question: str) -> tuple[list[str], str]:
    """Split a nested question such as "What does the founder of ... make?" into look-ups, innermost first.

    Returns the look-ups, and the thing that the first one is about.
    """
    steps, thing = list[str](), question
    while inner := [(step, match[1]) for step, form in _FORMS.items() if (match := re.fullmatch(form, thing))]:
        step, thing = inner[0]
        steps = [step, *steps]
    return steps, thing
