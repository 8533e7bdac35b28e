"""Imports recorded conversations as training data for imitation and preference learning.

A recorded call is parsed as the gateway parses one, so that a model learns the text with which it will be called. Calls
of one conversation repeat each other: the last of them becomes the row, with all its recorded answers as targets.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from forge_agents.envs.reasoning import join_reasoning
from forge_agents.errors import did_you_mean
from forge_agents.files import atomic_writer, user_path
from forge_agents.jsonl import UnreadableJsonError, json_values
from forge_agents.programs.calls import ChatMessage, RefusedError, as_text
from forge_agents.programs.logs import Exchange, parse_exchange
from forge_agents.programs.protocols import PROTOCOLS
from forge_agents.programs.protocols.common import text_of
from forge_agents.programs.spans import (
    REASONING_KEYS,
    as_list,
    attributes,
    exported,
    find_score,
    finish_reasons,
    from_blocks,
    is_container,
    is_truncated,
    model_names,
    parse_messages,
)
from forge_agents.repeated_prompts import overlap, text_after
from forge_agents.row_keys import is_learned, marks_of

Source: TypeAlias = str | os.PathLike[str]
_PARSE_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""Exceptions that parsing an arbitrary file may raise."""
_ANSWER_KEYS = ("messages", "completion", "chosen", "rejected")
"""Every row has one of these keys."""
_REQUEST_KEYS = ("tool_choice", "parallel_tool_calls", "response_format")
"""Keys of a request that change the system prompt, in addition to messages and tools."""
_ROW_KEYS = (*_ANSWER_KEYS, *_REQUEST_KEYS, "prompt", "system", "tools", "model", "finish_reason")
"""Keys of a row that are read."""
_CONTENT_KEYS = ("role", "content", "tool_calls", "tool_call_id", "function_call", "name", "refusal")
"""Keys of a message that the protocol reads or refuses."""
_MESSAGE_KEYS = (*_CONTENT_KEYS, *REASONING_KEYS, "finish_reason")
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
    """A conversation that ends with an answer."""

    messages: tuple[ChatMessage, ...]
    instructions: str
    score: float | None
    is_chat: bool
    """Whether the record was a whole chat, rather than a call and its answer."""
    unlearned: frozenset[int] = frozenset()
    """Indices of answers that are not to be learned."""

    def score_or_zero(self) -> float:
        """Score for comparing answers to the same messages."""
        return self.score or 0.0

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
        out: The file to write. It must not exist.
        model: Name of a model or an agent, to import only its calls.
        pairs: Name of a score, to write pairs: the best and the worst answer to the same messages. The score is an
            attribute of a span, an evaluation of it (``gen_ai.evaluation.result``) or a key of a row.
        say: Called with a message for each line that cannot be read.

    Raises:
        ValueError: There is nothing to learn, or `out` exists.
    """
    target = user_path(out)
    if missing := [str(source) for source in sources if not user_path(source).is_file()]:
        raise ValueError(f"{', '.join(missing)} is not a file; give files of spans or chats in JSON")
    if target.exists():
        raise ValueError(f"{target} exists; give another --out, or remove it")
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
            raise ValueError("a file changed while it was read; copy it first")
        new = [mark for mark in learned if mark[1] not in written]
        if learned and (not new or new[-1][1] in longer):
            reader.skipped["repeated in another"] += 1
            continue
        written.update(mark for _, mark in new)
        yield from _split_runs(conversation, {place for place, _ in new})


def _trailing_recorded(marks: Sequence[tuple[int, bytes]], recorded: set[bytes]) -> list[tuple[int, bytes]]:
    """Return the last answers of a conversation that were recorded. Earlier ones are examples or rewritten."""
    return list(itertools.takewhile(lambda mark: mark[1] in recorded, reversed(marks)))[::-1]


def _split_runs(conversation: _Conversation, places: Collection[int]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield a row for each run of answers at `places`, which are to be learned."""
    every = (place for place, _ in conversation.marks)
    for learned, run in itertools.groupby(every, key=lambda place: place in places):
        answers = list(run)
        if learned:
            messages = conversation.messages[: answers[-1] + 1]
            yield _row(replace(conversation, messages=messages), answers[0]), len(answers)


def _row(conversation: _Conversation, first: int) -> dict[str, Any]:
    if any(message.role == "assistant" for message in conversation.messages[:first]):
        prompt = as_text(conversation.messages[:first], conversation.instructions)
        return {"prompt": prompt, "completion": as_text(conversation.messages[first:])}
    return {"messages": as_text(conversation.messages, conversation.instructions)}


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
        score = _Conversation.score_or_zero
        extremes[prompt] = min(worst, conversation, key=score), max(best, conversation, key=score)
    for worst, best in extremes.values():
        if worst.score == best.score or worst.messages[-1].key == best.messages[-1].key:
            reader.skipped["conversations without a better answer"] += 1
            continue
        sides = {"chosen": as_text(best.messages[-1:]), "rejected": as_text(worst.messages[-1:])}
        yield {"prompt": as_text(best.messages[:-1], best.instructions), **sides}, 2


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


