"""Rows of conversations and of preferences: which messages they hold, and which of the answers are learned.

A key that may change what is learned is followed or refused by name. Other unknown keys are collected for one warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forge_agents.envs.reasoning import join_recorded, split_reasoning
from forge_agents.errors import did_you_mean
from forge_agents.programs.protocols.common import text_of
from forge_agents.repeated_prompts import overlap, text_after
from forge_agents.row_keys import LEARN_KEYS, is_cut, is_learned, refusal
from forge_agents.types import Message

_ROLES = ("system", "user", "assistant", "tool")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_OTHER_KEYS = {
    "from": "role", "value": "content", "conversations": "messages", "conversation": "messages",
    "instruction": "prompt", "question": "prompt", "output": "completion", "response": "completion",
    "answer": "completion",
    "preferred_output": "chosen", "non_preferred_output": "rejected", "accepted": "chosen",
}  # fmt: skip
"""Names that ShareGPT, Alpaca and OpenAI's preference rows have for keys of messages and rows."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning before an answer: the usual one, OpenRouter's and vLLM's, and that of gpt-oss."""


@dataclass(frozen=True, slots=True)
class RowMessage:
    """A message of a row."""

    role: str
    text: str
    learned: bool
    """True for an answer that is to be learned."""

    @property
    def key(self) -> tuple[str, str]:
        """Role and text, equal for messages that differ in blanks only."""
        return self.role, " ".join(self.text.split())


