"""Oracle of `forge_envs.teams.tables`."""

from __future__ import annotations

import re

from forge_envs.oracles.script import Script
from forge_envs.teams.tables import ALL, MOST, QUESTIONS


class Oracle(Script):
    """The analyst writes the query of the question, and the reviewer repeats it and compares the results."""

    def answer(self, seen: str) -> str:
        question = seen.removeprefix("Question: ").partition("\n")[0]
        if question.endswith("?"):
            self.proposed = seen.rpartition("Answer: ")[2]
            query = self.query(question)
            return self.call("sql", query=query) if query else "no idea"
        value = re.split(r"[|\n]", seen.partition(": ")[2] or seen)[0].strip()
        if self.agent == "analyst":
            return value
        return "APPROVE" if value == self.proposed else f"It is {value}."

    def query(self, question: str) -> str:
        """Return the query of a question."""
        return query_for(question)


def query_for(question: str, levels: int = len(QUESTIONS)) -> str:
    """Return the query of a question, empty if it has no form of the first `levels`."""
    for form, query in (pair for level in QUESTIONS[:levels] for pair in level):
        pattern = re.escape(form).replace(r"\{", "(?P<").replace(r"\}", r">\w+)")
        if match := re.fullmatch(pattern, question):
            return query.format(**match.groupdict(), all=ALL, most=MOST)
    return ""
