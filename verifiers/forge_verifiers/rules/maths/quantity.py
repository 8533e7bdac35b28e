r"""Plain numbers with units: ``1,234.5``, ``2 3/4``, ``\frac{1}{2}``, ``2.5 \times 10^3``, ``50\%``, ``$18``, ``5 km``.

Values are exact, the size of numbers is bounded, and nothing is evaluated as code.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from forge_verifiers.rules.languages import ALTERNATIVE, BOUND, COUNTER, NEGATION, normalized
from forge_verifiers.rules.maths.fields import fields
from forge_verifiers.rules.maths.number_words import MEASURE, PART, number_in_words

MAX_CHARS = 1_000
"""Longer texts are not read as answers."""
_MAX_DIGITS = 300
_MAX_EXPONENT = 300
_MAX_FACTORIAL = 170
_MAX_FACTORS = 8  # of a unit


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit of a number."""

    dimension: tuple[tuple[str, int], ...]
    """Base units and their powers, sorted. An unknown word is a base unit by itself."""
    factor: Fraction = Fraction(1)
    """Size in base units."""
    remark: str = ""
    """Word after the unit: "north" in "5 km north"."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A real number and its unit."""

    value: Fraction
    unit: Unit | None = None
    is_decimal: bool = False
    """True if the number is written as a decimal, so that it may be rounded."""


PERCENT = Unit((("%", 1),), Fraction(1, 100))

_SI = (  # base units, their symbols and other names, which all take prefixes
    "metre m meter; gram g; second s; litre l L liter; newton N; joule J; watt W; volt V; ampere A amp; coulomb C; "
    "ohm \u03a9; kelvin K; molar M; hertz Hz; pascal Pa; mole mol; byte B"
)
_PREFIXES = {"nano n": -9, "micro \u03bc": -6, "milli m": -3, "centi c": -2, "deci d": -1}
_PREFIXES |= {"kilo k": 3, "mega M": 6, "giga G": 9}
_OTHERS = {  # base unit -> names and sizes
    "metre": "in 127/5000 inch 127/5000 inche 127/5000 ft 381/1250 foot 381/1250 feet 381/1250 yd 1143/1250 "
    "yard 1143/1250 mi 201168/125 mile 201168/125",
    "gram": "lb 45359237/100000 pound 45359237/100000 oz 45359237/1600000 ounce 45359237/1600000",
    "second": "sec 1 min 60 minute 60 h 3600 hr 3600 hour 3600 day 86400 week 604800",
    "hertz": "hz 1 khz 1000 mhz 1000000",
    "joule": "kj 1000 kwh 3600000 eV 1602176634e-28 keV 1602176634e-25 MeV 1602176634e-22 cal 4.184 calorie 4.184 "
    "kcal 4184",
    "pascal": "atm 101325 atmosphere 101325 bar 100000",
    "watt": "kw 1000",
    "dollar": "$ 1 dollar 1 usd 1 cent 1/100 \u00a2 1/100",
    "euro": "\u20ac 1 euro 1 eur 1",
    "sterling": "\u00a3 1 gbp 1",
    "degree": "\u00b0 1 degree 1 deg 1",
    "yen": "\u00a5 1 yen 1 jpy 1",
    "rupee": "\u20b9 1 rupee 1 inr 1",
}
_DERIVED = {  # unit -> base units and its size in them
    "newton": "gram 1 metre 1 second -2 1000",
    "joule": "gram 1 metre 2 second -2 1000",
    "watt": "gram 1 metre 2 second -3 1000",
    "pascal": "gram 1 metre -1 second -2 1000",
    "volt": "gram 1 metre 2 second -3 ampere -1 1000",
    "ohm": "gram 1 metre 2 second -3 ampere -2 1000",
    "coulomb": "ampere 1 second 1 1",
    "hertz": "second -1 1",
    "litre": "metre 3 1/1000",
    "molar": "mole 1 metre -3 1000",
}


def _units() -> dict[str, tuple[str, Fraction]]:
    """Base unit and size of each name."""
    units: dict[str, tuple[str, Fraction]] = {}
    for names in (text.split() for text in _SI.split(";")):
        units |= {name: (names[0], Fraction(1)) for name in names}
        for prefix, power in _PREFIXES.items():
            long, short = prefix.split()
            units |= {(long if len(name) > 2 else short) + name: (names[0], Fraction(10) ** power) for name in names}
    for base, text in _OTHERS.items():
        units |= {name: (base, Fraction(size)) for name, size in zip(*[iter(text.split())] * 2, strict=True)}
    return units


