"""Code blocks of a Markdown text, as CommonMark (version 0.31) defines them."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

_OPENING_AFTER_TEXT = re.compile(
    r"^(?!(?:[-*+>]|\d+[.)]|[ \t])*[`~]{3})((?:[^`\n]|`(?!``))*\S[ \t]*)(?=```[ \t]*\w*[ \t]*$)", re.MULTILINE
)
_CLOSING_BEFORE_TAG = re.compile(r"^([ \t]*(?:`{3,}|~{3,}))[ \t]*(?=</|<\|)", re.MULTILINE)
_CODE_SPAN = re.compile(r"\s*(`{1,3})(?:(json|python|py)\b)?([^`]+)\1\s*", re.IGNORECASE)
_DEEP_FENCE = re.compile(r"^(?=(?: {4}|\t)[ \t]*(?:`{3}|~{3}))", re.MULTILINE)
"""A fence at an indentation at which CommonMark would continue the paragraph above it."""
_WORD = re.compile(r"[\w+#-]+")


class CodeBlock(NamedTuple):
    """A code block."""

    language: str
    """First word after the opening fence, in lower case, or empty if there is none."""
    text: str
    """The lines of the block, with ``\\n`` line endings and without the indentation of the fence."""


def answer_section(text: str) -> str:
    """The content of the ``<answer>`` section that ends a text. Without such a section the whole text.

    Tags in code blocks are ignored.
    """
    text = text.removeprefix("\ufeff")
    before, tag, section = text.partition("<answer>")
    if not tag or not text.rstrip().endswith("</answer>") or "```" in before or "~~~" in before:
        return text
    return section.rstrip().removesuffix("</answer>").strip()


def code_blocks(text: str) -> list[CodeBlock]:
    """All fenced code blocks of a text, in order.

    Fences of backticks or tildes count at any indentation, in lists and in quotes. A block without a closing fence ends
    with the text. In addition to CommonMark, an opening fence may follow other text on its line
    (``<answer>```python``), a tag may follow a closing fence (```` ```</answer> ````), code may follow the language on
    the line of the opening fence, and a text that is a code span as a whole is a block.
    """
    if (span := _CODE_SPAN.fullmatch(text)) and "\n" not in span[3].strip(" \t"):
        return [CodeBlock((span[2] or "").lower(), span[3].strip())]
    if "```" not in text and "~~~" not in text:
        return []
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CLOSING_BEFORE_TAG.sub(r"\1\n", _OPENING_AFTER_TEXT.sub(r"\1\n", text))
    if deep := len(_DEEP_FENCE.findall(text)):  # pairs within a block are part of the code, for example of a docstring
        blocks = _fences(_parser(fenced=True, indented=True), text)
        inner = [len(_DEEP_FENCE.findall(block.text)) for block in blocks]
        if sum(inner) == deep and not any(number % 2 for number in inner):
            return blocks
    return _fences(_parser(fenced=True), _DEEP_FENCE.sub("\n", text))


def _fences(parser: MarkdownIt, text: str) -> list[CodeBlock]:
    return [_block(token.info, token.content) for token in parser.parse(text) if token.type == "fence"]


def _block(info: str, content: str) -> CodeBlock:
    """A block with the code that follows the language on the line of the opening fence, if the block is empty."""
    return CodeBlock(_language(info), content if content.strip() else info.strip().partition(" ")[2])


def indented_blocks(text: str) -> list[CodeBlock]:
    """All code blocks that are indented by four spaces instead of fenced, in order."""
    tokens = _parser(fenced=False).parse(text)
    return [CodeBlock("", token.content) for token in tokens if token.type == "code_block"]


def _language(info: str) -> str:
    word = _WORD.search(info)
    return word[0].lower() if word else ""


def _ends_quote(state: object, start_line: int, end_line: int, silent: bool) -> bool:
    """A rule of markdown-it that forms no block, and in a silent call ends the quote before the line."""
    return silent


@cache
def _parser(*, fenced: bool, indented: bool = False) -> MarkdownIt:
    """A parser of fenced or indented blocks, or both, whose time grows linearly with hostile texts.

    If it reads both, a line indented by four spaces closes no fence. A quote ends with its last line that begins with
    ">": with lines that may continue its paragraph, each of many quotes would be searched up to the end of the text.
    """
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").disable(["html_block", "reference", "heading", "lheading", "hr"])
    parser.core.ruler.enableOnly(["normalize", "block"])
    parser.block.ruler.push("end of quotes", _ends_quote, {"alt": ["blockquote"]})
    return parser if indented else parser.disable("code" if fenced else "fence")
