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
_CLOSING = (
    *(f"\n{close}\n\n".replace("\\", "") for _, close in _PREFILLED),
    "<channel|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)
"""What closes a thought of each family that was cut off, up to where its answer begins."""
_OPEN = "|".join(opening for opening, _ in _PREFILLED)
_CLOSE = re.compile("|".join(close for _, close in _PREFILLED))
_FINAL = re.compile(r"\s*<\|channel\|>final<\|message\|>")
"""What stands before an answer of gpt-oss."""


def split_reasoning(text: str, *, opened: bool | None = False) -> tuple[str, str]:
    """The thought and the answer of what somebody said.

    A thought stands at the beginning, in the tags of a family of models; several may follow each other. One that is
    never closed is all there is, and the answer is empty. From the first word of the answer on, tags are words like
    any other: an answer may speak of them.

    Args:
        opened: Whether the prompt had opened a thought already, so that one is being thought until it is closed. None
            where nobody knows the prompt: then a closing tag without an opening one before it says so.

    Returns:
        Thought and answer, without tags and surrounding blanks; or no thought, and `text` as it is.
    """
    thoughts, at, _ = _thoughts(text, opened)
    final = _FINAL.match(text, at)
    if not thoughts and final is None:
        return "", text
    said = text[final.end() if final else at :]
    return "\n\n".join(filter(None, map(str.strip, thoughts))), said.strip()


def split_response(text: str, *, opening: str | None = "") -> tuple[str, str, str]:
    """The thought, the reasoning text and the answer of a response.

    Args:
        text: The response.
        opening: The tag with which the prompt has opened the reasoning, empty where it has not; None where the prompt
            is not known.

    Returns:
        Thought and answer as `split_reasoning` has them, and between them the start of the response up to the answer,
        exactly as it was written. A tag that the prompt has opened is part of it. It is empty where no tags were
        written.
    """
    opened = None if opening is None else bool(opening)
    thought, answer = split_reasoning(text, opened=opened)
    thoughts, at, _ = _thoughts(text, opened)
    final = _FINAL.match(text, at)
    if not thoughts and final is None:
        return "", "", answer
    rest = text[final.end() if final else at :].lstrip()
    written = text[: len(text) - len(rest)].lstrip()
    if thoughts and _OPENS.match(written) is None:
        written = (opening or _opening_of(written)) + written
    return thought, written, answer


def _opening_of(text: str) -> str:
    """The opening tag that belongs to the first closing tag in `text`."""
    found = ((close.search(text), tags[0]) for close, tags in zip(_CLOSES, _PREFILLED, strict=False))
    at = [(match.start(), opening) for match, opening in found if match is not None]
    return min(at)[1].replace("\\", "") if at else "<think>"


def in_think_tags(text: str) -> str:
    """A response whose reasoning at the beginning stands in ``<think>``, whatever tags its model writes.

    Reasoning that is never closed stays unclosed, and several sections stay several.
    """
    thoughts, at, unclosed = _thoughts(text, False)
    final = _FINAL.match(text, at)
    sections = [f"<think>{thought}</think>" for thought in thoughts]
    if unclosed is not None:
        sections[-1] = sections[-1].removesuffix("</think>")
    return "".join(sections) + text[final.end() if final else at :]


def answer_at(text: str, *, opened: bool = False) -> int:
    """Where in `text`, which is as in `split_reasoning`, the answer begins: its end where a thought is not closed."""
    return _thoughts(text, opened)[1]


def closing(text: str) -> str:
    """What a model would write to end the thought that `text`, opening tag and all, is in; empty if it is in none."""
    unclosed = _thoughts(text, False)[2]
    return "" if unclosed is None else _CLOSING[unclosed]


def _thoughts(text: str, opened: bool | None) -> tuple[list[str], int, int | None]:
    """The thoughts at the beginning of `text`, where they end, and the number of the tags of one that is not closed."""
    thoughts, at, unclosed = [], 0, None
    begun, close = _OPENS.match(text), _CLOSE.search(text)
    if opened is None:
        opened = close is not None and re.search(_OPEN, text[: close.start()]) is None
    if opened and begun is None:
        thoughts.append(text[: close.start() if close else None])
        at = close.end() if close else len(text)
        begun = _OPENS.match(text, at)
    while begun is not None:
        tags = (begun.lastindex or 1) - 1
        close = _CLOSES[tags].search(text, begun.end())
        thoughts.append(text[begun.end() : close.start() if close else None])
        at, unclosed = (close.end(), None) if close else (len(text), tags)
        begun = _OPENS.match(text, at)
    return thoughts, at, unclosed


def opens_reasoning(text: str) -> str:
    """The tag with which `text`, the end of a prompt, has opened a thought that a model goes on with; empty if none."""
    opening = re.search(rf"(?:{_OPEN})\Z", text.rstrip())
    return opening[0] if opening else ""


def is_tag(text: str) -> bool:
    """Whether `text` is a tag that opens or closes a thought, in the form in which prompts may hold it."""
    return any(re.fullmatch(tag, text) for pair in _PREFILLED for tag in pair)


def continued(prompt: str, message: str) -> str:
    """What a model writes after `prompt` to say `message`: where the prompt has opened a thought, the rest of it."""
    opening = opens_reasoning(prompt)
    if not opening:
        return message
    thought, answer = split_reasoning(message)
    return thought if closing(message) else f"{thought}{closing(opening)}{answer}"  # may break off in its thought


def whole(thought: str, answer: str, *, cut: bool = False) -> str:
    """Thought and answer in one text, in the tags that most models are trained on.

    Args:
        cut: Whether it breaks off; without an answer it does so in the thought, which is not closed then.
    """
    if cut and thought and not answer:
        return f"<think>\n{thought}"
    return f"<think>\n{thought}\n</think>\n\n{answer}" if thought else answer


def heard(env: Any, thought: str, answer: str) -> str:
    """The text that `env` gets: the answer, with the reasoning before it if `env.observes_reasoning` is true."""
    # True, and not what any attribute of somebody's game that makes up attributes would be
    return whole(thought, answer) if thought and hook(env, "observes_reasoning") is True else answer
