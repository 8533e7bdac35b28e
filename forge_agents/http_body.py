"""Bodies of HTTP responses with a maximum size, because a server may send data without end, also compressed.

Their texts are UTF-8, as JSON and event streams are by their standards, whatever encoding a server names: some of
Python's encodings, such as punycode, take quadratic time.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from http.cookiejar import Cookie, CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.request import Request

ENCODINGS = "gzip"
"""Value of the header ``accept-encoding``: the compression that `read_bounded` reads."""
MAX_BODY_BYTES = 32 << 20
"""Maximum size of a body, before and after decompression."""
MAX_BRACKETS = 500_000
"""Maximum number of opening brackets in a JSON text. Each may become an object of 72 bytes. 10,000 tokens with 20
alternatives each have 420,000."""
MAX_COMMAS = 2_000_000
"""Maximum number of commas in a JSON text, which is at least the number of its further values. Each may take 60 bytes.
Those 10,000 tokens have 1.3 million if each is a word of 4 bytes."""
MAX_MODEL_BRACKETS, MAX_MODEL_COMMAS = 1_000_000, 4_000_000
"""The same for files of models: the tokenizer of Gemma 3 has 515,000 pairs."""
_MAX_EQUAL_HASHES = 300
"""Maximum number of different whole numbers with one hash in a JSON text. Python's hash of an integer is its remainder
by 2^61 - 1, so that a set of many multiples of it takes hours. All powers of 2 that JSON may hold have 61 hashes."""
_LONG, _LONG_AS_ZEROS = re.compile(rb"(?<![0-9.])[0-9]{21,4300}"), b"0" * 21
_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
"""Matches a text in JSON, also without its end: a search that fails would begin again at each quotation mark."""
_GZIP_OR_ZLIB = 47
_MAX_COOKIES = 20


class BodyError(ValueError):
    """A body is too large, or compressed in an unknown way."""


async def read_bounded(response: Any, max_bytes: int = MAX_BODY_BYTES) -> None:
    """Read the body of a streaming response of httpx, as its ``aread`` does.

    Raises:
        BodyError: The body has more than `max_bytes`, `MAX_BRACKETS` or `MAX_COMMAS`, or its compression is not one of
            `ENCODINGS`.
    """
    parts, size = [], 0
    async for part in response.aiter_raw():
        size += len(part)
        _check(size, max_bytes)
        parts.append(part)
    body = b"".join(parts)
    encoding = response.headers.get("content-encoding", "identity").lower()
    if encoding in ("gzip", "deflate"):
        try:
            body = zlib.decompressobj(_GZIP_OR_ZLIB).decompress(body, max_bytes + 1)
        except zlib.error as cause:
            raise BodyError(f"the response is not valid {encoding} ({cause})") from None
        _check(len(body), max_bytes)
    elif encoding != "identity":
        raise BodyError("the response has another compression than gzip")
    if too_many := too_many_values(body):
        raise BodyError(f"the response has {too_many}")
    response._content = body  # as `aread` sets it
    read_as_utf8(response)


def too_many_values(body: bytes, max_brackets: int = MAX_BRACKETS, max_commas: int = MAX_COMMAS) -> str:
    """Return which limit the values of a JSON text exceed, as "600000 brackets, more than 500000", or an empty text.

    Values are counted before they are parsed, because they take many times the memory of their text.
    """

    def excess(text: bytes) -> str:
        brackets, commas = text.count(b"[") + text.count(b"{"), text.count(b",")
        counts = (
            (brackets, max_brackets, "brackets"),
            (commas, max_commas, "commas"),
            (_num_equal_hashes(text), _MAX_EQUAL_HASHES, "whole numbers of more than 20 digits with one hash"),
        )
        return next((f"{count} {name}, more than {limit}" for count, limit, name in counts if count > limit), "")

    return excess(body) and excess(_TEXT.sub(b"", body))  # a text may have any number of brackets


def _num_equal_hashes(text: bytes) -> int:
    """Return the largest number of different whole numbers of over 20 digits with one hash, or 0 if there are few."""
    if text.translate(_AS_ZEROS).count(_LONG_AS_ZEROS) <= _MAX_EQUAL_HASHES:
        return 0
    hashes = Counter(hash(int(digits)) for digits in set(_LONG.findall(text)))
    return max(hashes.values(), default=0)


class _FewCookies(DefaultCookiePolicy):
    def __init__(self, jar: CookieJar) -> None:
        super().__init__()
        self._jar = jar

    def set_ok(self, cookie: Cookie, request: Request) -> bool:
        """Whether a cookie of a response is kept."""
        return len(self._jar) < _MAX_COOKIES and super().set_ok(cookie, request)


def limit_cookies(client: Any) -> None:
    """Make a client of httpx keep few cookies. It sends and searches all of them at each request."""
    client.cookies.jar.set_policy(_FewCookies(client.cookies.jar))


def bounded_json(text: bytes | str, max_brackets: int = MAX_BRACKETS, max_commas: int = MAX_COMMAS) -> Any:
    """Parse a JSON text, which may be a stranger's. Raises ValueError if it is none, or has too many values."""
    body = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if too_many := too_many_values(body, max_brackets, max_commas):
        raise ValueError(f"it has {too_many}")
    return json.loads(text)


def read_as_utf8(response: Any) -> None:
    """Make a response of httpx decode its texts as UTF-8. Invalid bytes are replaced."""
    response.encoding = "utf-8"


def _check(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise BodyError(f"the response has more than {max_bytes >> 20} MiB")
