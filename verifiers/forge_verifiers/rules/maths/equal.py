"""Equality of numbers and of mathematical answers.

Plain numbers are compared here, exactly. Formulas are compared by math-verify's parser and sympy in processes with
limits, see `worker`. No text is evaluated as code.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import Scores
from forge_verifiers.rules.answers import AnswerRule, folded, same_text
from forge_verifiers.rules.choices import choice_letter
from forge_verifiers.rules.languages import normalized
from forge_verifiers.rules.maths.formula import assigned, is_words, latex, split_unit
from forge_verifiers.rules.maths.quantity import (
    MAX_CHARS,
    PERCENT,
    Quantity,
    cleaned,
    decimal_comma,
    hundredth,
    literal,
    read_quantity,
    same_quantity,
)
from forge_verifiers.rules.maths.worker import WORKERS, Pair

_LOG = logging.getLogger(__name__)
_ROUNDING = 1e-6  # a tolerance up to here forgives rounding only, which whole numbers need not
_FIELDS = re.compile(r"\d+(?:-\d+)+|\d+/\d+/\d+|\d{1,2}:[0-5]\d(?::[0-5]\d)?")


class UnreadGolds:
    """Counts trajectories whose gold answer a rule could not read, for the report."""

    def __init__(self) -> None:
        self.abstained = 0
        """Trajectories without a score."""
        self._example = self._reason = ""
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def add(self, name: str, gold: str, reason: str) -> None:
        """Count a trajectory and log the first one."""
        with self._lock:
            first = not self._example
            self.abstained += 1
            self._example, self._reason = gold[:80], reason
        if first:
            _LOG.warning("verifier %r: %s", name, self)

    def __str__(self) -> str:
        if not self._example:
            return ""
        return (
            f"gold answers of {self.abstained} trajectories cannot be read, such as {self._example!r}: "
            f"without a score ({self._reason})"
        )


@dataclass(frozen=True, kw_only=True)
class Numeric(AnswerRule):
    r"""The final answer is the gold number, however it is written: ``1,234.5``, ``1e3``, ``\frac{1}{2}``, ``\sqrt{4}``.

    A unit, a currency or a percent sign that one side leaves out is forgiven, as `MathEqual` does. An answer that is no
    single number, such as "3-5" for 5 or "41 or 42", is wrong; a gold answer that is none makes it abstain.
    """

    name: str = "numeric"
    tolerance: float = 1e-6
    """Greatest difference that counts as equal, relative to the gold number, and absolute below 1. Up to 1e-6 it is for
    rounding: two whole numbers must be the same."""
    unread: UnreadGolds = field(default_factory=UnreadGolds, init=False, repr=False, compare=False)
    """Gold answers that are no number."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance={self.tolerance} of {self.name!r} must be finite and not negative")

    def grade(self, trajectory: Trajectory) -> float | None:
        """1 where they are equal, else 0; None without a gold answer that is a number."""
        if (found := self.read(trajectory)) is None:
            return None
        answer, wanted = found
        golds = [number for gold in wanted if not _fields(gold) and (number := _number(gold))]
        if not golds:
            self.unread.add(self.name, wanted[0], "not a number")
            return None
        numbers = [_number(part) for part in answer.value.split(" or ")]  # "1/2 or 0.5"
        return float(any(all(number and self._equal(number, gold) for number in numbers) for gold in golds))

    def _equal(self, answer: Quantity, gold: Quantity) -> bool:
        a, b = answer.value, gold.value
        if answer.unit is not None and gold.unit is not None:
            same_kind = answer.unit.dimension == gold.unit.dimension
            return same_kind and self._close(a * answer.unit.factor, b * gold.unit.factor)
        if PERCENT in {answer.unit, gold.unit} and self._close(hundredth(answer), hundredth(gold)):
            return True
        return self._close(a, b)

    def _close(self, a: Fraction, b: Fraction) -> bool:
        if a == b:
            return True
        if self.tolerance <= _ROUNDING and a.denominator == b.denominator == 1:
            return False
        return abs(a - b) <= Fraction(self.tolerance) * max(Fraction(1), abs(b))


