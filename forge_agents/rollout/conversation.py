"""A seat's conversation as its model reads it: one stream of tokens that grows, and is written anew where it has to be.

In: observations, and what the model said. Out: prompts as token ids. Waits for nothing.
"""

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
_NOTES_SHARE, _ANSWER_SHARE, _KEPT_SHARE = 8, 4, 2
"""Of the context at most an eighth is taken by notes, a quarter is kept free for an answer, and half is filled by a
prompt that is written anew, so that the stream grows again instead of being written anew in every turn."""


Messages: TypeAlias = "tuple[tuple[str, str], ...]"
"""Role and text of each."""


@dataclass(frozen=True, slots=True)
class _Said:
    """A turn as it is remembered."""

    heard: Messages
    answer: str
    response_ids: tuple[int, ...]


class Conversation:
    """What one model has heard and said in one seat, and how much of it the model reads again.

    A prompt is the stream so far and what is heard now, unless something that the stream holds is to be dropped:
    thoughts, by `keep_reasoning`, or turns for which there is no room. Then it is written anew: what was heard first,
    what stands in place of the turns that are left out, and the turns that are kept. Those whose thoughts are dropped
    are rendered from their text; of the others the tokens are taken as they were sampled.

    A copy goes on by itself.

    Args:
        limit: Tokens of prompt and response that the model has room for.
        max_tokens: Most tokens of an answer.
        context: What is done when the room is used up.
        keep_reasoning: Which thoughts the model reads again.
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
        self._wanted = 1 if context == "end" else min(max_tokens, limit // _ANSWER_SHARE)
        self.max_notes = self._reserve = 0
        if context == "summarize":  # kept free, so that there is room to ask and to write when the rest is full
            self.max_notes = limit // _NOTES_SHARE
            self._reserve = len(renderer.extend((), (), ASK_FOR_NOTES)) + self.max_notes
        self._said: tuple[_Said, ...] = ()
        self._stream: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # last prompt and response
        self._thoughts_held = False
        self._thoughtless = 0  # first turns whose thoughts are not read any more
        self._left_out, self._in_their_place = 0, ""

    def prompt(self, heard: Messages, *, only_results: bool = False) -> tuple[int, ...]:
        """Tokens up to where the model answers what it hears now, whatever room they leave.

        Args:
            only_results: Whether that is nothing but the results of the model's own tool calls.
        """
        if not self._said:
            return self._renderer.begin(heard)
        kept = self._keep_reasoning == "all" or (self._keep_reasoning == "turn" and only_results)
        if kept or not self._thoughts_held:
            return self._renderer.go_on(*self._stream, heard)
        self._thoughts_held, self._thoughtless = False, len(self._said)
        return self._written(self._left_out, self._in_their_place, heard)

    def room(self, prompt_ids: tuple[int, ...]) -> int:
        """Tokens that an answer to `prompt_ids` may have; what notes need is not among them."""
        left = self._limit - len(prompt_ids)
        return left - self._reserve if self._reserve and left - self._reserve >= self._wanted else left

    def is_full(self, prompt_ids: tuple[int, ...]) -> bool:
        """Whether `prompt_ids` leave too little for an answer, and for notes."""
        return self._limit - len(prompt_ids) < self._wanted + self._reserve

    @property
    def least_free(self) -> int:
        """Tokens that the shortest prompt has to leave free for a conversation to go on when its room is used up."""
        return self._wanted + self._reserve + self.max_notes

    @property
    def may_leave_out(self) -> bool:
        """Whether there are turns that may be left out."""
        return self.context != "end" and bool(self._said)

    def to_leave_out(self, heard: Messages) -> int | None:
        """How many turns, from the first on, have to be left out; None: all are too few."""
        most_tokens = self._limit - self.least_free
        aim = min(self._limit // _KEPT_SHARE - self.max_notes, most_tokens)
        fewest, most = max(1, self._left_out), len(self._said)

        def size(number: int) -> int:
            return len(self._written(number, left_out(number), heard))

        number = fewest + bisect.bisect_left(range(fewest, most), True, key=lambda n: size(n) <= aim)
        return number if number < most or size(most) <= most_tokens else None

    def texts(self, number: int) -> tuple[tuple[str, str], ...]:
        """What was heard, without instructions, and answered in each of the first `number` turns."""
        return tuple(
            ("\n\n".join(text for role, text in turn.heard if role != "system"), turn.answer)
            for turn in self._said[:number]
        )

    def ask_for_notes(self) -> tuple[int, ...]:
        """Tokens of the prompt that asks the model for notes on all that it has read and said."""
        return self._renderer.extend(*self._stream, ASK_FOR_NOTES)

    def leave_out(self, number: int, text: str, heard: Messages) -> tuple[int, ...]:
        """The prompt, written anew without the first `number` turns, in whose place stands `text`."""
        self._left_out, self._in_their_place = number, text
        return self._written(number, text, heard)

    def answered(
        self, heard: Messages, thought: str, answer: str, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...]
    ) -> None:
        """Remember a turn."""
        self._said = (*self._said, _Said(heard, answer, response_ids))
        self._stream = (prompt_ids, response_ids)
        self._thoughts_held |= bool(thought)

    def _written(self, number: int, text: str, now: Messages) -> tuple[int, ...]:
        kept = self._said[number:]
        heard = [*(turn.heard for turn in kept), now]
        if number:
            heard[0] = _joined(self._said[0].heard, text, heard[0])
        first = max(0, self._thoughtless - number)  # of those whose tokens are taken as they are
        told = [(*seen, ("assistant", turn.answer)) for seen, turn in zip(heard, kept[:first], strict=False)]
        prompt_ids = self._renderer.begin([*(message for turn in told for message in turn), *heard[first]])
        for turn, seen in zip(kept[first:], heard[first + 1 :], strict=True):
            prompt_ids = self._renderer.go_on(prompt_ids, turn.response_ids, seen)
        return prompt_ids


class Branches:
    """Which of a seat's conversations each of its decisions belongs to, and where one branched off another."""

    def __init__(self) -> None:
        self._branches: list[int] = []  # by decision
        self._fresh = 0  # the next that is begun
        self._main: int | None = None  # branch of the conversation that an environment need not name
        self._gone_on: set[int] = set()  # decisions whose branch has moved on: who goes on from them begins another

    def place(self, told: Mapping[str, Any] | None) -> tuple[int, int | None]:
        """The branch of the next decision and, where it begins there, the decision whose conversation it goes on from.

        Args:
            told: What `forge_agents.envs.env.CONVERSATION` says of it; None for the main conversation.

        Raises:
            ValueError: It goes on from a decision that the seat has not made.
        """
        number, after = len(self._branches), None if told is None else told["after"]
        if after is not None and not (type(after) is int and 0 <= after < number):
            raise ValueError(f"a conversation goes on from decision {after!r}; the seat has made {number}, from 0 on")
        begins = told is not None and (after is None or after in self._gone_on)
        if told is None:  # 0, unless another conversation was there before it
            branch = self._main = self._fresh if self._main is None else self._main
        else:
            branch = self._fresh if begins or after is None else self._branches[after]
        self._fresh = max(self._fresh, branch + 1)
        # the main one needs no name: who names a decision of it asks beside it
        on = number if told is None else after
        if on is not None:
            self._gone_on.add(on)
        self._branches.append(branch)
        return branch, after if begins else None


def _joined(opening: Messages, text: str, then: Messages) -> Messages:
    """`opening`, `text` and `then`; many templates want roles to alternate, so what one role says is one message."""
    *before, (role, last) = opening
    if then and then[0][0] == role:
        (_, first), *rest = then
        return (*before, (role, f"{last}\n\n{text}\n\n{first}"), *rest)
    return (*before, (role, f"{last}\n\n{text}"), *then)


def left_out(number: int, text: str = "", *, notes: bool = False) -> str:
    """What a model reads in place of the first `number` turns.

    Args:
        text: What is known of them; empty: nothing.
        notes: Whether the model itself wrote `text`.
    """
    told = f"[{number} earlier turn{'s are' if number > 1 else ' is'} left out here"
    if not text.strip():
        return f"{told}.]"
    return f"{told}. {'Your notes' if notes else 'In short'}:]\n{text.strip()}\n[Here it goes on.]"
