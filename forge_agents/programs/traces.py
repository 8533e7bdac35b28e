"""Imports recorded conversations as training data for imitation and preference learning.

A recorded call is parsed as the gateway parses one, so that a model learns the text with which it will be called. Calls
of one conversation repeat each other: the last of them becomes the row, with all its recorded answers as targets.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from forge_agents.errors import did_you_mean
from forge_agents.files import atomic_writer, user_path
from forge_agents.jsonl import UnreadableJsonError, json_values, number
from forge_agents.programs.calls import ChatMessage, RefusedError, as_text
from forge_agents.programs.logs import (
    CONTENT_KEYS,
    RecordedCall,
    as_list,
    parse_conversation,
    parse_log,
    read_messages,
    with_system,
)
from forge_agents.programs.spans import attributes, exported, find_score, model_names, parse_span
from forge_agents.repeated_prompts import overlap, text_after
from forge_agents.row_keys import is_cut, is_cut_reason, is_learned, marks_of

Source: TypeAlias = str | os.PathLike[str]
_PARSE_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""Exceptions that parsing an arbitrary file may raise."""
_MAX_ANSWERS = 128
_UNKNOWN_CALLS = "answers that call a tool which is not listed"
_ANSWER_KEYS = ("messages", "completion", "chosen", "rejected")
"""Every row has one of these keys."""
_ROW_KEYS = (
    *_ANSWER_KEYS, "prompt", "system", "tools", "tool_choice", "parallel_tool_calls", "response_format", "model",
    "finish_reason",
)  # fmt: skip
"""Keys of a row that are read."""
_MESSAGE_KEYS = (*CONTENT_KEYS, "finish_reason")
"""Keys of a message that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Result of an import."""

    rows: int
    """Number of conversations or pairs that were written."""
    answers: int
    """Number of answers to be learned in them, two for a pair."""
    skipped: Mapping[str, int]
    """Number of skipped records by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversation:
    messages: tuple[ChatMessage, ...]
    instructions: str
    score: float | None
    is_chat: bool
    """Whether the record was a whole chat, rather than a call and its answer."""
    unlearned: frozenset[int] = frozenset()
    """Indices of answers that are not to be learned."""

    @property
    def marks(self) -> list[tuple[int, bytes]]:
        """Index of each answer, and a digest of all messages up to it."""
        marks, mark = [], _digest(self.instructions.encode())
        for place, message in enumerate(self.messages):
            mark = _digest(mark + message.key)
            if message.role == "assistant":
                marks.append((place, mark))
        return marks

    @property
    def to_learn(self) -> list[tuple[int, bytes]]:
        """The marks of answers that are to be learned."""
        return [(place, mark) for place, mark in self.marks if place not in self.unlearned]


def import_traces(
    sources: Sequence[Source],
    out: Source,
    *,
    model: str | None = None,
    pairs: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Imported:
    """Write recorded conversations as rows for `SFTTrainer`, or as pairs for `DPOTrainer`.

    A file holds one JSON value per line, or several lines each: exports of spans (``resourceSpans``), single spans with
    ``attributes``, logged requests (``request`` and ``response``, as OpenAI's or Anthropic's protocols have them), or
    chats with ``messages``, ``prompt`` and ``completion``, or ``prompt``, ``chosen`` and ``rejected``, and ``tools``
    next to them. Spans are read if their attributes contain messages in the form of OpenTelemetry's conventions
    (``gen_ai.input.messages``), OpenInference (``llm.input_messages``) or OpenLLMetry (``gen_ai.prompt``), in any
    order. Conversations that repeat each other, such as requests with a growing history, become one row, and each
    answer is learned once.

    Args:
        sources: The files.
        out: The file to write. Must not exist.
        model: Name of a model or an agent, to import only its calls.
        pairs: Name of a score, to write pairs: the best and the worst answer to the same messages. The score is an
            attribute of a span, an evaluation of it (``gen_ai.evaluation.result``) or a key of a row.
        say: Called with a message for each line that cannot be read.

    Raises:
        ValueError: There is nothing to learn, or `out` exists.
    """
    target = user_path(out)
    if missing := [str(source) for source in sources if not user_path(source).is_file()]:
        raise ValueError(f"{', '.join(missing)} is not a file. Give files of spans or chats in JSON")
    if target.exists():
        raise ValueError(f"{target} exists. Give another --out, or remove it")
    reader = _Reader(sources, model, pairs, say)
    rows = answers = 0
    with atomic_writer(target) as file:
        for row, count in _rows(reader) if pairs is None else _pairs(reader):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            rows, answers = rows + 1, answers + count
        if not rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in reader.skipped.items())
            raise ValueError(f"there is nothing to learn from: {reasons or 'the files are empty'}")
    return Imported(rows=rows, answers=answers, skipped=reader.skipped)


def _rows(reader: _Reader) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield rows for imitation, each with its number of answers to be learned.

    The files are read twice, so that conversations need not be kept in memory until the last of their calls is read.
    """
    calls: list[list[tuple[int, bytes]]] = []
    longer: set[bytes] = set()  # answers that a longer conversation contains
    for conversation in reader.conversations():
        if isinstance(conversation, _Conversation) and conversation.is_chat:
            longer.update(mark for _, mark in conversation.to_learn[:-1])
        elif isinstance(conversation, _Conversation):
            calls.append(conversation.marks)
    recorded = {marks[-1][1] for marks in calls}
    longer.update(mark for marks in calls for _, mark in _trailing_recorded(marks, recorded)[:-1])
    written: set[bytes] = set()  # an answer shared by several conversations is learned in the first of them
    for conversation in reader.again().conversations():
        if not isinstance(conversation, _Conversation):
            yield conversation, 1 + ("chosen" in conversation)
            continue
        learned = conversation.to_learn if conversation.is_chat else _trailing_recorded(conversation.marks, recorded)
        if not learned and not conversation.is_chat:
            raise ValueError("a file changed while it was read. Copy it first")
        new = [mark for mark in learned if mark[1] not in written]
        if learned and (not new or new[-1][1] in longer):
            reader.skipped["repeated in another"] += 1
            continue
        written.update(mark for _, mark in new)
        if new:
            yield _row(conversation, {place for place, _ in new}), len(new)


