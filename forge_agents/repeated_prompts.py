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
    if not (prompt and answer):
        return 0, 0
    for end, size in enumerate(_sizes(prompt, answer[: instructions + len(prompt)]), 1):
        if size == len(prompt):
            return end - size, end
    return 0, _sizes(answer, prompt)[-1]


def _sizes(pattern: Sequence[Hashable], items: Sequence[Hashable]) -> list[int]:
    """Return for each item how many items up to it equal the beginning of `pattern` (Knuth, Morris and Pratt).

    The time is linear, because a file of a stranger may have any number of equal messages.
    """
    sizes: list[int] = []  # first those of the pattern's own items, from its second on
    for place, item in enumerate((*pattern[1:], *items)):
        size = 0 if place in (0, len(pattern) - 1) else sizes[-1]
        while size and (size == len(pattern) or pattern[size] != item):
            size = sizes[size - 2] if size > 1 else 0
        sizes.append(size + (pattern[size] == item))
    return sizes[len(pattern) - 1 :]