_UNITS = _units()
_NO_UNITS = frozenset(
    re.findall(
        r"\w+",
        "sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh sqrt exp ln lg log abs alpha beta gamma delta "
        "epsilon theta lambda mu nu rho sigma tau phi omega pi frac binom infinity half halves third thirds quarter "
        "quarters tenths hundredths squared cubed factorial over times plus minus less more least most mod modulo and "
        "or if unless when otherwise "
        # "thousand" and "million" in other languages
        "mil mille tausend tusen duizend ribu bin millones milhões millionen millions miljoner miljoen juta milyon "
        "тысяч тысячи тысяча миллион миллиона миллионов हजार हज़ार लाख करोड़ ألف آلاف مليون هزار میلیون χιλιάδες "
        "εκατομμύρια nghìn ngàn triệu tỷ tysięcy tysiące milionów tisíc milionů พัน ล้าน",
    )
)
"""Words after a number that are operations, functions or variables."""
_MORE = re.compile(r"^(more|less|fewer|extra|additional)\s+(?!than\b)([^\W\d].*)$")  # 5 more apples
_FOREIGN_WORD = re.compile(r"[^\W\d_]{3,}")
_COUNTED_WORD = re.compile(rf"{COUNTER}[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3]{{1,6}}")
_NO_WORD = re.compile(
    rf"{ALTERNATIVE}|{NEGATION}|{BOUND}|以|未|左右|不|和|与|と|多|余|超|이상|이하|미만|정도", re.IGNORECASE
)
_HOURS = re.compile(r"^(\d+)\s?h\s?([0-5]?\d)\s?m?$")  # 8h30m
_PERCENT_WORDS = {"%", "percent", "per cent", "pct", "percentage", "prozent", "procent", "pour cent", "por ciento"}
_PERCENT_WORDS |= {"por cento", "per cento", "процент", "процента", "процентов", "パーセント", "퍼센트"}
_HYPHEN = re.compile(
    r"^-(?=(?:inch|foot|yard|mile|meter|pound|gram|second|minute|hour|day|week|month|year|dollar|degree)\b)"
)
_PHRASES = {"mph": "mile/hour", "kmh": "km/h", "kph": "km/h", "celsius": "°C", "fahrenheit": "°F"}
_PER = re.compile(r"\s*/\s*|\s+per\s+|\s+an?\s+")
_TIMES = re.compile(
    r"\s*\*\s*|\s+(?!squared|cubed|\^)(?<!square\s)(?<!cubic\s)(?<!sq\s)(?<!sq\.\s)(?<!cu\s)(?<!cu\.\s)"
)
_PART = re.compile(
    r"(?:(square|sq\.?|cubic|cu\.?)\s+)?([A-Za-z$€£¥₹¢°Ωμ]+)\s*(?:(squared|cubed)|\^\s*\{?\s*(-?[1-9])\s*\}?)?"
)
_TEMPERATURE = re.compile(r"(?:degrees?|°)\s*([CcFfKk])(?:elsius|ahrenheit|elvin)?")
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}