def _trailing_recorded(marks: Sequence[tuple[int, bytes]], recorded: set[bytes]) -> list[tuple[int, bytes]]:
    """Return the last answers of a conversation that were recorded. Earlier ones are examples or rewritten."""
    return list(itertools.takewhile(lambda mark: mark[1] in recorded, reversed(marks)))[::-1]


def _row(conversation: _Conversation, places: Collection[int]) -> dict[str, Any]:
    """Return a row that learns the answers at these places. Other answers before the last of them have weight 0.

    The size of the row is linear in that of the conversation, however learned and other answers alternate.
    """
    messages = conversation.messages[: max(places) + 1]
    answers = [place for place, message in enumerate(messages) if message.role == "assistant"]
    unlearned, first = [place for place in answers if place not in places], min(places)
    if unlearned and unlearned[-1] < first:
        prompt = as_text(messages[:first], conversation.instructions)
        return {"prompt": prompt, "completion": as_text(messages[first:])}
    row: dict[str, Any] = {"messages": as_text(messages, conversation.instructions)}
    texts = [message for message in row["messages"] if message["role"] == "assistant"]
    for place, text in zip(answers, texts, strict=True):
        if place not in places:
            text["weight"] = 0
    return row


def _pairs(reader: _Reader) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the best and the worst answer to the same messages; of equal scores the earlier answer."""
    extremes: dict[bytes, tuple[_Conversation, _Conversation]] = {}
    for conversation in reader.conversations():
        if not isinstance(conversation, _Conversation):
            yield conversation, 2
            continue
        keys = (message.key for message in conversation.messages[:-1])
        prompt = _digest(b"".join([conversation.instructions.encode(), *keys]))
        worst, best = extremes.get(prompt, (conversation, conversation))
        extremes[prompt] = min(worst, conversation, key=_score), max(best, conversation, key=_score)
    for worst, best in extremes.values():
        if worst.score == best.score or worst.messages[-1].key == best.messages[-1].key:
            reader.skipped["conversations without a better answer"] += 1
            continue
        sides = {"chosen": as_text(best.messages[-1:]), "rejected": as_text(worst.messages[-1:])}
        yield {"prompt": as_text(best.messages[:-1], best.instructions), **sides}, 2


def _score(conversation: _Conversation) -> float:
    return conversation.score or 0.0


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


# ---- files


class _SkippedError(Exception):
    """A record is left out and counted under the reason that is this exception's text."""