class RowReader:
    """Reads rows, and remembers which of their keys it does not read."""

    def __init__(self) -> None:
        self.unread: set[str] = set()
        """Keys of rows and messages that were ignored and are no usual metadata."""
        self.counts: Counter[str] = Counter()
        """How many rows were left out or changed, by reason."""

    def conversation(self, source: str, row: Mapping[str, Any]) -> list[RowMessage]:
        """Return the conversation of a row with ``messages``, or with ``prompt`` and ``completion``.

        The conversation has a message to be learned, or is empty if the row is marked as not to be learned. Raises
        ValueError for a malformed row, or a key that is neither followed nor harmless.
        """
        if row.get("messages") is not None:
            messages = self._messages(source, "messages", row["messages"])
            self._check_beside(source, row, messages)
        elif row.get("prompt") is not None and row.get("completion") is not None:
            prompt = self._messages(source, "prompt", row["prompt"], text_is="user")
            messages = self._messages(source, "completion", row["completion"], text_is="assistant")
            if isinstance(row["completion"], str):
                messages = self._without_prompt(prompt, messages, least_words=2)
            messages = _joined(source, "completion", prompt, messages)
        else:
            expected = "'messages', or 'prompt' and 'completion'"
            raise _wrong_keys(source, row, ("messages", "prompt", "completion"), expected)
        _check_complete(source, row)
        keys = ("messages", "prompt", "completion", "chosen", "rejected", "system")
        learned = is_learned(source, row, self.unread, keys)
        messages = _with_system(source, row, messages)
        if not any(message.role == "assistant" for message in messages):
            raise ValueError(
                f"{source} has no assistant message to learn. It has {', '.join(message.role for message in messages)}"
            )
        if learned and any(message.learned for message in messages):
            return messages
        self.counts["marked as not to be learned"] += 1
        return []

    def sides(self, source: str, row: Mapping[str, Any]) -> tuple[list[RowMessage], list[RowMessage]] | None:
        """Return the chosen and the rejected conversation of a row, or None if the row is not to be learned.

        Answers that both begin with are not learned. Raises ValueError as `conversation`, or if a side has no answer.
        """
        names = ("chosen", "rejected")
        if any(row.get(name) is None for name in names):
            raise _wrong_keys(source, row, ("prompt", *names), "'prompt', 'chosen' and 'rejected'")
        prompt = [] if row.get("prompt") is None else self._messages(source, "prompt", row["prompt"], text_is="user")
        answers = {name: self._messages(source, name, row[name], text_is="assistant") for name in names}
        texts = [name for name in names if isinstance(row[name], str)]
        if texts and not prompt:
            raise _wrong_keys(source, row, ("prompt", *names), "'prompt' next to answers that are texts")
        both = len(texts) == 2 and all(_text_after(prompt, answers[name], least_words=1) for name in texts)
        for name in texts:
            answers[name] = self._without_prompt(prompt, answers[name], least_words=1 if both else 2)
        _check_complete(source, row)
        learned = is_learned(source, row, self.unread, ("messages", "prompt", *names, "system"))
        chosen, rejected = (_with_system(source, row, _joined(source, name, prompt, answers[name])) for name in names)
        differing = (number for number, both in enumerate(zip(chosen, rejected, strict=False)) if not _is_same(*both))
        common = next(differing, min(len(chosen), len(rejected)))
        if common == len(chosen) == len(rejected):
            self.counts["pairs of equal answers"] += 1
            return None
        differing_roles = [side[common].role for side in (chosen, rejected) if common < len(side)]
        if len(differing_roles) == 2 and "assistant" not in differing_roles:
            raise ValueError(
                f"{source}: 'chosen' and 'rejected' answer different prompts. Give two answers to the same messages"
            )
        chosen, rejected = (
            [replace(message, learned=message.learned and place >= common) for place, message in enumerate(side)]
            for side in (chosen, rejected)
        )
        for name, side in zip(names, (chosen, rejected), strict=True):
            if not any(message.learned for message in side):
                raise ValueError(f"{source}: {name!r} has no assistant message of its own. There is nothing to prefer")
        if learned:
            return chosen, rejected
        self.counts["marked as not to be learned"] += 1
        return None

    def _messages(self, source: str, key: str, value: Any, *, text_is: str = "") -> list[RowMessage]:
        """The messages of a value. A text stands for one message of the role `text_is`, if that is not empty."""
        if isinstance(value, str) and text_is:
            if text_is == "assistant":
                _check_answer(f"{source}: {key!r}", value)
            return [RowMessage(text_is, value, text_is == "assistant")]
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            expected = "a text or a list of messages" if text_is else "a list of messages"
            raise ValueError(f"{source}: {key!r} is {type(value).__name__}. Expected {expected}")  # noqa: TRY004  # content of a row
        return [self._message(f"{source}, {key}[{number}]", message) for number, message in enumerate(value)]

    def _message(self, source: str, message: Any) -> RowMessage:
        if isinstance(message, Message):
            return RowMessage(message.role, message.content, message.role == "assistant")
        if not isinstance(message, Mapping):
            kind = type(message).__name__
            raise ValueError(f"{source} is {kind}. Expected {{'role', 'content'}}")  # noqa: TRY004  # content of a row
        for key in ("role", "content"):
            if key not in message:
                others = (each for each in message if _OTHER_KEYS.get(each) == key or did_you_mean(str(each), [key]))
                near = next((f" Is {other!r} meant?" for other in others), "")
                raise ValueError(f"{source} has no {key!r}. Its keys are {', '.join(map(str, message))}.{near}")
        role = "system" if message["role"] == "developer" else message["role"]
        if role not in _ROLES:
            suggested = _OTHER_NAMES.get(str(role))
            near = f" Did you mean {suggested!r}?" if suggested else did_you_mean(str(role), _ROLES)
            raise ValueError(f"{source} has the role {role!r}, known are {', '.join(_ROLES)}.{near}")
        if message.get("tool_calls"):
            raise ValueError(
                f"{source} holds 'tool_calls', which are not read. Write them into the content as text, as "
                "`forge-agents import` does"
            )
        if message.get("name") and role == "assistant":
            raise ValueError(refusal(source, "name"))
        learned = is_learned(source, message, self.unread, ("role", "content", *_THOUGHTS))
        flags = [key for key in LEARN_KEYS if message.get(key)]
        if flags and role != "assistant":
            raise ValueError(f"{source} has {flags[0]}={message[flags[0]]!r}, but only answers are learned. Remove it")
        _check_complete(source, message)
        text, name = _text(source, role, message), message.get("name")
        if name and role in ("system", "user") and name != role:
            text = f"{name}: {text}"  # as the gateway shows it
        return RowMessage(str(role), text, learned and role == "assistant")

    def _check_beside(self, source: str, row: Mapping[str, Any], messages: Sequence[RowMessage]) -> None:
        """Raise ValueError for a row whose ``prompt`` or ``completion`` is not part of its ``messages``."""
        spoken = {message.key for message in messages}
        for key, role in (("prompt", "user"), ("completion", "assistant")):
            if row.get(key) is None:
                continue
            if not {message.key for message in self._messages(source, key, row[key], text_is=role)} <= spoken:
                raise ValueError(f"{source} has both 'messages' and {key!r}, and they differ. Keep one of them")

    def _without_prompt(
        self, prompt: Sequence[RowMessage], answer: list[RowMessage], *, least_words: int
    ) -> list[RowMessage]:
        """A text answer without the prompt's text, if it repeats that and the prompt has at least `least_words`."""
        rest = _text_after(prompt, answer, least_words=least_words)
        if rest:
            self.counts["answers without the prompt that they repeated"] += 1
            return [replace(answer[0], text=rest)]
        if _text_after(prompt, answer, least_words=1):
            self.counts["answers that begin with a prompt of one word"] += 1
        return answer


