"""`Judge`: a language model that scores agents' texts by a rubric."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from forge_agents.errors import EndpointError
from forge_agents.policy import Endpoint, Policy
from forge_agents.types import Trajectory
from forge_verifiers.core.functions import check_trajectories
from forge_verifiers.core.verifier import Assessment, Composable, Scores, group_ids, turn_means
from forge_verifiers.judge.clients import Chat, Conversation, EndpointChat, EngineChat, Question
from forge_verifiers.judge.prompts import (
    Answer,
    Document,
    Pairs,
    Reasoned,
    Reply,
    Ruler,
    Scale,
    ScoreSheet,
    View,
    YesNo,
    comparison_of,
    documents,
    fence_key,
    fitted,
    instructions_for,
    mark_of,
    question_of,
)

if TYPE_CHECKING:
    from forge_agents.serving.config import EngineConfig

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_REFUSED = (400, 403, 422)
"""Statuses by which endpoints refuse a single text."""
_Form: TypeAlias = YesNo | Scale | Reasoned | Pairs | ScoreSheet
_Replies: TypeAlias = Mapping[str, Reply | BaseException]
"""Reply or error by question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeUsage:
    """Counters of a judge."""

    trajectories: int = 0
    """Scored trajectories, abstentions included."""
    questions: int = 0
    """Questions sent to the model."""
    repeated: int = 0
    """Questions not sent because they were repeated in the same call."""
    nonsense: int = 0
    """Replies that were not an answer, so that the judge abstained, and refusals if most questions are answered."""
    failed: int = 0
    """Questions without a reply. The trajectories count as failed, not as abstentions."""
    cut_chars: int = 0
    """Characters left out because of `max_chars`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    """Wall time of `score`, including the start of the model."""


class Judge(Composable):
    """Asks a language model whether an agent's text satisfies a rubric.

    A policy or a model name is served by the judge's own engine, in a process that starts with the first score (seconds
    to a minute) or with `start`. The engine stops with `close`, at the end of a ``with`` block, or with this process. A
    judge can be called from any thread, with or without a running event loop.

    Texts are fenced with a code that their author cannot know, control tokens in them are broken up, and the model's
    answer is constrained to valid answers, without reasoning before it in the judge's own engine. For any other reply
    the judge abstains and counts it in `usage`. A judge always asks the same question about the same text.

    Args:
        model: A `Policy` or an `Endpoint` (judges decode greedily and ignore its sampling), a model's name or folder,
            or another judge, whose model is shared. Any judge that shares a model can close it.
        rubric: Criterion in words.
        answer: `YesNo`, `Scale`, `Reasoned`, or, to compare the episodes of a group with each other, `Pairs` or
            `Ruler`.
        view: Text that the judge sees: ``"answer"``, the last turn; ``"trajectory"``, all turns at once; ``"turns"``,
            one question per turn, whose grades are averaged; or a function from a trajectory to a text or None.
        reasoning: Whether the judge also sees the reasoning before each answer, in a separate fence. A function as
            `view` can always read `turn.reasoning`.
        max_chars: Maximum length of a text. Longer texts lose the middle of the history first, then the beginning of
            the answer. The task is kept if it takes at most three quarters of the length.
        engine: Settings of the judge's engine. Not for endpoints.
        timeout_s: Timeout in seconds of one question to the judge's engine, queue included (default 120). An endpoint
            has its own. A late answer loses only its own row, and an `Ensemble` waits as long as these timeouts allow.
        start_timeout_s: Timeout in seconds of the engine's start.
        seed: Seed of the fence codes and of the pairs in `Pairs`. None draws a random seed for each judge. With a
            number, equal texts get equal questions in every run, so that a resumed run reproduces its scores.
        name: Name in reports.
        family: Label of verifiers that share a cause of error. In an `Ensemble` by default all judges on its model.

    Raises:
        ValueError: The rubric is empty, or a number is out of range.
        TypeError: `model` has another type.
    """

    def __init__(
        self,
        model: str | Policy | Endpoint | Judge,
        rubric: str,
        *,
        answer: Answer | None = None,
        view: View = "answer",
        reasoning: bool = False,
        max_chars: int = 8000,
        engine: EngineConfig | None = None,
        timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
        seed: int | None = None,
        name: str = "judge",
        family: str | None = None,
    ) -> None:
        self.name, self.family = name, family
        self.default_family = model.default_family if isinstance(model, Judge) else f"judges on {_served(model)}"
        self.answer = _checked_answer(YesNo() if answer is None else answer)
        self.cost = self.answer.cost
        self.view: View = view
        self.reasoning = reasoning
        self.max_chars = max_chars
        self._instructions = instructions_for(rubric)
        if not rubric.strip():
            raise ValueError(f"rubric={rubric!r} is empty. Describe a good answer in words")
        if not callable(view) and view not in {"answer", "trajectory", "turns"}:
            raise ValueError(f"view={view!r}. Choose 'answer', 'trajectory', 'turns' or a function")
        if view == "turns" and self.sees_groups:
            kind = type(self.answer).__name__
            raise ValueError(f"{kind} compares whole trajectories. Use view='answer' or 'trajectory'")
        if max_chars < 1:
            raise ValueError(f"max_chars={max_chars} shows the judge nothing. Give at least 1")
        limit_s = 120.0 if timeout_s is None else timeout_s
        for option, seconds in (("timeout_s", limit_s), ("start_timeout_s", start_timeout_s)):
            if not 0 < seconds < math.inf:
                raise ValueError(f"{option}={seconds} must be positive and finite: every wait needs a timeout")
        self._conversation: Conversation
        has_settings = engine is not None or timeout_s is not None
        if isinstance(model, Judge):
            if has_settings:
                raise ValueError(f"engine= and timeout_s= are set by {model.name!r}, whose model is shared")
            self._conversation = model._conversation
        else:
            chat: Chat
            if isinstance(model, Endpoint):
                if has_settings:
                    raise ValueError(f"engine= and timeout_s= are for a model served here. {model.url} has its own")
                chat = EndpointChat(model)
            else:
                served = _name_of(model)
                chat = EngineChat(served, engine, name=name, timeout_s=limit_s, start_timeout_s=start_timeout_s)
            self._conversation = Conversation(chat, name=name, start_timeout_s=start_timeout_s)
        self._key = fence_key(seed)
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()

    @property
    def own_engine(self) -> EngineChat | None:
        """The engine that starts with the first score, placed next to those of a run. None for an endpoint."""
        chat = self._conversation.chat
        return chat if isinstance(chat, EngineChat) else None

    @property
    def usage(self) -> JudgeUsage:
        """Counters since the judge was created."""
        return JudgeUsage(**self._counts)

    def start(self) -> None:
        """Start the model unless it is running.

        Raises:
            ModelNotFoundError: There is no such model.
            StallError: The model was not ready in time.
            ValueError: The endpoint's key is not set.
        """
        self._conversation.start()

    def close(self) -> None:
        """Stop the model if it is running. The next score starts it again."""
        self._conversation.close()

    def __enter__(self) -> Judge:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def sees_groups(self) -> bool:  # type: ignore[override]
        """True if the trajectories of a group are compared with each other."""
        return isinstance(self.answer, Pairs | Ruler)

    @property
    def grades_each_text(self) -> bool:  # type: ignore[override]
        """True unless a function chooses the text, which may be None."""
        return not callable(self.view)

    def max_duration_s(self, trajectories: Sequence[Trajectory], default_s: float) -> float:
        """The bound for a start and all questions."""
        if isinstance(self.answer, Pairs):
            sizes = np.bincount(group_ids(trajectories)) if len(trajectories) else np.zeros(1, np.intp)
            limit = np.inf if self.answer.opponents is None else self.answer.opponents
            return self._conversation.max_duration_s(int((sizes * np.minimum(sizes - 1, limit)).sum()))
        if isinstance(self.answer, Ruler):
            return self._conversation.max_duration_s(len(np.unique(group_ids(trajectories))))
        turns = self.view == "turns"
        return self._conversation.max_duration_s(sum(len(t.turns) if turns else 1 for t in trajectories))

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Grades, float32 [n], or NaN without turns and for abstentions. Raises if all questions fail."""
        return self.assess(trajectories).scores

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """As `score`, with failures. With ``view="turns"`` also the grade of every turn."""
        check_trajectories(trajectories)
        if not len(trajectories):
            return Assessment(scores=np.empty(0, np.float32))
        started = time.perf_counter()
        texts = (documents(t, self.view, self.max_chars, reasoning=self.reasoning) for t in trajectories)
        views, cut = zip(*texts, strict=True)
        if isinstance(self.answer, Pairs):
            result = self._compare(self.answer, views, group_ids(trajectories))
        elif isinstance(self.answer, Ruler):
            result = self._rank(views, group_ids(trajectories))
        else:
            result = self._grade(views)
        self._count(trajectories=len(trajectories), cut_chars=sum(cut), seconds=time.perf_counter() - started)
        return result

    def _grade(self, views: Sequence[tuple[Document, ...]]) -> Assessment:
        assert not isinstance(self.answer, Pairs | Ruler)
        ask = partial(question_of, ask=self.answer.ask, key=self._key)
        texts = [[ask(d) for d in each] for each in views]
        drafts = {ask(d): (self.answer, partial(self._shorter, ask, (d,))) for each in views for d in each}
        replies = self._ask(drafts, sum(map(len, texts)))
        grades = _grades(self.answer.grade, replies)
        self._count_nonsense(replies, grades)
        values = [[math.nan if (g := grades.get(text)) is None else g for text in questions] for questions in texts]
        rows = [np.array(row) for row in values]
        turns = [row.astype(np.float32) for row in rows] if self.view == "turns" else None
        failed = {row: e for row, each in enumerate(texts) if (e := _error(replies, each))}
        return Assessment(scores=turn_means(rows, failed, needs_all=True), turns=turns, failed=failed)

    def _compare(self, answer: Pairs, views: Sequence[tuple[Document, ...]], groups: NDArray[np.intp]) -> Assessment:
        matches = [
            (group, first, second)
            for group, texts in self._ordered(views, groups).items()
            for first, second in (map(texts.__getitem__, pair) for pair in pairings(len(texts), answer.opponents))
        ]
        ask = partial(comparison_of, names=answer.choices, ask=answer.ask, key=self._key)
        both = [(ask((first, second)), ask((second, first))) for _, first, second in matches]
        orders = [pair for _, first, second in matches for pair in ((first, second), (second, first))]
        replies = self._ask({ask(p): (answer, partial(self._shorter_group, ask, p)) for p in orders}, len(orders))
        winners = _grades(answer.grade, replies)
        self._count_nonsense(replies, winners)
        won: defaultdict[tuple[int, Document], list[float]] = defaultdict(list)
        lost: dict[tuple[int, Document], str] = {}
        undecided: list[tuple[tuple[int, Document], tuple[int, Document]]] = []
        for (group, first, second), (forward, backward) in zip(matches, both, strict=True):
            winner, reverse = winners.get(forward), winners.get(backward)
            if error := _error(replies, (forward, backward)):
                lost |= {(group, first): error, (group, second): error}
            elif winner is None or reverse is None:
                undecided.append(((group, first), (group, second)))
            else:
                points = 0.5 if winner == reverse else float(winner == "A")  # the same letter twice: position bias
                won[group, first].append(points)
                won[group, second].append(1 - points)
        compared = set(won)
        for pair in undecided:  # a tie, or a text that confuses the judge could evade its defeats only
            if compared.issuperset(pair):
                for text in pair:
                    won[text].append(0.5)
        scores, failed = np.full(len(views), math.nan, np.float32), {}
        for row, (group, each) in enumerate(zip(groups.tolist(), views, strict=True)):
            if each and (group, each[0]) in won:
                scores[row] = np.mean(won[group, each[0]])
            elif each and (group, each[0]) in lost:
                failed[row] = lost[group, each[0]]
        return Assessment(scores=scores, failed=failed)

    def _rank(self, views: Sequence[tuple[Document, ...]], groups: NDArray[np.intp]) -> Assessment:
        marks: dict[tuple[int, Document], float] = {}
        lost: dict[tuple[int, Document], str] = {}
        parts = [(group, texts) for group, texts in self._ordered(views, groups).items() if len(texts) > 1]
        error: BaseException | None = None
        while parts:
            replies, grades = self._score_sheets([texts for _, texts in parts])
            error = error or next((reply for reply in replies if isinstance(reply, BaseException)), None)
            halves: list[tuple[int, list[Document]]] = []
            for (group, texts), reply, values in zip(parts, replies, grades, strict=True):
                keys = [(group, text) for text in texts]
                if values is not None:
                    marks.update(zip(keys, values, strict=True))
                elif len(texts) > 3:  # a single text may be the cause: the others get their scores in smaller groups
                    half = len(texts) // 2
                    halves += [(group, texts[:half]), (group, texts[half:])]
                elif isinstance(reply, BaseException):
                    lost |= dict.fromkeys(keys, f"{type(reply).__name__}: {reply}")
            parts = halves
        if error is not None and not marks:
            raise error
        scores, failed = np.full(len(views), math.nan, np.float32), {}
        for row, (group, each) in enumerate(zip(groups.tolist(), views, strict=True)):
            if each and (group, each[0]) in marks:
                scores[row] = marks[group, each[0]]
            elif each and (group, each[0]) in lost:
                failed[row] = lost[group, each[0]]
        return Assessment(scores=scores, failed=failed)

    def _score_sheets(
        self, parts: Sequence[Sequence[Document]]
    ) -> tuple[list[Reply | BaseException], list[tuple[float, ...] | None]]:
        """The reply to the question about each part of a group, and the grades of its texts, or None."""
        sheets = [ScoreSheet(len(texts)) for texts in parts]
        asks = [partial(comparison_of, names=sheet.names, ask=sheet.ask, key=self._key) for sheet in sheets]
        questions = [ask(texts) for ask, texts in zip(asks, parts, strict=True)]
        drafts = {
            question: (sheet, partial(self._shorter_group, ask, texts))
            for question, sheet, ask, texts in zip(questions, sheets, asks, parts, strict=True)
        }
        replies = self._ask(drafts, len(parts), raises=False)
        grades = {t: drafts[t][0].grade(reply) for t, reply in replies.items() if isinstance(reply, Reply)}
        self._count_nonsense(replies, grades)
        return [replies[question] for question in questions], [grades.get(question) for question in questions]

    def _ordered(self, views: Sequence[tuple[Document, ...]], groups: NDArray[np.intp]) -> dict[int, list[Document]]:
        """The distinct texts of each group, in the order of a keyed hash, independent of their content."""
        members: defaultdict[int, set[Document]] = defaultdict(set)
        for group, each in zip(groups.tolist(), views, strict=True):
            members[group].update(each)
        return {group: sorted(each, key=lambda text: mark_of(text, key=self._key)) for group, each in members.items()}

    def _shorter_group(self, ask: Callable[..., str], shown: Sequence[Document], times: int) -> str:
        return ask([fitted(document, self.max_chars >> times) for document in shown])

    def _shorter(self, ask: Callable[..., str], shown: Sequence[Document], times: int) -> str:
        return ask(*(fitted(document, self.max_chars >> times) for document in shown))

    def _ask(
        self, unique: Mapping[str, tuple[_Form, Callable[[int], str]]], count: int, *, raises: bool = True
    ) -> _Replies:
        """Send each distinct question once. With `raises`, an error of all is raised.

        Args:
            unique: The form of the answer, and a function that returns a shorter text (see `Question.shorter`), by
                question.
            count: Number of questions with repetitions.
        """
        if not unique:
            return {}
        question = partial(Question, instructions=self._instructions)
        outcomes = self._conversation.ask(
            [
                question(
                    text=text,
                    shorter=shorter,
                    choices=f.choices,
                    schema=f.schema,
                    max_tokens=f.max_tokens,
                    token_limit=f.token_limit if isinstance(f, Reasoned) else 0,
                )
                for text, (f, shorter) in unique.items()
            ]
        )
        if 2 * sum(isinstance(outcome, Reply) for outcome in outcomes) > len(outcomes):
            outcomes = [_reply_of(outcome) for outcome in outcomes]
        answered = [reply for reply in outcomes if isinstance(reply, Reply)]
        self._count(
            questions=len(unique),
            repeated=count - len(unique),
            failed=len(unique) - len(answered),
            prompt_tokens=sum(reply.prompt_tokens for reply in answered),
            completion_tokens=sum(reply.completion_tokens for reply in answered),
        )
        error = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        if error is not None:
            if not answered and raises:
                raise error
            _LOG.warning("judge %r: %d questions have failed: %s", self.name, len(unique) - len(answered), error)
        return dict(zip(unique, outcomes, strict=True))

    def _count(self, **more: Any) -> None:
        with self._counting:
            self._counts.update(more)

    def _count_nonsense(self, replies: _Replies, answers: Mapping[str, object]) -> None:
        nonsense = [reply for text, reply in replies.items() if isinstance(reply, Reply) and answers[text] is None]
        self._count(nonsense=len(nonsense))
        if nonsense:
            first, min_mass = nonsense[0], getattr(self.answer, "min_mass", 0.0)
            mass = f": all choices together had a probability of {first.mass:.2g}, min_mass={min_mass:g}"
            _LOG.warning(
                "judge %r: %d of %d replies are not exactly an answer, e.g. %r%s",
                self.name,
                len(nonsense),
                len(replies),
                first.text[:80],
                mass if first.mass < min_mass else "",
            )


