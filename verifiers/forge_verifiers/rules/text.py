"""Cheap rules that compare a text with a gold answer, a pattern, a schema or a size. Their work on any text is bounded.

Rules with a gold answer read ``trajectory.info[answer_key]`` (one value or a list of alternatives) and abstain if it is
missing. All rules abstain for an agent without turns.

Rules about content (`Exact`, `Regex`, `JsonSchema`, `Language`) read the answer, `Turn.action`. Rules about form
(`Format`, `Length`, `Repetition`) read the whole response including reasoning, `Turn.response`.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from forge_agents.envs.reasoning import in_think_tags
from forge_agents.types import Trajectory, Turn, total_tokens
from forge_verifiers.core.markdown import answer_section, code_blocks
from forge_verifiers.core.verifier import TrajectoryRule
from forge_verifiers.rules.answers import AnswerRule, last_action, same_text
from forge_verifiers.rules.languages import normalized

if TYPE_CHECKING:
    from forge_agents.schemas import Schema


@dataclass(frozen=True, kw_only=True)
class Exact(AnswerRule):
    """The final answer equals the gold answer as text, ignoring case, white space and a final period.

    `answers` finds the final answer: "It is Paris.", "**Paris**" and "Paris" are equal.
    """

    name: str = "exact"

    def grade(self, trajectory: Trajectory) -> float | None:
        """1 if the answer, or the whole text, is a gold answer, else 0."""
        if (pair := self.read(trajectory)) is None:
            return None
        answer, golds = pair
        return float(any(same_text(answer, gold) for gold in golds))


@dataclass(frozen=True, kw_only=True)
class Regex(TrajectoryRule):
    """The last answer matches a pattern (Perl syntax, as the package ``regex`` takes it).

    A pattern with a ``<think>`` or ``</think>`` tag is matched with the whole response, including the reasoning. A text
    on which matching takes longer than `timeout_s` scores 0, so that evading the check does not pay.
    """

    pattern: str
    """Regular expression."""
    exact = True
    name: str = "regex"
    full: bool = False
    """True if the whole text, without surrounding white space, must match."""
    timeout_s: float = 0.25
    """Timeout in seconds of one match."""

    def __post_init__(self) -> None:
        try:
            _compiled(self.pattern)
        except importlib.import_module("regex").error as error:
            raise ValueError(f"pattern {self.pattern!r} of {self.name!r} is no regular expression: {error}") from error

    def grade(self, trajectory: Trajectory) -> float | None:
        """1 if the pattern matches, else 0."""
        text = last_action(trajectory)
        if text is None:
            return None
        if "think>" in self.pattern:
            text = trajectory.turns[-1].response
        pattern = _compiled(self.pattern)
        try:
            if self.full:
                return float(pattern.fullmatch(text.strip(), timeout=self.timeout_s) is not None)
            return float(pattern.search(text, timeout=self.timeout_s) is not None)
        except TimeoutError:
            return 0.0


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    return importlib.import_module("regex").compile(pattern)  # unlike `re`, it has a timeout


@dataclass(frozen=True, kw_only=True)
class Format(TrajectoryRule):
    """Every response is a sequence of XML-like sections, each once and in order, with only white space between them.

    ``Format(tags=("think", "answer"))`` expects ``<think>...</think><answer>...</answer>``. The score is the fraction
    of the agent's responses in this format.

    With "think" in `tags`, the reasoning is part of the format. Reasoning tags of other models, such as ``[THINK]``,
    count as ``<think>``. Without "think", only the answer is checked. Sections other than "think" must not be empty.
    """

    tags: Sequence[str] = ("think", "answer")
    """Names of the sections in order."""
    exact = True
    name: str = "format"

    def __post_init__(self) -> None:
        if not self.tags or not all(re.fullmatch(r"[\w-]+", tag) for tag in self.tags):
            raise ValueError(f"tags={self.tags!r} of {self.name!r} must be one or more names of letters and digits")

    def grade(self, trajectory: Trajectory) -> float | None:
        """Fraction of responses in the format."""
        if not trajectory.turns:
            return None
        return sum(map(self._matches, trajectory.turns)) / len(trajectory.turns)

    def _matches(self, turn: Turn) -> bool:
        text = (in_think_tags(turn.response) if "think" in self.tags else turn.action).strip()
        position = 0
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1 or not text.startswith(opening, position):
                return False
            end = text.find(closing, position)
            if end < 0 or (tag != "think" and _is_blank(text[position + len(opening) : end])):
                return False
            position = end + len(closing)
            while position < len(text) and text[position].isspace():
                position += 1
        return position == len(text)


def _is_blank(text: str) -> bool:
    """Return whether a text shows nothing: white space, control and format characters, and letters without a shape."""
    return all(char in _SHAPELESS or char.isspace() or unicodedata.category(char)[0] in "CMZ" for char in text)


_SHAPELESS = "\u115f\u1160\u2800\u3164\uffa0"
"""Fillers of Hangul and the braille pattern without dots."""


@dataclass(frozen=True, kw_only=True)
class JsonSchema(TrajectoryRule):
    """The last action, or its last fenced block, is JSON that conforms to a JSON schema.

    Fenced blocks in languages other than JSON are ignored unless there is no other block. If the text has an
    ``<answer>`` section, only this section counts. A text on which the schema's patterns take longer than `timeout_s`
    scores 0.
    """

    schema: Mapping[str, Any]
    """The schema (draft 2020-12 unless it declares another)."""
    exact = True
    name: str = "json_schema"
    timeout_s: float = 0.25
    """Timeout in seconds of all patterns together on one text."""

    def __post_init__(self) -> None:
        jsonschema = importlib.import_module("jsonschema")
        try:
            jsonschema.validators.validator_for(self.schema).check_schema(self.schema)
            self._make()
        except jsonschema.SchemaError as error:
            raise ValueError(f"schema of {self.name!r} cannot be used: {error.message}") from error

    @cached_property
    def _checked(self) -> Schema:
        return self._make()

    def _make(self) -> Schema:
        from forge_agents.schemas import Schema

        return Schema(self.schema, timeout_s=self.timeout_s)

    def grade(self, trajectory: Trajectory) -> float | None:
        """1 if the text is JSON and conforms, else 0."""
        text = last_action(trajectory)
        if text is None:
            return None
        text = answer_section(text)
        blocks = code_blocks(text)
        texts = [block.text for block in blocks if block.language in {"", "json"}] or [block.text for block in blocks]
        try:
            value = json.loads(texts[-1] if texts else text, parse_float=_finite, parse_constant=_finite)
            return float(self._checked.first_error(value) is None)
        except (ValueError, RecursionError, TimeoutError):  # invalid, nested too deeply, or too slow for the patterns
            return 0.0


def _finite(text: str) -> float:
    """Return the number of a JSON text. NaN, infinity and numbers beyond a float's range are no JSON."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not JSON")
    return value


