"""Bodies of HTTP responses with a maximum size, because a server may send data without end, also compressed.

Their texts are UTF-8, as JSON and event streams are by their standards, whatever encoding a server names: some of
Python's encodings, such as punycode, take quadratic time.
"""

from __future__ import annotations

import zlib
from typing import Any

ENCODINGS = "gzip"
"""Value of the header ``accept-encoding``: the compression that `read_bounded` reads."""
MAX_BODY_BYTES = 32 << 20
"""Maximum size of a body, before and after decompression."""
MAX_BRACKETS = 500_000
"""Maximum number of opening brackets in a JSON text. Each may become an object of 72 bytes. 10,000 tokens with 20
alternatives each have 420,000."""
_GZIP_OR_ZLIB = 47


class BodyError(ValueError):
    """A body is too large, or compressed in an unknown way."""


async def read_bounded(response: Any) -> None:
    """Read the body of a streaming response of httpx, as its ``aread`` does.

    Raises:
        BodyError: The body has more than `MAX_BODY_BYTES` or `MAX_BRACKETS`, or its compression is not one of
            `ENCODINGS`.
    """
    parts, size = [], 0
    async for part in response.aiter_raw():
        size += len(part)
        _check(size)
        parts.append(part)
    body = b"".join(parts)
    encoding = response.headers.get("content-encoding", "identity").lower()
    if encoding in ("gzip", "deflate"):
        try:
            body = zlib.decompressobj(_GZIP_OR_ZLIB).decompress(body, MAX_BODY_BYTES + 1)
        except zlib.error as cause:
            raise BodyError(f"the response is not valid {encoding} ({cause})") from None
        _check(len(body))
    elif encoding != "identity":
        raise BodyError("the response has another compression than gzip")
    if (brackets := num_brackets(body)) > MAX_BRACKETS:
        raise BodyError(f"the response has {brackets} brackets, more than {MAX_BRACKETS}")
    response._content = body  # as `aread` sets it
    read_as_utf8(response)


def num_brackets(body: bytes) -> int:
    """Return the number of opening brackets of a JSON text, which is at least the number of its lists and objects."""
    return body.count(b"[") + body.count(b"{")


def read_as_utf8(response: Any) -> None:
    """Make a response of httpx decode its texts as UTF-8. Invalid bytes are replaced."""
    response.encoding = "utf-8"


def _check(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise BodyError(f"the response has more than {MAX_BODY_BYTES >> 20} MiB")