def _checked_answer(answer: Answer) -> Answer:
    if not isinstance(answer, Answer):
        raise TypeError(f"answer={answer!r}. Give an object such as fv.YesNo(), fv.Scale(levels=5) or fv.Ruler()")
    return answer


def _served(model: str | Policy | Endpoint) -> str:
    return f"{model.model} at {model.url}" if isinstance(model, Endpoint) else _name_of(model)


def _name_of(model: str | Policy) -> str:
    name = model.model if isinstance(model, Policy) else model
    if not isinstance(name, str):
        raise TypeError(f"Judge got {type(model).__name__}. Give a Policy, a model's name, an Endpoint or a Judge")
    return name


def _grades(grade: Callable[[Reply], T | None], replies: _Replies) -> dict[str, T | None]:
    """The grade of each reply. If most have one, unlikely choices count as well: the graded text caused them."""
    answered = {text: reply for text, reply in replies.items() if isinstance(reply, Reply)}
    grades = {text: grade(reply) for text, reply in answered.items()}
    without = [text for text, each in grades.items() if each is None]
    if 2 * len(without) < len(grades):
        grades |= {text: grade(replace(answered[text], mass=math.nan)) for text in without}
    return grades


def _reply_of(outcome: Reply | BaseException) -> Reply | BaseException:
    """An endpoint's refusal, such as that of a content filter, as a reply that is no answer. The text caused it.

    As a failure it would be no evidence, and a text that nobody may grade would have the reward of an average one.
    """
    if isinstance(outcome, EndpointError) and outcome.status in _REFUSED:
        return Reply(text=str(outcome), shares={}, prompt_tokens=0, completion_tokens=0)
    return outcome


def _error(replies: _Replies, questions: Iterable[str]) -> str:
    """The first error among the replies to these questions, or empty if all were answered."""
    error = next((reply for text in questions if isinstance(reply := replies[text], BaseException)), None)
    return "" if error is None else f"{type(error).__name__}: {error}"


def pairings(n: int, opponents: int | None) -> Iterator[tuple[int, int]]:
    """Pairs among `n` texts: all, or each with its nearest `opponents` on a ring. Each pair once."""
    reach = n - 1 if opponents is None else min(opponents // 2, n - 1)
    for first in range(n):
        for second in range(first + 1, n):
            distance = second - first
            if min(distance, n - distance) <= reach:
                yield first, second
