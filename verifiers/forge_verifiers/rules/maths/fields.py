"""Dates, times of day, scores and ranges, whose numbers are compared one by one and not computed."""

from __future__ import annotations

import calendar
import re
from functools import lru_cache

from forge_verifiers.rules.languages import normalized

_MONTHS = {name[:length].lower(): k for k, name in enumerate(calendar.month_name) if k for length in (3, len(name))}
_DAY = r"\d{1,2}(?:st|nd|rd|th)?(?!\d)"
_MONTH = rf"(?i:{'|'.join(sorted(_MONTHS, key=len, reverse=True))})(?![A-Za-z])\.?"
DATE = rf"(?:{_MONTH}\s+{_DAY}(?:,?\s+\d{{4}})?|{_DAY}\s+(?:of\s+)?{_MONTH}(?:,?\s+\d{{4}})?)(?!\d)"
"""A date with the name of a month, such as ``July 4, 1776`` and ``4th of July``."""
_DATE = re.compile(rf"(?:\w+day,?\s+)?(?P<date>{DATE})")
_CLOCK = re.compile(r"(\d{1,2})(?::([0-5]\d)(?::([0-5]\d))?)?\s*(?:([ap])\.?m\b\.?|o'clock)", re.IGNORECASE)
_BRACED = re.compile(r"(?:\\(?:text|mathrm)\s?)?\{\s*([^{}]{1,20}?)\s*\}")
_FIELDS = re.compile(r"\d+(?:-\d+)+|\d+/\d+/\d+|\d{1,2}:[0-5]\d(?::[0-5]\d)?")
_CURRENCIES = {"dollar": "$", "euro": "\u20ac", "pound": "\u00a3"}
_PRICE = r"(?:\\?([$\u20ac\u00a3\u00a5]))?\s?(\d[\d,]*(?:\.\d+)?)\s?([\u20ac\u00a3\u00a5])?"
_PRICES = re.compile(rf"{_PRICE}\s?-\s?{_PRICE}(?:({'|'.join(_CURRENCIES)})s?)?")
"""A range of prices such as ``$5-$10``, which is no difference of two amounts."""
_SIGNS = str.maketrans({"\u2013": "-", "\u2212": "-", "\u2019": "'"})


@lru_cache(maxsize=8192)
def fields(text: str) -> tuple[str | float, ...]:
    """Kind and numbers of a date, a time of day, a score or a range, or an empty tuple for any other text.

    A date is ``("date", year, month, day)``, with year 0 if it has none. A time of day counts 24 hours.
    """
    whole = _BRACED.sub(r"\1", normalized(text)).strip().translate(_SIGNS).replace(" to ", "-")
    text = whole.strip("$ ")
    if match := _DATE.fullmatch(text):
        day, *year = map(int, sorted(re.findall(r"\d+", match["date"]), key=len))
        month = next(_MONTHS[word] for word in re.findall("[a-z]+", match["date"].lower()) if word in _MONTHS)
        return "date", *(year or [0]), month, day
    if match := _CLOCK.fullmatch(text):
        hour = int(match[1]) % 12 + 12 * (match[4].lower() == "p") if match[4] else int(match[1])
        return ":", hour, *(int(part or 0) for part in match.groups()[1:3][: 1 + bool(match[3])])
    if match := _PRICES.fullmatch(text if whole.endswith("$") else whole):
        low, high = (float(match[number].replace(",", "")) for number in (2, 5))
        signs = set(filter(None, (*match.group(1, 3, 4, 6), _CURRENCIES.get(match[7]))))
        if len(signs) == 1 and low < high:
            return "price", *map(str, signs), low, high
    if not _FIELDS.fullmatch(text):
        return ()
    sign = text.lstrip("0123456789")[0]
    numbers = [*map(int, text.split(sign))]
    return ("date" if sign == "-" and len(numbers) == 3 and numbers[0] > 999 else sign), *numbers


def same_fields(answer: tuple[str | float, ...], gold: tuple[str | float, ...]) -> bool:
    """True for equal results of `fields`. A range of prices equals the range of numbers."""
    kinds = {answer[:-2], gold[:-2]}
    is_range = ("-",) in kinds and any(kind[:1] == ("price",) for kind in kinds)
    return answer == gold or (is_range and answer[-2:] == gold[-2:])
