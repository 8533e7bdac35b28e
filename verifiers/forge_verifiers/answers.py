"""What an agent finally answered, and what it should have answered.

In: a trajectory. Out: texts; None where there is nothing to judge. Waits for nothing.
"""

from __future__ import annotations

import re

from forge_agents.types import Trajectory

MAX_CHARS = 20_000
"""Longer texts are judged by their last characters: answers come last, and no text may cost unbounded time."""

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_PHRASE = re.compile(r"(?:final answer|answer)(?: is)?[ \t]*[:=][ \t]*([^\n]+)", re.IGNORECASE)


def last_action(trajectory: Trajectory) -> str | None:
    """The agent's last answer, at most `MAX_CHARS` of it; None where it never decided."""
    if not trajectory.turns:
        return None
    return trajectory.turns[-1].action[-MAX_CHARS:]


def golds(trajectory: Trajectory, key: str) -> tuple[str, ...] | None:
    """The accepted answers in ``info[key]``, a value or a list of alternatives; None where there is none."""
    value = trajectory.info.get(key)
    if value is None:
        return None
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(str(v) for v in values) or None


def final_answer(text: str) -> str:
    r"""The answer within a text: the last ``\boxed{}``, ``<answer></answer>`` or ``Answer: ...``, else all of it."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    if "</" in text:
        tags = _TAG.findall(text)
        if tags:
            return str(tags[-1]).strip()
    if ":" in text or "=" in text:
        phrases = _PHRASE.findall(text)
        if phrases:
            return str(phrases[-1]).strip().removesuffix(".")
    return text.strip()


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for at in range(begin, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            if depth == 0:
                return text[begin:at].strip()
            depth -= 1
    return None


def folded(text: str) -> str:
    """Case, runs of white space and a closing full stop do not matter."""
    return " ".join(text.split()).casefold().removesuffix(".")
