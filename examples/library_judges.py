"""Weak judges of a team that looks things up in `forge/Library-v0`: none of them knows the answer.

Two are the 135M model itself, asked about what a seat read and what was answered; two look at siblings; the others are
signs that anybody would write down who never saw an answer: it was read somewhere, it stands on the page that is cited,
it looks like what was asked for. Each passes wrong answers, too.
"""

import functools
import re

import forge_agents as fa
from forge_envs.teams.signs import calls_work
from forge_verifiers import EmbeddingSimilarity, Judge, Length, Rule, SelfConsistency


def read_by(trajectory):
    """All that a seat read: the question, and pages or a note."""
    return "\n".join(turn.observation for turn in trajectory.turns)


def given(trajectory):
    """The team's answer without its citations, in small letters; empty where it gave none."""
    return trajectory.info.get("given", "")


def cited(trajectory):
    return [f"[{number}]" for number in trajectory.info.get("cited", ())]


def holds(text, words):
    return bool(words) and bool(re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, re.IGNORECASE))


def was_read(trajectory):
    """The seat read the answer, and not in the question."""
    question = trajectory.info.get("question", "")
    return holds(read_by(trajectory).replace(question, ""), given(trajectory))


def cites_what_was_read(trajectory):
    """Share of the cited pages that the seat has heard of; 0 where none is cited."""
    numbers, text = cited(trajectory), read_by(trajectory)
    return sum(number in text for number in numbers) / len(numbers) if numbers else 0.0


def on_a_cited_page(trajectory):
    """A line with a cited number holds the answer, too."""
    lines = read_by(trajectory).splitlines()
    return any(holds(line, given(trajectory)) for number in cited(trajectory) for line in lines if number in line)


def fits_the_question(trajectory):
    """A year where a year is asked for, else words without digits."""
    form = r"\d{4}" if "year" in trajectory.info.get("question", "") else r"[^\W\d]+( [^\W\d]+)?"
    return bool(re.fullmatch(form, given(trajectory)))


def with_what_was_read(trajectory):
    """What a judge is shown of either seat."""
    return f"{read_by(trajectory)}\nAnswer: {given(trajectory)} {' '.join(cited(trajectory))}"


@functools.cache
def weak_verifiers(model):
    """Ten of them; the two judges share one engine, and their errors."""
    engine = fa.EngineConfig(max_model_len=2048)
    judge = functools.partial(Judge, max_chars=1600, view=with_what_was_read, seed=0)
    correct = judge(model, "The answer is the correct answer to the question.", name="judge: correct", engine=engine)
    return [
        correct,
        judge(correct, "What was read says that the answer is right.", name="judge: supported"),
        SelfConsistency(extract=given, name="agreement"),
        EmbeddingSimilarity(model, against="group", floor=0.5, threads=1, name="likeness"),
        Rule(was_read, name="was read"),
        Rule(cites_what_was_read, name="cites what was read"),
        Rule(on_a_cited_page, name="on a cited page"),
        Rule(fits_the_question, name="fits the question"),
        Rule(calls_work, name="calls work"),
        Length(high=8, slack=8, unit="words", name="brief"),
    ]
