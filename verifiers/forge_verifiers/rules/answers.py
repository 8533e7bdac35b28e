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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import TrajectoryRule
from forge_verifiers.rules.choices import choice_letter, chosen_letter
from forge_verifiers.rules.languages import foreign_sentence, foreign_statements, normalized
from forge_verifiers.rules.maths.quantity import read_quantity
from forge_verifiers.rules.statements import (
    BOUND_SPACE,
    CORRECTED,
    DOUBTING,
    JOINED,
    MAX_VALUE,
    NOT,
    REASON,
    REFUSED,
    RUN,
    SENTENCE,
    STARTS,
    WRONG,
    ParsedAnswer,
    bare_value,
    candidates,
    list_items,
    readable,
    sentence_value,
    strip_markup,
    unmarked_answer,
    without_lead_in,
    without_remark,
)

MAX_CHARS = 20_000
"""Only the last characters of longer texts are read, because answers come last and the work must be bounded."""
_MAX_MARKS = 20
_NEAR = 300  # characters after a mark in which a correction may begin


def last_action(trajectory: Trajectory) -> str | None:
    """At most `MAX_CHARS` from the end of the agent's last action, or None without turns."""
    if not trajectory.turns:
        return None
    return trajectory.turns[-1].action[-MAX_CHARS:]


def gold_answers(trajectory: Trajectory, key: str) -> tuple[str, ...] | None:
    """The accepted answers in ``info[key]``, a value or several alternatives, or None if there is none.

    None, NaN and blank texts count as missing. If a gold answer is a whole solution, as in GSM8K and MATH, only its
    marked answer counts. As of answers, only the last `MAX_CHARS` count.
    """
    value = trajectory.info.get(key)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    values = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return tuple(_gold(str(v)[-MAX_CHARS:]) for v in values if not _is_missing(v)) or None


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
        if text is None or golds is None:
            return None
        answer = parse_answer(text)
        if any(map(_RATIO.fullmatch, golds)):  # otherwise, "3 to 4" is a range
            answer = answer._replace(value=_TO.sub(":", answer.value))
        return answer, golds

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


def same_text(answer: ParsedAnswer, gold: str, *, differ: Callable[[str, str], bool] | None = None) -> bool:
    """True if an answer equals the gold answer after `fold`. For a gold option, whether this option is chosen.

    Args:
        differ: Whether texts that are equal after `fold` differ in meaning. By default `units_differ`.
    """
    differ = differ or units_differ
    if letter := choice_letter(gold):
        return chosen_letter(answer.text) == letter
    target = fold(gold)
    if target in POLAR and answer.value and fold(answer.value) not in POLAR:  # "No, 15 is not prime."
        polar = _POLAR_FIRST.match(answer.raw) or _POLAR_END.search(answer.raw)
        if polar is None and not NOT.search(answer.raw):
            polar = _POLAR_LAST.search(answer.raw)
        if polar:
            return polar[1].lower() == target
    texts = (answer.raw, answer.value) if answer.source != "fallback" else (answer.raw,)
    return any(fold(text) == target and not differ(text, gold) for text in texts)


def units_differ(answer: str, gold: str) -> bool:
    """True for numbers with different units: 5 mg is not 5 Mg, although only the case differs."""
    if answer == gold or answer.lower() != gold.lower():
        return False
    number, other = read_quantity(answer), read_quantity(gold)
    return bool(number and other and number.unit and other.unit and number.unit != other.unit)


_RATIO = re.compile(r"\$?\d+(?:\s*:\s*\d+)+\$?")
_TO = re.compile(r"(?<=\d)\s+to\s+(?=\d)")

# Marks.