class _Reader:
    def __init__(
        self, sources: Sequence[Source], model: str | None, pairs: str | None, say: Callable[[str], None]
    ) -> None:
        self._sources, self._model, self._pairs, self._say = sources, model, pairs, say
        self._names: set[str] = set()
        self._ignored_keys: set[str] = set()
        self.skipped: Counter[str] = Counter()

    def again(self) -> _Reader:
        """Return a reader of the same files that prints no messages, since this one has."""
        return _Reader(self._sources, self._model, self._pairs, lambda line: None)

    def conversations(self) -> Iterator[_Conversation | dict[str, Any]]:
        """Yield conversations, and rows whose answers are in separate fields."""
        for source in self._sources:
            for line, value in json_values(source):
                where = f"{source}:{line}"
                try:
                    if isinstance(value, UnreadableJsonError):
                        raise RefusedError(f"it is not JSON ({value})")
                    items = list(_items(value))
                except _PARSE_ERRORS as error:
                    self._skip(where, error)
                    continue
                for item in items:
                    yield from self._read(where, item)
        if self._ignored_keys:
            self._say(f"ignored keys: {', '.join(map(repr, sorted(self._ignored_keys)[:20]))}")
        if self._model is not None and self._names and self._model not in self._names:
            names = ", ".join(map(repr, sorted(self._names)[:20]))
            self._say(f"there is no call of {self._model!r}, only of {names}.{did_you_mean(self._model, self._names)}")

    def _skip(self, where: str, error: BaseException) -> None:
        self.skipped["unreadable"] += 1
        reason = str(error) if isinstance(error, RefusedError) else f"its form is unknown ({error!r})"
        self._say(f"{where} is skipped: {reason}")

    def _read(self, where: str, item: Mapping[str, Any]) -> Sequence[_Conversation | dict[str, Any]]:
        try:
            if (call := parse_log(item)) is not None:
                self._select(call.models)
                return self._from_call(call, item.get(self._pairs or ""), item)
            if any(name in item for name in _ANSWER_KEYS):
                self._select({str(item.get("model") or "")})
                return self._from_row(item)
            if (span := attributes(item)) is None:
                keys = ", ".join(map(repr, list(item)[:12]))
                raise RefusedError(f"expected a span, a chat, or a request with its response. The keys are {keys}")
            self._select(model_names(span))
            call_or_reason = parse_span(span)
            if isinstance(call_or_reason, str):
                raise _SkippedError(call_or_reason)
            return self._from_call(call_or_reason, find_score(item, span, self._pairs) if self._pairs else None)
        except _SkippedError as reason:
            self.skipped[str(reason)] += 1
        except _PARSE_ERRORS as error:
            self._skip(where, error)
        return []

    def _select(self, names: Collection[str]) -> None:
        """Note the model's names. Raises _SkippedError for models that are not imported."""
        self._names |= {name for name in names if name}
        if self._model is not None and self._model not in names:
            raise _SkippedError("of other models, or of none that is named")

    def _from_call(self, call: RecordedCall, score: Any, row: Mapping[str, Any] = {}) -> list[_Conversation]:
        prompt, _ = self._chat(call.messages)
        marked = [("the row", row), *(("the answer", answer[0]) for answer, _ in call.answers)]
        if not all(self._is_learned(name, marks_of(item), ()) for name, item in marked):
            raise _SkippedError("marked as not to be learned")
        if not call.answers:
            raise _SkippedError("requests that failed")
        if len(call.answers) > _MAX_ANSWERS:  # each becomes a row with the whole prompt
            raise RefusedError(f"it has {len(call.answers)} answers. Expected at most {_MAX_ANSWERS}, as in APIs")
        answers = [(_read(answer), reason) for answer, reason in call.answers]
        if all(list(map(_key, prompt[-1:])) == list(map(_key, answer)) for answer, _ in answers):
            prompt = prompt[:-1]  # the log contains the answer in the request as well
        conversations = []
        for answer, reason in answers:
            if is_cut_reason(reason):
                self.skipped["answers that were cut off"] += 1
            elif not self._pairs and _unknown_calls(answer, call.request):
                self.skipped[_UNKNOWN_CALLS] += 1
            elif self._pairs and number(score) is None:
                self.skipped[f"without a number {self._pairs!r}"] += 1
            else:
                conversations.append(_make_conversation([*prompt, *answer], call.request, number(score)))
        return conversations

    def _from_row(self, row: Mapping[str, Any]) -> list[_Conversation | dict[str, Any]]:
        lists = [value for name in _ANSWER_KEYS if isinstance(value := row.get(name), list)]
        parts = itertools.chain([row], *lists)
        if any(is_cut(part) for part in parts if isinstance(part, Mapping)):
            raise _SkippedError("answers that were cut off")
        if all(row.get(name) is None for name in _ANSWER_KEYS):
            raise RefusedError("it contains no answer")
        if not self._is_learned("the row", row, (*_ROW_KEYS, self._pairs or "")):
            raise _SkippedError("marked as not to be learned")
        if row.get("messages") is None:
            return [self._from_sides(row)]
        score = number(row.get(self._pairs)) if self._pairs else None
        if self._pairs and score is None:
            raise _SkippedError(f"without a number {self._pairs!r}")
        chat, unlearned = self._chat(with_system(row["messages"], row.get("system")))
        conversation = _make_conversation(chat, row, score, is_chat=True)
        unknown = set() if self._pairs else _unknown_calls(conversation.messages, row) - unlearned
        left_out = {"answers of weight 0": len(unlearned), _UNKNOWN_CALLS: len(unknown)}
        self.skipped.update({reason: count for reason, count in left_out.items() if count})
        return [replace(conversation, unlearned=frozenset(unlearned | unknown))]

    def _from_sides(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row whose answers are in fields of their own."""
        if (row.get("chosen") is None) != (row.get("rejected") is None):
            raise RefusedError("it has only one of chosen and rejected")
        if self._pairs and row.get("chosen") is None:
            raise _SkippedError("without sides to compare")
        prompt: list[ChatMessage] = []
        written: dict[str, Any] = {}
        for name in ("prompt", *_ANSWER_KEYS):
            if (value := row.get(name)) is None:
                continue
            is_text = isinstance(value, str)
            messages = [{"role": "user" if name == "prompt" else "assistant", "content": value}] if is_text else value
            chat, unlearned = self._chat(messages if written else with_system(messages, row.get("system")))
            rest = _without_prompt(prompt, chat, is_text=is_text)
            if name == "prompt":
                prompt = chat
            elif any(place >= len(chat) - len(rest) for place in unlearned):
                raise RefusedError(f"an answer of {name!r} is marked as not to be learned. Write it as messages")
            parsed, instructions = parse_conversation(rest, {} if "prompt" in written else row)
            written[name] = as_text(parsed, instructions)
        return written

    def _chat(self, entries: Any) -> tuple[list[ChatMessage], set[int]]:
        """Return messages, and the indices of answers that are marked as not to be learned.

        Raises:
            RefusedError: A message has an unsupported key that may change what is learned.
        """
        messages: list[ChatMessage] = []
        unlearned: set[int] = set()
        for place, (entry, parsed) in enumerate(read_messages(entries)):
            if not self._is_learned(f"messages[{place}]", entry, _MESSAGE_KEYS):
                unlearned |= {at for at, each in enumerate(parsed, len(messages)) if each.role == "assistant"}
            messages += parsed
        return messages, unlearned

    def _is_learned(self, where: str, item: Mapping[str, Any], keys: Sequence[str]) -> bool:
        try:
            return is_learned(where, item, self._ignored_keys, keys)
        except ValueError as cause:
            raise RefusedError(str(cause)) from None


def _items(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, list):
        for each in value:
            yield from _items(each)
        return
    if not isinstance(value, Mapping):
        raise RefusedError(f"it is a JSON {type(value).__name__}. Expected spans or a chat")
    yield from (value,) if (spans := exported(value)) is None else spans


# ---- conversations


def _read(entries: Any) -> list[ChatMessage]:
    return [message for _, messages in read_messages(entries) for message in messages]


def _without_prompt(prompt: Sequence[ChatMessage], answer: list[ChatMessage], *, is_text: bool) -> list[ChatMessage]:
    if not (prompt and answer):
        return answer
    if is_text:
        rest = text_after(prompt[-1].text, answer[0].text)
        return [replace(answer[0], text=rest)] if rest else answer
    _, end = overlap(list(map(_key, prompt)), list(map(_key, answer)), instructions=0)
    return answer[end:]


def _key(message: ChatMessage) -> ChatMessage:
    """Return a key that is equal for messages that differ only in whitespace."""
    return replace(message, text=" ".join(message.text.split()))


def _unknown_calls(messages: Sequence[ChatMessage], request: Mapping[str, Any]) -> set[int]:
    """Return the indices of answers that call a tool which the request does not list. Empty without a list."""
    tools = [tool for tool in as_list(request.get("tools")) if isinstance(tool, Mapping)]
    functions = (tool["function"] if isinstance(tool.get("function"), Mapping) else tool for tool in tools)
    names = {function.get("name") for function in functions}
    return {
        place
        for place, message in enumerate(messages)
        if names and message.role == "assistant" and any(call.name not in names for call in message.calls)
    }


def _make_conversation(
    messages: list[ChatMessage], request: Mapping[str, Any], score: float | None = None, *, is_chat: bool = False
) -> _Conversation:
    parsed, instructions = parse_conversation(messages, request)
    if parsed[0].role == "assistant":
        raise RefusedError("it begins with an answer")
    while is_chat and parsed and parsed[-1].role != "assistant":  # the last messages have no answer
        parsed = parsed[:-1]
    if not parsed or parsed[-1].role != "assistant":
        raise RefusedError("it contains no answer")
    return _Conversation(messages=parsed, instructions=instructions, score=score, is_chat=is_chat)