@dataclass(frozen=True, kw_only=True)
class Length(TrajectoryRule):
    """The total length of the responses is in [low, high]. Outside, the score falls linearly to 0 over `slack`.

    Characters without a shape, such as zero-width spaces, and more than one blank between words do not count towards
    `low`.
    """

    low: int = 0
    """Minimum length that scores 1."""
    high: int
    """Maximum length that scores 1."""
    slack: int = 0
    """Distance from the range at which the score reaches 0."""
    unit: Literal["chars", "words", "tokens"] = "chars"
    """Unit of the length. Tokens are those that the policy sampled. Each character of Chinese, Japanese and Thai is a
    word, and so are 40 characters of a longer run without white space."""
    reasoning: bool = True
    """True if the length includes the reasoning."""
    name: str = "length"

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or self.slack < 0:
            raise ValueError(
                f"low={self.low}, high={self.high}, slack={self.slack} of {self.name!r}: "
                "expected 0 <= low <= high and slack >= 0"
            )
        if self.unit not in {"chars", "words", "tokens"}:
            raise ValueError(f"unit={self.unit!r} of {self.name!r} must be 'chars', 'words' or 'tokens'")

    def grade(self, trajectory: Trajectory) -> float | None:
        """1 within the range, less outside."""
        if not trajectory.turns:
            return None
        size = self._size(trajectory)
        outside = max(self.low - (self._size(trajectory, shown=True) if self.low else size), size - self.high, 0)
        return max(0.0, 1.0 - outside / (self.slack or 1))

    def _size(self, trajectory: Trajectory, *, shown: bool = False) -> int:
        if self.unit == "tokens":
            excluded = 0 if self.reasoning else sum(p.reasoning_tokens for turn in trajectory.turns for p in turn.parts)
            return total_tokens(trajectory.turns) - excluded
        texts = [turn.response if self.reasoning else turn.action for turn in trajectory.turns]
        texts = [" ".join(_shown(text).split()) for text in texts] if shown else texts
        if self.unit == "chars":
            return sum(map(len, texts))
        return sum(-(-len(word) // _MAX_WORD) for text in texts for word in _compiled(_WORDS).findall(text))


_SCRIPTS = ("latin", "cyrillic", "greek", "han", "kana", "hangul", "arabic", "hebrew", "devanagari", "bengali", "thai")
"""Scripts of Unicode. Kana is hiragana, katakana and their long vowel mark."""
_LANGUAGES = {
    code: tuple(scripts.split())
    for scripts, codes in (
        *(("latin", "en de fr es it pt nl pl tr vi id sv cs"), ("cyrillic", "ru uk bg"), ("arabic", "ar fa ur")),
        *(("devanagari", "hi mr ne"), ("greek", "el"), ("han", "zh"), ("han kana", "ja"), ("hangul han", "ko")),
        *(("hebrew", "he"), ("bengali", "bn"), ("thai", "th")),
    )
    for code in codes.split()
}


@dataclass(frozen=True, kw_only=True)
class Language(TrajectoryRule):
    """The fraction of letters of the answers that belong to the script of a language.

    Reasoning is ignored. Languages with the same script are not distinguished. Answers without letters and digits, such
    as an empty one, score 0. Abstains if there are digits only.
    """

    language: str
    """ISO 639-1 code, or the name of a script."""
    name: str = "language"
    _pattern: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        scripts = (self.language,) if self.language in _SCRIPTS else _LANGUAGES.get(self.language)
        if scripts is None:
            names = ", ".join(sorted([*_LANGUAGES, *_SCRIPTS]))
            raise ValueError(f"language={self.language!r} of {self.name!r} is unknown. Choose one of {names}")
        object.__setattr__(self, "_pattern", _compiled("|".join(map(_letters, scripts))))

    def grade(self, trajectory: Trajectory) -> float | None:
        """Fraction of letters in the script. Circled letters count as the letters in the circles."""
        text = normalized("".join(turn.action for turn in trajectory.turns))
        if letters := "".join(filter(str.isalpha, text)):
            return len(self._pattern.findall(letters)) / len(letters)
        return None if not trajectory.turns or any(map(str.isnumeric, text)) else 0.0


def _letters(script: str) -> str:
    return r"[\p{Hiragana}\p{Katakana}\u30fc\uff70]" if script == "kana" else rf"\p{{{script}}}"


_WORDS = r"(?V1)[\p{Han}\p{Hiragana}\p{Katakana}\u30fc\p{Thai}]|[^\s\p{Han}\p{Hiragana}\p{Katakana}\u30fc\p{Thai}]+"


_UNSHOWN = r"(?V1)[[\p{C}\p{Default_Ignorable_Code_Point}\u2800]--\s]"
"""Control, format and other characters that take no space, fillers, and the braille pattern without dots."""


def _shown(text: str) -> str:
    """Return a text without characters that show nothing. White space stays."""
    return str(_compiled(_UNSHOWN).sub("", text))


_MAX_WORD = 40
"""Longer runs of characters without white space are no words of a language."""
_WINDOW = 9
"""Number of characters that stand for a word in such a run. Few texts repeat four windows in a row by chance."""


@dataclass(frozen=True, kw_only=True)
class Repetition(TrajectoryRule):
    """1 minus the fraction of repeated word n-grams in the responses, reasoning included.

    Chinese, Japanese and Thai, single words, and runs of over 40 characters without white space are compared by
    characters. Letter case and characters without a shape, such as zero-width spaces, are ignored.
    """

    size: int = 4
    """Number of words in an n-gram."""
    allowed: float = 0.1
    """Fraction of repeated n-grams without a penalty."""
    name: str = "repetition"

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.allowed < 1:
            raise ValueError(
                f"size={self.size}, allowed={self.allowed} of {self.name!r}: expected size >= 1 and 0 <= allowed < 1"
            )

    def grade(self, trajectory: Trajectory) -> float | None:
        """1 without repetitions, 0 if everything is repeated."""
        if not trajectory.turns:
            return None
        texts = [_shown(turn.response).casefold() for turn in trajectory.turns]
        words: Sequence[str] = [word for text in texts for word in _compiled(_WORDS).findall(text)]
        if len(words) == 1 and len(words[0]) <= _MAX_WORD:
            words = words[0]
        elif any(len(word) > _MAX_WORD for word in words):
            words = [part for word in words for part in _windows(word)]
        total = len(words) - self.size + 1
        if total <= 1:
            return 1.0
        distinct = len(set(zip(*(words[k:] for k in range(self.size)), strict=False)))
        repeated = 1.0 - distinct / total
        return 1.0 - max(0.0, repeated - self.allowed) / (1.0 - self.allowed)


def _windows(word: str) -> list[str]:
    """Return a word, or all windows of a long one, so that it may repeat itself at any distance."""
    return [word] if len(word) <= _MAX_WORD else [word[k : k + _WINDOW] for k in range(len(word) - _WINDOW + 1)]
