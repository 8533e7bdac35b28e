"""Detects answers that repeat their prompt, as in many recorded rows, so that the prompt is read only once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def text_after(prompt: str, answer: str, *, least_words: int = 2) -> str:
    """Return the text of `answer` after `prompt`, ignoring differences in whitespace. Empty if it is not repeated.

    An answer may begin with a prompt of fewer than `least_words` words by chance ("Hi").
    """
    words = prompt.split()
    parts = answer.split(None, len(words) - 1)
    if len(words) < max(1, least_words) or parts[:-1] != words[:-1] or len(parts) != len(words):
        return ""
    if not parts[-1].startswith(words[-1]):
        return ""
    rest = parts[-1].removeprefix(words[-1])
    apart = rest[:1].isspace() or (len(words) > 1 and not words[-1][-1].isalnum())
    return rest.strip() if apart else ""


def overlap(prompt: Sequence[Hashable], answer: Sequence[Hashable], instructions: int) -> tuple[int, int]:
    """Return the range of messages in `answer` that repeat `prompt` or the end of it. Empty if none do.

    The whole prompt may follow the system messages of the answer, whose number is `instructions`.
    """
    for begin in range(instructions + 1):
        if prompt and answer[begin : begin + len(prompt)] == prompt:
            return begin, begin + len(prompt)
    sizes = range(min(len(prompt), len(answer)), 0, -1)
    return 0, next((size for size in sizes if prompt[-size:] == answer[:size]), 0)
