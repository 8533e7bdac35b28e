r"""Extracts final answers from texts and gold answers from trajectories, for all rules that compare answers.

The first of these sources that is present counts:

1. *marked*: ``\boxed{}``, ``<answer></answer>``, ``#### 42``, "the answer is ...", "**Answer:** ...", "42 is the
   answer". The last mark counts, unless the following text corrects it ("Wait, no: 13") or doubts it ("or maybe 42").
2. *statement*: a short statement, "I think it's 42", or the end of a sentence, "6 times 7 is 42".
3. *fallback*: the last value of the last sentence with a value.

A value is never split: "3-5" is not 5, and "41 or 42" is neither. A denied value, "it is not 42", is not an answer. The
work on any text is bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import TrajectoryRule
from forge_verifiers.rules.choices import choice_letter, chosen_letter
from forge_verifiers.rules.languages import (
    ALTERNATIVE,
    COPULA,
    CORRECTION,
    ENGLISH_CORRECTION,
    OTHER_SCRIPTS,
    foreign_sentence,
    foreign_statements,
    is_denied,
    normalized,
)

MAX_CHARS = 20_000
"""Only the last characters of longer texts are read, because answers come last and the work must be bounded."""
_MAX_VALUE = 1_000
_MAX_MARKS = 20
_NEAR = 300  # characters after a mark in which a correction may begin


class ParsedAnswer(NamedTuple):
    """The final answer of a text."""

    raw: str
    """Everything that was marked as the answer, else the whole text."""
    value: str
    """The answer without markup, lead-in and remarks, or empty if there is none or it is denied."""
    source: Literal["marked", "statement", "fallback"]
    """Source of the value. Only rules for numbers trust a fallback."""
    text: str = ""
    """The whole text."""


def last_action(trajectory: Trajectory) -> str | None:
    """At most `MAX_CHARS` from the end of the agent's last action, or None without turns."""
    if not trajectory.turns:
        return None
    return trajectory.turns[-1].action[-MAX_CHARS:]


def gold_answers(trajectory: Trajectory, key: str) -> tuple[str, ...] | None:
    """The accepted answers in ``info[key]``, a value or several alternatives, or None if there is none.

    None, NaN and blank texts count as missing. If a gold answer is a whole solution, as in GSM8K and MATH, only its
    marked answer counts.
    """
    value = trajectory.info.get(key)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    values = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return tuple(_gold(str(v)) for v in values if not _is_missing(v)) or None


@dataclass(frozen=True, kw_only=True)
class AnswerRule(TrajectoryRule):
    """Base class of rules that compare the final answer with a gold answer."""

    exact = True
    answer_key: str = "answer"
    """Key of the gold answer in `Trajectory.info`: a value, or several alternatives."""

    @property
    def default_family(self) -> str | None:  # type: ignore[override]
        """Checks against the same gold answer, which extract, and sometimes misread, the same answer."""
        return f"answer in info[{self.answer_key!r}]"

    def read(self, trajectory: Trajectory) -> tuple[ParsedAnswer, tuple[str, ...]] | None:
        """The final answer and the accepted answers, or None if either is missing."""
        text, golds = last_action(trajectory), gold_answers(trajectory, self.answer_key)
        return None if text is None or golds is None else (parse_answer(text), golds)

    def extracted(self, trajectory: Trajectory) -> str | None:
        """The answer that is compared, or None without turns."""
        text = last_action(trajectory)
        if text is None:
            return None
        is_choice = any(map(choice_letter, gold_answers(trajectory, self.answer_key) or ()))
        return chosen_letter(text) if is_choice else parse_answer(text).value


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value)) or not str(value).strip()


def _gold(text: str) -> str:
    if text.isalnum():
        return text
    answer = parse_answer(text)
    return answer.value if answer.source == "marked" else answer.raw.strip()


def final_answer(text: str) -> str:
    """The final answer of a text, `ParsedAnswer.value`, or empty if there is none."""
    return parse_answer(text).value


def fold(text: str) -> str:
    """The text without differences of case, width, Unicode composition, white space and a final period."""
    return " ".join(normalized(text).split()).casefold().removesuffix(".").removesuffix("\u3002")


def same_text(answer: ParsedAnswer, gold: str) -> bool:
    """True if an answer equals the gold answer after `fold`. For a gold option, whether this option is chosen."""
    if letter := choice_letter(gold):
        return chosen_letter(answer.text) == letter
    target = fold(gold)
    if target in _POLAR and answer.source != "marked" and fold(answer.value) not in _POLAR:  # "No, 15 is not prime."
        polar = _POLAR_FIRST.match(answer.raw)
        if polar is None and not _NOT.search(answer.raw):
            polar = _POLAR_LAST.search(answer.raw)
        if polar:
            return polar[1].lower() == target
    return (answer.source != "fallback" and fold(answer.value) == target) or fold(answer.raw) == target