# ---- files


class _Reader:
    """Reads files and counts what it skips."""

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

    def _read(self, where: str, item: Mapping[str, Any]) -> Iterator[_Conversation | dict[str, Any]]:
        try:
            exchange = parse_exchange(item)
            is_row = exchange is not None or any(name in item for name in _ANSWER_KEYS)
            span = None if is_row else attributes(item)
            if span is None and not is_row:
                keys = ", ".join(map(repr, list(item)[:12]))
                raise RefusedError(f"expected a span, a chat, or a request with its response; the keys are {keys}")
            names = model_names(span) if span else exchange.models if exchange else {str(item.get("model") or "")}
            self._names |= names - {""}
            if self._model is not None and self._model not in names:
                self.skipped["of other models, or of none that is named"] += 1
                return
            results: Sequence[_Conversation | dict[str, Any]]
            if exchange is not None:
                results = self._from_exchange(item, exchange)
            else:
                results = self._from_span(item, span) if span is not None else self._from_row(item)
        except _PARSE_ERRORS as error:
            self._skip(where, error)
        else:
            yield from results

    def _from_exchange(self, row: Mapping[str, Any], exchange: Exchange) -> list[_Conversation]:
        request = exchange.request
        if unread := [name for name in ("functions", "function_call") if request.get(name)]:
            raise RefusedError(f"the request has {unread[0]}, which is not supported; only tools are")
        prompt = _as_chat(exchange.messages, request.get("system"))
        self._find_unlearned(prompt)
        learned = [answer for answer in exchange.answers if self._is_learned("the answer", marks_of(answer), ())]
        if not self._is_learned("the row", marks_of(row), ()) or len(learned) < len(exchange.answers):
            self.skipped["marked as not to be learned"] += 1
            return []
        answers = [(_as_chat([answer], None), answer.get("finish_reason")) for answer in learned]
        if not answers:
            self.skipped["requests that failed"] += 1
        if answers and all(_repeats(prompt[-1:], chat) for chat, _ in answers):
            prompt = prompt[:-1]  # the log contains the answer in the request as well
        score = row.get(self._pairs) if self._pairs else None
        return self._to_conversations(prompt, answers, as_list(request.get("tools")), score, asks=exchange.asks)

    def _from_span(self, span: Mapping[str, Any], attrs: Mapping[str, Any]) -> list[_Conversation]:
        if is_container(attrs):
            self.skipped["spans around calls"] += 1
            return []
        call = parse_messages(attrs)
        if call is None:
            model = any(name.startswith(("gen_ai.", "llm.")) for name in attrs)
            self.skipped["calls without their messages" if model else "spans of other things"] += 1
            return []
        prompt, answers, tools = call
        ends = finish_reasons(attrs)
        answers_with_reasons = [
            ([answer], answer.pop("finish_reason", None) or (ends[at + 1] if at + 1 < len(ends) else ends[0]))
            for at, answer in enumerate(answers)
        ]
        if not answers:
            self.skipped["calls without an answer"] += 1
        score = find_score(span, attrs, self._pairs) if self._pairs else None
        return self._to_conversations(prompt, answers_with_reasons, tools, score)

    def _to_conversations(
        self,
        prompt: list[Any],
        answers: Sequence[tuple[list[Any], Any]],
        tools: Sequence[Any],
        score: Any,
        asks: Mapping[str, Any] = {},
    ) -> list[_Conversation]:
        """Return a conversation for each answer to one request. Answers come with their finish reasons."""
        conversations = []
        for answer, reason in answers:
            if is_truncated(reason):
                self.skipped["answers that were cut off"] += 1
            elif not self._pairs:
                conversations.append(_make_conversation([*prompt, *answer], tools, asks=asks))
            elif (number := _number(score)) is None:
                self.skipped[f"without a number {self._pairs!r}"] += 1
            else:
                conversations.append(_make_conversation([*prompt, *answer], tools, number, asks=asks))
        return conversations

    def _from_row(self, row: Mapping[str, Any]) -> list[_Conversation | dict[str, Any]]:
        lists = [value for name in _ANSWER_KEYS if isinstance(value := row.get(name), list)]
        parts = itertools.chain([row], *lists)
        if any(is_truncated(part.get("finish_reason")) for part in parts if isinstance(part, Mapping)):
            self.skipped["answers that were cut off"] += 1
            return []
        if all(row.get(name) is None for name in _ANSWER_KEYS):
            raise RefusedError("it contains no answer")
        if not self._is_learned("the row", row, (*_ROW_KEYS, self._pairs or "")):
            self.skipped["marked as not to be learned"] += 1
            return []
        if row.get("messages") is None:
            return self._from_sides(row)
        score = _number(row.get(self._pairs)) if self._pairs else None
        if self._pairs and score is None:
            self.skipped[f"without a number {self._pairs!r}"] += 1
            return []
        chat = _as_chat(row["messages"], row.get("system"))
        conversation = _make_conversation(chat, as_list(row.get("tools")), score, is_chat=True, asks=row)
        unlearned = self._find_unlearned(chat)
        self.skipped.update({"answers of weight 0": len(unlearned)} if unlearned else {})
        return [replace(conversation, unlearned=unlearned)]

    def _from_sides(self, row: Mapping[str, Any]) -> list[_Conversation | dict[str, Any]]:
        """Return a row whose answers are in fields of their own."""
        if (row.get("chosen") is None) != (row.get("rejected") is None):
            raise RefusedError("it has only one of chosen and rejected")
        if self._pairs and row.get("chosen") is None:
            self.skipped["without sides to compare"] += 1
            return []
        chats: dict[str, Any] = {}
        for name in ("prompt", *_ANSWER_KEYS):
            if (value := row.get(name)) is None:
                continue
            message = {"role": "user" if name == "prompt" else "assistant", "content": value}
            system = None if chats else row.get("system")
            chat = _as_chat([message] if isinstance(value, str) else value, system)
            chats[name] = _without_prompt(chats.get("prompt"), chat, is_text=isinstance(value, str))
        written: dict[str, Any] = {}
        for name, chat in chats.items():
            asks = {} if "prompt" in written else row
            parsed, instructions = _parse(chat, as_list(asks.get("tools")), asks)
            if self._find_unlearned(chat) and name != "prompt":
                raise RefusedError(f"an answer of {name!r} is marked as not to be learned; write it as messages")
            written[name] = as_text(parsed, instructions)
        return [written]

    def _find_unlearned(self, chat: Sequence[Mapping[str, Any]]) -> frozenset[int]:
        """Return the indices of answers that are marked as not to be learned.

        Raises:
            RefusedError: A message has an unsupported key that may change what is learned.
        """
        return frozenset(
            place
            for place, message in enumerate(chat)
            if not self._is_learned(f"messages[{place}]", message, _MESSAGE_KEYS) and message.get("role") == "assistant"
        )

    def _is_learned(self, where: str, item: Mapping[str, Any], keys: Sequence[str]) -> bool:
        try:
            return is_learned(where, item, self._ignored_keys, keys)
        except ValueError as cause:
            raise RefusedError(str(cause)) from None


