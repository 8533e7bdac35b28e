"""Reads users' JSON files: JSONL, or JSON values of several lines each, in UTF-8, UTF-16 or UTF-32.

All readers of users' data use this module, so that they accept the same files.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import re
from collections.abc import Generator, Iterator
from typing import IO, Any, cast

from forge_agents.files import check_dense, user_path
from forge_agents.http_body import MAX_BRACKETS, MAX_COMMAS, bounded_json, too_many_values

_SOLID = re.compile(r"\S")
_MARKED = "forge_agents.marked"
"""Name of the handler that replaces invalid bytes by a surrogate. `surrogatepass` raises for half a character."""
codecs.register_error(_MARKED, lambda error: ("\udcff", cast("UnicodeDecodeError", error).end))
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class UnreadableJsonError(ValueError):
    """A line of a file is not JSON. The message gives the reason without the name of the file."""


def number(value: Any) -> float | None:
    """Return `value` as a finite float, or None if it is missing, NaN or infinite."""
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:  # an int of 400 digits
        return None


def json_objects(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each JSON object of a file with its place, ``file:line``, lines counted from 1.

    A byte order mark, Windows line ends and blank lines are accepted.

    Raises:
        ValueError: A line is not JSON or not an object. The message names the file and the line.
    """
    for line, value in json_values(path):
        if isinstance(value, UnreadableJsonError):
            raise ValueError(f"{path}:{line} is not JSON ({value}). Write one object per line")  # noqa: TRY004  # content of a file
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{line} is a JSON {type(value).__name__}. Write one object per line")  # noqa: TRY004  # content of a file
        yield f"{path}:{line}", value


def json_values(path: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """Yield each JSON value of a file with its line, counted from 1. Bad values are yielded as `UnreadableJsonError`.

    Memory grows with the longest line, or with the whole file if values span several lines.

    Raises:
        ValueError: The file is sparse.
    """
    check_dense(user_path(path))
    with _opened(path) as file:
        first = next((line for line in file if line.strip()), "")
    done: int | None = 0
    try:
        if not too_many_values(first.encode(errors="surrogatepass")):
            json.loads(first)
    except (ValueError, RecursionError):
        done = yield from _spread_values(path)
    if done is None:
        return
    with _opened(path) as file:
        yield from ((number, _parsed(line)) for number, line in enumerate(file, 1) if number > done and line.strip())


def _opened(path: str | os.PathLike[str]) -> IO[str]:
    """Open the file as text. Invalid bytes, also those of half a character, become surrogates for `_checked`."""
    with user_path(path).open("rb") as file:
        encoding = json.detect_encoding(file.read(4))
    if encoding.startswith("utf-8"):
        return user_path(path).open(encoding="utf-8-sig", errors="surrogateescape")
    return user_path(path).open(encoding=encoding, errors=_MARKED)


def _parsed(text: str) -> Any:
    try:
        return _checked(bounded_json(text), text)
    except (ValueError, RecursionError) as cause:
        return UnreadableJsonError(_reason(cause, text))


def _checked(value: Any, text: str) -> Any:
    """Return `value`, read from `text`, or an error if a string in it contains a lone surrogate."""
    suspect = _ESCAPED_SURROGATE.search(text) or not _is_unicode(text)
    if suspect and not _is_unicode(json.dumps(value, ensure_ascii=False)):
        return UnreadableJsonError("it holds bytes or escapes that are not Unicode text. Save the file as UTF-8")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reason(cause: BaseException, text: str) -> str:
    return str(cause) if _is_unicode(text) else f"{cause}. The file is not UTF-8"


def _spread_values(path: str | os.PathLike[str]) -> Generator[tuple[int, Any], None, int | None]:
    """Yield the values of a file whose values span several lines.

    Returns:
        The last line that was read (0 if none) if nothing after the first line could be read, otherwise None.
    """
    with _opened(path) as file:
        text = file.read()
    if too_many := too_many_values(text.encode(errors="surrogatepass"), 10 * MAX_BRACKETS, 10 * MAX_COMMAS):
        yield 1, UnreadableJsonError(f"it has {too_many}. Write one value per line")
        return None
    end, line, first = 0, 1, 0
    while match := _SOLID.search(text, end):
        start = match.start()
        line += text.count("\n", end, start)
        first = first or line
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError) as cause:
            reason = _reason(cause, text[start : start + 1000])
            if line > first:
                yield line, UnreadableJsonError(f"{reason}. The rest of the file is not read")
                return None
            if end:
                yield line, UnreadableJsonError(f"only the first value of the line is read: {reason}")
            return line if end else 0
        yield line, _checked(value, text[start:end])
        line += text.count("\n", start, end)
    return None
