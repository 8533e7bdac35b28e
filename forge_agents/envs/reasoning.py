"""Separation of reasoning and answer in a response, so that agents never see each other's reasoning."""

from __future__ import annotations

import re

_PREFILLED = (  # opening tags that a prompt may end with, and their closing tags
    ("<think>", "</think>"),  # DeepSeek R1, Qwen3, GLM, MiniMax, Nemotron, Olmo, SmolLM3
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ("◁think▷", "◁/think▷"),  # Kimi
)
TAGS = tuple(tag for pair in _PREFILLED for tag in pair)
"""Tags of reasoning that are texts of their own."""
_PATTERNS = tuple((re.escape(opening), re.escape(close)) for opening, close in _PREFILLED)
_REMARK = r"commentary<\|message\|>(?=(?s:(?:(?!<\|end\|>).)*)<\|end\|><\|start\|>assistant)"
"""Matches the header of a text of gpt-oss that stands before a tool call or an answer."""
_TAGS = (
    *_PATTERNS,
    (r"<\|channel>thought\b", r"<channel\|>"),  # Gemma 4
    (rf"<\|channel\|>(?:analysis<\|message\|>|{_REMARK})", r"<\|end\|>(?:<\|start\|>assistant)?"),  # gpt-oss
)
_ANALYSIS, _FINAL_HEADER = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
"""Headers of reasoning and answer of gpt-oss."""
_OPENING = (
    *(f"{opening}\n" for opening, _ in _PREFILLED),
    "<|channel>thought\n",
    _ANALYSIS,
)
"""Text that opens the reasoning of each family."""
_OPENS = re.compile(r"\s*(?:" + "|".join(f"({opening})" for opening, _ in _TAGS) + ")")
_CLOSES = tuple(re.compile(close) for _, close in _TAGS)
_CLOSING = (
    *(f"\n{close}\n\n" for _, close in _PREFILLED),
    "<channel|>",
    f"<|end|><|start|>assistant{_FINAL_HEADER}",
)
"""Text that closes unfinished reasoning of each family, up to the start of the answer."""
_OPEN = "|".join(opening for opening, _ in _PATTERNS)
_CLOSE = re.compile("|".join(close for _, close in _PATTERNS))
_FINAL = re.compile(r"\s*" + re.escape(_FINAL_HEADER))


def split_reasoning(text: str, *, opened: bool | None = False) -> tuple[str, str]:
    """Split a response into reasoning and answer.

    Reasoning stands at the beginning, in the tags of a model family. Several sections may follow each other. If a
    section is never closed, the answer is empty. Tags inside the answer are plain text.

    Args:
        opened: Whether the prompt already opened a reasoning section. None if the prompt is unknown: then a closing
            tag without an earlier opening tag implies it.

    Returns:
        Reasoning and answer, without tags and surrounding whitespace. Without reasoning, "" and `text` unchanged.
    """
    sections, start, _ = _scan(text, opened)
    final = _FINAL.match(text, start)
    if not sections and final is None:
        return "", text
    answer = text[final.end() if final else start :]
    return "\n\n".join(filter(None, map(str.strip, sections))), answer.strip()


def split_response(text: str, *, opening: str | None = "") -> tuple[str, str, str]:
    """Split a response into reasoning, the raw text of the reasoning, and the answer.

    Args:
        text: The response.
        opening: Reasoning tag that the prompt ended with, empty if none, None if the prompt is unknown.

    Returns:
        Reasoning and answer as `split_reasoning` returns them. Between them the unmodified start of the response up to
        the answer, including a tag that the prompt opened. Empty if there were no tags.
    """
    opened = None if opening is None else bool(opening)
    reasoning, answer = split_reasoning(text, opened=opened)
    sections, start, _ = _scan(text, opened)
    final = _FINAL.match(text, start)
    if not sections and final is None:
        return "", "", answer
    rest = text[final.end() if final else start :].lstrip()
    raw = text[: len(text) - len(rest)].lstrip()
    if sections and _OPENS.match(raw) is None:
        raw = (opening or _matching_opening(raw)) + raw
    return reasoning, raw, answer


