"""The oracle of `forge_envs.teams.library`.

In: a question, then the results of searches; for the writer the note. Out: searches, notes, answers. Waits for nothing.
"""

from __future__ import annotations

import re

from forge_envs.oracles.script import Script, read

_QUESTIONS = (
    (r"In which year was (.+) born\?", "year"),
    (r"What does (.+) make\?", "makes"),
    (r"On which river does (.+) lie\?", "river"),
)
_THINGS = (
    (r"the town where (.+) was born", "born"),
    (r"the company that (.+) founded", "founded"),
    (r"the founder of (.+)", "founder"),
    (r"the town where (.+) has its seat", "seat"),
    (r"the mayor of (.+)", "mayor"),
)
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
"""How a page says what is asked of its thing."""


class Oracle(Script):
    """The searcher takes the question apart and looks up one thing after the other; the writer repeats the note."""

    def searcher(self, seen: str) -> str:
        """A search, and at the end the answer with the numbers of its pages."""
        if "\n[" not in f"\n{seen}" and seen.endswith("?"):
            self.steps, self.thing = apart(seen)
            self.pages: list[str] = []
            return self.call("search", words=self.thing)
        pages = re.findall(r"\[(\d+)\] (.+)", seen)
        number, page = next(one for one in pages if one[1].startswith(self.thing))
        self.pages.append(f"[{number}]")
        self.thing = read(_SAYS[self.steps.pop(0)], page)
        return self.call("search", words=self.thing) if self.steps else self.found()

    def found(self) -> str:
        """What was found last, and where everything was."""
        return " ".join((self.thing, *self.pages))

    def writer(self, seen: str) -> str:
        """The note."""
        return seen.rpartition("Note: ")[2]


def apart(question: str) -> tuple[list[str], str]:
    """What to look up, step by step, and of what: ``"the mayor of the town where Ada Berg was born"``, inside out."""
    steps, thing = next(([step], match[1]) for form, step in _QUESTIONS if (match := re.fullmatch(form, question)))
    while inner := [(step, match[1]) for form, step in _THINGS if (match := re.fullmatch(form, thing))]:
        step, thing = inner[0]
        steps = [step, *steps]
    return steps, thing
