"""Conversations as token streams with the answers marked.

In: rows with messages, a renderer. Out: `Demonstration`s. Waits for nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_agents.errors import did_you_mean
from forge_agents.rollout.rendering import Renderer
from forge_agents.types import Message

if TYPE_CHECKING:
    from forge_trainers.batch.packing import Sample

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demonstration:
    """One token stream to imitate."""

    ids: np.ndarray
    """int32 ``[L]``."""
    mask: np.ndarray
    """bool ``[L]``, True at the tokens of answers, their end-of-turn tokens included."""
    source: str
    """Where it comes from, as errors say it."""

    @property
    def content(self) -> bytes:
        """32 bytes, equal for equal streams."""
        return hashlib.sha256(self.ids.tobytes() + self.mask.tobytes()).digest()

    def sample(self) -> Sample:
        """What the learner takes, every token of an answer with weight 1."""
        from forge_trainers.batch.packing import Sample

        n = len(self.ids)
        return Sample(
            token_ids=self.ids,
            loss_mask=self.mask,
            logprobs=np.zeros(n),
            advantage=1.0,
            versions=np.full(n, -1),
            group=0,  # conversations of a batch that begin alike share the computation of that
        )


def from_row(source: str, row: Mapping[str, Any], renderer: Renderer) -> Demonstration:
    """The conversation of a row with ``messages``, or with ``prompt`` and ``completion``.

    Args:
        source: What errors call the row.

    Raises:
        ValueError: The row is malformed, has no answer, or the template refuses it.
    """
    if row.get("messages") is not None:
        messages, learned_from = messages_of(source, "messages", row["messages"]), 0
    elif row.get("prompt") is not None and row.get("completion") is not None:
        prompt = messages_of(source, "prompt", row["prompt"], text_is="user")
        messages = prompt + messages_of(source, "completion", row["completion"], text_is="assistant")
        learned_from = sum(role == "assistant" for role, _ in prompt)
    else:
        raise wrong_keys(source, row, ("messages", "prompt", "completion"), "'messages', or 'prompt' and 'completion'")
    if sum(role == "assistant" for role, _ in messages) <= learned_from:
        raise ValueError(f"{source} has no assistant message to learn; it has {', '.join(r for r, _ in messages)}")
    return rendered(source, messages, renderer, learned_from)


def wrong_keys(source: str, row: Mapping[str, Any], known: Sequence[str], expected: str) -> ValueError:
    """The error of a row without the keys that are read."""
    near = next((hint for key in row if key not in known and (hint := did_you_mean(str(key), known))), "")
    return ValueError(f"{source} has the keys {', '.join(map(str, row))}; expected {expected}.{near}")


def rendered(
    source: str, messages: Sequence[tuple[str, str]], renderer: Renderer, learned_from: int = 0
) -> Demonstration:
    """`messages` with all answers marked but the first `learned_from`."""
    try:
        said = renderer.dialogue(messages)
    except ValueError as cause:
        raise ValueError(f"{source}: {cause}") from cause
    ids = [token for heard, answer in said for token in (*heard, *answer)]
    mask = [
        learn
        for number, (heard, answer) in enumerate(said)
        for learn in (*[False] * len(heard), *[number >= learned_from] * len(answer))
    ]
    return stream(source, ids, mask)


def stream(source: str, ids: Sequence[int] | np.ndarray, mask: Sequence[bool] | np.ndarray) -> Demonstration:
    """A demonstration of one entry per token."""
    return Demonstration(ids=np.array(ids, np.int32), mask=np.array(mask, np.bool_), source=source)


def messages_of(source: str, key: str, value: Any, *, text_is: str = "") -> list[tuple[str, str]]:
    """Role and text of each message; a text stands for one message where `text_is` says of whom."""
    if isinstance(value, str) and text_is:
        return [(text_is, value)]
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        wanted = "a text or a list of messages" if text_is else "a list of messages"
        raise ValueError(f"{source}: {key!r} is {type(value).__name__}; expected {wanted}")  # noqa: TRY004  # content of a row
    return [_message(f"{source}, {key}[{number}]", message) for number, message in enumerate(value)]


def _message(source: str, message: Any) -> tuple[str, str]:
    if isinstance(message, Message):
        return message.role, message.content
    if not isinstance(message, Mapping):
        found = type(message).__name__
        raise ValueError(f"{source} is {found}; expected {{'role', 'content'}}")  # noqa: TRY004  # content of a row
    for key in ("role", "content"):
        if key not in message:
            near = next((f" Is {other!r} meant?" for other in message if did_you_mean(str(other), [key])), "")
            raise ValueError(f"{source} has no {key!r}; its keys are {', '.join(map(str, message))}.{near}")
    role, content = message["role"], message["content"]
    if role not in _ROLES:
        raise ValueError(f"{source} has the role {role!r}, known are {', '.join(_ROLES)}.{_near_role(role)}")
    if message.get("tool_calls"):
        raise ValueError(f"{source} holds 'tool_calls', which are not read; write calls into the content as text")
    if not isinstance(content, str) or (role == "assistant" and not content.strip()):
        what = "empty" if isinstance(content, str) else f"of type {type(content).__name__}"
        raise ValueError(f"{source} has a content that is {what}; expected text")
    return str(role), content


def _near_role(role: Any) -> str:
    other_names = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
    meant = other_names.get(str(role))
    return f" Did you mean {meant!r}?" if meant else did_you_mean(str(role), _ROLES)