_BOX = re.compile(r"(?<!\\)\\+f?(?:rame)?boxe?d?\s*\{|\\.|[{}]", re.DOTALL)
_TAG = re.compile(r"<(/?)(?:final[_-]?)?answer>", re.IGNORECASE)
_HASHES = re.compile(r"(?:^|(?<=\s))####[ \t]*([^\s#](?:(?!\s####)[^\n])*)", re.MULTILINE)
_JSON = re.compile(
    r"""["'](?:final[_ ]?)?answer["']\s*:\s*(?:"((?:[^"\\\n]|\\.)+)"|(-?\d[\d.eE+-]*|null))(?=\s*[,}])"""
)
_LINK = re.compile(
    r"s?\b[*_`\"')\]]*[^\n.:=?!;\uff1a]{0,60}?"
    r"(?:[ *_]*([:=\uff1a])[*_]*|\s(?:is|are|was|be|equals|comes to)\b(?:\s*(:))?)\s*(?:\n[\s>]*)?"
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_ALIGNED = re.compile(r"\\begin\{((?:align|gather|equation|split)\w*\*?)\}(.{0,4000}?)\\end\{\1\}", re.DOTALL)
_COURTESY = re.compile(
    r"(?:\n\s?|(?<=[.!] ))(?:(?:I\s+)?hope\s+(?:this|that|it)\s+helps"
    r"|(?:please\s+)?let\s+me\s+know\s+if\b[^.!?\n]{0,100}|feel\s+free\s+to\b[^.!?\n]{0,100}|is\s+there\s+anything\s+else\b[^.!?\n]{0,100})[.!?\s]*$",
    re.IGNORECASE,
)
_DECIMAL_COMMA = re.compile(r"[-+]?\d,\d")
_JOINED_WORD = re.compile(r"[A-Za-z](?:(?<=[A-Za-z])_)?$")
_TITLE = re.compile(r"[#>*_ \t]*(?:(?:the|final)\s+)*a", re.IGNORECASE)
_TITLE_END = re.compile(r"[*_: \t]*\n[\s>]*")
_REVERSED = re.compile(r"\b(?:is|are|was)\s+(?:the|my|our)\s+(?:(?!wrong|incorrect|false)[a-z]+\s+){0,2}[aA]$")
_BOXED = re.compile(r"(?:\}|</answer>)[\s$.*]*$")
_DOUBTED = re.compile(
    r"(?:(?:n['\u2019]t|not|never)\s+(?:think|believe|say|claim|suppose|mean)|doubt|\bif|whether|unless|wrong\s+to\s+\w+|(?:wrong|incorrect)(?=\s$))\b"
    r"[^,.;:\n]{0,20}$",
    re.IGNORECASE,
)
_EARLIER = re.compile(
    r"\b(?:previous|earlier|initial|original|old|not\s+(?:the|my|our))\s+(?:(?:final|right|correct)\s+)*$",
    re.IGNORECASE,
)
_PLAIN = re.compile(
    rf"[^\w\n]*(?:(?:no|wait|that(?:['\u2019]s| is)\s+(?:wrong|incorrect)|(?:the|my)?\s*(?:final|right|correct)?"
    rf"\s*answer|(?:it|that|this)(?=\s+(?:is|must|should)|['\u2019]s)|['\u2019]s|is|should\s+be|must\s+be|make\s+(?:it|that))[^\w\n]*)*"
    rf"(?:{RUN.pattern})\W*(?:\n|$)",
    re.IGNORECASE,
)
"""A correction that has only a value and words that introduce it."""
_NO_REPLY = re.compile(r"[\s*_\"]*\?\s*no\b", re.IGNORECASE)
_DENIED_BOX = re.compile(
    r"(?:\bnot|n['\u2019]t(?:\s+be)?|\bnever|\bneither|\bcannot\s+be)(?:\s+(?:the|equal|to|answer))*[\s$:*(\[\\]*$",
    re.IGNORECASE,
)
_INSTEAD = re.compile(r"not\s.{1,300}?,?\s+but\s+(?:rather\s+)?", re.DOTALL)
_NEGATED = re.compile(r"(?:\w+ly\s+)?(?:not|neither)\s+")
_REPEATED = re.compile(  # between two boxes that are two answers
    r"(?:[\s$.,;:!*_#\u3002\u0964-]|\\[()\[\]]|\b(?:so|and|or|also|the|my|final|answers?|is|are)\b)*", re.IGNORECASE
)
_BARE_BOX = re.compile(  # \boxed 7
    r"\\f?boxed?(?![A-Za-z{]|\s*\{)\s*((?:\\[A-Za-z]+(?:\s*\{[^{}\n]*\})*|[^\s$\\{}])+?)(?=[.,;:!?]*(?:\s|\$|\\[)\]]|$))"
)
_BLOCK = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]", re.DOTALL)
_NO_NAMES = frozenset({"that", "this", "it", "here", "which", "what", "there", "so"})
"""Words before "is the answer" that are not answers."""
_VERDICTS = frozenset({"wrong", "incorrect", "correct", "right"})
POLAR = frozenset({"yes", "no", "true", "false"})
"""Gold answers that `same_text` alone compares: as formulas, "no" is a product."""
_POLAR_FIRST = re.compile(
    r"\W{0,4}(yes|no|true|false)\W{0,3}(?:[,.!:;(\n\u2013\u2014]|\s-\s|\s(?:because|since|as)\s|$)", re.IGNORECASE
)
_POLAR_LAST = re.compile(r"\bis\s\W{0,4}(true|false)(?:\W{0,4}$|,?\s(?:because|since|as)\s)", re.IGNORECASE)
_POLAR_END = re.compile(r"(?:\b(?:so|hence|thus)\s|[,.;:]\s)\W{0,4}(yes|no)\W{0,4}$", re.IGNORECASE)
_NAME = re.compile(
    r"(?!(?:I|It|This|That|We|You|Yes|No|Let|Sure)\b)[^\W\d_a-z][\w.'\u2019-]*"
    r"(?:\s+(?:of|the|and|de|von|van|[^\W\d_a-z][\w.'\u2019-]*)){0,3}"
)


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
    answer = _parse(text)
    return answer._replace(text=text, value=answer.value.replace(BOUND_SPACE, " "))


