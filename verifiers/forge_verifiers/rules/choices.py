r"""The option that a text chooses in a multiple-choice question: "The answer is (A).", "**B. Paris**", ``\boxed{C}``.

A letter is chosen if the last statement about the answer affirms it. Denied letters ("(A) is wrong") are not chosen. A
statement that affirms several letters ("A or B", a list of all options) chooses none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from forge_verifiers.rules.languages import (
    ALTERNATIVE,
    ANSWER,
    IS,
    NEGATION,
    OPTION,
    RIGHT,
    latin_choices,
    normalized,
)
from forge_verifiers.rules.statements import CORRECTED, TAKEN_BACK, readable

_MAX_CHARS = 4_000
_GOLD = re.compile(r"[(\[{]?\s*([A-Z])\s*[)\]}.:]?")
_MARKUP = re.compile(
    r"\\(?:text|math|m|bold|underline)(?:bf|it|rm|tt|sf|normal|box|symbol)?\s*(?=\{)"
    r"|\\(?:bf|it|rm|tt|sf|bfseries|left|right|quad|displaystyle|large|Large|huge|Huge)(?![A-Za-z])|\\[,;: ()\[\]]"
    r"|[*_`$\"“”«»{}\u2190-\u21ff\u2700-\u27bf\ufe0f\U0001f300-\U0001faff]"
)
_BOX = re.compile(
    r"(?<!\\)\\+f?boxe?d?\s*\{((?:[^{}]|\{[^{}]*\})*)\}|(?<!\\)\\+boxed\s+(\w)\b|<(?:(?:final[_-]?)?answer|choice)>(.*?)</(?:(?:final[_-]?)?answer|choice)>",
    re.DOTALL | re.IGNORECASE,
)
_VERDICT_SIGN = re.compile("([\u2705\u2713\u2714])\ufe0f?|[\u274c\u2717\u2718]\ufe0f?")
_QUOTED = re.compile(r"['\u2018]([(\[]?[A-Za-z][)\]]?)['\u2019]")
_ALL_BUT = re.compile(r"\b(?:anything|everything|all|any)\s+but\b", re.IGNORECASE)
_EXCEPTION = re.compile(  # "All of them are mammals except C"
    r"\b(?:all|each|every\w*)\s[^.,\n]{0,60}?\b(?:is|are|was|were|ha(?:s|ve)|do(?:es)?|can)\b[^.,\n]{0,60}?"
    r"\bexcept(?:\s+for)?\b",
    re.IGNORECASE,
)
_DESCRIBED = re.compile(
    r"(?<!\w\s)(?<!\w)the\s+(?:(?!(?:answer|option|choice|letter|solution|pick|exclude|reject|eliminat|rul|doubt|dismiss|discard)\w*)"
    r"[\w'\u2019-]+\s+){1,10}?(?:is|was|must\s+be)(?=\s+[(\[]?[A-J]\b(?!\s*[a-z]))",
    re.IGNORECASE,
)
_VERDICTS = {"wrong", "incorrect", "false", "correct", "right", "true"}
_TRAPS = {"trap", "distractor", "mistake", "error"}
_NOT_BUT = re.compile(r"\bnot\s+[(\[]?[A-Za-z][)\]]?,?\s+but(?:\s+rather)?\s+", re.IGNORECASE)
_LOWER = re.compile(
    r"(?:\b(?:answer|option|choice|letter)\b(?:\s+is)?\s*[:=]?\s*|^\s*)[(\[]?([a-z])[)\]]?(?=\s*(?:[).:,;!]|$))",
    re.IGNORECASE,
)
_NEXT = (
    r"(?:is|was|isn|because|since|as|and|or|nor|but|not|if|so|seems?|looks?|fits|would|could|can|cannot|must|may|might|should"
    r"|has|then|for|due|instead|rather|over|which|it|to be|correct|right|wrong|probably|y|o|und|oder|et|ou)\b"
)
_AFTER_I = r"\s*(?:[).:;!\]]|$|,?\s*(?:is|because|since|as|or|and|not)\b|[,/]\s*[(\[]?[A-J]\b)"
"""Text after the option I of ten (MMLU-Pro, arXiv 2406.01574), in contrast to the pronoun."""
_LETTER = re.compile(  # in "A dog", A is an article
    r"(?<![A-Za-z\d])[(\[]\s*([A-Za-z])\s*[)\]]"
    r"|(?<![A-Za-z\d'\u2019\\^.(])(?:([B-HJ-Z])|(A)(?!(?<!ption A)(?<!hoice A)(?<!etter A)(?<!nswer A)(?<!nswer is A)"
    rf"[ \t]+(?!{_NEXT})[a-z])|(I)(?={_AFTER_I}))"
    r"(?!['\u2019](?![dt][\u0131iu\u00fc]r\b)|[A-Za-z\d(\[^_<>+#\u266d\u266f]|\s*[=+*^<>]\s*\w|-[A-Za-z\d]|\.\d|\.[A-Z]\.)[).:]?"
)
_JOINED = re.compile(
    rf"[\s,;/&|+.-]*+(?:(?:and|or|nor|(?-i:y|o|e|и)|und|et|和|と|,)|{ALTERNATIVE})?[\s,;/&|+-]*+(?:{ALTERNATIVE}\s*)?",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<!\n[A-Z])(?<!^[A-Z])[.!](?=\s|$)|[\n\u3002\u0964\u2026]|\.\.+|(?<=[?\u061f])")
_NUMBERING = re.compile(r"[\s\d]*")
_CLAUSE = re.compile(
    r"[;:,]|\b(?:but|so|while|whereas|although|though|therefore|thus|hence|because|since|instead(?! of)|then)\b"
    r"|(?=\b(?:instead of|rather than)\b)"  # "B rather than A" denies A
    r"|\s[-\u2013]\s|\u2014|\((?=not\b)",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"\b(?:not|never|neither|nor|nobody|cannot|wrong|incorrect(?:ly)?|false|invalid|untrue|impossible|mistaken?|avoid"
    r"|(?:^|(?<=^ )|(?<=let us )|(?<=let['\u2019]s ))(?:suppose|assume)|exclud\w+|except|eliminat\w+|ruled?"
    r"|reject\w*|doubt\w*|unlikely|instead of|rather than|unless|if|other than"
    r"|(?:is|are|was|were|do|does|did|ca|wo|would|could|should)nt)\b|n['\u2019]t\b"
    rf"|{NEGATION}",
    re.IGNORECASE,
)
_FAILS = re.compile(r"\s*(?:fail(?:s|ed)|is\s+(?:only\s+|just\s+)?a\s+(?:distractor|trap))\b", re.IGNORECASE)
_ELIMINATED = re.compile(
    r"\b(?:eliminated|rejected|excluded|ruled out|wrong|incorrect|false)"
    r"(?:\s+(?:options?|answers?|choices?))?\s*:[\s(\[]*$|\bthan\s[(\[]?$",
    re.IGNORECASE,
)
_HEDGED = re.compile(
    rf"(?:\b(?:or|maybe|perhaps|possibly|also|alternatively|either|if not)\b|{ALTERNATIVE})[\s,:(\[]*$", re.IGNORECASE
)
_ALSO = re.compile(
    r"[)\].:]*\s*(?:(?:could|might|may|can)\b(?:\s+also)?|(?:is|are)\s+(?:also|possible|plausible)\b|too\b)",
    re.IGNORECASE,
)
_CUE = re.compile(
    rf"(?:{ANSWER}|{OPTION}|{RIGHT}|\b(?:answer(?:\s+(?:to|for|of)\s+(?:[a-z]+\s+){{0,3}}(?:question|problem|\d+))?(?:\s+\d+)?"
    r"|ans|option|choice|letter|solution|choose|chose|pick|select(?:ed)?|with|for|correct|right|best|only|just|response"
    r"|verdict|conclusion|decision|prediction|output|result|it is|it['\u2019]?s|that is|that['\u2019]s"
    r"|this is|guess|so|thus|hence|therefore|final|conclude|think|believe|say|leaving|leaves|left is"
    r"|(?:must|should|has to|seems to) be|looks like|gabarito|lösung|chọn)\b|选|選|因此|所以|只有|よって|따라서)"
    rf"(?:[\s:=.>,'\u2013\u2014\u2192\u21d2-]|{IS}|{OPTION}|的"
    r"|\b(?:is|be|are|would|must|should|might|could|may|option|choice|the|letter|number|probably|likely|definitely|clearly|either|both|maybe"
    r"|possibly|perhaps|la|le|el|das|die|der|a|o|yang)\b)*[(\[]?$",
    re.IGNORECASE,
)
_STRONG = re.compile(rf"{ANSWER}|(?:answer|choose|chose|pick|select|correct|right|best|final)", re.IGNORECASE)
_CONCLUDING = re.compile(r"(?:hence|therefore|thus|so|leav(?:es|ing)|conclude)\b", re.IGNORECASE)
_UNSURE = re.compile(r"\b(?:could|might|may|maybe|possibly|perhaps)\b", re.IGNORECASE)
_AROUND = " .,:()[]=>\u2192\u21d2"
_LAST = re.compile(r"[(\[][A-J][)\]]\W*$")
_CONFIRMED = re.compile(
    r"\s*(?:(?:is|are|must be|would be|seems|looks|fits|works|most|likely|probably|clearly|definitely|the|my|only"
    r"|best|one|final)\s+)+(?:correct|right|true|answer|best|better|strong(?:er|est)|choice|option|solution"
    r"|more\s+(?:accurate|likely|plausible|appropriate|suitable|precise|complete))\b"
    r"|[)\].]*[\s|:\u2013\u2014-]+(?:correct|right)[\s|]*$",
    re.IGNORECASE,
)
_RETRACTED = re.compile(
    r"\b(?:that|this|it)(?:['\u2019]?s| is| was)\s+(?:wrong|incorrect|not\s+(?:right|correct)|a mistake)\b",
    re.IGNORECASE,
)


def choice_letter(gold: str) -> str:
    """The letter of a gold answer such as ``A``, ``(A)`` or ``A.``, or empty for other answers."""
    match = _GOLD.fullmatch(_MARKUP.sub("", normalized(gold)).strip())
    return match[1] if match else ""


@lru_cache(maxsize=2048)
def chosen_letter(text: str) -> str:
    """The upper-case letter that a text chooses, or empty for none or several."""
    text = readable(text)[-_MAX_CHARS:]
    text = _BOX.sub(lambda m: f"\nAnswer: {(m[1] or m[2] or m[3] or '').strip()}\n", text)
    text = _QUOTED.sub(r"\1", text.replace("####", "\nAnswer: "))
    text = _MARKUP.sub("", latin_choices(_VERDICT_SIGN.sub(_verdict, text))).strip()
    text = _DESCRIBED.sub(_without_description, _EXCEPTION.sub("It is", text))
    text = _NOT_BUT.sub("", _ALL_BUT.sub("not", text))
    text = _LOWER.sub(_with_capital, text)
    decided: frozenset[str] = frozenset()
    mentioned: frozenset[str] = frozenset()
    strength, is_adjacent, is_corrected = 0, False, False
    for letters, new_strength, is_correction, is_short in _statements(text):
        is_corrected = is_corrected or is_correction
        if not letters:
            is_adjacent = False
            if is_correction:
                decided = mentioned = frozenset()
        elif new_strength == 0 and not is_correction:
            mentioned |= letters
        elif is_corrected or new_strength > strength or (new_strength == strength and not is_adjacent):
            decided, strength, is_adjacent, is_corrected = letters, new_strength, True, False
        elif is_adjacent and (new_strength == strength or is_short):  # "It is A. It is B.", "A. Also B."
            decided |= letters
    chosen = decided or mentioned
    return next(iter(chosen)) if len(chosen) == 1 else ""


def _without_description(match: re.Match[str]) -> str:
    """Replaces "The statement that is not true is", whose "not" denies no option, by "It is"."""
    words = match[0].lower().split()
    is_verdict = "one" in words and _VERDICTS & {*words}
    return match[0] if is_verdict or words[1] in _TRAPS else "It is"


def _verdict(sign: re.Match[str]) -> str:
    return " correct " if sign[1] else " wrong "


def _with_capital(match: re.Match[str]) -> str:
    start, end = match.start(1) - match.start(), match.end(1) - match.start()
    return match[0][:start] + match[1].upper() + match[0][end:]


def _statements(text: str) -> Iterator[tuple[frozenset[str], int, bool, bool]]:
    """By sentence: affirmed letters, their strength, whether it corrects earlier statements, and whether it is short.

    The strength is 2 if the sentence calls them the answer, 1 if it concludes with them or consists of them, else 0.
    """
    for whole in _SENTENCE.split(text):
        if _JOINED.fullmatch(whole) or _NUMBERING.fullmatch(whole) or whole.rstrip().endswith(("?", "\u061f")):
            continue
        corrections = list(CORRECTED.finditer(whole))
        is_correction = bool(corrections)
        is_new = corrections and _LETTER.search(whole, corrections[-1].end())
        sentence = whole[corrections[-1].end() :] if is_new else whole
        letters, strength = _affirmed(sentence)
        if not letters and len(sentence.split()) <= 4 and _CUE.search(sentence):  # "The answer is", before a box
            continue
        if not letters and not _RETRACTED.search(sentence) and not (corrections and _LETTER.search(sentence)):
            is_correction = False
        yield letters, strength, is_correction, len(sentence.split()) <= 3


def _affirmed(sentence: str) -> tuple[frozenset[str], int]:
    """Letters that a sentence affirms, and the strength of the statement."""
    groups = _groups(sentence)
    affirmed: list[tuple[set[str], int, bool]] = []
    for number, (start, end, letters) in enumerate(groups):
        low = groups[number - 1][1] if number else 0
        high = groups[number + 1][0] if number + 1 < len(groups) else len(sentence)
        before, after = sentence[low:start], sentence[end:high]
        is_hedged = bool(_HEDGED.search(before) or (number and _ALSO.match(after)))
        near = _CLAUSE.split(before)[-1] + " " + _CLAUSE.split(after, maxsplit=1)[0]
        is_denied = _ELIMINATED.search(before) or _FAILS.match(after) or TAKEN_BACK.match(after)
        if is_denied or (_DENIED.search(near) and not is_hedged):
            continue
        is_whole = is_hedged or not (before + after).strip(_AROUND)
        strength = _strength(sentence[:start], after, is_whole=is_whole, is_single=len(letters) == 1)
        affirmed.append((letters, strength, is_hedged))
    best = max((strength for _, strength, _ in affirmed), default=0)
    is_after_text = bool(groups and sentence[: groups[0][0]].strip(" -("))  # neither "A) Paris" nor "Paris (A)"
    if best == 0 and is_after_text and not (len(groups) == 1 and _LAST.search(sentence)):
        return frozenset(), 0
    is_chosen = [
        strength == best or is_hedged or any(later[2] for later in affirmed[number + 1 : number + 2])  # A (or B)
        for number, (_, strength, is_hedged) in enumerate(affirmed)
    ]
    chosen_groups = [group for (group, _, _), chosen in zip(affirmed, is_chosen, strict=True) if chosen]
    return frozenset().union(*chosen_groups), best


def _strength(before: str, after: str, *, is_whole: bool, is_single: bool) -> int:
    cue = _CUE.search(before[-80:])
    if _CONFIRMED.match(after) or (cue and _STRONG.match(cue[0]) and not _UNSURE.search(cue[0])):
        return 2
    is_end = is_single and not after.strip(_AROUND)
    if cue and is_end and _CONCLUDING.match(cue[0]) and not _UNSURE.search(cue[0]):  # "Hence C."
        return 2
    return int(is_whole or cue is not None)


def _groups(sentence: str) -> list[tuple[int, int, set[str]]]:
    """Start, end and letters of the options in a sentence. A list such as "A, B or C" is one group."""
    groups: list[tuple[int, int, set[str]]] = []
    is_last = False  # after "and", a comma ends the list
    for match in _LETTER.finditer(sentence):
        letter = next(filter(None, match.groups())).upper()
        joiner = sentence[groups[-1][1] if groups else 0 : match.start()]
        is_word = any(map(str.isalpha, joiner))
        if groups and _JOINED.fullmatch(joiner) and (is_word or not is_last):
            groups[-1] = (groups[-1][0], match.end(), groups[-1][2] | {letter})
            is_last = is_last or is_word
        else:
            groups.append((match.start(), match.end(), {letter}))
            is_last = False
    return groups
