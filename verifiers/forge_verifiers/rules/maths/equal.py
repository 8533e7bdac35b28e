"""The verifiers `Numeric` and `MathEqual`: equality of numbers and of mathematical answers.

Plain numbers are compared exactly here, formulas by math-verify and sympy in processes with limits (see `worker`). No
text is evaluated as code.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.functions import check_trajectories, grade_each
from forge_verifiers.core.verifier import Assessment, Scores
from forge_verifiers.rules.answers import POLAR, AnswerRule, fold, same_text, units_differ
from forge_verifiers.rules.choices import choice_letter
from forge_verifiers.rules.maths.fields import fields, same_fields
from forge_verifiers.rules.maths.formula import assigned, is_words, latex, split_unit
from forge_verifiers.rules.maths.quantity import (
    MAX_CHARS,
    Quantity,
    cleaned,
    decimal_comma,
    literal,
    read_quantity,
    same_decimal,
    same_quantity,
)
from forge_verifiers.rules.maths.worker import WORKERS, Pair, is_slow

_LOG = logging.getLogger(__name__)
_INDEX = re.compile(r"(?<=[A-Za-z)\]])_\s*(?:(\d+)|\{(\d+)\})(?!\d)|(?<=\^)\{(\d*[-+])\}$")
_ION = re.compile(r"([(\[]?[A-Z][A-Za-z\d()\[\]_{}]{0,40}?)\s?\^?\{?(\d?[-+])\}?")  # Fe3+
_ARROW = re.compile(r"[\u2192\u27f6\u21d2]|\\(?:long)?rightarrow(?![A-Za-z])|\\to(?![A-Za-z])|-{2,}>")
_ARTICLE = re.compile(r"(?i:the)\s+|[Aa]n?\s+(?=[A-Za-z]{3})(?!exp|det|max|min|mod|gcd)")
_SHORT = re.compile(
    r"([A-Za-z][a-z]+(?:\s[A-Za-z]+){0,5})\s+\((?!No\)|Or\))([A-Z][a-z]|[A-Z]{1,6})\)"  # gold (Au)
    r"|((?:[A-Z][a-z]?\d*){1,12})\s+\((?!(?:wrong|incorrect|false|not?|maybe|perhaps|or)\b)([a-z]+(?:\s[a-z]+){0,3})\)"
)
_LETTERS = re.compile(r"\\?[^\W\d_]+")
_CODE = re.compile(r"[A-Z]{2}|[IVXLCDM]{2,}|\\(?:angle|triangle|overline)\s*\{?[A-Z]{2,4}\}?")
"""A numeral, a code or the name of a figure, whose letters are no factors."""
_PRODUCT = re.compile(r"[*=\u00b7\u00d7]|\\(?:cdot|times)|[A-Z]\s+[A-Z]")
_OPTIONS = re.compile(r"[A-Ea-e](?:,?[A-Ea-e])*")
_STATED = re.compile(r"(?:\\(?:lim|int|sum|prod)|\||e\^)(?:(?!\b(?:and|or)\b)[^,;<>])*=[^=,;<>]*")
_COMPUTED = re.compile(r"\\(?:sum|int|prod|lim|det|[bp]?mod|gcd)(?![A-Za-z])|!")
"""Operations that a number in an answer does not have."""
_BLANK = re.compile(r"[\s~$]|\\[,;:!% ]")
_OPERATOR = re.compile(
    r"[\w)\]}!'%](?:\\(?:text|math[a-z]+)\{)?"
    r"(?:[-+*/\u00b7\u00d7\u00f7\u2044\u2212\u2217\u22c5]|\\(?:times|cdot|div|ast)(?![A-Za-z]))"
)
"""An operator between two operands, in a text without `_BLANK`."""
_IRRATIONAL = re.compile(
    r"(?:\^|\*\*)\s*[{(]?\s*-?\s*(?:\d*\.\d|\d+\s*/|\\[dt]?frac)|[\u03c0\u221a]|(?<![A-Za-z])e(?![A-Za-z])"
    r"|(?<![A-Za-z])(?:sqrt|pi|exp|ln|log|(?:arc)?(?:sin|cos|tan)h?)(?![A-Za-z])"
)
"""Parts of numbers that are sums or products in their simplest form, such as ``1+\\sqrt{2}``."""
_SCIENTIFIC = re.compile(
    r"[-+\u2212]?[\d.,]+\s*(?:[*\u00b7\u00d7]|\\times|\\cdot)\s*(?:10|\{10\})\s*(?:\^|\*\*)\s*[{(]?[-+\u2212]?\d+[)}]?"
)
_EQUALS = re.compile(r"[=\u2248]|\\(?:approx|simeq)(?![A-Za-z])")
_NAMES = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
"""Names of variables and units, but not of commands."""
_SIMPLE = 1000
"""Maximum denominator of a gold number for which an answer with a root or pi is a calculation: it cancels out."""
_LOWERED = {0x2080 + digit: str(digit) for digit in range(10)}
_MAX_ALTERNATIVES = 8
"""Maximum number of forms of one answer, as in "1/2 or 0.5"."""
_ROUNDING = 1e-6  # up to here, a tolerance is for rounding only and does not apply to whole numbers


@dataclass
class UnreadGolds:
    """Counter of trajectories that were not compared, for the report."""

    abstained: int = 0
    """Number of trajectories without a score."""
    example: str = ""
    reason: str = ""

    def add(self, name: str, gold: str, reason: str) -> None:
        """Count a trajectory. The first one is logged."""
        self.abstained, self.example, self.reason = self.abstained + 1, gold[:80], reason
        if self.abstained == 1:
            _LOG.warning("verifier %r: %s", name, self)

    def __str__(self) -> str:
        text = f"no score for {self.abstained} trajectories, such as one with the gold answer {self.example!r}"
        return f"{text} ({self.reason})" if self.abstained else ""


@dataclass(frozen=True, kw_only=True)
class _FormulaRule(AnswerRule):
    timeout_s: float = 60.0
    """Timeout in seconds for all formulas of one call."""
    unread: UnreadGolds = field(default_factory=UnreadGolds, init=False, repr=False, compare=False)
    """Gold answers that cannot be read."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s} of {self.name!r} must be finite and above 0")