def _parse(text: str) -> ParsedAnswer:
    text = _COURTESY.sub("", _ALIGNED.sub(lambda m: m[2].replace("&", "").replace("\\\\", "\n"), readable(text)))
    denied: str | None = None
    marks = _marks(text)[-_MAX_MARKS:]
    for number, mark in reversed(list(enumerate(marks))):
        if mark.is_strong and not _is_denied_box(text[max(0, mark.start - 40) : mark.start], text[mark.end :][:40]):
            read = ParsedAnswer(mark.text.strip(), _inside(mark.text), "marked")
            return _reconsidered(read, text[mark.end :], is_strong=True)
        if mark.is_strong:
            denied = denied or _inside(mark.text)
            continue
        read, end, is_denied = _phrase(text, mark)
        if is_denied:
            if denied is None and (other := unmarked_answer(text[end:])).value and RUN.search(other.value):
                return other._replace(source="marked")
            denied = read.value
        elif read.value and read.value == denied:
            return read._replace(value="")
        elif read.value.lower() in _VERDICTS and RUN.search(text, end):  # "My answer was wrong. It is 42."
            continue
        elif read.value and (STARTS.match(read.value) or mark.text == "title" or not RUN.search(text[: mark.start])):
            if number and (before := _other_answer(text, marks[number - 1], mark, read.value)):
                read = ParsedAnswer(text, f"{before} or {read.value}", "marked")
            return _reconsidered(read, text[end:])
    return unmarked_answer(text) if denied is None else ParsedAnswer(text, "", "marked")


def _is_denied_box(before: str, after: str) -> bool:
    return bool(_DENIED_BOX.search(before) or _DOUBTED.search(before) or WRONG.match(after.lstrip(" $*)]\\")))


def _other_answer(text: str, before: _Mark, mark: _Mark, value: str) -> str:
    """Another answer in the statement directly before a mark: "The answer is 5. The answer is 6."."""
    if before.is_strong or "reversed" in (before.text, mark.text):
        return ""
    read, end, is_denied = _phrase(text, before)
    is_other = read.value and not is_denied and fold(read.value) != fold(value)
    return read.value if is_other and _REPEATED.fullmatch(text, end, mark.start) else ""


def _inside(text: str) -> str:
    """The value in a box or tag, which may contain further marks: ``<answer>The answer is 42</answer>``."""
    if "\\text" in text and ("nswer" in text or " is" in text):
        text = _TEXT.sub(r"\1", text)
    if text.startswith("\n") and len(items := list_items(text)) == 1:
        text = items[0][1]
    if len(text) <= MAX_VALUE and ("\\box" in text or "nswer" in text or "NSWER" in text):
        inner = parse_answer(text)
        if inner.source == "marked":
            return inner.value
    stated = sentence_value(text) if " is " in text and len(text) <= MAX_VALUE else None
    value = stated[0] if stated and stated[1] == "statement" else bare_value(text)
    return f"{value}!" if text.rstrip().endswith("!") and value[-1:].isdigit() else value  # \boxed{5!}


