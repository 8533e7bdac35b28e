"""Prompts that an answer repeats, as recorded rows often do: the prompt must be read once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def text_after(prompt: str, answer: str, *, least_words: int = 2) -> str:
    """The text of `answer` after `prompt`, regardless of how blanks are written; empty if it does not repeat it.

    Args:
        prompt: A question.
        answer: A text that may begin with the question.
        least_words: Words that the prompt must have. A shorter prompt may begin an answer by chance ("Hi", "Hi there").
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
    """The messages of `answer`, from one place to another, that repeat `prompt` or the end of it; equal if none do.

    Args:
        prompt: A key for each message of the prompt.
        answer: The same of the answer.
        instructions: System messages at the beginning of the answer. The whole prompt may follow them.
    """
    for begin in range(instructions + 1):
        if prompt and answer[begin : begin + len(prompt)] == prompt:
            return begin, begin + len(prompt)
    sizes = range(min(len(prompt), len(answer)), 0, -1)
    return 0, next((size for size in sizes if prompt[-size:] == answer[:size]), 0)