def _items(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the spans or rows in a value."""
    if isinstance(value, list):
        for each in value:
            yield from _items(each)
        return
    if not isinstance(value, Mapping):
        raise RefusedError(f"it is a JSON {type(value).__name__}; expected spans or a chat")
    yield from (value,) if (spans := exported(value)) is None else spans


def _number(value: Any) -> float | None:
    number = float(value) if isinstance(value, bool | int | float) else math.nan
    return number if math.isfinite(number) else None


# ---- conversations


def _as_chat(messages: Any, system: Any) -> Any:
    """Return a row's messages in OpenAI's form. Anthropic's have a separate system prompt, and blocks."""
    if not isinstance(messages, list):
        return messages
    chat = [{"role": "system", "content": system}] if system else []
    if system and _has_role(messages[:1], "system"):
        if text_of(system, "system").split() != text_of(messages[0].get("content"), "messages[0]").split():
            raise RefusedError("it has 'system' and a system message, and they differ; keep one of them")
        chat = []
    for message in messages:
        blocks = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(blocks, list) and any(_is_anthropic(block) for block in blocks):
            marks = {key: message[key] for key in message if message["role"] == "assistant" and key != "content"}
            chat += [{**marks, **each} for each in from_blocks(message["role"], blocks)]
        else:
            chat.append(message)
    return chat


def _repeats(end: Sequence[Any], answer: Sequence[Any]) -> bool:
    """Return whether the last message of a request is its answer."""
    return _are_messages(end) and list(map(_key, end)) == list(map(_key, answer))


def _without_prompt(prompt: Any, answer: Any, *, is_text: bool) -> Any:
    """Return an answer without the prompt that it repeats."""
    if not (_are_messages(prompt) and _are_messages(answer)):
        return answer
    question = prompt[-1].get("content")
    if is_text:
        rest = text_after(question, answer[0]["content"]) if isinstance(question, str) else ""
        return [{**answer[0], "content": rest}] if rest else answer
    _, end = overlap(list(map(_key, prompt)), list(map(_key, answer)), instructions=0)
    return answer[end:]


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _key(message: Mapping[str, Any]) -> str:
    """Return a key that is equal for messages that differ only in whitespace."""
    content = {key: message[key] for key in _CONTENT_KEYS if message.get(key)}
    plain = {key: " ".join(value.split()) if isinstance(value, str) else value for key, value in content.items()}
    return json.dumps(plain, sort_keys=True, default=str)


def _has_role(messages: Sequence[Any], role: str) -> bool:
    return any(isinstance(message, Mapping) and message.get("role") == role for message in messages)


def _is_anthropic(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") in ("tool_use", "tool_result")


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a tool in OpenAI's form. None if it is not a function that the program runs."""
    if "function" in tool:
        return tool
    if tool.get("type") not in (None, "function", *(("custom",) if "input_schema" in tool else ())):
        return None
    schema = tool.get("parameters", tool.get("input_schema"))  # Anthropic's name of it
    return {"type": "function", "function": {**tool, "parameters": schema}}


def _parse(messages: Any, tools: Sequence[Any], asks: Mapping[str, Any] = {}) -> tuple[tuple[ChatMessage, ...], str]:
    """Parse messages as the gateway does, with reasoning before the answers. Also returns the tools' description.

    Args:
        messages: Messages in OpenAI's form.
        tools: Tools in OpenAI's or Anthropic's form.
        asks: Other fields of the request or row.
    """
    offered = [function for tool in tools if (function := _function(tool)) is not None]
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise RefusedError(f"the messages are {str(messages)[:100]!r}; expected a list of objects")
    spoken = []
    for place, message in enumerate(messages):
        reasoning_texts = [message.get(name) for name in REASONING_KEYS]
        content = message.get("content")
        if isinstance(content, list):
            reasoning_texts.append("\n".join(text for part in content if (text := _reasoning_in(part)) is not None))
            content = [part for part in content if _reasoning_in(part) is None]
        reasoning = next((text for text in reasoning_texts if text and isinstance(text, str)), "")
        text = join_reasoning(reasoning, text_of(content, f"messages[{place}]")) if reasoning else content
        spoken.append({**{key: message[key] for key in _CONTENT_KEYS if key in message}, "content": text})
    more = {name: asks[name] for name in _REQUEST_KEYS if asks.get(name) is not None}
    request = PROTOCOLS["/v1/chat/completions"].read({"model": "", "messages": spoken, "tools": offered, **more})
    for place, message in enumerate(request.messages):
        if message.role == "assistant" and not (message.text.strip() or message.calls):
            raise RefusedError(f"messages[{place}]: the answer is empty")
    messages = tuple(_with_arguments(message, place) for place, message in enumerate(request.messages))
    return messages, request.instructions


def _with_arguments(message: ChatMessage, place: int) -> ChatMessage:
    """Return a message with valid arguments in its calls. An empty text stands for no arguments.

    Raises:
        RefusedError: The arguments of a call are not a JSON object. They would be learned as they are.
    """
    calls = []
    for call in message.calls:
        written = call.arguments.strip() or "{}"
        try:
            arguments = json.loads(written, parse_constant=_reject_constant)
        except (ValueError, RecursionError) as cause:
            raise RefusedError(f"messages[{place}]: the arguments of {call.name!r} are not JSON ({cause})") from None
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise RefusedError(f"messages[{place}]: the arguments of {call.name!r} are a JSON {kind}, not an object")
        calls.append(replace(call, arguments=written))
    return replace(message, calls=tuple(calls)) if calls else message


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _reasoning_in(part: Any) -> str | None:
    """Return the text of a reasoning part. None for other parts."""
    if not isinstance(part, Mapping) or (kind := part.get("type")) not in ("reasoning", "thinking"):
        return None
    return text_of(part.get(kind) or part.get("text"), f"a part of type {kind!r}")


def _make_conversation(
    messages: Any,
    tools: Sequence[Any],
    score: float | None = None,
    *,
    is_chat: bool = False,
    asks: Mapping[str, Any] = {},
) -> _Conversation:
    parsed, instructions = _parse(messages, tools, asks)
    if parsed[0].role == "assistant":
        raise RefusedError("it begins with an answer")
    while is_chat and parsed and parsed[-1].role != "assistant":  # the last messages have no answer
        parsed = parsed[:-1]
    if not parsed:
        raise RefusedError("it contains no answer")
    return _Conversation(messages=parsed, instructions=instructions, score=score, is_chat=is_chat)