def _marks(text: str) -> list[_Mark]:
    """All marks in order. Boxes or tags separated only by "and" or "or" are one mark. Inner marks are ignored."""
    outer: list[_Mark] = []
    for mark in sorted([*_boxes(text), *_tags(text), *_hashes(text), *_json(text)]):
        last = outer[-1] if outer else None
        if last is None or mark.start >= last.end:
            is_joined = last is not None and JOINED.fullmatch(text, last.end, mark.start)
            if last is not None and (is_joined or _REPEATED.fullmatch(text, last.end, mark.start)):
                between = text[last.end : mark.start].strip(" $") if is_joined else "or"
                is_same = fold(bare_value(last.text)) == fold(bare_value(mark.text))
                both = mark.text if is_same else f"{last.text.strip()} {between} {mark.text.strip()}"
                outer[-1] = last._replace(end=mark.end, text=both)
            else:
                outer.append(mark)
    phrases: list[_Mark] = []
    foreign = [_Mark(*places, "foreign", False) for places in foreign_statements(text)]
    for phrase in [*_phrases(text), *foreign]:
        line_end = text.find("\n", phrase.content)
        line_end = len(text) if line_end < 0 else line_end
        is_inside = any(phrase.content <= s.start <= line_end or s.start <= phrase.start < s.end for s in outer)
        if not is_inside and not any(_is_one_sentence(text, phrase, later) for later in phrases):
            phrases.append(phrase)
    return sorted(outer + phrases)


def _is_one_sentence(text: str, phrase: _Mark, later: _Mark) -> bool:
    return phrase.content <= later.start and not SENTENCE.search(text, phrase.content, later.start)


def _phrases(text: str) -> list[_Mark]:
    """The last phrases "The answer is", "Answer:", a line with the title "Answer", or "... is the answer"."""
    phrases: list[_Mark] = []
    end = len(text)
    while len(phrases) < _MAX_MARKS and (at := max(text.rfind("nswer", 0, end), text.rfind("NSWER", 0, end))) > 0:
        end, head = at, text[max(0, at - 60) : at]
        if head[-1] not in "aA" or _JOINED_WORD.search(head[-3:-1]):  # wrong_answer
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
    for m in _BARE_BOX.finditer(text) if "box" in text else ():
        yield _Mark(m.start(), m.start(1), m.end(), m[1], True)
    opened: list[re.Match[str] | None] = []
    for m in _BOX.finditer(text) if "box" in text else ():
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
        if m.end() >= len(text.rstrip()) or STARTS.match(m[1]):  # other lines of this kind are headings
            yield _Mark(m.start(), m.start(1), m.end(), m[1], True)


def _json(text: str) -> Iterator[_Mark]:
    for m in _JSON.finditer(text) if "{" in text else ():
        start = m.start(m.lastindex or 0)
        yield _Mark(m.start(), start, m.end(), text[start : m.end(m.lastindex or 0)], True)


def _phrase(text: str, mark: _Mark) -> tuple[ParsedAnswer, int, bool]:
    """The answer in a phrase, its end, and whether it is denied or doubted."""
    if mark.text == "reversed":
        statement = SENTENCE.split(text[max(0, mark.start - 200) : mark.start])[-1]
        read = sentence_value(statement)
        words = bare_value(without_lead_in(statement))
        if any(map(str.isdigit, statement)) or words.lower() in _NO_NAMES:
            words = ""
        return ParsedAnswer(statement.strip(), read[0] if read else words, "marked"), mark.end, False
    content = text[mark.content : mark.content + MAX_VALUE]
    if "\n" in text[mark.start : mark.content] and (items := list_items(content)):
        at, last = items[-1]
        if value := _joined([item for _, item in items]):
            end = at + len(last)
            return ParsedAnswer(content[:end].strip(), value, "marked"), mark.content + end, False
        at, first = items[0]
        mark = mark._replace(content=mark.content + at, end=mark.content + at + len(first))
    return _foreign_phrase(text, mark) if mark.text == "foreign" else _stated_phrase(text, mark)


def _joined(items: list[str]) -> str:
    """The items of a list that is the answer as one value. Empty for one item, and if the first one is explained."""
    if len(items) > 1 and all(map(STARTS.match, items)):
        return " or ".join(bare_value(without_remark(item)) for item in items)
    is_words = len(items) > 1 and not any(map(RUN.search, items))
    return ", ".join(map(strip_markup, items)) if is_words else candidates(items)