# Marks.

_BOX = re.compile(r"(?<!\\)\\+f?boxe?d?\s*\{|\\.|[{}]", re.DOTALL)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_HASHES = re.compile(r"(?:^|(?<=\s))####[ \t]*([^\s#](?:(?!\s####)[^\n])*)", re.MULTILINE)
_LINK = re.compile(
    r"s?\b[*_`\"')\]]*[^\n.:=?!;\uff1a]{0,60}?"
    r"(?:[ *_]*([:=\uff1a])[*_]*|\s(?:is|are|was|be|equals|comes to)\b(?:\s*(:))?)\s*(?:\n[\s>]*)?"
)
_CALCULATED = re.compile(r"<<[^<>\n]*>>")  # 3*100=<<3*100=300>>300, as GSM8K has it
_TOKEN = re.compile(r"<\|\w+\|>")  # <|im_end|>
_ALIGNED = re.compile(r"\\begin\{((?:align|gather|equation|split)\w*\*?)\}(.{0,4000}?)\\end\{\1\}", re.DOTALL)
_TITLE = re.compile(r"[#>*_ \t]*(?:(?:the|final)\s+)*a", re.IGNORECASE)
_TITLE_END = re.compile(r"[*_: \t]*\n[\s>]*")
_REVERSED = re.compile(r"\b(?:is|are|was)\s+(?:the|my|our)\s+(?:[a-z]+\s+){0,2}[aA]$")
_BOXED = re.compile(r"(?:\}|</answer>)[\s$.*]*$")
_DOUBTED = re.compile(
    r"(?:(?:n['\u2019]t|not|never)\s+(?:think|believe|say|claim|suppose|mean)|doubt|\bif|whether|unless)\b"
    r"[^,.;\n]{0,20}$",
    re.IGNORECASE,
)
_INSTEAD = re.compile(r"not\s.{1,300}?,?\s+but\s+(?:rather\s+)?", re.DOTALL)
_NEGATED = re.compile(r"(?:\w+ly\s+)?(?:not|neither)\s+")
_NOT = re.compile(r"n['\u2019]t\b|\b(?:not|never|cannot)\b", re.IGNORECASE)
_CORRECTED = re.compile(
    rf"\b(?:{ENGLISH_CORRECTION}|that(?:['\u2019]s| is) (?:wrong|incorrect|not right)"
    rf"|let me (?:correct|redo|recompute))\b|{CORRECTION}",
    re.IGNORECASE,
)
_DOUBTING = re.compile(
    rf"\W*{ALTERNATIVE}|\W*(?:or|maybe|perhaps|possibly|alternatively"
    r"|(?:(?:but|though|and)\s+)?(?:(?:it|that)\s+)?(?:could|might|may)(?:\s+also)?\s+be)\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<!\b[A-Z][a-z])(?<!\.[A-Za-z])[.!?](?=[\s*_\"$]|$)(?!\s*=)|[\u3002\u0964]|\n|</")
_REPEATED = re.compile(  # between two boxes that are two answers
    r"(?:[\s$.,;:!*_#\u3002\u0964-]|\\[()\[\]]|\b(?:so|and|or|also|the|my|final|answers?|is|are)\b)*", re.IGNORECASE
)
_BARE_BOX = re.compile(  # \boxed 7
    r"\\f?boxed?(?![A-Za-z{]|\s*\{)\s*((?:\\[A-Za-z]+(?:\s*\{[^{}\n]*\})*|[^\s$\\{}])+?)(?=[.,;:!?]*(?:\s|\$|\\[)\]]|$))"
)
_BLOCK = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]", re.DOTALL)


class _Mark(NamedTuple):
    start: int
    content: int
    """Start of the content."""
    end: int
    text: str
    is_strong: bool
    """True if the mark has an end, like a box or a tag."""


@lru_cache(maxsize=2048)  # all rules of an ensemble read the same texts
def parse_answer(text: str) -> ParsedAnswer:
    """Extract the final answer of a text."""
    return _parse(text)._replace(text=text)


