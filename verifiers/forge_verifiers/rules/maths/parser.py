r"""Reads mathematical answers, LaTeX or plain: expressions, their units, and what lists, brackets and relations make.

In: text. Out: an `Answer`, or `NotMathsError`. Waits for nothing; size and depth are bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from forge_verifiers.rules.maths.expression import (
    CALLS,
    GREEK,
    Node,
    NotMathsError,
    literal,
    read_expression,
    variables,
)

MAX_CHARS = 1_000
"""Longer texts are no answers."""
_MAX_PARTS = 64
_MAX_LEVELS = 5
_MAX_REPEATED = 50


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An expression, or several and what holds them together."""

    kind: str
    """"value"; a relation of two parts, "=", "!=", "<" or "<="; "set", "union", "ratio", "matrix", "row"; or the
    brackets of a tuple or an interval, such as "(]"."""
    parts: tuple[Answer, ...] = ()
    node: Node | None = None
    """The expression of a value; else None."""
    unit: Unit | None = None
    """What stands behind a value; None where nothing does."""
    name: str = ""
    """The variable that lies in an interval or in a set, where the answer said."""
    is_words: bool = False
    """Whether it looks like words: their letters must not be taken for factors of a product on both sides."""


_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|tt|normal)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{([^{}]*)\}")
_COMMANDS = {
    name: sign
    for names, sign in (
        ("left right displaystyle quad qquad limits big Big bigg Bigg bigl bigr Bigl Bigr ; : , !", " "),
        ("dfrac tfrac cfrac", r"\frac"),
        ("dbinom tbinom", r"\binom"),
        ("cdot times", "*"),
        ("div", "/"),
        ("vert lvert rvert mid", "|"),
        ("langle", "("),
        ("rangle", ")"),
        ("le leq leqslant", "<="),
        ("ge geq geqslant", ">="),
        ("ne neq", "!="),
        ("lt", "<"),
        ("gt", ">"),
        ("pm", "±"),
        ("mp", "∓"),
        ("cup", "\u222a"),
        ("in", "∈"),
        ("approx", "≈"),
        ("emptyset varnothing", r"\{\}"),
        ("degree", "°"),
        ("( ) angle", ""),
    )
    for name in names.split()
} | {" ": " "}
_COMMAND = re.compile(r"\\([A-Za-z]+|[;:,! ()])")
_SIGNS = str.maketrans(
    {"\u00d7": "*", "\u00b7": "*", "÷": "/", "\u2212": "-", "\u2013": "-", "π": r"\pi ", "√": r"\sqrt ", "≤": "<="}
    | {"≥": ">=", "≠": "!=", "∅": r"\{\}", "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "\u00a0": " "}
)
_RAISED = re.compile("[\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_LOWER = str.maketrans("\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "-0123456789")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
_THIN = re.compile(r"(?<=\d)(?:\s?\{,\s?\}\s?|,\\!\s?|\\,)(?=\d{3}(?!\d))")  # 12{,}500
_SPELLED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<=\d)\s+out\s+of\s+(?=\d)"), "/"),
    (re.compile(r"(?<=\d)\s*x\s*(?=10\s*\^)"), "*"),
    (re.compile(r"(?<![A-Za-z])(?:minus|negative)\s+(?=\d)"), "-"),
    (re.compile(r"=([^≈]*)≈.*"), r"=\1"),  # x = 1/3, which is about 0.33
    (re.compile(r"(?<=\S)\s*≈"), "="),
    (re.compile(r"^\s*(?:[A-Za-z]\s*∈|≈)"), ""),
    (re.compile(r"^\s*([A-Za-z])\s*\(\s*[A-Za-z]\s*\)\s*="), r"\1="),  # f(x) = ...
    (re.compile(r"(?:,\s*)?(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"), ","),
)
_SCALES = {"dozen": "12", "hundred": "100", "thousand": "10^3"} | {"million": "10^6", "billion": "10^9"}
_SCALED = re.compile(rf"(?<=\d)\s+({'|'.join(_SCALES)})(?![A-Za-z])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{?(\d+)\}?")
_MIXED = re.compile(
    r"(?<![\d.^_/{}])(\d+)(?:\s*\\frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)(\d))|\s+(\d+)\s*/\s*(\d+))(?![\d.])"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_COMMA_BEFORE_UNIT = re.compile(  # 3,5 km; two numbers have one unit each
    r"^([-+\u2212]?\d+),(\d{1,2}|\d{4,})(?=\s?(?:\\?%|[€£]|(?:[ckm]?m|[km]?g|[hls]|percent|euros?)\b))"
    r"|^([-+\u2212]?[€£]\s?\d+),(\d\d)$"
)
_MATRIX = re.compile(
    r"(?:\\left\s*[(\[]\s*)?\\(begin)\{(?:[pbB]?matrix|array)\}(?:\{[clr|]*\})?"
    r"|\\end\{(?:[pbB]?matrix|array)\}(?:\s*\\right\s*[)\]])?"
)
_MONEY = re.compile(r"^\s*([-+]?)\s*\\?([$€£])\s*(?=[\d.])")
_REMARKED = re.compile(r"(?<=\d)\s+[A-Za-z]{2}[A-Za-z\s]*$")
_COUNTED = re.compile(
    r"((?:[^A-Za-z\\%$€£¢°]|\\(?:frac|sqrt|pi|binom)(?![A-Za-z]))*)((?:\\[$%]|[A-Za-z%$€£¢°])[^\\=]*)"
)
_NAME = re.compile(r"[A-Za-z](?:_\w|_\{\w+\})?|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)")
_RELATION = re.compile(r"(!=|<=|>=|=<|=>|=|<|>)")
_FLIPPED = {">": "<", ">=": "<="}
_WORD = re.compile(r"[A-Za-z]+")
_THIN_SPACES = re.compile(r"\\[ ,;:!]|~")
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d|\s)")  # "1 1/2" is not "11/2"