def _matching_opening(text: str) -> str:
    """Return the opening tag that belongs to the first closing tag in `text`."""
    matches = ((close.search(text), tags[0]) for close, tags in zip(_CLOSES, _PREFILLED, strict=False))
    starts = [(match.start(), opening) for match, opening in matches if match is not None]
    return min(starts)[1] if starts else "<think>"


def in_think_tags(text: str) -> str:
    """Rewrite the reasoning tags of any model family as ``<think>``. Unclosed reasoning stays unclosed."""
    sections, start, unclosed = _scan(text, False)
    final = _FINAL.match(text, start)
    tagged = [f"<think>{section}</think>" for section in sections]
    if unclosed is not None:
        tagged[-1] = tagged[-1].removesuffix("</think>")
    return "".join(tagged) + text[final.end() if final else start :]


def answer_start(text: str, *, opened: bool = False) -> int:
    """Return the index where the answer begins. The length of `text` if the reasoning is not closed."""
    return _scan(text, opened)[1]


def closing_text(text: str) -> str:
    """Return the text that closes the unfinished reasoning of `text`. Empty if there is none."""
    unclosed = _scan(text, False)[2]
    return "" if unclosed is None else _CLOSING[unclosed]


def _scan(text: str, opened: bool | None) -> tuple[list[str], int, int | None]:
    """Return the reasoning sections, the index of their end, and the tag index of an unclosed last section."""
    sections, end, unclosed = [], 0, None
    opening, close = _OPENS.match(text), _CLOSE.search(text)
    if opened is None:
        opened = close is not None and re.search(_OPEN, text[: close.start()]) is None
    if opened and opening is None:
        sections.append(text[: close.start() if close else None])
        end = close.end() if close else len(text)
        opening = _OPENS.match(text, end)
    while opening is not None:
        tags = (opening.lastindex or 1) - 1
        close = _CLOSES[tags].search(text, opening.end())
        sections.append(text[opening.end() : close.start() if close else None])
        end, unclosed = (close.end(), None) if close else (len(text), tags)
        opening = _OPENS.match(text, end)
    return sections, end, unclosed


def opens_reasoning(prompt: str) -> str:
    """Return the reasoning tag that a prompt ends with. Empty if none."""
    opening = re.search(rf"(?:{_OPEN})\Z", prompt.rstrip())
    return opening[0] if opening else ""


def is_tag(text: str) -> bool:
    """Whether `text` is an opening or closing reasoning tag."""
    return text in TAGS


def continuation(prompt: str, message: str, *, template: str = "") -> str:
    """Return `message` as a model would write it after `prompt`, which may already have opened the reasoning.

    Args:
        prompt: The prompt.
        message: Reasoning in the tags of any family, and the answer.
        template: Chat template of the model. Its tags and headers replace those of `message`.
    """
    reasoning, answer = split_reasoning(message)
    if opening := opens_reasoning(prompt):
        return reasoning if closing_text(message) else f"{reasoning}{closing_text(opening)}{answer}"
    opening = "" if "<think>" in template else next((tag for tag in _OPENING if tag.strip() in template), "")
    if opening and closing_text(message):
        return f"{opening}{reasoning}"
    if opening and reasoning:
        return f"{opening}{reasoning}{closing_text(opening)}{answer}"
    return f"{_FINAL_HEADER}{answer}" if opening == _ANALYSIS else message


def join_reasoning(reasoning: str, answer: str, *, cut: bool = False) -> str:
    """Join reasoning and answer in one text with ``<think>`` tags.

    Args:
        cut: Whether the response was cut off. Without an answer, the reasoning then stays unclosed.
    """
    if cut and reasoning and not answer:
        return f"<think>\n{reasoning}"
    return f"<think>\n{reasoning}\n</think>\n\n{answer}" if reasoning else answer


def join_recorded(reasoning: str, text: str) -> str:
    """Return a recorded answer with its reasoning, which `text` may already contain.

    Raises:
        ValueError: `text` begins with other reasoning.
    """
    written = split_reasoning(text)[0]
    if written and reasoning.strip() and written.split() != reasoning.split():
        raise ValueError("an answer has reasoning in its text and in a key, and they differ. Keep one of them")
    return text if written else join_reasoning(reasoning.strip(), text)
