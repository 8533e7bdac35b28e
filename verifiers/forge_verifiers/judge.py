"""A language model as a judge of what agents wrote.

In: trajectories, a rubric. Out: scores [n] in [0, 1], NaN where the judge makes no sense. Waits for the judge's model.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forge_agents.policy import Endpoint, Policy
from forge_agents.types import Trajectory
from forge_verifiers.chat import Chat, Conversation, Question
from forge_verifiers.chat_endpoint import EndpointChat
from forge_verifiers.chat_engine import EngineChat
from forge_verifiers.judge_answers import Answer, Pairs, Reply, YesNo, choice_in
from forge_verifiers.judge_ranking import pairings, rank
from forge_verifiers.judge_text import (
    Document,
    View,
    comparison_of,
    documents,
    fence_key,
    instructions_for,
    question_of,
)
from forge_verifiers.verifier import Assessment, Composable, Scores, group_ids

if TYPE_CHECKING:
    from forge_agents.serving.config import EngineConfig

_LOG = logging.getLogger(__name__)
_Replies: TypeAlias = Mapping[str, Reply | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeUsage:
    """What a judge was asked so far, and what came of it."""

    trajectories: int = 0
    """Scored, abstentions included."""
    questions: int = 0
    """Sent to the model."""
    repeated: int = 0
    """Not sent, because the same call asked the same already."""
    nonsense: int = 0
    """Replies that were no answer: the judge abstained."""
    failed: int = 0
    """Questions without a reply: the judge abstained."""
    cut_chars: int = 0
    """Left out because a text was longer than `max_chars`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    """Wall time within `score`, the model's start included."""

    def __add__(self, other: JudgeUsage) -> JudgeUsage:
        names = [entry.name for entry in fields(JudgeUsage)]
        return JudgeUsage(**{name: getattr(self, name) + getattr(other, name) for name in names})


