"""Conversations that were recorded elsewhere, as rows that imitation and preference learning read.

In: files of spans, as an exporter of OpenTelemetry writes them in JSON, or of chats. Out: a file of rows, and what was
left out. Waits for the disk.

A recorded call is read as the gateway reads one, so that a model learns the text that it will be asked with. Calls of
one conversation repeat each other: the last of them becomes the row, with all its recorded answers to be learned.
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
from forge_agents.programs.calls import RefusedError, Said, as_text
from forge_agents.programs.logs import Exchange, exchange_in
from forge_agents.programs.protocols import PROTOCOLS, text_of
from forge_agents.programs.spans import (
    THOUGHTS,
    attributes,
    ends_in,
    exported,
    is_around_calls,
    is_cut,
    messages_in,
    names_in,
    of_blocks,
    score_in,
    some,
)
from forge_agents.repeated_prompts import overlap, text_after
from forge_agents.row_keys import is_learned, marks_of

Source: TypeAlias = str | os.PathLike[str]
_ODD = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""What reading somebody else's file may end in, whatever stands in it."""
_ROW = ("messages", "completion", "chosen", "rejected")
"""One of these is in every row."""
_ASKED = ("tool_choice", "parallel_tool_calls", "response_format")
"""Of a request what is told the model beside its messages and tools."""
_ROW_KEYS = (*_ROW, *_ASKED, "prompt", "system", "tools", "model", "finish_reason")
"""Keys of a row that are read."""
_SPOKEN_KEYS = ("role", "content", "tool_calls", "tool_call_id", "function_call", "name", "refusal")
"""Keys of a message that the protocol reads or refuses."""
_MESSAGE_KEYS = (*_SPOKEN_KEYS, *THOUGHTS, "finish_reason")
"""Keys of a message that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What became of recordings."""

    rows: int
    """Conversations, or pairs, that were written."""
    answers: int
    """Answers in them that are learned; of a pair two."""
    left_out: Mapping[str, int]
    """How many others there were, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Talk:
    """A conversation that ends with an answer."""

    said: tuple[Said, ...]
    told: str
    score: float | None
    whole: bool
    """Whether all of it was given as one, rather than as a call and its answer."""
    unlearned: frozenset[int] = frozenset()
    """Places of answers that are not to be learned."""

    def by_score(self) -> float:
        """To compare answers to the same."""
        return self.score or 0.0

    @property
    def marks(self) -> list[tuple[int, bytes]]:
        """Place of each answer, and a digest of all up to it."""
        found, mark = [], _mark(self.told.encode())
        for place, message in enumerate(self.said):
            mark = _mark(mark + message.key)
            if message.role == "assistant":
                found.append((place, mark))
        return found

    @property
    def to_learn(self) -> list[tuple[int, bytes]]:
        """The marks of the answers that are to be learned."""
        return [(place, mark) for place, mark in self.marks if place not in self.unlearned]


def import_traces(
    sources: Sequence[Source],
    out: Source,
    *,
    model: str | None = None,
    pairs: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Imported:
    """Write the conversations of recordings as rows for `SFTTrainer`, or as pairs for `DPOTrainer`.

    A file holds one JSON value per line, or several lines each: exports of spans (``resourceSpans``), single spans with
    ``attributes``, logged requests (``request`` and ``response``, as OpenAI's or Anthropic's protocols have them), or
    chats with ``messages``, ``prompt`` and ``completion``, or ``prompt``, ``chosen`` and ``rejected``, and ``tools``
    next to them. Of spans those count that hold messages in the attributes of OpenTelemetry's conventions
    (``gen_ai.input.messages``), of OpenInference (``llm.input_messages``) or of OpenLLMetry (``gen_ai.prompt``). Their
    order does not matter. Conversations that repeat each other, as requests with a growing history do, become one row,
    and each answer is learned once.

    Args:
        sources: The files.
        out: The file to write, which must not exist.
        model: Only calls of a model, or of an agent, with this name.
        pairs: Write pairs: of the answers to the same conversation the best and the worst, by the number that has this
            name among the attributes of a span, its evaluations (``gen_ai.evaluation.result``) or the keys of a row.
        say: Is told of each line that was left out because it cannot be read, and why.

    Raises:
        ValueError: Nothing was found, or `out` exists.
    """
    target = user_path(out)
    if missing := [str(source) for source in sources if not user_path(source).is_file()]:
        raise ValueError(f"{', '.join(missing)} is no file; give files of spans or chats in JSON")
    if target.exists():
        raise ValueError(f"{target} exists; give another --out, or remove it")
    reader = _Reader(sources, model, pairs, say)
    rows = answers = 0
    with atomic_writer(target) as file:
        for row, count in _rows(reader) if pairs is None else _pairs(reader):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            rows, answers = rows + 1, answers + count
        if not rows:
            why = ", ".join(f"{count} {reason}" for reason, count in reader.left.items()) or "the files are empty"
            raise ValueError(f"nothing was found to learn from: {why}")
    return Imported(rows=rows, answers=answers, left_out=reader.left)


def _rows(reader: _Reader) -> Iterator[tuple[dict[str, Any], int]]:
    """Rows for imitation, each with the number of answers that are learned of it.

    The files are read twice, so that no conversation has to be kept until the last of its calls is found.
    """
    calls: list[list[tuple[int, bytes]]] = []
    longer: set[bytes] = set()  # answers that a longer conversation repeats and teaches
    for talk in reader.talks():
        if isinstance(talk, _Talk) and talk.whole:
            longer.update(mark for _, mark in talk.to_learn[:-1])
        elif isinstance(talk, _Talk):
            calls.append(talk.marks)
    recorded = {marks[-1][1] for marks in calls}
    longer.update(mark for marks in calls for _, mark in _learned(marks, recorded)[:-1])
    written: set[bytes] = set()  # an answer that several conversations go on from is learned in the first of them
    for talk in reader.again().talks():
        if not isinstance(talk, _Talk):
            yield talk, 1 + ("chosen" in talk)
            continue
        learned = talk.to_learn if talk.whole else _learned(talk.marks, recorded)
        if not learned and not talk.whole:
            raise ValueError("a file changed while it was read; copy it first")
        mine = [one for one in learned if one[1] not in written]
        if learned and (not mine or mine[-1][1] in longer):
            reader.left["repeated in another"] += 1
            continue
        written.update(mark for _, mark in mine)
        yield from _parts_of(talk, {place for place, _ in mine})


def _learned(marks: Sequence[tuple[int, bytes]], recorded: set[bytes]) -> list[tuple[int, bytes]]:
    """The last answers of a conversation, back to one that nobody recorded: an example, or a history rewritten."""
    return list(itertools.takewhile(lambda one: one[1] in recorded, reversed(marks)))[::-1]


def _parts_of(talk: _Talk, places: Collection[int]) -> Iterator[tuple[dict[str, Any], int]]:
    """A row for each run of answers at `places`, which are to be learned."""
    for learned, run in itertools.groupby((place for place, _ in talk.marks), key=lambda place: place in places):
        mine = list(run)
        if learned:
            yield _row(replace(talk, said=talk.said[: mine[-1] + 1]), mine[0]), len(mine)


def _row(talk: _Talk, first: int) -> dict[str, Any]:
    if any(message.role == "assistant" for message in talk.said[:first]):
        return {"prompt": as_text(talk.said[:first], talk.told), "completion": as_text(talk.said[first:])}
    return {"messages": as_text(talk.said, talk.told)}


def _pairs(reader: _Reader) -> Iterator[tuple[dict[str, Any], int]]:
    """Of the answers to the same the worst and the best; of equals the earlier."""
    found: dict[bytes, tuple[_Talk, _Talk]] = {}
    for talk in reader.talks():
        if not isinstance(talk, _Talk):
            yield talk, 2
            continue
        asked = _mark(b"".join([talk.told.encode(), *(message.key for message in talk.said[:-1])]))
        worst, best = found.get(asked, (talk, talk))
        found[asked] = min(worst, talk, key=_Talk.by_score), max(best, talk, key=_Talk.by_score)
    for worst, best in found.values():
        if worst.score == best.score or worst.said[-1].key == best.said[-1].key:
            reader.left["conversations without a better answer"] += 1
            continue
        sides = {"chosen": as_text(best.said[-1:]), "rejected": as_text(worst.said[-1:])}
        yield {"prompt": as_text(best.said[:-1], best.told), **sides}, 2


def _mark(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


# ---- files


class _Reader:
    """Reads files, and counts what it leaves out."""

    def __init__(
        self, sources: Sequence[Source], model: str | None, pairs: str | None, say: Callable[[str], None]
    ) -> None:
        self._sources, self._model, self._pairs, self._say = sources, model, pairs, say
        self._names: set[str] = set()
        self._unread: set[str] = set()
        self.left: Counter[str] = Counter()

    def again(self) -> _Reader:
        """One that tells nobody what it leaves out, for this one has."""
        return _Reader(self._sources, self._model, self._pairs, lambda line: None)

    def talks(self) -> Iterator[_Talk | dict[str, Any]]:
        """Conversations, and rows in which what is learned is set apart."""
        for source in self._sources:
            for line, value in json_values(source):
                where = f"{source}:{line}"
                try:
                    if isinstance(value, UnreadableJsonError):
                        raise RefusedError(f"it is not JSON ({value})")
                    things = list(_things(value))
                except _ODD as odd:
                    self._leave(where, odd)
                    continue
                for thing in things:
                    yield from self._read(where, thing)
        if self._unread:
            self._say(f"keys that are not read: {', '.join(map(repr, sorted(self._unread)[:20]))}")
        if self._model is not None and self._names and self._model not in self._names:
            names = ", ".join(map(repr, sorted(self._names)[:20]))
            self._say(f"no call is of {self._model!r}; they are of {names}.{did_you_mean(self._model, self._names)}")

    def _leave(self, where: str, odd: BaseException) -> None:
        self.left["unreadable"] += 1
        why = str(odd) if isinstance(odd, RefusedError) else f"its form is not known ({odd!r})"
        self._say(f"{where} is left out: {why}")

    def _read(self, where: str, thing: Mapping[str, Any]) -> Iterator[_Talk | dict[str, Any]]:
        try:
            exchange = exchange_in(thing)
            is_row = exchange is not None or any(name in thing for name in _ROW)
            span = None if is_row else attributes(thing)
            if span is None and not is_row:
                keys = ", ".join(map(repr, list(thing)[:12]))
                raise RefusedError(f"it is no span, no chat and no request with its response; its keys are {keys}")
            names = names_in(span) if span else exchange.models if exchange else {str(thing.get("model") or "")}
            self._names |= names - {""}
            if self._model is not None and self._model not in names:
                self.left["of other models, or of none that is named"] += 1
                return
            found: Sequence[_Talk | dict[str, Any]]
            if exchange is not None:
                found = self._of_exchange(thing, exchange)
            else:
                found = self._of_span(thing, span) if span is not None else self._of_row(thing)
        except _ODD as odd:
            self._leave(where, odd)
        else:
            yield from found

    def _of_exchange(self, row: Mapping[str, Any], exchange: Exchange) -> list[_Talk]:
        request = exchange.request
        if unread := [name for name in ("functions", "function_call") if request.get(name)]:
            raise RefusedError(f"the request has {unread[0]}, which is not read; only tools are")
        asked = _as_chat(exchange.messages, request.get("system"))
        self._unlearned(asked)
        given = [answer for answer in exchange.answers if self._is_learned("the answer", marks_of(answer), ())]
        if not self._is_learned("the row", marks_of(row), ()) or len(given) < len(exchange.answers):
            self.left["marked as not to be learned"] += 1
            return []
        answers = [(_as_chat([answer], None), answer.get("finish_reason")) for answer in given]
        if not answers:
            self.left["requests that failed"] += 1
        if answers and all(_repeats(asked[-1:], chat) for chat, _ in answers):
            asked = asked[:-1]  # logged with its answer
        score = row.get(self._pairs) if self._pairs else None
        return self._talks_of(asked, answers, some(request.get("tools")), score, asks=exchange.asks)

    def _of_span(self, span: Mapping[str, Any], known: Mapping[str, Any]) -> list[_Talk]:
        if is_around_calls(known):
            self.left["spans around calls"] += 1
            return []
        found = messages_in(known)
        if found is None:
            model = any(name.startswith(("gen_ai.", "llm.")) for name in known)
            self.left["calls without their messages" if model else "spans of other things"] += 1
            return []
        asked, answers, tools = found
        ends = ends_in(known)
        ended = [
            ([answer], answer.pop("finish_reason", None) or (ends[at + 1] if at + 1 < len(ends) else ends[0]))
            for at, answer in enumerate(answers)
        ]
        if not answers:
            self.left["calls without an answer"] += 1
        return self._talks_of(asked, ended, tools, score_in(span, known, self._pairs) if self._pairs else None)

    def _talks_of(
        self,
        asked: list[Any],
        answers: Sequence[tuple[list[Any], Any]],
        tools: Sequence[Any],
        score: Any,
        asks: Mapping[str, Any] = {},
    ) -> list[_Talk]:
        """A conversation for each answer, which comes with how it ended, to one request."""
        talks = []
        for answer, ended in answers:
            if is_cut(ended):
                self.left["answers that were cut off"] += 1
            elif not self._pairs:
                talks.append(_talk([*asked, *answer], tools, asks=asks))
            elif (number := _number(score)) is None:
                self.left[f"without a number {self._pairs!r}"] += 1
            else:
                talks.append(_talk([*asked, *answer], tools, number, asks=asks))
        return talks

    def _of_row(self, row: Mapping[str, Any]) -> list[_Talk | dict[str, Any]]:
        lists = [given for name in _ROW if isinstance(given := row.get(name), list)]
        parts = itertools.chain([row], *lists)
        if any(is_cut(part.get("finish_reason")) for part in parts if isinstance(part, Mapping)):
            self.left["answers that were cut off"] += 1
            return []
        if all(row.get(name) is None for name in _ROW):
            raise RefusedError("no answer is in it")
        if not self._is_learned("the row", row, (*_ROW_KEYS, self._pairs or "")):
            self.left["marked as not to be learned"] += 1
            return []
        if row.get("messages") is None:
            return self._of_sides(row)
        score = _number(row.get(self._pairs)) if self._pairs else None
        if self._pairs and score is None:
            self.left[f"without a number {self._pairs!r}"] += 1
            return []
        chat = _as_chat(row["messages"], row.get("system"))
        talk = _talk(chat, some(row.get("tools")), score, given_as_one=True, asks=row)
        unlearned = self._unlearned(chat)
        self.left.update({"answers of weight 0": len(unlearned)} if unlearned else {})
        return [replace(talk, unlearned=unlearned)]

    def _of_sides(self, row: Mapping[str, Any]) -> list[_Talk | dict[str, Any]]:
        """A row in which the answers stand apart from what was asked."""
        if (row.get("chosen") is None) != (row.get("rejected") is None):
            raise RefusedError("of chosen and rejected it has but one")
        if self._pairs and row.get("chosen") is None:
            self.left["without sides to compare"] += 1
            return []
        chats: dict[str, Any] = {}
        for name in ("prompt", *_ROW):
            if (given := row.get(name)) is None:
                continue
            message = {"role": "user" if name == "prompt" else "assistant", "content": given}
            system = None if chats else row.get("system")
            chat = _as_chat([message] if isinstance(given, str) else given, system)
            chats[name] = _without_prompt(chats.get("prompt"), chat, is_text=isinstance(given, str))
        written: dict[str, Any] = {}
        for name, chat in chats.items():
            asks = {} if "prompt" in written else row
            said, told = _said(chat, some(asks.get("tools")), asks)
            if self._unlearned(chat) and name != "prompt":
                raise RefusedError(f"an answer of {name!r} is marked as not to be learned; write it as messages")
            written[name] = as_text(said, told)
        return [written]

    def _unlearned(self, chat: Sequence[Mapping[str, Any]]) -> frozenset[int]:
        """Places of the messages that are marked as not to be learned.

        Raises:
            RefusedError: A message has a key that may change what is learned and is not read.
        """
        return frozenset(
            place
            for place, message in enumerate(chat)
            if not self._is_learned(f"messages[{place}]", message, _MESSAGE_KEYS) and message.get("role") == "assistant"
        )

    def _is_learned(self, where: str, thing: Mapping[str, Any], known: Sequence[str]) -> bool:
        try:
            return is_learned(where, thing, self._unread, known)
        except ValueError as cause:
            raise RefusedError(str(cause)) from None


def _things(value: Any) -> Iterator[Mapping[str, Any]]:
    """The spans or rows in a value."""
    if isinstance(value, list):
        for each in value:
            yield from _things(each)
        return
    if not isinstance(value, Mapping):
        raise RefusedError(f"it is a JSON {type(value).__name__}; expected spans or a chat")
    yield from (value,) if (spans := exported(value)) is None else spans


def _number(value: Any) -> float | None:
    number = float(value) if isinstance(value, bool | int | float) else math.nan
    return number if math.isfinite(number) else None


# ---- conversations


def _as_chat(messages: Any, system: Any) -> Any:
    """A row's messages as OpenAI's chats have them; Anthropic's have the system prompt beside them, and blocks."""
    if not isinstance(messages, list):
        return messages
    chat = [{"role": "system", "content": system}] if system else []
    if system and _is_of(messages[:1], "system"):
        if text_of(system, "system").split() != text_of(messages[0].get("content"), "messages[0]").split():
            raise RefusedError("it has 'system' and a system message, and they differ; keep one of them")
        chat = []
    for message in messages:
        blocks = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(blocks, list) and any(_is_anthropics(block) for block in blocks):
            marks = {key: message[key] for key in message if message["role"] == "assistant" and key != "content"}
            chat += [{**marks, **each} for each in of_blocks(message["role"], blocks)]
        else:
            chat.append(message)
    return chat