def _stated_phrase(text: str, mark: _Mark) -> tuple[ParsedAnswer, int, bool]:
    content = text[mark.content : mark.content + MAX_VALUE]
    if content.isascii() and content.isalnum() and not NOT.search(text, mark.start, mark.content):
        return ParsedAnswer(content, content, "marked"), mark.content + len(content), False
    if block := _BLOCK.match(content):
        return ParsedAnswer(block[0], bare_value(block[1] or block[2]), "marked"), mark.content + block.end(), False
    statement = SENTENCE.split(content, maxsplit=1)[0]
    raw, lead = strip_markup(statement), without_lead_in(statement)
    if (instead := _INSTEAD.match(lead)) and STARTS.match(lead, instead.end()):
        value = bare_value(without_remark(lead[instead.end() :]))
        return ParsedAnswer(raw, value, "marked"), mark.content + len(statement), False
    if (negated := _NEGATED.match(lead)) and STARTS.match(lead, negated.end()):
        value = run[0] if (run := RUN.search(lead)) else ""
        return ParsedAnswer(raw, value, "marked"), mark.content + statement.find(value) + len(value), True
    if (corrected := CORRECTED.search(statement)) and corrected.start() > 0:  # the correction is read later
        statement = statement[: corrected.start()]
    if STARTS.match(bare := without_lead_in(strip_markup(statement))):  # Answer: The total is $42
        end = len(statement) - len(bare)
        statement = without_remark(bare)
        end += len(statement)
    else:
        statement = REASON.split(statement, maxsplit=1)[0]
        end = len(statement)
    value = bare_value(statement)
    source: Literal["marked", "fallback"] = "marked"
    if not STARTS.match(value) and (read := sentence_value(statement)):  # Answer: The volume is 120
        value, source = read[0], "fallback" if read[1] == "fallback" else "marked"
    before = text[: mark.start][-60:]
    doubted = NOT.search(text, mark.start, mark.content) or _DOUBTED.search(before)
    if STARTS.match(value):
        doubted = doubted or _EARLIER.search(before)
    return ParsedAnswer(raw, value, source), mark.content + end, doubted is not None


def _foreign_phrase(text: str, mark: _Mark) -> tuple[ParsedAnswer, int, bool]:
    value, is_wrong = foreign_sentence(text[mark.content : mark.end])
    value = bare_value(value)
    if _DECIMAL_COMMA.fullmatch(value) and text[mark.start] < "\u0600":
        value = value.replace(",", ".")
    if not STARTS.match(value) and (read := sentence_value(value)):  # "Antwort: Er hat 42"
        value = read[0]
    return ParsedAnswer(strip_markup(text[mark.content : mark.end]), value, "marked"), mark.end, is_wrong


def _reconsidered(read: ParsedAnswer, rest: str, *, is_strong: bool = False) -> ParsedAnswer:
    """The answer after corrections and doubts in the following text. A box or tag needs a plain correction."""
    if not rest or rest.isspace():
        return read
    if len(rest) < _NEAR and REFUSED.match(rest):
        return read._replace(raw="", value="")
    corrected = CORRECTED.search(rest, 0, _NEAR)
    if corrected:
        again = unmarked_answer(rest[corrected.end() :])
        if is_strong and not _PLAIN.match(rest, corrected.end()):
            return read
        if _NO_REPLY.match(rest) and fold(again.value) in ("", fold(read.value)):  # "Is it 20? No, 20 is even."
            return read._replace(raw="", value="")
        is_name = _NAME.fullmatch(again.value) and not RUN.search(read.value)
        if again.value and (STARTS.match(again.value) or is_name):
            return again._replace(source="marked")
    doubting = DOUBTING.match(rest)
    if doubting:
        doubting = DOUBTING.match(rest, doubting.end()) or doubting  # "or perhaps"
        sentence = SENTENCE.split(rest[doubting.end() : doubting.end() + 200], maxsplit=1)[0]
        other = RUN.search(sentence) or (None if RUN.search(read.value) else _NAME.match(sentence.lstrip(" ,")))
        if other:
            return ParsedAnswer(read.raw, f"{read.value} or {other[0]}", read.source)
    return read