class Judge(Composable):
    """Asks a language model whether what an agent wrote satisfies a rubric.

    A policy or a model's name is served by an engine of the judge's own, in a process that starts with the first score
    (seconds to a minute) and ends with `close`, at the end of a ``with`` block, or with this process. `start` starts it
    ahead, so that the first score meets an `Ensemble`'s deadline. It may be called from any thread, beside or inside a
    running event loop.

    Texts are fenced with a code that their author cannot know, control tokens in them are broken up, and the model's
    answer is constrained to the possible ones. What still makes no sense abstains and is counted in `usage`. One judge
    asks the same question about the same text every time.

    Args:
        model: A `Policy` or an `Endpoint` (its sampling is not used: judges answer greedily), a model's name or folder.
        rubric: What is judged, in words.
        answer: `YesNo`, `Scale`, `Reasoned`, or `Pairs` to compare siblings of a group with each other.
        view: What the judge sees: ``"answer"``, the last turn; ``"trajectory"``, all turns at once; ``"turns"``, one
            question for each turn, whose grades are averaged; or a function from a trajectory to a text or None.
        max_chars: Longer texts lose their beginning.
        engine: Limits of the judge's engine; not for endpoints.
        timeout_s: Seconds for one question to the judge's engine, queue included; None is 120. An endpoint has its own.
        start_timeout_s: Seconds for the engine to start.
        seed: Of the codes of the fences. None draws anew for each judge; with a number equal texts get equal questions
            in every run, so that a resumed run repeats its scores.
        name: What reports call it.
        family: Judges on the same model share causes of error: give them one family.

    Raises:
        ValueError: The rubric is empty, or a number is out of range.
        TypeError: `model` is none of the above.
    """

    def __init__(
        self,
        model: str | Policy | Endpoint,
        rubric: str,
        *,
        answer: Answer | None = None,
        view: View = "answer",
        max_chars: int = 8000,
        engine: EngineConfig | None = None,
        timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
        seed: int | None = None,
        name: str = "judge",
        family: str | None = None,
    ) -> None:
        self.name, self.family = name, family
        self.answer: Answer = YesNo() if answer is None else answer
        self.cost = self.answer.cost
        self.view: View = view
        self.max_chars = max_chars
        self._instructions = instructions_for(rubric)
        if not rubric.strip():
            raise ValueError(f"rubric={rubric!r} says nothing; say in words what a good answer is")
        if not callable(view) and view not in {"answer", "trajectory", "turns"}:
            raise ValueError(f"view={view!r}; choose 'answer', 'trajectory', 'turns' or a function")
        if view == "turns" and isinstance(self.answer, Pairs):
            raise ValueError("Pairs compares siblings as a whole; use view='answer' or 'trajectory'")
        if max_chars < 1:
            raise ValueError(f"max_chars={max_chars} shows the judge nothing; give at least 1")
        limit_s = 120.0 if timeout_s is None else timeout_s
        for option, seconds in (("timeout_s", limit_s), ("start_timeout_s", start_timeout_s)):
            if not 0 < seconds < math.inf:
                raise ValueError(f"{option}={seconds} must be positive and finite: no wait goes without a deadline")
        chat: Chat
        if isinstance(model, Endpoint):
            if engine is not None or timeout_s is not None:
                raise ValueError(f"engine= and timeout_s= are for a model served here; {model.url} has its own")
            chat = EndpointChat(model)
        else:
            chat = EngineChat(_name_of(model), engine, name=name, timeout_s=limit_s, start_timeout_s=start_timeout_s)
        self._conversation = Conversation(chat, name=name, start_timeout_s=start_timeout_s)
        self._key = fence_key(seed)
        self._usage = JudgeUsage()
        self._counting = threading.Lock()

    @property
    def usage(self) -> JudgeUsage:
        """Counts since the judge was made."""
        return self._usage

    def start(self) -> None:
        """Start the model. Twice is no error.

        Raises:
            ModelNotFoundError: There is no such model.
            StallError: It was not ready in time.
            ValueError: The endpoint's key is not set.
        """
        self._conversation.start()

    def close(self) -> None:
        """Stop the model; the next score starts it again. Twice is no error."""
        self._conversation.close()

    def __enter__(self) -> Judge:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def sees_groups(self) -> bool:  # type: ignore[override]
        """Whether siblings are compared with each other."""
        return isinstance(self.answer, Pairs)

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Grades, float32 [n]; NaN where there is nothing to judge or the judge abstained.

        Raises:
            Exception: Not one question was answered; the error of the first.
        """
        return self.assess(trajectories).scores

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """As `score`; with ``view="turns"`` also the grade of every turn."""
        if not len(trajectories):
            return Assessment(scores=np.empty(0, np.float32))
        started = time.perf_counter()
        shown, cut = zip(*(documents(t, self.view, self.max_chars) for t in trajectories), strict=True)
        if isinstance(self.answer, Pairs):
            found = Assessment(scores=self._compared(self.answer, shown, group_ids(trajectories)))
        else:
            found = self._graded(shown)
        self._count(trajectories=len(trajectories), cut_chars=sum(cut), seconds=time.perf_counter() - started)
        return found

    def _graded(self, shown: Sequence[tuple[Document, ...]]) -> Assessment:
        assert not isinstance(self.answer, Pairs)
        texts = [[question_of(d, self.answer.ask, key=self._key) for d in each] for each in shown]
        replies = self._ask(itertools.chain.from_iterable(texts))
        grades = {text: None if reply is None else self.answer.grade(reply) for text, reply in replies.items()}
        self._count_nonsense(replies, grades)
        each = [np.array([math.nan if (g := grades[text]) is None else g for text in asked]) for asked in texts]
        means = [float(np.nanmean(given)) if np.isfinite(given).any() else math.nan for given in each]
        turns = [given.astype(np.float32) for given in each] if self.view == "turns" else None
        return Assessment(scores=np.array(means, np.float32), turns=turns)

    def _compared(self, answer: Pairs, shown: Sequence[tuple[Document, ...]], groups: NDArray[np.intp]) -> Scores:
        members: defaultdict[int, set[Document]] = defaultdict(set)
        for group, each in zip(groups.tolist(), shown, strict=True):
            members[group].update(each)
        matches = [
            (group, first, second)
            for group, texts in members.items()
            for first, second in _matches(sorted(texts, key=repr), answer.opponents)
        ]
        both = [
            (
                comparison_of(first, second, answer.ask, key=self._key),
                comparison_of(second, first, answer.ask, key=self._key),
            )
            for _, first, second in matches
        ]
        replies = self._ask(itertools.chain.from_iterable(both))
        winners = {t: None if reply is None else choice_in(reply.text, answer.choices) for t, reply in replies.items()}
        self._count_nonsense(replies, winners)
        outcomes: defaultdict[int, list[tuple[Document, Document, float]]] = defaultdict(list)
        for (group, first, second), (forward, backward) in zip(matches, both, strict=True):
            one, other = winners[forward], winners[backward]
            if one is not None and other is not None:
                won = 0.5 if one == other else float(one == "A")  # the same letter twice is the place, not the text
                outcomes[group].append((first, second, won))
        grades = {group: _ranked(found, answer) for group, found in outcomes.items()}
        found = [
            grades.get(group, {}).get(each[0], math.nan) if each else math.nan
            for group, each in zip(groups.tolist(), shown, strict=True)
        ]
        return np.array(found, np.float32)

    def _ask(self, texts: Iterable[str]) -> _Replies:
        """Every different question once; None for one that failed."""
        asked = list(texts)
        unique = list(dict.fromkeys(asked))
        if not unique:
            return {}
        form = self.answer
        questions = [
            Question(
                instructions=self._instructions,
                text=text,
                choices=form.choices,
                schema=form.schema,
                max_tokens=form.max_tokens,
            )
            for text in unique
        ]
        outcomes = self._conversation.ask(questions)
        replies = {t: o if isinstance(o, Reply) else None for t, o in zip(unique, outcomes, strict=True)}
        answered = [reply for reply in replies.values() if reply is not None]
        self._count(
            questions=len(unique),
            repeated=len(asked) - len(unique),
            failed=len(unique) - len(answered),
            prompt_tokens=sum(reply.prompt_tokens for reply in answered),
            completion_tokens=sum(reply.completion_tokens for reply in answered),
        )
        error = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        if error is not None:
            if not answered:
                raise error
            _LOG.warning("judge %r abstains on %d questions: %s", self.name, len(unique) - len(answered), error)
        return replies

    def _count(self, **more: Any) -> None:
        with self._counting:
            self._usage += JudgeUsage(**more)

    def _count_nonsense(self, replies: _Replies, meant: Mapping[str, object]) -> None:
        nonsense = [reply for text, reply in replies.items() if reply is not None and meant[text] is None]
        self._count(nonsense=len(nonsense))
        if nonsense:
            _LOG.warning(
                "judge %r: %d of %d replies are no answer, e.g. %r",
                self.name,
                len(nonsense),
                len(replies),
                nonsense[0].text[:80],
            )


def _name_of(model: str | Policy) -> str:
    name = model.model if isinstance(model, Policy) else model
    if not isinstance(name, str):
        raise TypeError(
            f"Judge got {type(model).__name__}; give a Policy, a model's name, or an Endpoint"
        )
    return name


def _matches(texts: Sequence[Document], opponents: int | None) -> list[tuple[Document, Document]]:
    return [(texts[first], texts[second]) for first, second in pairings(len(texts), opponents)]


def _ranked(outcomes: Sequence[tuple[Document, Document, float]], answer: Pairs) -> dict[Document, float]:
    numbers: dict[Document, int] = {}
    for first, second, _ in outcomes:
        numbers.setdefault(first, len(numbers))
        numbers.setdefault(second, len(numbers))
    wins = np.zeros((len(numbers), len(numbers)))
    for first, second, won in outcomes:
        wins[numbers[first], numbers[second]] += won
        wins[numbers[second], numbers[first]] += 1 - won
    grades = rank(wins, answer.ranking).tolist()
    return {document: grades[number] for document, number in numbers.items()}