def _repeats(end: Sequence[Any], answer: Sequence[Any]) -> bool:
    """Whether the last message of a conversation is the answer that was given to it."""
    return _are_messages(end) and list(map(_key, end)) == list(map(_key, answer))


def _without_prompt(prompt: Any, answer: Any, *, is_text: bool) -> Any:
    """The messages of an answer without those of the prompt that it repeats; of a text without the prompt's text."""
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
    """Equal for messages of one role that differ in blanks only."""
    said = {key: message[key] for key in _SPOKEN_KEYS if message.get(key)}
    plain = {key: " ".join(value.split()) if isinstance(value, str) else value for key, value in said.items()}
    return json.dumps(plain, sort_keys=True, default=str)


def _is_of(messages: Sequence[Any], role: str) -> bool:
    return any(isinstance(message, Mapping) and message.get("role") == role for message in messages)


def _is_anthropics(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") in ("tool_use", "tool_result")


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A tool as OpenAI's chats have it; None where it is no function of the program's."""
    if "function" in tool:
        return tool
    if tool.get("type") not in (None, "function", *(("custom",) if "input_schema" in tool else ())):
        return None
    schema = tool.get("parameters", tool.get("input_schema"))  # Anthropic's name of it
    return {"type": "function", "function": {**tool, "parameters": schema}}


def _said(messages: Any, tools: Sequence[Any], asks: Mapping[str, Any] = {}) -> tuple[tuple[Said, ...], str]:
    """Messages as the gateway reads them, thoughts before the answers, and what it tells of the tools and the form.

    Args:
        asks: What a row says beside them, as a request does.
    """
    offered = [function for tool in tools if (function := _function(tool)) is not None]
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise RefusedError(f"the messages are {str(messages)[:100]!r}; expected a list of objects")
    spoken = []
    for place, message in enumerate(messages):
        thoughts = [message.get(name) for name in THOUGHTS]
        content = message.get("content")
        if isinstance(content, list):
            thoughts.append("\n".join(text for part in content if (text := _thought_in(part)) is not None))
            content = [part for part in content if _thought_in(part) is None]
        thought = next((one for one in thoughts if one and isinstance(one, str)), "")
        told = join_reasoning(thought, text_of(content, f"messages[{place}]")) if thought else content
        spoken.append({**{key: message[key] for key in _SPOKEN_KEYS if key in message}, "content": told})
    more = {name: asks[name] for name in _ASKED if asks.get(name) is not None}
    call = PROTOCOLS["/v1/chat/completions"].read({"model": "", "messages": spoken, "tools": offered, **more})
    for place, said in enumerate(call.said):
        if said.role == "assistant" and not (said.text.strip() or said.calls):
            raise RefusedError(f"messages[{place}]: the answer is empty")
    return tuple(_with_arguments(message, place) for place, message in enumerate(call.said)), call.told


def _with_arguments(message: Said, place: int) -> Said:
    """`message`, whose calls have JSON objects as arguments; an empty text stands for no arguments.

    Raises:
        RefusedError: The arguments of a call are something else, which would be learned as it stands.
    """
    calls = []
    for call in message.calls:
        written = call.arguments.strip() or "{}"
        try:
            arguments = json.loads(written, parse_constant=_no_constant)
        except (ValueError, RecursionError) as cause:
            raise RefusedError(f"messages[{place}]: the arguments of {call.name!r} are not JSON ({cause})") from None
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise RefusedError(f"messages[{place}]: the arguments of {call.name!r} are a JSON {kind}, not an object")
        calls.append(replace(call, arguments=written))
    return replace(message, calls=tuple(calls)) if calls else message


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _thought_in(part: Any) -> str | None:
    """The thought that a part of a message is; None where it is something else."""
    if not isinstance(part, Mapping) or (kind := part.get("type")) not in ("reasoning", "thinking"):
        return None
    return text_of(part.get(kind) or part.get("text"), f"a part of type {kind!r}")


def _talk(
    messages: Any,
    tools: Sequence[Any],
    score: float | None = None,
    *,
    given_as_one: bool = False,
    asks: Mapping[str, Any] = {},
) -> _Talk:
    said, told = _said(messages, tools, asks)
    if said[0].role == "assistant":
        raise RefusedError("it begins with an answer")
    while given_as_one and said and said[-1].role != "assistant":  # nobody answered that
        said = said[:-1]
    if not said:
        raise RefusedError("no answer is in it")
    return _Talk(said=said, told=told, score=score, whole=given_as_one)
