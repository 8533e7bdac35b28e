"""Thought and answer apart: what somebody thought before answering is heard by nobody else.

In: what a player said, tags and all. Out: its thought and its answer; what an environment is given of them. Waits for
nothing.
"""

from __future__ import annotations

import re
from typing import Any

from forge_agents.envs.env import hook

_PREFILLED = (  # a prompt may end with these
    (r"<think>", r"</think>"),  # DeepSeek R1, Qwen3, GLM, MiniMax, Nemotron, Olmo, SmolLM3
    (r"<mm:think>", r"</mm:think>"),  # MiniMax M3
    (r"<seed:think>", r"</seed:think>"),  # Seed-OSS
    (r"\[THINK\]", r"\[/THINK\]"),  # Mistral
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),  # Command
    (r"◁think▷", r"◁/think▷"),  # Kimi
)
_TAGS = (
    *_PREFILLED,
    (r"<\|channel>thought\b", r"<channel\|>"),  # Gemma 4
    (r"<\|channel\|>analysis<\|message\|>", r"<\|end\|>(?:<\|start\|>assistant)?"),  # gpt-oss
)
_OPENS = re.compile(r"\s*(?:" + "|".join(f"({opening})" for opening, _ in _TAGS) + ")")
_CLOSES = tuple(re.compile(close) for _, close in _TAGS)
_OPEN = "|".join(opening for opening, _ in _PREFILLED)
_CLOSE = re.compile("|".join(close for _, close in _PREFILLED))
_FINAL = re.compile(r"\s*<\|channel\|>final<\|message\|>")
"""What stands before an answer of gpt-oss."""


def split_thought(text: str, *, opened: bool | None = False) -> tuple[str, str]:
    """The thought and the answer of what somebody said.

    A thought stands at the beginning, in the tags of a family of models; several may follow each other. One that is
    never closed is all there is, and the answer is empty. From the first word of the answer on, tags are words like
    any other: an answer may speak of them.

    Args:
        text: What was said.
        opened: Whether the prompt had opened a thought already, so that one is being thought until it is closed. None
            where nobody knows the prompt: then a closing tag without an opening one before it says so.

    Returns:
        Thought and answer, without tags and surrounding blanks; or no thought, and `text` as it is.
    """
    thoughts, at = [], 0
    begun, close = _OPENS.match(text), _CLOSE.search(text)
    if opened is None:
        opened = close is not None and re.search(_OPEN, text[: close.start()]) is None
    if opened and begun is None:
        thoughts.append(text[: close.start() if close else None])
        at = close.end() if close else len(text)
        begun = _OPENS.match(text, at)
    while begun is not None:
        close = _CLOSES[(begun.lastindex or 1) - 1].search(text, begun.end())
        thoughts.append(text[begun.end() : close.start() if close else None])
        at = close.end() if close else len(text)
        begun = _OPENS.match(text, at)
    final = _FINAL.match(text, at)
    if not thoughts and final is None:
        return "", text
    said = text[final.end() if final else at :]
    return "\n\n".join(filter(None, map(str.strip, thoughts))), said.strip()


def opens_thought(text: str) -> bool:
    """Whether `text`, the end of a prompt, has opened a thought that a model goes on with."""
    return _closing(text) is not None


def continued(prompt: str, message: str) -> str:
    """What a model writes after `prompt` to say `message`: where the prompt has opened a thought, the rest of it."""
    closing = _closing(prompt)
    if closing is None:
        return message
    thought, answer = split_thought(message)
    return f"{thought}\n{closing}\n\n{answer}"


def _closing(prompt: str) -> str | None:
    """The tag that closes the thought in which `prompt` ends; None where it ends in none."""
    closings = (close for opening, close in _PREFILLED if re.search(rf"{opening}\Z", prompt.rstrip()))
    return next((close.replace("\\", "") for close in closings), None)


def whole(thought: str, answer: str) -> str:
    """Thought and answer in one text, in the tags that most models are trained on."""
    return f"<think>\n{thought}\n</think>\n\n{answer}" if thought else answer


def heard(env: Any, thought: str, answer: str) -> str:
    """What `env` is given of what somebody said: the answer; the thought as well where `env.hears_thoughts` is true."""
    # True, and not what any attribute of somebody's game that makes up attributes would be
    return whole(thought, answer) if thought and hook(env, "hears_thoughts") is True else answer