def _parse(text: str) -> ParsedAnswer:
    if "</think>" in text and (visible := text.rpartition("</think>")[2].strip()):
        text = visible
    text = normalized(text)
    if "<<" in text:
        text = _CALCULATED.sub("", text)
    if "<|" in text:
        text = _TOKEN.sub("\n", text)
    if "\\begin{" in text:
        text = _ALIGNED.sub(lambda m: m[2].replace("&", "").replace("\\\\", "\n"), text)
    denied: str | None = None
    marks = _marks(text)[-_MAX_MARKS:]
    for number, mark in reversed(list(enumerate(marks))):
        if mark.is_strong:
            return _reconsidered(ParsedAnswer(mark.text.strip(), _inside(mark.text), "marked"), text[mark.end :])
        read, end, is_denied = _phrase(text, mark)
        if is_denied:
            if denied is None and (other := _unmarked(text[end:])).value and _RUN.search(other.value):
                return other._replace(source="marked")
            denied = read.value
        elif read.value and read.value == denied:
            return read._replace(value="")
        elif read.value and (_STARTS.match(read.value) or mark.text == "title" or not _RUN.search(text[: mark.start])):
            if number and (before := _other_answer(text, marks[number - 1], mark, read.value)):
                read = ParsedAnswer(text, f"{before} or {read.value}", "marked")
            return _reconsidered(read, text[end:])
    return _unmarked(text) if denied is None else ParsedAnswer(text, "", "marked")


def _other_answer(text: str, before: _Mark, mark: _Mark, value: str) -> str:
    """Another answer in the statement directly before a mark: "The answer is 5. The answer is 6."."""
    if before.is_strong or "reversed" in (before.text, mark.text):
        return ""
    read, end, is_denied = _phrase(text, before)
    is_other = read.value and not is_denied and fold(read.value) != fold(value)
    return read.value if is_other and _REPEATED.fullmatch(text, end, mark.start) else ""


def _inside(text: str) -> str:
    """The value in a box or tag, which may contain further marks: ``<answer>The answer is 42</answer>``."""
    if len(text) <= _MAX_VALUE and ("\\box" in text or "nswer" in text or "NSWER" in text):
        inner = parse_answer(text)
        if inner.source == "marked":
            return inner.value
    value = _bare(text)
    return f"{value}!" if text.rstrip().endswith("!") and value[-1:].isdigit() else value  # \boxed{5!}


def _marks(text: str) -> list[_Mark]:
    """All marks in order. Boxes or tags separated only by "and" or "or" are one mark. Inner marks are ignored."""
    outer: list[_Mark] = []
    for mark in sorted([*_boxes(text), *_tags(text), *_hashes(text)]):
        last = outer[-1] if outer else None
        if last is None or mark.start >= last.end:
            is_joined = last is not None and _JOINED.fullmatch(text, last.end, mark.start)
            if last is not None and (is_joined or _REPEATED.fullmatch(text, last.end, mark.start)):
                between = text[last.end : mark.start].strip(" $") if is_joined else "or"
                is_same = fold(_bare(last.text)) == fold(_bare(mark.text))
                both = mark.text if is_same else f"{last.text.strip()} {between} {mark.text.strip()}"
                outer[-1] = last._replace(end=mark.end, text=both)
            else:
                outer.append(mark)
    phrases: list[_Mark] = []
    foreign = [_Mark(each.start, each.content, each.end, "foreign", False) for each in foreign_statements(text)]
    for phrase in [*_phrases(text), *foreign]:
        line_end = text.find("\n", phrase.content)
        line_end = len(text) if line_end < 0 else line_end
        is_inside = any(phrase.content <= s.start <= line_end or s.start <= phrase.start < s.end for s in outer)
        if not is_inside and not any(_is_one_sentence(text, phrase, later) for later in phrases):
            phrases.append(phrase)
    return sorted(outer + phrases)


def _is_one_sentence(text: str, phrase: _Mark, later: _Mark) -> bool:
    return phrase.content <= later.start and not _SENTENCE.search(text, phrase.content, later.start)


def _phrases(text: str) -> list[_Mark]:
    """The last phrases "The answer is", "Answer:", a line with the title "Answer", or "... is the answer"."""
    phrases: list[_Mark] = []
    end = len(text)
    while len(phrases) < _MAX_MARKS and (at := max(text.rfind("nswer", 0, end), text.rfind("NSWER", 0, end))) > 0:
        end, head = at, text[max(0, at - 60) : at]
        if head[-1] not in "aA" or head[-2:-1].isalpha():
            continue
        link = _LINK.match(text, at + 5)
        title = _TITLE.fullmatch(head.rpartition("\n")[2]) and _TITLE_END.match(text, at + 5)
        if title:
            phrases.append(_Mark(at - 1, title.end(), title.end(), "title", False))
        elif link:  # after "final" or a colon, words are an answer, too: "Final answer: Paris"
            kind = "title" if link[1] or link[2] or head[-7:-2].lower() == "final" else "phrase"
            phrases.append(_Mark(at - 1, link.end(), link.end(), kind, False))
        if (reversed_ := _REVERSED.search(head)) and not _BOXED.search(head[: reversed_.start()]):
            start = at - len(head) + reversed_.start()
            phrases.append(_Mark(start, start, at + 5, "reversed", False))
    return phrases


