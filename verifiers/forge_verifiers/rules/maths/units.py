"""Units after numbers: ``cm``, ``km/h``, ``square feet``, ``dollars``, ``apples``.

In: the words behind a number. Out: a `Unit`, or None where they are none. Waits for nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from forge_verifiers.rules.maths.expression import CALLS, GREEK


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What a number counts."""

    dimension: tuple[tuple[str, int], ...]
    """Base units and their powers, sorted; a word that is not known is a base unit of its own."""
    factor: Fraction = Fraction(1)
    """How many of the base units it is."""


PERCENT = Unit(dimension=(("%", 1),), factor=Fraction(1, 100))

_BASES = {  # base unit -> {name: how many of it}
    "metre": "mm 1/1000 cm 1/100 m 1 km 1000 in 127/5000 inch 127/5000 inche 127/5000 ft 381/1250 foot 381/1250 "
    "feet 381/1250 yd 1143/1250 yard 1143/1250 mi 201168/125 mile 201168/125",
    "gram": "mg 1/1000 g 1 kg 1000 lb 45359237/100000 pound 45359237/100000 oz 45359237/1600000 ounce 45359237/1600000",
    "second": "s 1 sec 1 second 1 min 60 minute 60 h 3600 hr 3600 hour 3600 day 86400 week 604800",
    "litre": "ml 1/1000 l 1",
    "dollar": "$ 1 dollar 1 usd 1 cent 1/100 ¢ 1/100",
    "euro": "€ 1 euro 1 eur 1",
    "sterling": "£ 1 gbp 1",
    "degree": "° 1 degree 1 deg 1",
}
_PREFIXES = {"milli": Fraction(1, 1000), "centi": Fraction(1, 100), "": Fraction(1), "kilo": Fraction(1000)}
_NAMED = {"meter": "metre", "metre": "metre", "gram": "gram", "liter": "litre", "litre": "litre"}
_KNOWN: dict[str, tuple[str, Fraction]] = {
    name: (base, Fraction(size))
    for base, text in _BASES.items()
    for name, size in zip(text.split()[::2], text.split()[1::2], strict=True)
} | {prefix + name: (base, size) for name, base in _NAMED.items() for prefix, size in _PREFIXES.items()}
_RESERVED = (
    CALLS
    | set(GREEK.split("|"))
    | {"frac", "binom", "infinity", "half", "halves", "third", "thirds", "quarter", "quarters", "tenths", "hundredths"}
    | {"squared", "cubed", "factorial", "over", "times", "plus", "minus", "less", "more", "mod", "modulo"}
)
_PHRASES = {"mph": "mile/hour", "kmh": "km/h", "kph": "km/h"}
_PER = re.compile(r"\s*/\s*|\s+per\s+|\s+an?\s+")
_PART = re.compile(
    r"(?:(square|sq\.?|cubic|cu\.?)\s+)?([A-Za-z$€£¢°]+)\s*(?:(squared|cubed)|\^\s*\{?\s*([1-9])\s*\}?)?"
)
_TEMPERATURE = re.compile(r"(?:degrees?|°)\s*([CcFfKk])(?:elsius|ahrenheit|elvin)?")
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}


def read_unit(text: str, *, spaced: bool) -> Unit | None:
    """Reads the words behind a number.

    Args:
        text: the words, such as ``km/h``.
        spaced: whether a space stands before them; without it a single letter is a variable, not a unit.
    """
    text = text.strip().removesuffix(".").strip()
    if text.lower() in {"%", "percent", "per cent", "pct", "percentage"}:
        return PERCENT
    text = _PHRASES.get(text.lower(), text)
    temperature = _TEMPERATURE.fullmatch(text)
    if temperature:
        return Unit(dimension=(("°" + temperature[1].upper(), 1),))
    powers: dict[str, int] = {}
    factor = Fraction(1)
    for k, part in enumerate(_PER.split(text)):
        found = _PART.fullmatch(part)
        known = _known(found[2]) if found else None
        if found is None or known is None or (len(text) == 1 and text.isalpha() and not spaced):
            return _own(text) if spaced else None
        word = found[1] or found[3]
        power = (_POWERS[word.rstrip(".")] if word else int(found[4] or 1)) * (1 if k == 0 else -1)
        powers[known[0]] = powers.get(known[0], 0) + power
        factor *= known[1] ** power
    return Unit(dimension=tuple(sorted(powers.items())), factor=factor)


def _known(word: str) -> tuple[str, Fraction] | None:
    return _KNOWN.get(word) or _KNOWN.get(word.lower().removesuffix("s") if len(word) > 2 else word)


def _own(text: str) -> Unit | None:
    """A phrase of ordinary words counts in itself: eight apples are not eight oranges."""
    words = [word.lower().rstrip(".") for word in text.split()]
    if not re.fullmatch(r"[a-z]{3,}|[a-z.]{2,} [a-z. ]+|[a-z]\.[a-z]", " ".join(words)):
        return None
    if any(word in _RESERVED for word in words) and words != ["times"]:
        return None
    if not re.search("[aeiou]", words[0]):  # "xyz" is a product
        return None
    return Unit(dimension=((" ".join(words).removesuffix("s"), 1),))