_PLUS = re.compile(r"(?<=[A-Za-z])(?:,?\s+and\s+|,?\s+)(?=\d)")
_GROUPED = re.compile(
    r"([-+]?\d{1,3}(?:([,' _\u00a0\u202f\u2009]|\{,\}|\\[,!]|,\\!)\d{3})(?:\2\d{3})*)(?:([.,])(\d+))?"
)
_DOTTED = re.compile(r"([-+]?\d{1,3}(?:(?:\.\d{3}){2,}|(?:\.\d{3})+(?=,)))(?:,(\d+))?")
_LITERAL = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
_COMMA = re.compile(r"[-+]?(?:\d{2,}|0),\d+|[-+]?\d,\d{2,}")
_COMMA_BEFORE_UNIT = re.compile(
    r"^([-+]?\d+),(\d{1,2}|\d{4,})(?=\s?(?:%|[€£]|(?:[ckm]?m|[km]?g|[hls]|percent|euros?)\b)|\s*(?:\*|x|\\times|\\cdot)\s*10\s*\^)|^([-+]?[€£]\s?\d+),(\d\d)$"
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_LETTER_SCALES = {"K": "thousand", "M": "million", "B": "billion"}
_LETTER_SCALE = re.compile(r"(?<=\d)\s?([KMBkmb])(?:n)?(?![A-Za-z])")
_WRAPPED = re.compile(
    r"\\(?:text(?:bf|it|rm|tt|normal)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_DEGREES = re.compile(r"(?<=\d)\^\s*\{?\s*o\s*\}?(?![A-Za-z])|\^\s*\{?\s*\\circ\s*\}?|\\degree\b")
_SIGNS = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u2013": "-", "\u00a0": " ", "\u2009": " ", "\u202f": " "})
_SIGNS |= str.maketrans({"\u00ba": "°", "\u02da": "°"})  # taken for the degree sign
_SIGNS |= str.maketrans(
    {"\u2019": "'", "\u2044": "/", "\u2215": "/", "\u2236": ":", "\u00b5": "\u03bc", "\u2103": "°C", "\u2109": "°F"}
)
_REPEATING = re.compile(r"^([-+]?\d*\.\d*?)(\d{1,6})\2+\s*(?:\.\.\.|\u2026|\\[lc]?dots)$")  # 0.1666...
_PERIOD = re.compile(r"^([-+]?\d+\.\d*)\((\d{1,9})\)$")  # 0.1(6)
_LOWERED = re.compile("[\u2080-\u2089]+")
_RAISED = re.compile("[\u207a\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")  # 1/4 to 7/8 as one character
_MONEY = re.compile(r"([-+]?)\s*(?:\\?(?:US|A|C)?\s?\\?([$€£¥₹])\s*|(USD|EUR|GBP|JPY|INR)\s+)(?=[-\d.])")
_REMARK = re.compile(r"(?<=\d)(\s+(?:dozen|hundred|thousand|million|billion))?\s+[A-Za-z]{2}[A-Za-z\s]*$")
_DIGITS = r"\d[\d,' .]*\d|\d+\.?|\.\d+"
_FRACTION = re.compile(r"\\frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))")
_OVER = r"(?:/|\s(?:out\s+of|in)\s|:)"
_SIGN = re.compile(r"(?:[-+]\s*|(?:minus|negative)\s+)*")
_SCALE = re.compile(r"\s+(dozen|hundred|thousand|million|billion)s?(?![A-Za-z])")


def literal(text: str) -> str | None:
    """A number in Python's notation, or None for any other text, and if a comma may separate two numbers.

    Thousands may be separated by commas, apostrophes and narrow or plain spaces, in English or European style:
    ``1,234.5``, ``1 234,5``, ``1.234,5``.
    """
    if not text.isascii():
        text = text.replace("\u2212", "-")
    if _LITERAL.fullmatch(text):
        return text
    grouped = _GROUPED.fullmatch(text)
    if grouped and grouped[2] != grouped[3] and not grouped[1].lstrip("+-").startswith("0"):
        whole = grouped[1].replace(grouped[2], "")
        return f"{whole}.{grouped[4]}" if grouped[4] else whole
    dotted = _DOTTED.fullmatch(text)
    if dotted:
        return dotted[1].replace(".", "") + (f".{dotted[2]}" if dotted[2] else "")
    return None


def decimal_comma(text: str) -> str | None:
    """A number with a decimal comma, such as ``3,14``, as a literal, or None for any other text, and for thousands."""
    if not text.isascii():
        text = text.replace("\u2212", "-")
    return text.replace(",", ".") if _COMMA.fullmatch(text) and literal(text) is None else None


def cleaned(text: str) -> str:
    r"""The text without dollar signs, ``\text``, thin spaces and a final period, with common signs in ASCII."""
    text = normalized(text).strip()
    if text.isascii() and text.isalnum():
        return text
    text = _REPEATING.sub(r"\1\\overline{\2}", _PERIOD.sub(r"\1\\overline{\2}", text)).rstrip(".,")
    text = re.sub(r"^\((\w+)\)(?=_)", r"\1", text)  # (101)_2
    if "\\\\" in text and "\\begin" not in text:  # escaped twice
        text = text.replace("\\\\", "\\")
    text = re.sub(r"(?<!\\)\\[\[\]()]", " ", text).strip().rstrip(".,")
    if (text.count("$") - text.count("\\$")) % 2 == 0:  # a single sign is a currency
        text = re.sub(r"(?<!\\)\$", "", text).strip().rstrip(".,")
    text = _DEGREES.sub("°", _WRAPPED.sub(r" \1 ", text).translate(_SIGNS))
    text = re.sub(r"\\(?:left|right|displaystyle|quad|qquad|bigl?|bigr)(?![A-Za-z])", "", text)
    text = re.sub(r"(?<=\d)\{,\}(?=(?:\d{1,2}|\d{4,})(?!\d))", ".", text)  # 6{,}02 in Europe
    text = re.sub(r"(?<=\d)(?:\s?\{,\s?\}\s?|,\\!\s?|\\,|\\!)(?=\d{3}(?!\d))", ",", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", re.sub(r"(?<!\\)\\[ ,;:!]|~", " ", text).replace(r"\%", "%"))
    text = re.sub(r"(?<=\d)\*\*(?=\(?[-+]?\d)", "^", text)
    text = _LOWERED.sub(lambda m: f"_{{{_plain(m[0])}}}", text)
    text = _RAISED.sub(lambda m: f"^{{{_plain(m[0])}}}", text)
    return _VULGAR.sub(lambda m: f" {_plain(m[0])}", text).strip()


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-").replace("\u2044", "/")


@lru_cache(maxsize=8192)
def read_quantity(text: str) -> Quantity | None:
    """A plain real number with or without a unit, or None for any other text."""
    if len(text) > MAX_CHARS:
        return None
    if digits := literal(text):
        return _quantity(digits)
    text = cleaned(text)
    if digits := literal(text) or decimal_comma(text):
        return _quantity(digits)
    if text[-4:].isdecimal() and text[-5:-4] == " " and fields(text)[:1] == ("date",):
        return Quantity(Fraction(text[-4:]))
    if spelled := number_in_words(text):
        return _spelled(*spelled)
    if money := _MONEY.match(text):
        return _amount(money[1] + text[money.end() :], money[2] or money[3])
    text = _HOURS.sub(r"\1 h \2 min", text)
    text = _COMMA_BEFORE_UNIT.sub(lambda m: f"{m[1] or m[3]}.{m[2] or m[4]}", text)
    text = _FRACTION.sub(r" \1\2/\3\4", text).lstrip() if "\\frac" in text else text
    if (read := _number(text)) is None:
        return None
    number, end = read
    rest = text[end:]
    if not rest.strip():
        return number
    rest = rest.replace("\\$", "$")
    is_spaced = text[end - 1].isspace() or rest[0].isspace() or not rest[0].isalpha()
    unit = None if "\\" in rest else read_unit(rest, spaced=is_spaced)
    return Quantity(number.value, unit, number.is_decimal) if unit else _sum(text)


def _sum(text: str) -> Quantity | None:
    """``2 hours and 30 minutes``, with units from large to small."""
    texts = _PLUS.split(text) if len(text) < _MAX_DIGITS else []
    parts = [read_quantity(part) for part in texts] if len(texts) > 1 else []
    units = [part.unit for part in parts if part and part.unit]
    if not 1 < len(units) == len(parts) or len({unit.dimension for unit in units}) > 1:
        return None
    factors = [unit.factor for unit in units]
    if factors != sorted({*factors}, reverse=True):
        return None
    value = sum(part.value * part.unit.factor for part in parts if part and part.unit)
    return Quantity(value / factors[0], units[0], any(part.is_decimal for part in parts if part))


def _spelled(value: Fraction, rest: str) -> Quantity | None:
    """A number in words with at most one word after it, because "one of them is left" is not a quantity."""
    rest = rest.strip()
    unit = read_unit(rest, spaced=True) if rest else None
    is_quantity = not rest or (unit is not None and (" " not in rest or unit.remark != ""))
    return Quantity(value, unit) if is_quantity else None


def _amount(text: str, sign: str) -> Quantity | None:
    """An amount of money after the currency sign: ``$18 per day``, ``$5 million``."""
    currency = read_unit(sign, spaced=True)
    text = re.sub(r"^(\d+)(?= and \d+ cents?$)", r"\1 dollars", text)
    text = _LETTER_SCALE.sub(lambda m: f" {_LETTER_SCALES[m[1].upper()]}", text)
    for amount in (read_quantity(text), read_quantity(_REMARK.sub(r"\1", text))):
        if amount and currency and (amount.unit is None or amount.unit.dimension == currency.dimension):
            return Quantity(amount.value, currency, amount.is_decimal)
    return None


def _quantity(digits: str) -> Quantity | None:
    mantissa, _, exponent = digits.lower().partition("e")
    if len(mantissa) > _MAX_DIGITS or abs(int(exponent or 0)) > _MAX_EXPONENT:
        return None
    return Quantity(Fraction(digits), None, not mantissa.lstrip("+-").isdigit())


def _exact(text: str) -> Quantity:
    number = _quantity(literal(text.rstrip()) or "")
    if number is None:
        raise ValueError(text)
    return number


def _limited(text: str, limit: int) -> int:
    if abs(int(text)) > limit:
        raise ValueError(text)
    return int(text)


def _fraction(whole: str | None, top: str, bottom: str) -> Quantity | None:
    value = _exact(top).value / _exact(bottom).value
    return None if whole and not 0 < value < 1 else Quantity(int(whole or 0) + value)  # 2 3/2 is no mixed number


def _scientific(mantissa: str, ten: str) -> Quantity:
    number = _exact(mantissa)
    return Quantity(number.value * Fraction(10) ** _limited(ten, _MAX_EXPONENT), None, number.is_decimal)


def _repeating(whole: str, once: str, again: str) -> Quantity:
    rest = int(once or 0) + Fraction(int(again), 10 ** len(again) - 1)
    return Quantity(int(whole or 0) + rest / 10 ** len(once))


_FORMS: tuple[tuple[str, Callable[..., Quantity | None]], ...] = (
    (rf"(?:(\d+)\s+(?=\d+\s*/\s*\d))?(-?(?:{_DIGITS}))\s*{_OVER}\s*(-?(?:{_DIGITS}))(?![\d., ]*[:/])", _fraction),
    (rf"({_DIGITS})\s*(?:\*|\\times|\\cdot|x)\s*10\s*\^\s*\{{?\s*([-+]?\d+)\s*\}}?", _scientific),
    (r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?", _repeating),
    (r"([0-9A-Za-z]*\d[0-9A-Za-z]*)_\{?(\d{1,2})\}?", lambda digits, base: Quantity(Fraction(int(digits, int(base))))),
    (
        r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*([-+]?\d+)\s*\}?",
        lambda root, power: Quantity(Fraction(root) ** _limited(power, 4 * _MAX_EXPONENT // len(root))),
    ),
    (r"(\d+)!", lambda number: Quantity(Fraction(math.factorial(_limited(number, _MAX_FACTORIAL))))),
    (rf"((?:{_DIGITS})(?:[eE][-+]?\d{{1,3}}(?![A-Za-z\d]))?)", _exact),
)
_READERS = tuple((re.compile(pattern), read) for pattern, read in _FORMS)


def _number(text: str) -> tuple[Quantity, int] | None:
    """The number that a text begins with and its end, or None if it is too large or has no value."""
    sign = _SIGN.match(text)
    start = sign.end() if sign else 0
    match, read = next(((m, read) for form, read in _READERS if (m := form.match(text, start))), (None, _exact))
    if match is None or any(len(part or "") > _MAX_DIGITS for part in match.groups()):
        return None
    try:
        number = read(*match.groups())
    except (ValueError, ZeroDivisionError):
        return None
    if number is None:
        return None
    scale = _SCALE.match(text, match.end())
    factor = (-1) ** len(re.findall(r"-|minus|negative", text[:start])) * (_SCALES[scale[1]] if scale else 1)
    return Quantity(factor * number.value, None, number.is_decimal), (scale or match).end()


def read_unit(text: str, *, spaced: bool) -> Unit | None:
    """The unit in the words after a number, such as ``km/h``. If not `spaced`, a single letter is a variable."""
    text = _HYPHEN.sub("", text.strip().removesuffix(".")).strip()
    if PART.match(text):
        return None
    text = _MORE.sub(r"\2 \1", text)
    words, _, last = text.rpartition(" ")
    if re.fullmatch(MEASURE, last.lower()) and (words or spaced):
        unit = read_unit(words, spaced=spaced) if words else Unit(())
        return replace(unit, remark=last.lower()) if unit else None
    if text.lower() in _PERCENT_WORDS:
        return PERCENT
    if re.fullmatch(COUNTER, text) or _is_foreign_unit(text, spaced):
        return Unit(((text, 1),))
    text = _PHRASES.get(text.lower(), text)
    temperature = _TEMPERATURE.fullmatch(text)
    if temperature and temperature[1] not in "Kk":
        return Unit((("°" + temperature[1].upper(), 1),))
    powers: dict[str, int] = {}
    factor = Fraction(1)
    factors = [(part, k) for k, side in enumerate(_PER.split(text)) for part in _TIMES.split(side.strip("()"))]
    for part, k in factors if len(factors) <= _MAX_FACTORS else [("", 0)]:
        match = _PART.fullmatch(part)
        base = _base_unit(match[2]) if match else None
        if match is None or base is None or (len(text) == 1 and text.isalpha() and not spaced):
            return _counted(text) if spaced else None
        word = match[1] or match[3]
        power = (_POWERS[word.rstrip(".")] if word else int(match[4] or 1)) * (1 if k == 0 else -1)
        *parts, size = _DERIVED.get(base[0], f"{base[0]} 1 1").split()
        for name, inner in zip(parts[::2], map(int, parts[1::2]), strict=True):
            powers[name] = powers.get(name, 0) + power * inner
        factor *= (base[1] * Fraction(size)) ** power
    return Unit(tuple(sorted((name, power) for name, power in powers.items() if power)), factor)


def _is_foreign_unit(text: str, spaced: bool) -> bool:
    """True for one word of another language that is not "or", "not" and the like: ``42 яблока``, ``42个苹果``."""
    is_word = not text.isascii() and (_COUNTED_WORD.fullmatch(text) or (spaced and _FOREIGN_WORD.fullmatch(text)))
    return bool(is_word) and text.lower() not in _NO_UNITS and not _NO_WORD.search(text)


def _base_unit(word: str) -> tuple[str, Fraction] | None:
    lower = word.lower() if len(word) > 1 else word
    return _UNITS.get(word) or _UNITS.get(lower) or _UNITS.get(lower.removesuffix("s") if len(word) > 2 else word)


def _counted(text: str) -> Unit | None:
    """Ordinary words as a unit: eight apples are not eight oranges."""
    words = [word.lower().rstrip(".") for word in text.split()]
    if not re.fullmatch(r"[a-z]{3,}|[a-z.]{2,} [a-z. ]+|[a-z]\.[a-z]", " ".join(words)):
        return None
    if any(word in _NO_UNITS for word in words) and words != ["times"]:
        return None
    if not re.search("[aeiou]", words[0]):  # "xyz" is a product
        return None
    return Unit(((" ".join(words).removesuffix("s"), 1),))


def same_quantity(answer: Quantity, gold: Quantity, is_close: Callable[[Fraction, Fraction], bool]) -> bool:
    """True if two quantities are close by `is_close`. A missing unit or remark is assumed to be that of the other."""
    if answer.unit is not None and gold.unit is not None:
        factor, gold_factor = answer.unit.factor, gold.unit.factor
        same_kind = answer.unit.dimension in ((), gold.unit.dimension) or not gold.unit.dimension
        same_kind &= answer.unit.remark in ("", gold.unit.remark) or not gold.unit.remark
        return same_kind and is_close(answer.value * factor, gold.value * gold_factor)
    if (_is_percent(answer) or _is_percent(gold)) and is_close(_hundredth(answer), _hundredth(gold)):
        return True
    return is_close(answer.value, gold.value)


def same_decimal(answer: Quantity, gold: Quantity, tolerance: float) -> bool:
    """`same_quantity` of exact numbers, or with a relative difference up to `tolerance` if one of them is a decimal."""
    if not (answer.is_decimal or gold.is_decimal):
        tolerance = 0.0
    return same_quantity(answer, gold, lambda a, b: abs(a - b) <= Fraction(tolerance) * max(abs(a), abs(b)))


def _hundredth(quantity: Quantity) -> Fraction:
    return quantity.value / 100 if _is_percent(quantity) else quantity.value


def _is_percent(quantity: Quantity) -> bool:
    return quantity.unit is not None and quantity.unit.dimension == PERCENT.dimension