def _number(text: str) -> Quantity | None:
    r"""A text that is one real number, such as ``\sqrt{2}``; None for anything else."""
    number = read_quantity(text) or assigned(text)[1]
    if number is not None or not any(map(str.isdigit, text)) or _fields(text):
        return number
    formula, unit = split_unit(text)
    formula_latex = latex(formula)
    value = WORKERS.number(formula_latex) if formula_latex else None
    return None if value is None or not math.isfinite(value) else Quantity(Fraction(value), unit, True)


@dataclass(frozen=True, kw_only=True)
class MathEqual(AnswerRule):
    r"""The final answer equals the gold answer as mathematics: ``\frac{1}{2}``, ``0.5`` and ``50\%`` are equal.

    Reads LaTeX and plain text. Plain numbers and their units are compared exactly. All else is read by the parser of
    math-verify (https://github.com/huggingface/Math-Verify) and compared in sympy: expressions at fixed points, which
    unequal ones pass with probability near 0 (Schwartz 1980), sets, intervals and their unions, tuples, matrices,
    equations and inequalities. A list without brackets is a set of answers. A unit or a percent sign that one side
    leaves out is forgiven, two different ones are not. ``log`` is the natural logarithm, ``lg`` the decimal one. Words
    are compared as text, and a multiple-choice answer by its letter.

    Formulas are compared in up to four processes, which start at the first formula and use about 100 MB each. A text
    that takes more than three seconds of processor time or 3 GB there is wrong. If math-verify cannot read the gold
    answer, or the time for a call does not suffice, the score is NaN and counted.
    """

    name: str = "math_equal"
    tolerance: float = 1e-6
    """Greatest relative difference between decimal or irrational numbers that count as equal."""
    timeout_s: float = 60.0
    """Seconds for all formulas of one call."""
    unread: UnreadGolds = field(default_factory=UnreadGolds, init=False, repr=False, compare=False)
    """Gold answers that could not be read."""

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance} of {self.name!r} must lie between 0 and 1")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s} of {self.name!r} must be finite and above 0")

    def grade(self, trajectory: Trajectory) -> float | None:
        """1 where they are equal, else 0; None without a gold answer that can be read."""
        score = float(self.score([trajectory])[0])
        return None if math.isnan(score) else score

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """`grade` of each trajectory, float32 [n]; NaN where it abstained."""
        scores = np.full(len(trajectories), math.nan, np.float32)
        asked: dict[int, list[tuple[str, str]]] = {}
        for at, trajectory in enumerate(trajectories):
            if (found := self.read(trajectory)) is None:
                continue
            read, wanted = found
            if any(same_text(read, gold) for gold in wanted):
                scores[at] = 1.0
            else:
                asked[at] = [(read.value, gold) for gold in wanted if not choice_letter(gold)]
        pairs = dict.fromkeys(pair for row in asked.values() for pair in row)
        verdicts = equal_answers(pairs, tolerance=self.tolerance, timeout_s=self.timeout_s)
        for at, row in asked.items():
            found_ = [verdicts.get(pair, "late") for pair in row]
            if True in found_:
                scores[at] = 1.0
            elif unread := [gold for (_, gold), verdict in zip(row, found_, strict=True) if verdict in (None, "late")]:
                why = f"not compared within timeout_s={self.timeout_s:g}" if "late" in found_ else "no mathematics"
                self.unread.add(self.name, unread[0], why)
            else:
                scores[at] = 0.0
        return scores


def equal_answers(
    pairs: Iterable[tuple[str, str]], *, tolerance: float = 1e-6, timeout_s: float = 60.0
) -> dict[tuple[str, str], bool | None]:
    """Whether an answer and a gold answer are equal as mathematics, see `MathEqual`.

    Returns:
        True or False by pair; None if the gold answer cannot be read. Pairs for which the time did not suffice are
        missing.
    """
    verdicts: dict[tuple[str, str], bool | None] = {}
    asked: dict[tuple[str, str], list[Pair]] = {}
    for answer, gold in pairs:
        decided = _decided(answer, gold, tolerance)
        if isinstance(decided, list):
            asked[answer, gold] = decided
        else:
            verdicts[answer, gold] = decided
    formulas = [formula for each in asked.values() for formula in each]
    found = WORKERS.compare(formulas, tolerance=tolerance, timeout_s=timeout_s)
    for pair, each in asked.items():
        *whole, last = [found.get(formula, "late") for formula in each]
        if last is True or (whole and all(verdict is True for verdict in whole)):
            verdicts[pair] = True
        elif "late" not in (*whole, last):
            verdicts[pair] = None if last is None else False
    return verdicts