@lru_cache(maxsize=8192)
def parse_answer(text: str) -> Answer:
    """Reads an answer.

    Raises:
        NotMathsError: the text is no mathematics that is read here, or too large.
    """
    if len(text) > MAX_CHARS:
        raise NotMathsError(f"{len(text)} characters; at most {MAX_CHARS} are read")
    clean = _clean(text)
    answer = _Structure().read(clean)
    words = _WORD.findall(clean)
    is_words = not re.search(r"[^A-Za-z\s,.()]", clean) and any(len(w) > 2 and w not in CALLS for w in words)
    return replace(answer, is_words=True) if is_words else answer


def plain_text(text: str) -> str:
    r"""The text without ``\text{}``, dollar signs, quotation marks, case, a closing stop, spaces but in numbers."""
    text = _WRAPPED.sub(r"\1", text.replace("$", ""))
    return _SPACES.sub("", _THIN_SPACES.sub(" ", text)).strip("\"'").rstrip(".").casefold()


def _clean(text: str) -> str:
    text = text.strip().rstrip(".,")
    if text.count("$") - text.count("\\$") & 1 == 0:  # $...$ are delimiters, one sign alone is money
        text = re.sub(r"(?<!\\)\$", "", text).rstrip(".,")
    if text.startswith("\\[") and text.endswith("\\]"):
        text = text[2:-2].rstrip().rstrip(".,")
    if text.isascii() and text.isalnum():
        return text
    if digits := literal(text):
        return digits
    text = _COMMA_BEFORE_UNIT.sub(lambda m: f"{m[1] or m[3]}.{m[2] or m[4]}", text)
    text = _THIN.sub("", text)
    if "\\\\" in text and "\\begin" not in text:  # escaped twice
        text = text.replace("\\\\", "\\")
    if "\\" in text:
        text = _DEGREES.sub("°", _WRAPPED.sub(r" \1 ", text))
        if "\\begin" in text:
            text = _MATRIX.sub(lambda m: "⟦" if m[1] else "⟧", text).replace("\\\\", ";")
        text = _COMMAND.sub(lambda m: _COMMANDS.get(m[1], m[0]), _REPEATING.sub(_unrepeated, text))
    if not text.isascii():
        text = _RAISED.sub(lambda m: f"^{{{m[0].translate(_LOWER)}}}", text).translate(_SIGNS)
    for pattern, spelling in _SPELLED:
        text = pattern.sub(spelling, text)
    text = _SCALED.sub(lambda m: f"*{_SCALES[m[1]]}", _MIXED.sub(_unmixed, text)).replace("~", " ").strip()
    if not (
        text.startswith(("(", "[", "{", "\\{")) and text.endswith((")", "]", "}"))
    ):  # within brackets commas separate
        text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    return text


