"""An agent's conversation as its model reads it: a token stream that grows, and is rendered again if it must shrink."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from forge_agents.policy import Context, KeepReasoning
from forge_agents.rollout.rendering import Renderer

ASK_FOR_NOTES = (
    "Your memory is full: what was said up to here will be taken out of it. Write notes for yourself, of all that you "
    "need to go on. Answer with the notes alone."
)
# Notes take at most an eighth of the context, an answer has at least a quarter, and a prompt that is rendered again
# fills at most half, so that the stream can grow for a while before it is rendered once more.
_NOTES_DIVISOR, _ANSWER_DIVISOR, _PROMPT_DIVISOR = 8, 4, 2


Messages: TypeAlias = "tuple[tuple[str, str], ...]"
"""Role and text of each message."""


@dataclass(frozen=True, slots=True)
class _PastTurn:
    messages: Messages
    answer: str
    response_ids: tuple[int, ...]


class Conversation:
    """The messages and answers of one agent, and the part of them that its model reads again.

    A prompt is the stream so far plus the new messages, so it extends the previous prompt token by token. The engine
    can therefore reuse its prefix cache, and the learner can train all turns as one sample. The stream is rendered
    again only if something in it must be dropped: reasoning, by `keep_reasoning`, or turns for which the context has no
    room. The new prompt then has the first messages, a text in place of the dropped turns, and the remaining turns.
    Turns whose reasoning is dropped are rendered from text. The others keep their sampled tokens.

    `limit` is the maximum number of tokens of prompt and response together, `max_tokens` that of an answer. For the
    other settings see `Policy`. A shallow copy continues independently.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        limit: int,
        max_tokens: int,
        context: Context = "end",
        keep_reasoning: KeepReasoning = "all",
    ) -> None:
        self._renderer, self._limit, self.context, self._keep_reasoning = renderer, limit, context, keep_reasoning
        self.drops_turns = context in ("window", "summarize")
        self._min_answer = min(max_tokens, limit // _ANSWER_DIVISOR) if self.drops_turns else 1
        self.max_notes = self._notes_reserve = 0
        if context == "summarize":  # kept free to ask for notes and to write them when the rest is full
            self.max_notes = limit // _NOTES_DIVISOR
            self._notes_reserve = len(renderer.extend((), (), ASK_FOR_NOTES)) + self.max_notes
        self._turns: tuple[_PastTurn, ...] = ()
        self._stream: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        """Last prompt and response."""
        self._has_reasoning = False
        self._num_stripped = 0
        """Number of first turns whose reasoning the model does not read any more."""
        self._num_dropped, self._replacement = 0, ""

    def prompt(self, messages: Messages, *, only_results: bool = False) -> tuple[int, ...]:
        """Tokens up to the model's answer to `messages`, even if they leave no room for it.

        `only_results` says that they are only results of the model's own tool calls.
        """
        if not self._turns:
            return self._renderer.begin(messages)
        keep = self._keep_reasoning == "all" or (self._keep_reasoning == "turn" and only_results)
        if keep or not self._has_reasoning:
            return self._renderer.go_on(*self._stream, messages)
        self._has_reasoning, self._num_stripped = False, len(self._turns)
        return self._render(self._num_dropped, self._replacement, messages)

    def room(self, prompt_ids: tuple[int, ...]) -> int:
        """Number of tokens that an answer to `prompt_ids` may have, without the reserve for notes."""
        left = self._limit - len(prompt_ids)
        reserve = self._notes_reserve
        return left - reserve if reserve and left - reserve >= self._min_answer else left

    def is_full(self, prompt_ids: tuple[int, ...]) -> bool:
        """Whether `prompt_ids` leave too little room for an answer and for notes."""
        return self._limit - len(prompt_ids) < self._min_answer + self._notes_reserve

    @property
    def least_free(self) -> int:
        """Number of tokens that the shortest prompt must leave free for a full conversation to continue."""
        return self._min_answer + self._notes_reserve + self.max_notes

    @property
    def may_drop_turns(self) -> bool:
        """Whether there are turns that may be dropped."""
        return self.drops_turns and bool(self._turns)

    def num_turns_to_drop(self, messages: Messages) -> int | None:
        """Number of first turns that must be dropped, or None if dropping all of them is not enough."""
        most_tokens = self._limit - self.least_free
        target = min(self._limit // _PROMPT_DIVISOR - self.max_notes, most_tokens)
        fewest, most = max(1, self._num_dropped), len(self._turns)

        def size(number: int) -> int:
            return len(self._render(number, omission(number), messages))

        number = fewest + bisect.bisect_left(range(fewest, most), True, key=lambda n: size(n) <= target)
        return number if number < most or size(most) <= most_tokens else None

    def texts(self, number: int) -> tuple[tuple[str, str], ...]:
        """Messages, without instructions, and answer of each of the first `number` turns."""
        return tuple(
            ("\n\n".join(text for role, text in turn.messages if role != "system"), turn.answer)
            for turn in self._turns[:number]
        )

    def ask_for_notes(self) -> tuple[int, ...]:
        """Tokens of the prompt that asks the model for notes on the conversation so far."""
        return self._renderer.extend(*self._stream, ASK_FOR_NOTES)

    def drop_turns(self, number: int, replacement: str, messages: Messages) -> tuple[int, ...]:
        """Drop the first `number` turns and render the prompt again, with `replacement` in their place."""
        self._num_dropped, self._replacement = number, replacement
        return self._render(number, replacement, messages)

    def add_turn(
        self,
        messages: Messages,
        reasoning: str,
        answer: str,
        prompt_ids: tuple[int, ...],
        response_ids: tuple[int, ...],
    ) -> None:
        """Append a turn."""
        self._turns = (*self._turns, _PastTurn(messages, answer, response_ids))
        self._stream = (prompt_ids, response_ids)
        self._has_reasoning |= bool(reasoning)

    def _render(self, num_dropped: int, replacement: str, new: Messages) -> tuple[int, ...]:
        turns = self._turns[num_dropped:]
        messages = [*(turn.messages for turn in turns), new]
        if num_dropped:
            messages[0] = _join(self._turns[0].messages, replacement, messages[0])
        first = max(0, self._num_stripped - num_dropped)  # the first turn that keeps its tokens
        as_text = [(*seen, ("assistant", turn.answer)) for seen, turn in zip(messages, turns[:first], strict=False)]
        prompt_ids = self._renderer.begin([*(message for turn in as_text for message in turn), *messages[first]])
        for turn, seen in zip(turns[first:], messages[first + 1 :], strict=True):
            prompt_ids = self._renderer.go_on(prompt_ids, turn.response_ids, seen)
        return prompt_ids


class Branches:
    """Assigns each decision of an agent to one of its conversations, and records where a conversation branched off."""

    def __init__(self) -> None:
        self._branches: list[int] = []
        """By decision."""
        self._next = 0
        """Number of the next branch."""
        self._main: int | None = None
        """Branch of the conversation that an environment need not name."""
        self._continued: set[int] = set()
        """Decisions whose branch has moved on. A conversation that continues from one of them begins a new branch."""

    def place(self, conversation: Mapping[str, Any] | None) -> tuple[int, int | None]:
        """The branch of the next decision and, if the branch begins with it, the decision that it continues from.

        `conversation` is None for the main one. Raises ValueError if it continues from a decision that does not exist.
        """
        number, after = len(self._branches), None if conversation is None else conversation["after"]
        if after is not None and not (type(after) is int and 0 <= after < number):
            raise ValueError(
                f"a conversation continues from decision {after!r}. The agent has made {number}, numbered from 0"
            )
        begins = conversation is not None and (after is None or after in self._continued)
        if conversation is None:  # branch 0, unless another conversation began before it
            branch = self._main = self._next if self._main is None else self._main
        else:
            branch = self._next if begins or after is None else self._branches[after]
        self._next = max(self._next, branch + 1)
        # A named conversation that continues from a decision of the main one is a side question: a branch of its own.
        previous = number if conversation is None else after
        if previous is not None:
            self._continued.add(previous)
        self._branches.append(branch)
        return branch, after if begins else None


def _join(opening: Messages, text: str, following: Messages) -> Messages:
    """Join messages with `text` in between. Neighbors of one role become one message, as many templates require."""
    *before, (role, last) = opening
    if following and following[0][0] == role:
        (_, first), *rest = following
        return (*before, (role, f"{last}\n\n{text}\n\n{first}"), *rest)
    return (*before, (role, f"{last}\n\n{text}"), *following)


def omission(number: int, text: str = "", *, notes: bool = False) -> str:
    """Text that a model reads in place of the first `number` turns: their summary `text`, or its own notes."""
    head = f"[{number} earlier turn{'s are' if number > 1 else ' is'} left out here"
    if not text.strip():
        return f"{head}.]"
    return f"{head}. {'Your notes' if notes else 'In short'}:]\n{text.strip()}\n[Here it goes on.]"
