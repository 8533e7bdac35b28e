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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forge_agents.policy import Endpoint, Policy
from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import Assessment, Composable, Scores, group_ids
from forge_verifiers.judge.clients import Chat, Conversation, EndpointChat, EngineChat, Question
from forge_verifiers.judge.prompts import (
    Answer,
    Document,
    Pairs,
    Ranking,
    Reply,
    View,
    YesNo,
    comparison_of,
    documents,
    fence_key,
    instructions_for,
    mark_of,
    question_of,
)

if TYPE_CHECKING:
    from forge_agents.serving.config import EngineConfig

_LOG = logging.getLogger(__name__)
_ROUNDS, _CLOSE = 1000, 1e-9  # of Hunter's iteration
_Replies: TypeAlias = Mapping[str, Reply | BaseException]
"""By question its reply, or why there is none."""


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
    """Questions without a reply: what hangs on them is no abstention, but has failed."""
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
    ahead. It may be called from any thread, beside or inside a running event loop.

    Texts are fenced with a code that their author cannot know, control tokens in them are broken up, and the model's
    answer is constrained to the possible ones. What still makes no sense abstains and is counted in `usage`. One judge
    asks the same question about the same text every time.

    Args:
        model: A `Policy` or an `Endpoint` (its sampling is not used: judges answer greedily), a model's name or folder,
            or another judge, whose model it shares: several prompts on one engine, which any of them closes.
        rubric: What is judged, in words.
        answer: `YesNo`, `Scale`, `Reasoned`, or `Pairs` to compare siblings of a group with each other.
        view: What the judge sees: ``"answer"``, the last turn; ``"trajectory"``, all turns at once; ``"turns"``, one
            question for each turn, whose grades are averaged; or a function from a trajectory to a text or None.
        thoughts: Whether it also sees what was thought before each answer, fenced off as such; a function as `view` may
            always look at `turn.reasoning`.
        max_chars: Of longer texts the middle of the history is left out, then the beginning of the answer. The task
            stays as long as it takes at most three quarters of the room.
        engine: Limits of the judge's engine; not for endpoints.
        timeout_s: Seconds for one question to the judge's engine, queue included; None is 120. An endpoint has its own.
            An answer that is late is missing by itself; an `Ensemble` waits as long as these limits say.
        start_timeout_s: Seconds for the engine to start.
        seed: Of the codes of the fences and of who meets whom in `Pairs`. None draws anew for each judge; with a number
            equal texts get equal questions in every run, so that a resumed run repeats its scores.
        name: What reports call it.
        family: What it shares causes of error with; in an `Ensemble` by default all judges on its model.

    Raises:
        ValueError: The rubric is empty, or a number is out of range.
        TypeError: `model` is none of the above.
    """

    def __init__(
        self,
        model: str | Policy | Endpoint | Judge,
        rubric: str,
        *,
        answer: Answer | None = None,
        view: View = "answer",
        thoughts: bool = False,
        max_chars: int = 8000,
        engine: EngineConfig | None = None,
        timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
        seed: int | None = None,
        name: str = "judge",
        family: str | None = None,
    ) -> None:
        self.name, self.family = name, family
        self.likeness = model.likeness if isinstance(model, Judge) else f"judges on {_served(model)}"
        self.answer: Answer = YesNo() if answer is None else answer
        self.cost = self.answer.cost
        self.view: View = view
        self.thoughts = thoughts
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
        self._conversation: Conversation
        if isinstance(model, Judge):
            if engine is not None or timeout_s is not None:
                raise ValueError(f"engine= and timeout_s= are those of {model.name!r}, whose model is shared")
            self._conversation = model._conversation
        elif isinstance(model, Endpoint):
            if engine is not None or timeout_s is not None:
                raise ValueError(f"engine= and timeout_s= are for a model served here; {model.url} has its own")
            chat = EndpointChat(model)
            self._conversation = Conversation(chat, name=name, start_timeout_s=start_timeout_s)
        else:
            chat = EngineChat(_name_of(model), engine, name=name, timeout_s=limit_s, start_timeout_s=start_timeout_s)
            self._conversation = Conversation(chat, name=name, start_timeout_s=start_timeout_s)
        self._key = fence_key(seed)
        self._usage = JudgeUsage()
        self._counting = threading.Lock()

    @property
    def own_engine(self) -> EngineChat | None:
        """The engine that starts with the first score, which a run places beside its own; None of an endpoint."""
        chat = self._conversation.chat
        return chat if isinstance(chat, EngineChat) else None

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

    def longest_s(self, trajectories: Sequence[Trajectory], otherwise_s: float) -> float:
        """A start and all its questions."""
        if isinstance(self.answer, Pairs):
            sizes = np.bincount(group_ids(trajectories)) if len(trajectories) else np.zeros(1, np.intp)
            most = np.inf if self.answer.opponents is None else self.answer.opponents
            return self._conversation.longest_s(int((sizes * np.minimum(sizes - 1, most)).sum()))
        turns = self.view == "turns"
        return self._conversation.longest_s(sum(len(t.turns) if turns else 1 for t in trajectories))

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
        found_in = (documents(t, self.view, self.max_chars, thoughts=self.thoughts) for t in trajectories)
        shown, cut = zip(*found_in, strict=True)
        if isinstance(self.answer, Pairs):
            found = self._compared(self.answer, shown, group_ids(trajectories))
        else:
            found = self._graded(shown)
        self._count(trajectories=len(trajectories), cut_chars=sum(cut), seconds=time.perf_counter() - started)
        return found

    def _graded(self, shown: Sequence[tuple[Document, ...]]) -> Assessment:
        assert not isinstance(self.answer, Pairs)
        texts = [[question_of(d, self.answer.ask, key=self._key) for d in each] for each in shown]
        replies = self._ask(itertools.chain.from_iterable(texts))
        grades = {text: self.answer.grade(reply) for text, reply in replies.items() if isinstance(reply, Reply)}
        self._count_nonsense(replies, grades)
        each = [np.array([math.nan if (g := grades.get(text)) is None else g for text in asked]) for asked in texts]
        means = [float(np.nanmean(given)) if np.isfinite(given).any() else math.nan for given in each]
        turns = [given.astype(np.float32) for given in each] if self.view == "turns" else None
        failed = {at: why for at, own in enumerate(texts) if math.isnan(means[at]) and (why := _why(replies, own))}
        return Assessment(scores=np.array(means, np.float32), turns=turns, failed=failed)

    def _compared(self, answer: Pairs, shown: Sequence[tuple[Document, ...]], groups: NDArray[np.intp]) -> Assessment:
        members: defaultdict[int, set[Document]] = defaultdict(set)
        for group, each in zip(groups.tolist(), shown, strict=True):
            members[group].update(each)
        matches = [
            (group, first, second)
            for group, texts in members.items()
            for first, second in self._matches(texts, answer.opponents)
        ]
        both = [
            (
                comparison_of(first, second, answer.ask, key=self._key),
                comparison_of(second, first, answer.ask, key=self._key),
            )
            for _, first, second in matches
        ]
        replies = self._ask(itertools.chain.from_iterable(both))
        winners = {t: answer.grade(reply) for t, reply in replies.items() if isinstance(reply, Reply)}
        self._count_nonsense(replies, winners)
        outcomes: defaultdict[int, list[tuple[Document, Document, float]]] = defaultdict(list)
        lost: dict[tuple[int, Document], str] = {}
        for (group, first, second), (forward, backward) in zip(matches, both, strict=True):
            if why := _why(replies, (forward, backward)):
                lost |= {(group, first): why, (group, second): why}
            one, other = winners.get(forward), winners.get(backward)
            if one is not None and other is not None:
                won = 0.5 if one == other else float(one == "A")  # the same letter twice is the place, not the text
                outcomes[group].append((first, second, won))
        grades = {group: _ranked(found, answer) for group, found in outcomes.items()}
        found = [
            grades.get(group, {}).get(each[0], math.nan) if each else math.nan
            for group, each in zip(groups.tolist(), shown, strict=True)
        ]
        failed = {
            row: lost[group, each[0]]
            for row, (group, each) in enumerate(zip(groups.tolist(), shown, strict=True))
            if math.isnan(found[row]) and each and (group, each[0]) in lost
        }
        return Assessment(scores=np.array(found, np.float32), failed=failed)

    def _matches(self, texts: Iterable[Document], opponents: int | None) -> list[tuple[Document, Document]]:
        """Who meets whom: neighbours by a keyed hash, which has nothing to do with what they say."""
        order = sorted(texts, key=lambda text: mark_of(text, key=self._key))
        return [(order[first], order[second]) for first, second in pairings(len(order), opponents)]

    def _ask(self, texts: Iterable[str]) -> _Replies:
        """Every different question once."""
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
        answered = [reply for reply in outcomes if isinstance(reply, Reply)]
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
            _LOG.warning("judge %r: %d questions have failed: %s", self.name, len(unique) - len(answered), error)
        return dict(zip(unique, outcomes, strict=True))

    def _count(self, **more: Any) -> None:
        with self._counting:
            self._usage += JudgeUsage(**more)

    def _count_nonsense(self, replies: _Replies, meant: Mapping[str, object]) -> None:
        nonsense = [reply for text, reply in replies.items() if isinstance(reply, Reply) and meant[text] is None]
        self._count(nonsense=len(nonsense))
        if nonsense:
            first, least = nonsense[0], getattr(self.answer, "least_mass", 0.0)
            held = f", to which it was held: all choices had {first.mass:.2g} of its probability, least_mass={least:g}"
            _LOG.warning(
                "judge %r: %d of %d replies are no answer, e.g. %r%s",
                self.name,
                len(nonsense),
                len(replies),
                first.text[:80],
                held if first.mass < least else "",
            )


def _served(model: str | Policy | Endpoint) -> str:
    return f"{model.model} at {model.url}" if isinstance(model, Endpoint) else _name_of(model)


def _name_of(model: str | Policy) -> str:
    name = model.model if isinstance(model, Policy) else model
    if not isinstance(name, str):
        raise TypeError(
            f"Judge got {type(model).__name__}; give a Policy, a model's name, an Endpoint or a Judge"
        )
    return name


def _why(replies: _Replies, asked: Iterable[str]) -> str:
    """Why one of these questions has no reply; empty where all have."""
    error = next((reply for text in asked if isinstance(reply := replies[text], BaseException)), None)
    return "" if error is None else f"{type(error).__name__}: {error}"


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


def pairings(n: int, opponents: int | None) -> Iterator[tuple[int, int]]:
    """Who meets whom among `n`: all, or the nearest `opponents` on a ring in this order; each pair once."""
    reach = n - 1 if opponents is None else min(opponents // 2, n - 1)
    for first in range(n):
        for second in range(first + 1, n):
            distance = second - first
            if min(distance, n - distance) <= reach:
                yield first, second


def rank(wins: NDArray[np.float64], ranking: Ranking) -> NDArray[np.float32]:
    """Grades of n texts from their comparisons.

    ``"win_rate"``: wins plus half the ties, over the comparisons made. Copeland's score, on [0, 1], is the same number,
    because every pair has one outcome. ``"bradley_terry"``: strengths p that maximise the likelihood of the outcomes
    under P(i beats j) = p_i / (p_i + p_j), by Hunter's iteration (2004, Annals of Statistics 32, eq. 3); the grade is
    the mean probability of beating another. Departure: everyone also ties once with an invented opponent of strength
    1, which keeps the strengths finite. Prefer it where texts met different opponents.

    Args:
        wins: float64 [n, n]; how often row beat column, a tie is 0.5 for both, 0 where they did not meet.
        ranking: See above.

    Returns:
        float32 [n] in [0, 1]; NaN for a text that met nobody.
    """
    met = wins + wins.T
    alone = met.sum(axis=1) == 0
    if ranking == "win_rate":
        grades = wins.sum(axis=1) / np.where(alone, 1.0, met.sum(axis=1))
    else:
        strength = _strengths(wins, met)
        beats = strength[:, None] / (strength[:, None] + strength[None, :])
        others = ~alone[None, :] & ~np.eye(len(wins), dtype=bool)
        grades = (beats * others).sum(axis=1) / np.maximum(others.sum(axis=1), 1)
    return np.where(alone, np.nan, grades).astype(np.float32)


def _strengths(wins: NDArray[np.float64], met: NDArray[np.float64]) -> NDArray[np.float64]:
    strength = np.ones(len(wins))
    won = wins.sum(axis=1) + 0.5
    for _ in range(_ROUNDS):
        before = strength
        # p_i = W_i / sum over j of n_ij / (p_i + p_j), Hunter 2004, eq. 3; the invented opponent adds half a win.
        strength = won / ((met / (before[:, None] + before[None, :])).sum(axis=1) + 1.0 / (before + 1.0))
        if np.max(np.abs(strength - before) / strength) < _CLOSE:
            break
    return strength