@dataclass(frozen=True, kw_only=True)
class Numeric(_FormulaRule):
    r"""The final answer equals the gold number in any notation: ``1,234.5``, ``1e3``, ``\frac{1}{2}``, ``\sqrt{4}``.

    A unit, currency or percent sign may be missing on one side, as in `MathEqual`. An answer that is not a single
    number, such as "3-5" for 5 or "41 or 42", is wrong, and so is x = 3 for y = 3. For a plain gold number, a
    calculation that is not carried out is wrong, too: "6*7" for 42 may be a copy of the question. The rule abstains if
    the gold answer is not a number.

    A formula that needs more than three seconds of processor time or 3 GB is wrong. A formula for which `timeout_s`
    leaves no time has no score, or is wrong if only the answer has an integral, sum, product or limit.
    """

    name: str = "numeric"
    tolerance: float = 1e-6
    """Maximum difference, relative to the gold number. For gold numbers below 1 it is absolute, but at most ten times
    as large relative to the gold number. Up to 1e-6 it is for rounding only, so that whole numbers must be equal."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance={self.tolerance} of {self.name!r} must be finite and not negative")
        super().__post_init__()

    def grade(self, trajectory: Trajectory) -> float | None:
        """1 if they are equal, else 0, or None without a numeric gold answer."""
        return self._grade(trajectory, time.monotonic() + self.timeout_s)

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """`grade` of each trajectory, with one timeout for all."""
        end = time.monotonic() + self.timeout_s
        return self._assessment(grade_each(lambda each: self._grade(each, end), trajectories), len(trajectories))

    def _grade(self, trajectory: Trajectory, end: float) -> float | None:
        if (pair := self.read(trajectory)) is None:
            return None
        answer, gold_texts = pair
        try:
            golds = [(gold, number) for gold in gold_texts if not fields(gold) and (number := _number(gold, end))]
            if not golds:
                self.unread.add(self.name, gold_texts[0], "not a number")
                return None
            is_stated = _is_calculation(answer.value) and not _NAMES.search(answer.raw)
            sides = [side.strip() for side in _EQUALS.split(answer.raw)] if is_stated else []
            value = next(filter(read_quantity, sides), answer.value)  # 7 = 3 + 4, but not a + b = 7
            parts = value.split(" or ")  # "1/2 or 0.5"
            return float(
                len(parts) <= _MAX_ALTERNATIVES
                and any(all(self._is_gold(part, *gold, end) for part in parts) for gold in golds)
            )
        except TimeoutError:
            if is_slow(latex(answer.value) or "") and not any(is_slow(latex(gold) or "") for gold in gold_texts):
                return 0.0  # a slow answer must not be better than a wrong one
            self.unread.add(self.name, gold_texts[0], f"not compared within timeout_s={self.timeout_s:g}")
            return None

    def _is_gold(self, text: str, gold_text: str, gold: Quantity, end: float) -> bool:
        if not _same_name(assigned(text)[0], assigned(gold_text)[0]):
            return False
        is_exact = self.tolerance <= _ROUNDING and gold.value.denominator <= _SIMPLE
        is_calculation = read_quantity(gold_text) and _is_calculation(text, is_exact=is_exact)
        number = None if is_calculation else _number(text, end)
        if number is None and _STATED.fullmatch(text):  # \lim_{x \to 0} x = 0
            number = _number(text.rpartition("=")[2], end)
        return number is not None and same_quantity(number, gold, is_close=self._is_close)

    def _is_close(self, a: Fraction, b: Fraction) -> bool:
        if self.tolerance <= _ROUNDING and a.denominator == b.denominator == 1:
            return a == b
        scale = min(max(abs(b), Fraction(1)), 10 * abs(b)) or Fraction(1)
        return abs(a - b) <= Fraction(self.tolerance) * scale


def _is_calculation(text: str, *, is_exact: bool = False) -> bool:
    r"""Return whether a text is a calculation that is not carried out, and not a number as ``1+\sqrt{2}`` is.

    With `is_exact`, roots and pi make it no number, because they can only cancel out.
    """
    if read_quantity(text) or assigned(text)[1] or _SCIENTIFIC.fullmatch(text):
        return False
    is_irrational = not is_exact and _IRRATIONAL.search(text)
    return bool(_COMPUTED.search(text) or (_OPERATOR.search(_BLANK.sub("", text)) and not is_irrational))


def _number(text: str, end: float) -> Quantity | None:
    r"""A real number, such as ``\sqrt{2}``, or None for any other text. Raises TimeoutError after `end`."""
    number = read_quantity(text) or assigned(text)[1]
    if number is not None or not any(map(str.isdigit, text)) or fields(text):
        return number
    formula, unit = split_unit(text)
    formula_latex = latex(formula)
    value = WORKERS.number(formula_latex, end) if formula_latex else None
    return None if value is None or not math.isfinite(value) else Quantity(Fraction(value), unit, True)


@dataclass(frozen=True, kw_only=True)
class MathEqual(_FormulaRule):
    r"""The final answer equals the gold answer as mathematics: ``\frac{1}{2}``, ``0.5`` and ``50\%`` are equal.

    Answers may be LaTeX or plain text. Plain numbers and their units are compared exactly. Other answers are parsed by
    math-verify (https://github.com/huggingface/Math-Verify) and compared in sympy: sets, intervals and their unions,
    tuples, matrices, equations and inequalities, and expressions at fixed points, where unequal expressions agree with
    probability near 0 (Schwartz 1980). A list without brackets is a set of answers. A unit or percent sign may be
    missing on one side, but must not differ. ``log`` is the natural logarithm, ``lg`` the decimal one. The case and the
    primes of symbols count, so that m is not M. Words are compared as text, and multiple-choice answers by letter.

    Formulas are compared in up to four processes, which start with the first formula and use about 100 MB each. An
    answer that needs more than three seconds of processor time or 3 GB is wrong. If math-verify cannot read the gold
    answer, or the call times out, the score is NaN and counted. An answer for which no time is left is wrong if only
    the answer, and not the gold answer, has an integral, sum, product or limit.
    """

    name: str = "math_equal"
    tolerance: float = 1e-6
    """Maximum relative difference between equal decimal or irrational numbers."""

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance} of {self.name!r} must lie between 0 and 1")
        super().__post_init__()

    def grade(self, trajectory: Trajectory) -> float | None:
        """1 if they are equal, else 0, or None without a readable gold answer."""
        score = float(self.score([trajectory])[0])
        return None if math.isnan(score) else score

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """`grade` of each trajectory, float32 [n], or NaN for abstentions."""
        check_trajectories(trajectories)
        scores = np.full(len(trajectories), math.nan, np.float32)
        pairs_of: dict[int, list[tuple[str, str]]] = {}
        for row, trajectory in enumerate(trajectories):
            if (answer_and_golds := self.read(trajectory)) is None:
                continue
            answer, golds = answer_and_golds
            if any(same_text(answer, gold, differ=_symbols_differ) for gold in golds):
                scores[row] = 1.0
            else:
                formulas = [gold for gold in golds if not choice_letter(gold) and fold(gold) not in POLAR]
                pairs_of[row] = [(answer.value, gold) for gold in formulas]
        unique = dict.fromkeys(pair for pairs in pairs_of.values() for pair in pairs)
        equal = equal_answers(unique, tolerance=self.tolerance, timeout_s=self.timeout_s)
        for row, pairs in pairs_of.items():
            results = [equal.get(pair, "late") for pair in pairs]
            if True in results:
                scores[row] = 1.0
            elif unread := [gold for (_, gold), result in zip(pairs, results, strict=True) if result in (None, "late")]:
                reason = f"not compared within timeout_s={self.timeout_s:g}" if "late" in results else "no mathematics"
                self.unread.add(self.name, unread[0], reason)
            else:
                scores[row] = 0.0
        return scores


def equal_answers(
    pairs: Iterable[tuple[str, str]], *, tolerance: float = 1e-6, timeout_s: float = 60.0
) -> dict[tuple[str, str], bool | None]:
    """True if an answer and a gold answer are equal as mathematics, see `MathEqual`.

    Returns:
        True or False by pair, or None for an unreadable gold answer. Pairs that were not compared in time are missing,
        or False if only the answer may take seconds: a slow answer must not be better than a wrong one.
    """
    results: dict[tuple[str, str], bool | None] = {}
    formulas_of: dict[tuple[str, str], list[Pair]] = {}
    for answer, gold in pairs:
        result = _compare(answer, gold, tolerance)
        if isinstance(result, list):
            formulas_of[answer, gold] = result
        else:
            results[answer, gold] = result
    end = time.monotonic() + timeout_s
    while formulas_of:  # one formula of each answer at a time, so that answers with many take no time from others
        formulas = [first for first, *_ in formulas_of.values()]
        equal = WORKERS.compare(formulas, tolerance=tolerance, timeout_s=end - time.monotonic())
        for pair, (first, *rest) in list(formulas_of.items()):
            is_equal = equal.get(first)
            if first not in equal or not rest:
                del formulas_of[pair]
                if first in equal or (is_slow(first[0]) and not is_slow(first[1])):
                    results[pair] = is_equal if first in equal else False
            elif is_equal and len(rest) == 1:  # all alternatives are equal to the gold answer
                del formulas_of[pair]
                results[pair] = True
            else:  # an unequal alternative leaves the answer as a whole, such as a list
                formulas_of[pair] = rest if is_equal else rest[-1:]
    return results


def _compare(answer: str, gold: str, tolerance: float) -> bool | list[Pair] | None:
    """The result if text or plain numbers decide, else formulas to compare: alternatives, then the whole answer."""
    if not answer.strip():
        return False
    if (is_equal := _compare_texts(answer, gold)) is not None:
        return is_equal
    if max(len(answer), len(gold)) > MAX_CHARS:
        return False
    gold_fields, answer_fields = fields(gold), fields(answer)
    is_price = answer_fields[:1] == ("price",)
    if is_price or (gold_fields and (answer_fields or gold_fields[0] != ":")):  # 3:30 may be a ratio
        return same_fields(answer_fields, gold_fields)
    for a, b in ((answer, gold), (gold, answer)):  # 3,14 is a number if compared with 3.14, and a list with "3, 14"
        if (digits := decimal_comma(a.strip())) and "." in (literal(b.strip()) or ""):
            number, other = read_quantity(digits), read_quantity(b.strip())
            return number is not None and other is not None and same_decimal(number, other, tolerance)
    parts: list[Pair] = []
    alternatives = answer.split(" or ") if " or " not in gold else []  # "1/2 or 0.5" is one answer, "2 or 3" a list
    if 1 < len(alternatives) <= _MAX_ALTERNATIVES:
        results = [_compare(part, gold, tolerance) for part in alternatives]
        if all(result is True for result in results):
            return True
        if not any(result is False or result is None for result in results):
            parts = [pair for result in results if isinstance(result, list) for pair in result]
    if " or " in answer:
        return _formulas(answer, gold, parts)
    (name, value), (gold_name, gold_value) = assigned(answer), assigned(gold)
    if value is not None and gold_value is not None:
        return _same_name(name, gold_name) and same_decimal(value, gold_value, tolerance)
    return _formulas(answer, gold, parts)


def _same_name(name: str, gold_name: str) -> bool:
    """True if ``x = 5`` and ``5 = x`` name one variable, or if a name is left out."""
    return not name or not gold_name or name == gold_name


def _compare_texts(answer: str, gold: str) -> bool | None:
    """The result if the texts are equal up to their notation, or the gold answer is no formula, else None."""
    if not any(fold(part) == fold(gold) or (plain_text(part) or "-") == plain_text(gold) for part in _names(answer)):
        texts = (answer, gold)
        is_code = any(_CODE.fullmatch(text.strip(" $")) for text in texts) and not any(map(_PRODUCT.search, texts))
        return False if is_code else None
    return False if units_differ(answer, gold) else None if _symbols_differ(answer, gold) else True


def _symbols_differ(answer: str, gold: str) -> bool:
    """True for texts that differ in the case of a symbol, as m and M, or in units. Case of words does not count."""
    if units_differ(answer, gold):
        return True
    texts = [plain_text(text, casefold=False) for text in (answer, gold)]
    if texts[0] == texts[1] or is_words(gold) or (read_quantity(answer) and read_quantity(gold)):
        return False
    is_word = all(_OPTIONS.fullmatch(text) or (text.isalpha() and len(text) > 1) for text in texts)
    runs = zip(*(_LETTERS.findall(text) for text in texts), strict=False)
    return not is_word and any(a != b and not _is_word(a, b) for a, b in runs)


def _is_word(a: str, b: str) -> bool:
    """True if letters in formulas are a word, such as Sin and sin, and not a product of symbols, such as mgh."""
    forms = {a.lower(), a.upper(), a.capitalize()}
    return "\\" not in a and (len(a) > 3 or (len(a) == 3 and {a, b} <= forms))


def _names(answer: str) -> Sequence[str]:
    """The answer, or the name and symbol in "gold (Au)"."""
    short = _SHORT.fullmatch(answer.translate(_LOWERED))
    return (answer, *filter(None, short.groups())) if short else (answer,)


def _formulas(answer: str, gold: str, parts: list[Pair]) -> bool | list[Pair] | None:
    """The formulas to compare. False if the answer is not a formula, None if the gold answer is not."""
    if is_words(gold) and (is_words(answer) or not gold.isascii()):
        return False
    if _ION.fullmatch(plain_text(gold, casefold=False)):
        return False
    (left, unit), (right, gold_unit) = split_unit(answer), split_unit(gold)
    if unit and gold_unit and unit.dimension != gold_unit.dimension:
        return False
    formula, gold_formula = latex(left), latex(right)
    if gold_formula is None:
        return False if is_words(gold) or not any(c.isdigit() or c in "\\=<>^" for c in plain_text(gold)) else None
    if formula is None:
        return False
    if unit and gold_unit and unit != gold_unit:
        formula = rf"\frac{{{unit.factor.numerator}}}{{{unit.factor.denominator}}}\cdot({formula})"
        gold_formula = rf"\frac{{{gold_unit.factor.numerator}}}{{{gold_unit.factor.denominator}}}\cdot({gold_formula})"
    return [*parts, (formula, gold_formula)]


def plain_text(text: str, *, casefold: bool = True) -> str:
    r"""The text without ``\text{}``, dollar signs, quotation marks, case, a final period, spaces outside numbers.

    "Red, green, and blue" is "red,green,blue", the indices of H_2O and H₂O are those of H2O, and Fe^{3+} is
    Fe3+.
    """
    text = _INDEX.sub(r"\1\2\3", cleaned(text.replace("$", ""))).removesuffix(" only")
    text = re.sub(r"(?<=[A-Za-z]),?\s+and\s+(?=[A-Za-z])", ",", _ARROW.sub("->", text))
    text = _ARTICLE.sub("", text) if is_words(text) else text
    text = "".join(ion.groups()) if (ion := _ION.fullmatch(text)) else text
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d|\s)", "", text).strip('"')
    text = (text[1:-1] if text[:1] == text[-1:] == "'" else text).rstrip(".")  # a prime is no quotation mark
    return text.casefold() if casefold else text
