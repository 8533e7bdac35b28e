"""English numbers in words: "forty-two", "one hundred and five", "three and a half", "two thirds", "a dozen"."""

from __future__ import annotations

import re
from fractions import Fraction

_ONES = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
_SMALL = {word: k for k, word in enumerate(_ONES)} | {word: 10 * k for k, word in enumerate(_TENS, 2)}
_LARGE = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_IRREGULAR = {"three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth", "twelve": "twelfth"}
_ORDINALS = {_IRREGULAR.get(word, re.sub("y$", "ie", word) + "th"): k for word, k in (_SMALL | _LARGE).items() if k > 2}
_PARTS = {"half": 2, "halve": 2, "quarter": 4} | _ORDINALS
MEASURE = (
    r"(?:long|wide|tall|high|deep|thick|heavy|old|away|back|apart|total|extra|additional|more|less|fewer|ahead|behind|early|late|earlier|later"
    r"|longer|shorter|taller|older|younger|faster|slower|heavier|lighter|higher|lower|north|south|east|west|up|down"
    r"|(?:up|down|back|for)wards?)"
)
"""Words after a unit: 5 km long, 5 km north."""
PART = re.compile(rf"[\s-]*(?:{'|'.join(_PARTS)})s?\b", re.IGNORECASE)
"""The name of a part of a whole, which is no unit: "sevenths"."""
_ARTICLE = re.compile(rf"^an?\s+(?={'|'.join(_PARTS)})", re.IGNORECASE)
_WORD = rf"(?:{'|'.join([*_SMALL, *_LARGE])})(?![A-Za-z])"
_NUMBER = re.compile(
    r"(?P<sign>(?:minus|negative)\s+)?"
    rf"(?P<whole>(?:an?\s+(?={'|'.join(_LARGE)}))?{_WORD}(?:(?:[\s-]+|\s+and\s+){_WORD}){{0,15}})?"
    rf"(?:(?P<joint>\s+and\s+(?:an?|one)\s+|[\s-]+|)(?P<part>{'|'.join(_PARTS)})(?P<plural>s?)(?![A-Za-z]))?",
    re.IGNORECASE,
)
_FIRST = re.compile(
    rf"(?<![\w-])(?:(?:minus|negative)\s+|an?\s+(?={'|'.join([*_LARGE, *_PARTS])}))?"
    rf"(?:{'|'.join([*_SMALL, *_LARGE, *_PARTS])})\b",
    re.IGNORECASE,
)
_ONE_ONLY = re.compile(r"\b(?:only|exactly)\s$")
_ONE_IN = re.compile(r"\s+(?:in|out of)\s", re.IGNORECASE)


def number_in_words(text: str) -> tuple[Fraction, str] | None:
    """The number in words at the start of a text, and the text after it, or None if the text starts differently."""
    match = _NUMBER.match(_ARTICLE.sub("one ", text))
    if match is None or not (match["whole"] or match["part"]):
        return None
    whole = _whole(match["whole"].lower()) if match["whole"] else Fraction(1)
    if whole is None or (match["part"] and not match["whole"] and match["part"].lower() != "half"):
        return None
    if match["part"]:
        part = Fraction(1, _PARTS[match["part"].lower()])
        is_added = "and" in match["joint"].lower()
        if bool(match["plural"]) != (whole > 1 and not is_added):  # "twenty-third" is no fraction
            return None
        whole = whole + part if is_added else whole * part
    return -whole if match["sign"] else whole, match.string[match.end() :]


def with_digits(text: str) -> str:
    """The text with numbers in words as digits, except a bare "one", which may be a pronoun."""
    end, parts = 0, []
    for start in _FIRST.finditer(text):
        if start.start() >= end and (number := number_in_words(text[start.start() :])):
            value, rest = number
            if abs(value) != 1 or _ONE_IN.match(rest) or _ONE_ONLY.search(text[: start.start()][-9:]):
                parts += [text[end : start.start()], str(value)]
                end = len(text) - len(rest)
    return "".join([*parts, text[end:]])


def _whole(text: str) -> Fraction | None:
    """A whole number, or None for words that are not one number, such as "two three"."""
    total, current, scale, before = 0, 0, 10**15, ""
    for word in re.findall("[a-z]+", text):
        if word in _SMALL:
            size = 100 if _SMALL[word] >= 10 else 10
            is_first = not (total or current)
            if current % size or (size == 10 and 10 <= current % 100 < 20) or (word == "zero" and not is_first):
                return None
            current += _SMALL[word]
        elif word in {"hundred", "dozen"}:
            if current >= 100:
                return None
            current = max(current, 1) * _LARGE[word]
        elif word in _LARGE:
            if _LARGE[word] >= scale:
                return None
            scale = _LARGE[word]
            total, current = total + max(current, 1) * scale, 0
        elif word == "and" and before not in _LARGE:
            return None
        before = word
    return Fraction(total + current)
