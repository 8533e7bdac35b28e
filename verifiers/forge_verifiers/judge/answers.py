"""How a judge may answer, and what an answer is worth.

In: replies of a model. Out: grades in [0, 1], None for nonsense. Waits for nothing.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from forge_verifiers.core.verifier import Cost

LEAST_MASS = 0.01
"""A choice among answers that were all unlikely says nothing: the model was about to write something else. A model of
135M parameters gives yes and no together 0.3 to 0.4, marks 0.04 to 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a model answered."""

    text: str
    shares: Mapping[str, float]
    """Probability of each choice among all choices, summing to 1; empty where log-probabilities are not known."""
    prompt_tokens: int
    completion_tokens: int
    mass: float = math.nan
    """Probability of all choices together, had the model been free to say anything; NaN where it is not known."""


@dataclass(frozen=True, slots=True)
class YesNo:
    """Yes or no. The grade is P(yes) among the two where log-probabilities are known, else 1 or 0.

    A judge that was about to say something else was made to choose: below `least_mass` it abstains.
    """

    least_mass: float = LEAST_MASS
    """Probability of yes and no together, in [0, 1], below which the judge has not answered."""
    cost: ClassVar[Cost] = "model"
    choices: ClassVar[tuple[str, ...]] = ("yes", "no")
    max_tokens: ClassVar[int] = 12
    ask: ClassVar[str] = "Does it satisfy the rubric? Answer yes or no."

    @property
    def schema(self) -> dict[str, Any]:
        """The answer as JSON, for endpoints."""
        return _one_of(self.choices)

    def __post_init__(self) -> None:
        _check_mass(self.least_mass)

    def grade(self, reply: Reply) -> float | None:
        """In [0, 1]."""
        found = _chosen(reply, self.choices, self.least_mass)
        return None if found is None else found["yes"]


@dataclass(frozen=True, slots=True)
class Scale:
    """A mark from 1 (worst) to `levels` (best).

    The grade is (mark - 1) / (levels - 1). Where log-probabilities are known the mark is its expected value under the
    judge's distribution (G-Eval, arXiv 2303.16634, eq. 1), so that marks that the judge wavers between do not tie.
    """

    levels: int = 5
    """2 to 9."""
    least_mass: float = LEAST_MASS
    """Probability of all marks together, in [0, 1], below which the judge has not answered."""
    cost: ClassVar[Cost] = "model"
    max_tokens: ClassVar[int] = 12

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= 9:
            raise ValueError(f"levels={self.levels} must be 2 to 9: marks are single digits")
        _check_mass(self.least_mass)

    @property
    def choices(self) -> tuple[str, ...]:
        """The marks."""
        return tuple(string.digits[1 : self.levels + 1])

    @property
    def ask(self) -> str:
        """What is asked."""
        return (
            f"How well does it satisfy the rubric? Answer with a number from 1 (not at all) to {self.levels} (fully)."
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The answer as JSON, for endpoints."""
        return _one_of(self.choices)

    def grade(self, reply: Reply) -> float | None:
        """In [0, 1]."""
        found = _chosen(reply, self.choices, self.least_mass)
        if found is None:
            return None
        mark = sum(int(choice) * share for choice, share in found.items())
        return min(max((mark - 1) / (self.levels - 1), 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A reason, then pass or fail, as JSON. The grade is 1 or 0."""

    max_reason_chars: int = 300
    """The reason is cut off there."""
    cost: ClassVar[Cost] = "expensive"
    choices: ClassVar[tuple[str, ...]] = ()
    ask: ClassVar[str] = (
        'Does it satisfy the rubric? Answer in JSON: {"reason": one or two sentences, "pass": true or false}.'
    )

    def __post_init__(self) -> None:
        if self.max_reason_chars < 1:
            raise ValueError(f"max_reason_chars={self.max_reason_chars}; leave room for a reason, 100 or more")

    @property
    def max_tokens(self) -> int:
        """Enough for the whole reason even at one token a character."""
        return self.max_reason_chars + 40

    @property
    def schema(self) -> dict[str, Any]:
        """The answer as JSON; the reason comes first, so that the verdict follows from it."""
        return {
            "type": "object",
            "properties": {
                "reason": {"type": "string", "maxLength": self.max_reason_chars},
                "pass": {"type": "boolean"},
            },
            "required": ["reason", "pass"],
            "additionalProperties": False,
        }

    def grade(self, reply: Reply) -> float | None:
        """1 or 0."""
        answer = _json_in(reply.text)
        verdict = answer.get("pass") if answer is not None else None
        return float(verdict) if isinstance(verdict, bool) else None


Ranking: TypeAlias = Literal["win_rate", "bradley_terry"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Siblings of a group are compared with each other, two at a time, in both orders.

    A text wins where it is preferred in both places; a judge that prefers a place (arXiv 2306.05685, section 3.3) says
    nothing, which is a tie. See `judge_ranking.rank` for the grades. A group with only one distinct text has nothing to
    compare and abstains.
    """

    ranking: Ranking = "win_rate"
    """``"win_rate"`` or ``"bradley_terry"``."""
    opponents: int | None = None
    """Siblings that each text meets, an even number, drawn at random by the judge's seed; None: all. A group of n
    distinct texts costs n * opponents questions, or n * (n - 1) when all meet."""
    least_mass: float = LEAST_MASS
    """Probability of A and B together, in [0, 1], below which the judge has not answered."""
    cost: ClassVar[Cost] = "expensive"
    choices: ClassVar[tuple[str, ...]] = ("A", "B")
    max_tokens: ClassVar[int] = 12
    ask: ClassVar[str] = "Which satisfies the rubric better, A or B? Answer A or B."

    def __post_init__(self) -> None:
        if self.ranking not in {"win_rate", "bradley_terry"}:
            raise ValueError(f"ranking={self.ranking!r}; choose 'win_rate' or 'bradley_terry'")
        if self.opponents is not None and (self.opponents < 2 or self.opponents % 2):
            raise ValueError(f"opponents={self.opponents} must be an even number, 2 at least, or None for all")
        _check_mass(self.least_mass)

    @property
    def schema(self) -> dict[str, Any]:
        """The answer as JSON, for endpoints."""
        return _one_of(self.choices)


    def grade(self, reply: Reply) -> str | None:
        """The letter preferred."""
        unsaid = _chosen(reply, self.choices, self.least_mass) is None
        return None if unsaid else choice_in(reply.text, self.choices)


Answer: TypeAlias = YesNo | Scale | Reasoned | Pairs


def choice_in(text: str, choices: tuple[str, ...]) -> str | None:
    """The choice that a reply names, bare or as ``{"answer": choice}``; None where it names none."""
    answer = _json_in(text)
    word = str(answer.get("answer", "")) if answer is not None else text
    word = word.strip().strip("\"'.*").casefold()
    return next((choice for choice in choices if choice.casefold() == word), None)


def shares_of(alternatives: Mapping[str, float], choices: tuple[str, ...]) -> tuple[dict[str, float], float]:
    """Probability of each choice among them from those of the tokens that may begin it, and of all of them together.

    No shares where none of the tokens begins one, and NaN for all together where there are no tokens.

    Choices begin with different characters, so a token that begins one begins no other.
    """
    mass = dict.fromkeys(choices, 0.0)
    for token, probability in alternatives.items():
        start = token.strip(' \t\r\n"{:},.').casefold()
        found = next((choice for choice in choices if start and choice.casefold().startswith(start)), None)
        if found is not None:
            mass[found] += probability
    total = sum(mass.values())
    shares = {choice: share / total for choice, share in mass.items()} if total > 0 else {}
    return shares, total if alternatives else math.nan


def _chosen(reply: Reply, choices: tuple[str, ...], least_mass: float) -> dict[str, float] | None:
    """Probability of each choice, summing to 1; None for a reply that names none or was hardly about any."""
    chosen = choice_in(reply.text, choices)
    if chosen is None or reply.mass < least_mass:
        return None
    return dict(reply.shares) or {choice: float(choice == chosen) for choice in choices}


def _check_mass(least_mass: float) -> None:
    if not 0 <= least_mass <= 1:
        raise ValueError(f"least_mass={least_mass} must be a probability, in [0, 1]")


def _one_of(choices: tuple[str, ...]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"answer": {"type": "string", "enum": list(choices)}},
        "required": ["answer"],
        "additionalProperties": False,
    }


def _json_in(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