def _decided(answer: str, gold: str, tolerance: float) -> bool | list[Pair] | None:
    """What text and plain numbers decide; else formulas to compare: alternatives of the answer, then all of it."""
    if not answer.strip():
        return False
    if folded(answer) == folded(gold) or (plain_text(answer) and plain_text(answer) == plain_text(gold)):
        return True
    if max(len(answer), len(gold)) > MAX_CHARS:
        return False
    fields, answered = _fields(gold), _fields(answer)
    if fields and (answered or fields[0] != ":"):  # 3:30 may be a ratio
        return fields == answered
    for one, other in ((answer, gold), (gold, answer)):  # 3,14 is a number next to 3.14; next to "3, 14" it is a list
        if (digits := decimal_comma(one.strip())) and "." in (literal(other.strip()) or ""):
            return same_quantity(_plain(digits), _plain(other.strip()), tolerance, is_exact=True)
    parts: list[Pair] = []
    if " or " in answer and " or " not in gold:  # "1/2 or 0.5" is one answer, "2 or 3" a list
        each = [_decided(part, gold, tolerance) for part in answer.split(" or ")]
        if all(verdict is True for verdict in each):
            return True
        if not any(verdict is False or verdict is None for verdict in each):
            parts = [pair for verdict in each if isinstance(verdict, list) for pair in verdict]
    if " or " in answer:
        return _asked(answer, gold, parts)
    (name, value), (gold_name, gold_value) = assigned(answer), assigned(gold)
    if value is not None and gold_value is not None:
        same_name = not name or not gold_name or name == gold_name
        return same_name and same_quantity(value, gold_value, tolerance, is_exact=True)
    return _asked(answer, gold, parts)


def _plain(text: str) -> Quantity:
    quantity = read_quantity(text)
    assert quantity is not None  # it is a literal
    return quantity


def _asked(answer: str, gold: str, parts: list[Pair]) -> bool | list[Pair] | None:
    """The formulas to compare; False if the answer is none, None if the gold answer is none."""
    if is_words(answer) and is_words(gold):
        return False
    (left, unit), (right, gold_unit) = split_unit(answer), split_unit(gold)
    if unit and gold_unit and unit.dimension != gold_unit.dimension:
        return False
    one, other = latex(left), latex(right)
    if other is None:
        return False if is_words(gold) or not any(c.isdigit() or c in "\\=<>^" for c in plain_text(gold)) else None
    if one is None:
        return False
    if unit and gold_unit and unit != gold_unit:
        one = rf"\frac{{{unit.factor.numerator}}}{{{unit.factor.denominator}}}\cdot({one})"
        other = rf"\frac{{{gold_unit.factor.numerator}}}{{{gold_unit.factor.denominator}}}\cdot({other})"
    return [*parts, (one, other)]


def _fields(text: str) -> tuple[str | int, ...]:
    """The sign and the numbers of a date, a score, a range or a time of day, which are not to be computed."""
    text = normalized(text).strip("$ ").replace("\u2013", "-").replace("\u2212", "-")
    if not _FIELDS.fullmatch(text):
        return ()
    sign = text.lstrip("0123456789")[0]
    return sign, *map(int, text.split(sign))


def plain_text(text: str) -> str:
    r"""The text without ``\text{}``, dollar signs, quotation marks, case, a closing stop, spaces but in numbers."""
    text = cleaned(text.replace("$", ""))
    return re.sub(r"(?<!\d)\s+|\s+(?!\d|\s)", "", text).strip("\"'").rstrip(".").casefold()