def _boxes(text: str) -> Iterator[_Mark]:
    for m in _BARE_BOX.finditer(text) if "\\box" in text or "\\fbox" in text else ():
        yield _Mark(m.start(), m.start(1), m.end(), m[1], True)
    opened: list[re.Match[str] | None] = []
    for m in _BOX.finditer(text) if "\\box" in text or "\\fbox" in text else ():
        if m[0] == "}":
            start = opened.pop() if opened else None
            if start is not None:
                yield _Mark(start.start(), start.end(), m.end(), text[start.end() : m.start()], True)
        elif m[0] == "{" or "box" in m[0]:
            opened.append(m if len(m[0]) > 1 else None)


def _tags(text: str) -> Iterator[_Mark]:
    opened: re.Match[str] | None = None
    for tag in _TAG.finditer(text) if "</" in text else ():
        if tag[1] and opened:
            yield _Mark(opened.start(), opened.end(), tag.end(), text[opened.end() : tag.start()], True)
        opened = None if tag[1] else tag


def _hashes(text: str) -> Iterator[_Mark]:
    for m in _HASHES.finditer(text) if "####" in text else ():
        if m.end() >= len(text.rstrip()) or _STARTS.match(m[1]):  # other lines of this kind are headings
            yield _Mark(m.start(), m.start(1), m.end(), m[1], True)


def _phrase(text: str, mark: _Mark) -> tuple[ParsedAnswer, int, bool]:
    """The answer in a phrase, its end, and whether it is denied or doubted."""
    if mark.text == "reversed":
        statement = _SENTENCE.split(text[max(0, mark.start - 200) : mark.start])[-1]
        read = _sentence_value(statement)
        words = _bare(_lead(statement))
        if any(map(str.isdigit, statement)) or words.lower() in _NO_NAMES:
            words = ""
        return ParsedAnswer(statement.strip(), read[0] if read else words, "marked"), mark.end, False
    if mark.text == "foreign":
        value, is_wrong = foreign_sentence(text[mark.content : mark.end])
        value = _bare(value)
        if not _STARTS.match(value) and (read := _sentence_value(value)):  # "Antwort: Er hat 42"
            value = read[0]
        return ParsedAnswer(_clean(text[mark.content : mark.end]), value, "marked"), mark.end, is_wrong
    content = text[mark.content : mark.content + _MAX_VALUE]
    if content.isascii() and content.isalnum() and not _NOT.search(text, mark.start, mark.content):
        return ParsedAnswer(content, content, "marked"), mark.content + len(content), False
    if block := _BLOCK.match(content):
        return ParsedAnswer(block[0], _bare(block[1] or block[2]), "marked"), mark.content + block.end(), False
    statement = _SENTENCE.split(content, maxsplit=1)[0]
    raw, lead = _clean(statement), _lead(statement)
    if (instead := _INSTEAD.match(lead)) and _STARTS.match(lead, instead.end()):
        value = _bare(_cut(lead[instead.end() :]))
        return ParsedAnswer(raw, value, "marked"), mark.content + len(statement), False
    if (negated := _NEGATED.match(lead)) and _STARTS.match(lead, negated.end()):
        value = run[0] if (run := _RUN.search(lead)) else ""
        return ParsedAnswer(raw, value, "marked"), mark.content + statement.find(value) + len(value), True
    if (corrected := _CORRECTED.search(statement)) and corrected.start() > 0:  # the correction is read later
        statement = statement[: corrected.start()]
    statement = _cut(statement) if _STARTS.match(_lead(_clean(statement))) else _REASON.split(statement, maxsplit=1)[0]
    value = _bare(statement)
    source: Literal["marked", "fallback"] = "marked"
    if not _STARTS.match(value) and (read := _sentence_value(statement)):  # Answer: The volume is 120
        value, source = read[0], "fallback" if read[1] == "fallback" else "marked"
    doubted = _NOT.search(text, mark.start, mark.content) or _DOUBTED.search(text[: mark.start][-60:])
    return ParsedAnswer(raw, value, source), mark.content + len(statement), doubted is not None


def _reconsidered(read: ParsedAnswer, rest: str) -> ParsedAnswer:
    """The answer after corrections and doubts in the following text."""
    if not rest or rest.isspace():
        return read
    corrected = _CORRECTED.search(rest, 0, _NEAR)
    if corrected:
        again = _unmarked(rest[corrected.end() :])
        if again.value and _STARTS.match(again.value):
            return again._replace(source="marked")
    doubting = _DOUBTING.match(rest)
    if doubting:
        sentence = _SENTENCE.split(rest[doubting.end() : doubting.end() + 200], maxsplit=1)[0]
        if other := _RUN.search(sentence):
            return ParsedAnswer(read.raw, f"{read.value} or {other[0]}", read.source)
    return read


