r"""Rewrites formulas in LaTeX or plain text as LaTeX for math-verify's parser, without any computation."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache

from forge_verifiers.rules.languages import OTHER_SCRIPTS
from forge_verifiers.rules.maths.quantity import MAX_CHARS, Quantity, Unit, cleaned, read_quantity, read_unit

_NAMES = (
    "sqrt|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|sec|csc|cot|ln|lg|log|pi|infty|alpha|beta|gamma|delta|epsilon"
    "|theta|lambda|mu|rho|sigma|tau|phi|omega"
)
_NAME = re.compile(rf"(?<![A-Za-z\\])({_NAMES})(?![A-Za-z])")
_LOW = {">": "<", ">=": r"\le ", r"\ge": r"\le ", r"\geq": r"\le ", r"\gt": "<"}
_BOUND = re.compile(r"\s*([a-z])\s*(>=|<=|[<>]|\\(?:geq?|leq?|gt|lt)(?![A-Za-z]))\s*([^<>]+?)\s*")


def _matrix(rows: str) -> str:
    cells = re.sub(r"\]\s*,\s*\[", r"\\\\", rows.removesuffix("]")).replace(",", "&")
    return rf"\begin{{pmatrix}}{cells}\end{{pmatrix}}"


def _ordered(match: re.Match[str]) -> str:
    """``(y, x) = (2, 1)`` as the tuple of the values in the order of the names."""
    names, values = match[1].split(","), match[2].split(",")
    if len(names) != len(values):
        return match[0]
    return f"({','.join(value for _, value in sorted(zip(map(str.strip, names), values, strict=True)))})"


def _between(match: re.Match[str]) -> str:
    """``x > 0 and x < 1`` as ``0 < x < 1``. Other conjunctions have no notation here and are not read."""
    sides = [side for part in match.groups() if (side := _BOUND.fullmatch(part))]
    if len(sides) < 2 or sides[0][1] != sides[1][1]:
        return "$"
    low, high = sorted(sides, key=lambda side: side[2] in _LOW, reverse=True)
    is_range = low[2] in _LOW and high[2] not in _LOW
    return f"{low[3]}{_LOW[low[2]]}{low[1]}{high[2]}{high[3]}" if is_range else "$"


_COMMANDS = (
    r"\mathbb{R}|\mathbb{Z}|\mathbb{N}|\mathbb{Q}|\le |\ge |\neq |\cup |\cap |\in |\pi |\pm |\infty |\emptyset |/"
)
_LATEX_OF = str.maketrans(dict(zip("ℝℤℕℚ≤≥≠∪∩∈π±∞∅÷", _COMMANDS.split("|"), strict=True)))
_LATEX_OF |= str.maketrans({"′": "'", "″": "''", "λ": r"\lambda ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta "})
_RELATION = re.compile(r"[<>\u2264\u2265\u2248]|!=|\\(?:le|ge|lt|gt|ne|neq|leq|geq|approx|in)(?![A-Za-z])")
_Spelling = str | Callable[[re.Match[str]], str]
_RULES: tuple[tuple[str, _Spelling], ...] = (
    (r"\s+", " "),
    (r"\*\*", "^"),
    (r"\\(?:mathbb|mathbf|Bbb)\s*\{?\s*([RZNQC])\s*\}?|\\([RZNQC])(?![A-Za-z])", r"\\mathbb{\1\2}"),
    (r"^\s*\\?\{\s*([a-z])\s*(?:\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\\vert|\||:)(.*\1.*?)\\?\}\s*$", r"\2"),
    (r"(?i)^\s*(?:all|every|any)\s+(?:the\s+)?reals?(?:\s+numbers?)?(?=\s*$|\s+except)", r"\\mathbb{R}"),
    (r"(?<=\\mathbb\{R\})\s+except\s+(?:for\s+)?(?:[a-z]\s*=\s*)?([^{}]+)$", r"\\setminus\\{\1\\}"),
    (r"\\backslash(?![A-Za-z])", r"\\setminus "),
    (r"\\bigcup(?![A-Za-z])", r"\\cup "),
    (r"\\[lr]brace(?![A-Za-z])", lambda m: r"\{" if "l" in m[0] else r"\}"),
    (r"(?<![\\A-Za-z_^}])\{([^{}\\]*,[^{}\\]*)\}", r"\\{\1\\}"),
    (r"\\langle(?![A-Za-z])", "("),
    (r"\\rangle(?![A-Za-z])", ")"),
    (r"\\(?:vee|lor)(?![A-Za-z])", " or "),
    (r"\\(?:wedge|land)(?![A-Za-z])", " and "),
    (r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\choose(?![a-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"∛\s*(\d+|[A-Za-z])|cbrt\s*\(([^()]*)\)", r"\\sqrt[3]{\1\2}"),
    (r"(?<![A-Za-z\\])log(2|10)\s*(?=\()", r"\\log_{\1}"),
    (r"\\(begin|end)\{smallmatrix\}", r"\\\1{pmatrix}"),
    (r"^\s*\[\s*\[([^\[\]]*)\]((?:\s*,\s*\[[^\[\]]*\])*)\s*\]\s*$", lambda m: _matrix(f"{m[1]}]{m[2]}")),
    (  # k of "k, k \in Z"; integers that meet an inequality stay as they are
        r"^([^<>]+)(?:,\s*\(?|\s*\()[a-z]\s*\\in\s*\\mathbb\{Z\}\s*\)?$",
        lambda m: m[0] if _RELATION.search(m[1]) else m[1],
    ),
    (r"(?<=[\[\](])\s*([^;()\[\]]+);([^;()\[\]]+)(?=[\[\])])", lambda m: m[0].replace(",", ".").replace(";", ",")),
    (r"(^|\\cup|\\in)\s*\](?=[^\[\]]+[\[\]])", r"\1("),  # ]0, 1[
    (r"(?<=[^\s(\[,])\s*\[(?=\s*(?:$|\\cup))", ")"),
    (r"^[^()]*(?:[\[\]]|\\infty).*$", lambda m: re.sub(r"(?<=[\])])\s*or\s*(?=[\[(])", r"\\cup ", m[0])),
    (r"^\s*\(([a-z](?:\s*,\s*[a-z])+)\)\s*=\s*\(([^()]*)\)\s*$", _ordered),
    (r"^(.*?(?:[<>]|\\(?:[gl]eq?|[gl]t)(?![A-Za-z])).*?)\s*(?<![A-Za-z\\])and\s+(.*)$", _between),
    (r"\\varnothing|^\s*\\?\{\s*\\?\}\s*$", r"\\emptyset "),
    (r"\\(?:leq?slant|leqq)(?![A-Za-z])|=<|<=", r"\\le "),
    (r"\\(?:geq?slant|geqq)(?![A-Za-z])|=>|>=", r"\\ge "),
    (r"!=", r"\\neq "),
    (r"(?<=[)\]}])\s*U\s*(?=[(\[{\\])", r"\\cup "),
    (r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
    (r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
    (r"√", r"\\sqrt "),
    (r"\\(?:angle|triangle)(?![A-Za-z])", ""),
    (r"(?<![A-Za-z\\])a(sin|cos|tan)(?=\s*\()", r"arc\1"),
    (r"(?<![A-Za-z\\])(?:minus|negative)\s+(?=\d)", "-"),
    (r"=([^≈]*)(?:≈|\\approx(?![A-Za-z])).*", r"=\1"),  # x = 1/3, approximately 0.33
    (r"(?<=\S)\s*(?:≈|\\approx(?![A-Za-z]))", "="),
    (r"^\s*(?:≈|\\approx(?![A-Za-z]))", ""),
    (r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])", ""),
    (r"^\s*([A-Za-z])\^\s*(?:-1|\{\s*-1\s*\})\s*\(\s*[A-Za-z]\s*\)\s*=", r"\1_{inv}="),
    (r"^\s*([A-Za-z]'*)\s*\(\s*[A-Za-z]\s*\)\s*=", r"\1="),  # f(x) = ...
    (r"=\s*([A-Za-z])\s*\(\s*[A-Za-z]\s*\)\s*$", r"=\1"),
    (r"(?<=\\mathbb\{[RZNQC]\})\s*-\s*(?=\\\{)", r"\\setminus "),
    (r"(?:,\s*)?(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ","),
    (r"\\begin\{array\}\s*(?:\{[^{}]*\})?", r"\\begin{matrix}"),
    (r"\\end\{array\}", r"\\end{matrix}"),
    (r"[(\[]\s*\\begin\{matrix\}", r"\\begin{pmatrix}"),
    (r"\\end\{matrix\}\s*[)\]]", r"\\end{pmatrix}"),
    (r"(?<![\d.,([])\b(\d{1,3}(?:,\d{3})+)(?![\d,])", lambda m: m[1].replace(",", "")),
    (
        r"(?<![\d.^_/{}])(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(?<![\d.^_/{}])(\d+)\s+(\d+)\s*/\s*(\d+)",
        lambda m: rf"({m[1] or m[4]}+\frac{{{m[2] or m[5]}}}{{{m[3] or m[6]}}})",
    ),
    (r"\|([^|]*)\|", r"\\left|\1\\right|"),
    (r"(\d+(?:\.\d+)?)\s*°", r"(\\frac{\1\\pi}{180})"),
    (r"(?<!\\)%", r"\\%"),
)
_SPELLED = tuple((re.compile(pattern), spelling) for pattern, spelling in _RULES)
_PRIMED = re.compile(
    r"(\\[A-Za-z]+|[A-Za-z])(?:_\s*(?:(\w)|\{([^{}]*)\}))?(?:('+)|\^\s*(?:\{\s*((?:\\prime\s*|')+)\}|(\\prime(?![A-Za-z]))))"
)
_INDEXED = re.compile(r"(?<![A-Za-z\\])([EIe])_\s*(?:(\w)|\{([^{}]*)\})")  # math-verify reads no such index of these
_POWER_T = re.compile(r"\^\s*(?:T(?![A-Za-z])|\{\s*T\s*\})")  # which math-verify reads as a transposed matrix
_MAX_DEPTH = 30
_LOG = re.compile(r"\\log(?![A-Za-z])(?!\s*_)")
_CALL = re.compile(r"(\\sqrt|\^|(?<![A-Za-z\\])(?:abs|exp))\s*\(")
_BRACES = {"abs": (r"\left|", r"\right|"), "exp": ("e^{", "}")}
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{5,}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{\w+\}|\\(?:mathbb|overline|operatorname|variable)\{\w+\}")
_NOT_READ = re.compile(r"\d\s+[\d.]|\d\s*_|(?<![\w.])0[xXbo]\w")
"""Two numbers without an operator, and numbers with an index or a prefix, which math-verify would misread."""
_EXPENSIVE = re.compile(
    r"\^[\s{(]*\d+\s*\^[\s{(]*\d+\s*\^|\d{5,}\s*!|!\s*!|\^\s*\{?\s*[-+(]?\s*\d{5,}|\\binom\s*\{?\s*\d{5,}"
)
_COUNTED = re.compile(r"((?:[^A-Za-z\\%$€£¢°]|\\(?:frac|sqrt|pi|binom)(?![A-Za-z]))+)\s+([A-Za-z$€£¢°%][^\\=]*)")
_LETTERS_ONLY = re.compile(r"(?:[^\W\d_]|[\s,.()'\u2019-])*")
_FOREIGN = re.compile(f"[{OTHER_SCRIPTS}]")
_VARIABLE = re.compile(
    r"(?:m?\\(?:angle|triangle)\s*)?\\?(?:[A-Za-z\u0394]+|[\u03b1-\u03bf\u03c1-\u03c9])(?:_\{?\w+\}?)?'?"
    r"\s*(?:\(\s*\w+(?:\s*,\s*\w+)*\s*\))?|\|\s*[A-Z]{2}\s*\||\[[A-Z][\w+^-]*\]|\\overline\s*\{\s*[A-Z]{2}\s*\}"
)


@lru_cache(maxsize=8192)
def latex(text: str) -> str | None:
    """The formula in LaTeX, or None for words and for texts that are too large for an answer."""
    if len(text) > MAX_CHARS:
        return None
    text = cleaned(text).translate(_LATEX_OF)
    for pattern, spelling in _SPELLED:
        text = pattern.sub(spelling, text)
    text = _NAME.sub(r"\\\1 ", text)
    text = _LOG.sub(r"\\ln ", re.sub(r"\\lg(?![A-Za-z])", r"\\log_{10} ", text))
    text = re.sub(r"\\log\s*_\s*(\d+)", r"\\log_{\1}", text)
    text = _INDEXED.sub(_variable, _PRIMED.sub(_with_primes, text))
    text = text if r"\begin" in text else _POWER_T.sub(r"^{\\variable{T}}", text)
    text = _braced(text)
    if text.startswith("{") and text.endswith("}"):
        text = f"\\{{{text[1:-1]}\\}}"
    plain = _ENVIRONMENT.sub(" ", text)
    is_large = _depth(text) > _MAX_DEPTH or _EXPENSIVE.search(text)
    if "$" in text or is_large or _WORD.search(plain) or _NOT_READ.search(text):
        return None
    return text.strip() or None


def _with_primes(match: re.Match[str]) -> str:
    r"""``x''`` as ``x_{\prime\prime}``, because math-verify ignores primes."""
    primes = match[4] or match[5] or match[6]
    number = primes.count("'") + primes.count("prime")
    return f"{match[1]}_{{{match[2] or match[3] or ''}" + number * r"\prime" + "}"


def _variable(match: re.Match[str]) -> str:
    index = re.sub(r"\W", "", match[2] or match[3])
    return rf"\variable{{{match[1]}_{index}}}" if index else match[0]


def _depth(text: str) -> int:
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _braced(text: str) -> str:
    r"""``sqrt(...)`` and ``^(...)`` with braces instead of parentheses, ``abs(...)`` and ``exp(...)`` in LaTeX."""
    for _ in range(20):
        match = _CALL.search(text)
        end = _closing(text, match.end()) if match else -1
        if match is None or end < 0:
            break
        opening, closing = _BRACES.get(match[1], (match[1] + "{", "}"))
        text = text[: match.start()] + opening + text[match.end() : end] + closing + text[end + 1 :]
    return text


def _closing(text: str, start: int) -> int:
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] in "([") - (text[at] in ")]")
        if depth == 0:
            return at
    return -1


def is_words(text: str) -> bool:
    """True if a text looks like words, so that its letters are not factors of a product."""
    text = cleaned(text)
    words = re.findall(r"[^\W\d_]+", text)
    is_long = any((len(word) > 2 and not _NAME.fullmatch(word)) or _FOREIGN.search(word) for word in words)
    is_set = re.fullmatch(r"(?:all|every|any)\s.*real.*", text, re.IGNORECASE)
    return bool(is_long and _LETTERS_ONLY.fullmatch(text) and not is_set)


def assigned(text: str) -> tuple[str, Quantity | None]:
    """Name and value of ``x = 5``, ``5 = x`` or ``AB = 2 + 3 = 5``. An empty name for a plain number."""
    if "=" not in text:
        return "", read_quantity(text)
    text = cleaned(text)
    sides = [side.strip() for side in text.split("=")]
    is_list = re.search(r";|\b(?:or|and)\b", text) or any("," in side for side in sides[:-1])
    if not is_list and not _RELATION.search(text):
        if len(sides) > 2 and (last := read_quantity(sides[-1])):  # I = V/R = 3 A
            return "".join(sides[0].split()), last
        if _VARIABLE.fullmatch(sides[0]):
            return "".join(sides[0].split()), read_quantity(sides[-1])
        if len(sides) == 2 and _VARIABLE.fullmatch(sides[1]):
            return "".join(sides[1].split()), read_quantity(sides[0])
    return "", None


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""A formula or exact number and the unit after it, as in ``3\sqrt{5} \text{ cm}``."""
    if number := read_quantity(text):
        top, bottom = number.value.numerator, number.value.denominator
        if number.is_decimal:
            return f"{Decimal(top) / Decimal(bottom):f}", number.unit
        return (str(top) if bottom == 1 else rf"\frac{{{top}}}{{{bottom}}}"), number.unit
    text = cleaned(text)
    match = _COUNTED.fullmatch(text)
    unit = read_unit(match[2], spaced=True) if match and re.search(r"\d|\\pi", match[1]) else None
    return (match[1], unit) if match and unit else (text, None)