def _text_after(prompt: Sequence[RowMessage], answer: Sequence[RowMessage], *, least_words: int) -> str:
    if not prompt or prompt[-1].role != "user":
        return ""
    return text_after(prompt[-1].text, answer[0].text, least_words=least_words)


def _check_complete(source: str, thing: Mapping[str, Any]) -> None:
    if is_cut(thing):
        keys = ("finish_reason", "stop_reason", "truncated", "is_truncated")
        marks = ", ".join(f"{key}={thing[key]!r:.80}" for key in keys if thing.get(key))
        raise ValueError(f"{source} has {marks}: an answer that is not complete. Remove its row")


def _is_same(message: RowMessage, other: RowMessage) -> bool:
    """Whether two messages are equal. Prompts may differ in blanks."""
    if message.role == "assistant":
        return (message.role, message.text) == (other.role, other.text)
    return message.key == other.key


def _text(source: str, role: str, message: Mapping[str, Any]) -> str:
    """The text of a message, its thought in tags before it."""
    content, thought = message["content"], next((message[key] for key in _THOUGHTS if message.get(key)), "")
    if thought and not (role == "assistant" and isinstance(thought, str)):
        kind = type(thought).__name__
        raise ValueError(f"{source} has a thought, a {kind}, in the role {role!r}. Expected an assistant's text")
    content = text_of(content, source) if isinstance(content, list) else content
    if not isinstance(content, str) or (role == "assistant" and not content.strip()):
        what = "empty" if isinstance(content, str) else f"of type {type(content).__name__}"
        raise ValueError(f"{source} has a content that is {what}. Expected text")
    if role != "assistant":
        return content
    try:
        text = join_recorded(thought, content)
    except ValueError as cause:
        raise ValueError(f"{source}: {cause}") from None
    _check_answer(source, text)
    return text


def _check_answer(source: str, text: str) -> None:
    if not split_reasoning(text)[1].strip():
        problem = "has reasoning without an answer" if text.strip() else "is empty"
        raise ValueError(f"{source} {problem}, so the policy would learn to say nothing. Remove the row")


def _joined(source: str, name: str, prompt: list[RowMessage], answer: list[RowMessage]) -> list[RowMessage]:
    """Return `prompt`, which is context only, and `answer`, with messages that the answer repeats only once."""
    context = [replace(message, learned=False) for message in prompt]
    prompt_keys, answer_keys = [message.key for message in prompt], [message.key for message in answer]
    begin, end = overlap(prompt_keys, answer_keys, _num_instructions(answer_keys))
    if begin == end and prompt:
        question = prompt_keys[_num_instructions(prompt_keys) :]
        repeated = answer_keys[_num_instructions(answer_keys) :]
        same_start = len(prompt_keys) > 1 and answer_keys[:1] == prompt_keys[:1]
        if (question and repeated[: len(question)] == question) or same_start:
            raise ValueError(
                f"{source}: {name!r} begins as 'prompt' does and differs from it. Leave 'prompt' out, or let it hold "
                "all messages before the answer"
            )
    return [*answer[:begin], *context, *answer[end:]]


def _num_instructions(keys: Sequence[tuple[str, str]]) -> int:
    return next((place for place, (role, _) in enumerate(keys) if role != "system"), len(keys))


def _with_system(source: str, row: Mapping[str, Any], messages: list[RowMessage]) -> list[RowMessage]:
    """`messages` after the system prompt that the row has next to them."""
    if not row.get("system"):
        return messages
    if not isinstance(row["system"], str):
        raise ValueError(f"{source}: 'system' is {type(row['system']).__name__}. Expected a text")  # noqa: TRY004  # content of a row
    system = RowMessage("system", row["system"], learned=False)
    if messages and messages[0].role == "system":
        if messages[0].key != system.key:
            raise ValueError(f"{source} has 'system' and a system message, and they differ. Keep one of them")
        return messages
    return [system, *messages]


def _wrong_keys(source: str, row: Mapping[str, Any], keys: Sequence[str], expected: str) -> ValueError:
    suggested: dict[str, str] = {}
    for key, name in _OTHER_KEYS.items():
        if key in row and name in keys and row.get(name) is None:
            suggested.setdefault(name, key)  # the first: an answer next to a response is the expected one
    near = f" Rename {', '.join(f'{key!r} to {name!r}' for name, key in suggested.items())}." if suggested else ""
    near = near or next((hint for key in row if key not in keys and (hint := did_you_mean(str(key), keys))), "")
    listed = ", ".join(f"{key} (None)" if value is None else str(key) for key, value in row.items())
    return ValueError(f"{source} has the keys {listed}. Expected {expected}.{near}")