def _unrepeated(found: re.Match[str]) -> str:
    whole, once, again = found.groups()
    if len(once + again) > _MAX_REPEATED:
        return str(found[0])
    rest = Fraction(int(again), 10 ** len(again) - 1) + int(once or 0)
    value = int(whole[:_MAX_REPEATED] or 0) + rest / 10 ** len(once)
    return f"({value})"


def _unmixed(found: re.Match[str]) -> str:
    whole, *pairs = found.groups()
    top, bottom = (part for part in pairs if part is not None)
    return f"({whole}+{top}/{bottom})" if 0 < int(top[:9]) < int(bottom[:9]) else str(found[0])


class _Structure:
    """Lists, brackets, relations, down to single values; counts them."""

    def __init__(self) -> None:
        self.num_values = 0

    def read(self, text: str, level: int = 0) -> Answer:
        """One answer, or a list without brackets: a set."""
        parts = [one for part in _split(text, ",") for one in _signs(part)]
        if len(parts) == 1:
            return self.single(parts[0], level)
        answers = tuple(self.single(part, level) for part in parts)
        names = {solved(answer) for answer in answers} - {""}
        if len(names) == 1:  # x = 1 or x = 2
            answers = tuple(answer.parts[1] if solved(answer) else answer for answer in answers)
        return Answer(kind="set", parts=answers, name=names.pop() if len(names) == 1 else "")

    def single(self, text: str, level: int) -> Answer:
        text = text.strip()
        if level > _MAX_LEVELS:
            raise NotMathsError(f"brackets of lists more than {_MAX_LEVELS} deep")
        sides = _RELATION.split(text)
        if len(sides) > 1:
            return self.relation(sides, level)
        pieces = _split(text, "\u222a")
        if len(pieces) > 1:
            return Answer(kind="union", parts=tuple(self.single(piece, level + 1) for piece in pieces))
        held = self.held(text, level)
        if held is not None:
            return held
        ratio = _split(text, ":")
        if len(ratio) > 1:
            return self.ratio(ratio)
        return self.value(text)

    def held(self, text: str, level: int) -> Answer | None:
        """What brackets around all of the text hold; None where they only group, or are none."""
        if text[:1] == "⟦" and text.find("⟧") == len(text) - 1:
            rows = [row for row in text[1:-1].split(";") if row.strip()]
            cells = (Answer(kind="row", parts=tuple(self.value(c) for c in row.split("&"))) for row in rows)
            return Answer(kind="matrix", parts=tuple(cells))
        is_set = text[:2] == "\\{" and text[-2:] == "\\}"
        text = text.replace("\\{", "{").replace("\\}", "}")
        if text[:1] not in {"(", "[", "{"} or text[-1:] not in {")", "]", "}"} or _closing(text) != len(text) - 1:
            return None
        inner = text[1:-1].strip()
        if is_set and not inner:
            return Answer(kind="set")
        parts = [one for part in _split(inner, ",") for one in _signs(part)]
        if len(parts) == 1 and not is_set:
            return None
        kind = "set" if text[0] == "{" else text[0] + text[-1]
        return Answer(kind=kind, parts=tuple(self.single(part, level + 1) for part in parts))

    def relation(self, sides: list[str], level: int) -> Answer:
        texts, signs = [text.strip() for text in sides[::2]], [{"=<": "<=", "=>": ">="}.get(s, s) for s in sides[1::2]]
        if {*signs} == {"="}:
            texts, signs = [texts[0], texts[-1]], ["="]  # AB = 2 + 3 = 5
        if signs == ["="] and _NAME.fullmatch(texts[0]):  # x = 2 + 3 = 5
            right = self.single(texts[-1], level + 1)
            if right.kind != "value" or texts[0].startswith("("):
                return replace(right, name=right.name or "".join(texts[0].split()))  # (x, y) = (1, 2)
            return Answer(kind="=", parts=(self.value(texts[0]), right))
        if len(signs) == 1:
            ends = self.value(texts[0]), self.value(texts[1])
            if signs[0] in _FLIPPED:
                return Answer(kind=_FLIPPED[signs[0]], parts=ends[::-1])
            return Answer(kind=signs[0], parts=ends)
        if len(signs) == 2 and _NAME.fullmatch(texts[1]):
            if {*signs} <= {">", ">="}:
                texts, signs = texts[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
            if {*signs} <= {"<", "<="}:
                kind = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
                return Answer(kind=kind, parts=(self.value(texts[0]), self.value(texts[2])), name=texts[1])
        raise NotMathsError("relations that are not read here")

    def ratio(self, texts: list[str]) -> Answer:
        first, *rest = (self.value(text) for text in texts)
        if len(rest) == 1:
            return replace(first, node=_divided(first, rest[0]))
        return Answer(kind="ratio", parts=tuple(replace(first, node=_divided(part, first)) for part in rest))

    def value(self, text: str) -> Answer:
        self.num_values += 1
        if self.num_values > _MAX_PARTS:
            raise NotMathsError(f"more than {_MAX_PARTS} values")
        text, unit = _counted(text)
        return Answer(kind="value", node=read_expression(text), unit=unit)


def interval(answer: Answer) -> Answer:
    """``x > 7`` as the interval from 7 to infinity; other answers as they are."""
    if answer.kind == "set":
        parts = tuple(interval(part) for part in answer.parts)
        names = {part.name for part in parts}
        if len(names) == 1 and names != {""}:  # x < 1 or x > 4
            return Answer(kind="union", parts=parts, name=names.pop())
    if answer.kind not in {"<", "<="}:
        return answer
    low, high = answer.parts
    if low.node is None or high.node is None or bool(variables(low.node)) == bool(variables(high.node)):
        return answer
    infinity = Answer(kind="value", node=Node(op="constant", name="infinity"))
    minus = Answer(kind="value", node=Node(op="neg", args=(Node(op="constant", name="infinity"),)))
    if low.node.op == "var":
        return Answer(kind="(" + ("]" if answer.kind == "<=" else ")"), parts=(minus, high), name=low.node.name)
    if high.node.op == "var":
        return Answer(kind=("[" if answer.kind == "<=" else "(") + ")", parts=(low, infinity), name=high.node.name)
    return answer


def solved(answer: Answer) -> str:
    """The variable in ``x = 5``; empty where the answer is not of this form."""
    node = answer.parts[0].node if answer.kind == "=" else None
    return node.name if node is not None and node.op == "var" else ""


def _divided(top: Answer, bottom: Answer) -> Node:
    if top.node is None or bottom.node is None:
        raise NotMathsError("a ratio of something else than values")
    return Node(op="/", args=(top.node, bottom.node))


def _counted(text: str) -> tuple[str, Unit | None]:
    """Parts an expression from the unit behind it, or the currency before it."""
    text = text.strip()
    money = _MONEY.match(text)
    if money:
        amount, _ = _counted(text[money.end() :])  # $18 per day, $18 dollars
        return money[1] + _REMARKED.sub("", amount), read_unit(money[2], spaced=True)
    if text[-1:].isdigit() and text[-2:-1] != "^":
        return text, None
    counted = _COUNTED.fullmatch(text)
    if counted is None or not re.search(r"\d|\\pi", counted[1]):
        return text, None
    unit = read_unit(counted[2].replace("\\", ""), spaced=counted[1][-1:].isspace() or not counted[2][0].isalpha())
    return (text, None) if unit is None else (counted[1], unit)


def _signs(text: str) -> list[str]:
    """``2 ± 3`` is two answers."""
    if "±" not in text and "∓" not in text:
        return [text]
    return [text.replace("±", plus).replace("∓", minus) for plus, minus in (("+", "-"), ("-", "+"))]


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators outside of brackets."""
    if separator not in text:
        return [text]
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        if sign in "([{⟦":
            depth += 1
        elif sign in ")]}⟧":
            depth -= 1
        elif sign == separator and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _closing(text: str) -> int:
    """Where the bracket that opens the text closes; -1 where it does not."""
    depth = 0
    for at, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0:
            return at
    return -1


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