# Statements without a mark.

_STARTS = re.compile(
    r"(?:[-+\u2212\u2013\u00b1(\[{|]|\\[({\[]|\\left\b)*\s*(?:\\?[$\u20ac\u00a3]\s*)?[-+\u2212]?"
    r"(?:\.?\d|\\(?!text|math|[()\[\]{}])[A-Za-z]|[\u221a\u03c0\u221e\u00bc-\u00be\u2153\u2154]|(?:sqrt|pi|log|ln|sin|cos|tan|exp)\b"
    r"|[A-Za-z](?:\([a-z]\))?\s*[=<>^+*/\u2264\u2265\u2208]|[a-z]\s*\\|\(?[A-J]\)?(?![\w'\u2019]|\s+(?!because|since|as\b|is\b)[a-z]))"
)
_RUN = re.compile(
    r"\$\$?(?=\S)[^$\n]+?(?<=\S)\$\$?(?!\d)|\\\([^\n]+?\\\)|\\\[[^\n]+?\\\]"
    r"|(?:(?<![A-Za-z0-9_.)}])[-+\u2212\u00b1])?\\?[$\u20ac\u00a3]?"
    r"(?:(?<![A-Za-z0-9_.])(?:\d|\.\d)|\\(?:[dt]?frac|sqrt|pi|binom|infty)|[\u03c0\u221a\u221e\u00bc-\u00be\u2153\u2154])"
    rf"(?:[^\s,;:!?{OTHER_SCRIPTS}]"
    r"|[,:](?=\d)|(?<=[\d)}])\s+[-+*/x\u00d7\u00b7\u00f7^\u2212]\s+(?=[\d(\\]))*"
    r"(?:\s(?:dozen|hundred|thousand|million|billion)\b)?"
    r"(?:\s?%|\s?[AaPp]\.?[Mm]\b|\s+(?:percent|dollars|euros|cents|[kcm]?m|[km]?g|k?m/h|mph|ft|lbs?|inches|feet|miles"
    r"|hours|minutes|seconds|days|weeks)\b)?"
)
_HEDGE = re.compile(r"\b(?:or|maybe|perhaps|possibly|either|alternatively|could|might)\b", re.IGNORECASE)
_COMPUTED = re.compile(r"\d[^=]*=\s*$")  # "half as many, or 0.5 * 100 = 50"
_BETWEEN = re.compile(r"\bbetween[\s*$]*$", re.IGNORECASE)
_JOINED = re.compile(
    r"(?:[\s$,;]|\\q?quad|\\[,;) ])*(?:,|\band\b|\bor\b|\bto\b|\\text\{\s*(?:and|or)\s*\})(?:[\s$]|\\q?quad|\\[,;( ])*"
)
_COPULA = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals?|equal to|gives?|makes?|leaves?|gets?|got|ha(?:s|ve)|totals?|yields?|becomes?"
    rf"|comes? to|obtain|find)\b(?:\s+(?:that|us|you|me))?|{COPULA}"
    r"|['\u2019]s\b|[=\u2248\u2192\u21d2]|(?<![\d\s(])\s*:)"
    r"[\s*_]*(?:(?:exactly|about|now|only|just|the number)\s+)?"
)
_CLAUSE = re.compile(r"[,;]|\b(?:but|and|so|which|it(?=['\u2019]s|\sis))\b")
_BOUND = re.compile(  # "more than 5" is not 5
    r"\b(?:(?:more|less|fewer|greater|larger|smaller|other) than|at (?:least|most)|up to|over|under|above"
    r"|below|minus|negative|twice|half|double|triple|(?:half|third|quarter|square|cube|root|sum|product|quotient) of"
    r"|(?:one|two|three)[\s-](?:halves|thirds?|quarters?|fifths?) of)\s+(?:the\s+)?$",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r"[,;:]?\s*(?:\u2014|,\s+and\s+(?:the|s?he|it|they|we|you|this|that)\b|\s+of\s+(?:(?:the|them|all|his|her|its|their"
    r"|our|my|your|each|these|those)\b|[a-z]+\s+and\s+[a-z])|\s-\s(?=[A-Za-z])|;\s+(?=[A-Za-z]{2})"
    r"|(?<![\\A-Za-z])(?:because|since|which|so|as|after|given|is|are|was|were|but|instead|rather|hence|therefore"
    r"|thus|due|using|from|in (?:total|all|the)|altogether|left|now|remaining|correct|right|I|we|you|it|this|that|there"
    r"|they|he|she|not|the|with|than|each|assuming|provided|while|for|long|wide|tall|high|deep)\b|(?<=%)\s+of\b"
    r"|\s\((?!base|mod|maybe|perhaps|possibly)(?:(?:\d+\s+)?[A-Za-z]{3}|i\.e|e\.g)).*",
    re.DOTALL,
)
_HEAD = re.compile(r"^(?:[\s,:;!?\u2014]|\.(?!\d)|#+[ \t])+")
_REASON = re.compile(r",?\s+(?:because|since)\b")
_EXPLAINED = re.compile(r"(?<=\S)\s*\n[\s*_#]*(?:Explanation|Reasoning|Justification|Verification|Note)\b")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_COUNTED = re.compile(r"(?<=\d)\s+(?!sin|cos|tan|log|sqrt|mod)[a-z]{2,}\b|(?<=\d)\s*x(?=\s*\$?\d)")  # 6 kg, 2 x 3
_MEASURED = re.compile(r"(?<=\d)(?:\s[mghsl]|\s?(?:[kcm]m|[km]g|[km]l|min))(?![A-Za-z])(?:/[a-z]+)?")  # 3 m * 100 cm/m
_CHOICE = re.compile(
    r"(?:\\text\w*\{)?(?:\(?([A-J])\)\}?[\s\\]+\S|([A-J])\.\s+\S|\(?([A-J])\)?\s+(?:is|would be)\s+(?:the\s+)?"
    r"(?:correct|right|true|best)\b).*",
    re.DOTALL,
)
_ROUNDED = re.compile(
    r"(?<=\S),?\s+\(?(?:or|which is|i\.e\.)?,?\s*(?:approximately|approx\.?|about|roughly|\u2248)\s.*", re.DOTALL
)
_VARIABLE = re.compile(  # x, a_n, AB, \angle ABC, f(5), P(A)
    r"\s*m?(?:\\(?:angle|triangle)\s*)?(?!\\?(?:pi|infty)\b)(?:\\[a-z]+|[A-Za-z]{1,3})(?:_\{?\w+\}?)?'?"
    r"\s*(?:\(\s*\w+(?:\s*,\s*\w+)*\s*\)\s*)?"
)
_NO_NAMES = frozenset({"that", "this", "it", "here", "which", "what", "there", "so"})
"""Words before "is the answer" that are not answers."""
_POLAR = frozenset({"yes", "no", "true", "false"})
_POLAR_FIRST = re.compile(r"\W{0,4}(yes|no|true|false)\W{0,3}(?:[,.!:;\u2014]|$)", re.IGNORECASE)
_POLAR_LAST = re.compile(r"\bis\s\W{0,4}(true|false)\W{0,4}$", re.IGNORECASE)
_GIVEN = re.compile(r"(?:since|because|as|if|when|given|for)\b", re.IGNORECASE)
_HENCE = re.compile(
    r"[,;.$]?\s+(?:and\s+)?(?:so|therefore|thus|hence|meaning|which means|and(?=\s+(?:the|s?he|it|they)\b))\b,?\s+"
    r"(?:that\s+)?",
    re.IGNORECASE,
)
_EITHER = re.compile(r",?\s+\(?or\s+([^()]+)\)?$")  # "1/2 (or 0.5)"
_LEAD = re.compile(
    r"(?:(?:so|thus|therefore|hence|then|well|ok|okay|sure|hmm+|and|or|finally|oh|ah|overall|in (?:conclusion|short)"
    r"|actually|clearly|probably|maybe|perhaps|definitely|certainly|indeed|just|simply|exactly|precisely|about|around|approximately"
    r"|roughly|nearly|equal to|either|obviously|of course|option|choice)\b,?:?|(?:yes|no)[,:]|a:"
    r"|i(?:['\u2019](?:m|d|ve))?\s+(?:[a-z]+\s+)?(?:think|believe|guess|say|get|got|found|find|reckon|sure|have|see"
    r"|calculated)\b(?:\s+that)?,?:?|(?:we|you)\s+(?:can\s+)?(?:get|have|find|obtain|see)\b(?:\s+that)?,?:?"
    r"|(?:it|that|this|there|they|which|here)(?:['\u2019](?:s|re)|\s+(?:is|are|was|equals|gives|makes|leaves"
    r"|(?:would|should|must|will|could|might|may|has to)\s+be))\b:?"
    r"|the\s+(?:(?:correct|final|right)\s+)?(?:number|value|fraction|result|total|sum|product|integer|option|choice"
    r"|letter|solution)(?:\s+(?:is|are|was|equals))?\b:?)[\s*_]+",
    re.IGNORECASE,
)
_FOREIGN = re.compile(  # a word that does not occur in formulas
    r"(?<![\\A-Za-z])(?!(?:(?:arc)?(?:sin|cos|tan)h?|exp|abs|mod|and|max|min|log|sqrt|infinity)\b)"
    r"(?:[A-Za-z]{4,}|(?=[A-Za-z]?[AEIOUaeiou])[A-Za-z]{3}|[Tt]he|[Ii][sft]|[Tt]o|[Oo]f|[Ww]e|[Hh]e|[Ss]o|no|[Aa][st]"
    rf"|[Bb][ye]|my|why|try|[{OTHER_SCRIPTS}])(?![A-Za-z])"
)
_TEXT = re.compile(r"\\(?:text|math|begin|end|mbox)[a-z]*\s*\{[^{}]*\}")
_WRAPPED = re.compile(r"\\(?:text|math|m)(?:bf|it|rm|tt|normal|box)?\s*\{([^{}]*)\}")
_BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)((?:[^*\n]|\*(?!\*)|(?<=[\w)])\*\*(?=[\w(]))+)(?<=\S)\*\*(?![\w(])")
_LIST = re.compile(r"(?:[ \t]*(?:[-*][ \t]+|\d+[.)][ \t]+)?[-+$(]?\d[\d.,/]*%?[).,;]?[ \t]*(?:\n+|$)){2,}")
_LIST_MARK = re.compile(r"^\s*(?:[-*]|\d+[.)])\s+")
_OPEN = re.compile(r"^\$(?!\s?\d)|(?<!\d)(?<!\d\s)\$$")
_ORNAMENTS = "\u2026\u2705\u2713\u2714\ufe0f" + "".join(map(chr, range(0x1F300, 0x1F700)))
_PAIRS = [(sign, sign) for sign in ("$$", "$", "**", "*", "__", "_", "```", "`", '"', "'")]
_PAIRS += [("\\(", "\\)"), ("\\[", "\\]"), ("\u201c", "\u201d")]


def _unmarked(text: str) -> ParsedAnswer:
    """The answer of a text without a mark."""
    clean = _clean(_EXPLAINED.split(_HEAD.sub("", text), maxsplit=1)[0])
    if clean.isascii() and clean.isalnum():
        return ParsedAnswer(text, clean, "statement")
    if "\n" in clean and len(clean) <= _MAX_VALUE and _LIST.fullmatch(clean):
        items = [_LIST_MARK.sub("", line) for line in clean.splitlines() if line]
        return ParsedAnswer(text, " or ".join(items), "statement")
    tail = clean[-4 * _MAX_VALUE :]
    if not _RUN.search(tail):
        lines = clean.splitlines()
        is_short = len(lines) == 1 or (lines and len(lines[-1].split()) <= 5)
        return ParsedAnswer(text, _bare(lines[-1] if is_short else clean), "statement")
    if ("\n" not in clean or "\\begin" in clean) and _is_expression(lead := _lead(clean)):
        return ParsedAnswer(text, _bare(lead), "statement")
    sentences: list[str] = []
    for sentence in filter(str.strip, _SENTENCE.split(tail)):
        if sentences and _DOUBTING.match(sentence):  # "It is 41. Or 42."
            sentences[-1] += ", or" + sentence
        else:
            sentences.append(sentence)
    for sentence in reversed(sentences):
        read = _sentence_value(sentence)
        if read is not None:
            return ParsedAnswer(text, *read)
    return ParsedAnswer(text, "", "fallback")


def _sentence_value(text: str) -> tuple[str, Literal["statement", "fallback"]] | None:
    """The value and its source in a sentence, or None if there is none or it is denied."""
    text = _lead(_clean(_HEAD.sub("", text[-_MAX_VALUE:])))
    if not text.isascii() or is_denied(text):
        text, is_wrong = foreign_sentence(text)
        if is_wrong:
            return None
    runs = list(_RUN.finditer(text))
    corrected = _CORRECTED.search(text, runs[0].end()) if runs else None
    if corrected and (again := _sentence_value(text[corrected.end() :])):
        return again
    if _is_expression(text) and (runs or _STARTS.match(text)):
        return _bare(text), "statement"
    clauses = [clause.end() for clause in _HENCE.finditer(text)]
    if clauses and _stated_value(rest := text[clauses[-1] :], after_verb=True)[1]:  # Mary is 10, so John is 15
        text = rest
        runs = list(_RUN.finditer(text))
    at, value = _stated_value(text)
    source: Literal["statement", "fallback"] = "statement" if value else "fallback"
    if not value:
        last = next((run for run in reversed(runs) if not _is_denied(text[: run.start()])), None)
        if last is None:
            return None
        at, value = last.start(), _balanced(last[0])
        if bound := _BOUND.search(text, 0, at):
            at, value = bound.start(), bound[0] + value
    before = next((run for run in reversed(runs) if run.end() <= at), None)
    if before:  # "maybe 41, maybe 42": neither
        between = text[before.end() : at]
        if (
            (_HEDGE.search(between) and not _COMPUTED.search(between))
            or _JOINED.fullmatch(between)
            or _BETWEEN.search(text, 0, before.start())
        ):
            value = text[before.start() : at] + value
    return _bare(value), source


def _stated_value(text: str, *, after_verb: bool = False) -> tuple[int, str]:
    """Position and text of the value after "is", "gives" or "=", else of the value at the start of the sentence.

    Args:
        text: The sentence.
        after_verb: Whether a value at the start does not count.
    """
    at, value = 0, ""
    is_given = _GIVEN.match(text)  # "Since x is 2, y is 4"
    for copula in _COPULA.finditer(text):
        end = copula.end()
        if _STARTS.match(text, end) and not _is_denied(text[: copula.start()]) and (statement := _cut(text[end:])):
            at, value = end, statement
            if _is_expression(statement) and not is_given:
                return at, value
    is_sum = value != "" and "=" in text[:at].rstrip()[-1:]
    if _STARTS.match(text) and not after_verb and not is_sum:  # "42 is 6 times 7", "42 apples are left"
        return 0, _cut(text)
    return at, value


def _is_denied(before: str) -> bool:
    return _NOT.search(_CLAUSE.split(before)[-1]) is not None


def _is_expression(text: str) -> bool:
    return len(text) <= _MAX_VALUE and not _FOREIGN.search(_TEXT.sub("", text) if "\\" in text else text)


def _cut(text: str) -> str:
    """A value without remarks after it."""
    remark = _REMARK.search(text)
    return text[: remark.start()] if remark else text


def _balanced(text: str) -> str:
    if not text.endswith((")", "]", "}")):
        return text
    opened, closed = (sum(map(text.count, signs)) for signs in ("([{", ")]}"))
    return text[:-1] if opened < closed else text


def _lead(text: str) -> str:
    """The text without lead-ins such as "so" and "I think it's"."""
    text = text.lstrip()
    while lead := _LEAD.match(text):
        text = text[lead.end() :]
    return text


def _clean(text: str) -> str:
    """The text without surrounding white space and markup, and without closing punctuation."""
    text = text.strip()
    if text.isalnum():
        return text
    if "**" in text:
        text = _BOLD.sub(r"\1", text)
    for _ in range(6):
        before = text
        text = _balanced(text.strip().rstrip(",;:!?\u3002").strip())
        if text.endswith(".") and not text.endswith("..."):
            text = text[:-1].rstrip()
        text = text.rstrip(_ORNAMENTS)
        if text.count("$") == 1:
            text = _OPEN.sub("", text)
        for sign in ("**", "*"):  # "**Answer: 42**"
            if text.count(sign) == 1 and (text.endswith(sign) or (text.startswith(sign) and not text.startswith("* "))):
                text = text.removesuffix(sign).removeprefix(sign)
        if text.startswith("\\") and (wrapped := _WRAPPED.fullmatch(text)):
            text = wrapped[1]
        for opening, closing in _PAIRS:
            inner = text[len(opening) : -len(closing)]
            if inner and text == opening + inner + closing and opening not in inner:
                text = inner
                break
        if text == before:
            break
    return text


def _bare(text: str) -> str:
    """A value without markup and lead-in. For a calculation, its result."""
    text = _clean(text)
    if len(text) > _MAX_VALUE or text.isalnum():
        return text
    text = _EITHER.sub(r" or \1", _clean(_lead(text)))
    if choice := _CHOICE.fullmatch(text):
        return str(choice[choice.lastindex or 0])
    if _STARTS.match(text):
        text = _ROUNDED.sub("", text)
    if ("=" in text or "\u2248" in text or "\\approx" in text) and not re.search("[<>]|!=", text):
        left, _, _ = text.replace("\\approx", "\u2248").partition("\u2248")
        sum_, _, result = (left or text).rpartition("=")
        sum_ = sum_ or result
        if _LETTER.search(result):  # 3 m = 300 cm; in 3m = 300, m may be the unknown
            sum_ = _MEASURED.sub("", sum_)
        if not _LETTER.search(_TEXT.sub("", _COUNTED.sub("", sum_))):  # 6 * 7 = 42, 6 kg + 7 kg = 13 kg
            text = text if _VARIABLE.fullmatch(result) else result.strip()  # 5 = x
    return text
