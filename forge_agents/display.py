"""Safe display of untrusted text: standalone HTML reports without scripts, and text that cannot control a terminal."""

from __future__ import annotations

import math
import unicodedata

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.25rem 4rem; background: #fff; color: #1f2933;
  font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; overflow-wrap: anywhere; }
h2 { margin: 2.6rem 0 .4rem; padding-top: 1rem; border-top: 1px solid #e4e7eb; font-size: 1.2rem; }
p.lead { margin: .2rem 0 1.4rem; color: #52606d; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th { padding: .45rem .55rem; border-bottom: 2px solid #cbd2d9; color: #52606d; font-weight: 600; text-align: right;
  vertical-align: bottom; }
td { padding: .45rem .55rem; border-bottom: 1px solid #e4e7eb; text-align: right; white-space: nowrap; }
th.text, td.text { text-align: left; }
figcaption, p.note { max-width: 52rem; margin-top: .5rem; font-size: .86rem; color: #52606d; }
li { overflow-wrap: anywhere; }
section.alarm { margin-top: 1rem; padding: .6rem .9rem; border-left: 4px solid #c2410c; background: #fff4ed; }
"""
_MAX_ERROR_CHARS = 4000
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
PAGE_MARK = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
"""Part of each page."""


def decimals(value: float, digits: int = 3) -> str:
    """Format a number. NaN is a dash."""
    return "\N{EN DASH}" if math.isnan(value) else f"{value:.{digits}f}"


def standalone_page(title: str, body: str, *, style: str = "") -> str:
    """Return an HTML document with a content security policy that forbids scripts and requests.

    Args:
        body: Markup in which all text of users, models and servers is escaped.
        style: Additional CSS.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'{PAGE_MARK}<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}{style}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def printable(text: str, longest: int = 400) -> str:
    """Return a text as one line, with control and direction characters replaced and a long middle left out."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))
    half = longest // 2 - 1
    return text if len(text) <= longest else f"{text[:half]} \N{HORIZONTAL ELLIPSIS} {text[-half:]}"


def visible(text: str) -> str:
    r"""Escape the characters of `text` that could control a terminal or be invisible there.

    Control, format (bidirectional overrides, zero-width), surrogate and private characters and unusual line ends
    become escapes such as ``\x1b``. Newlines and tabs stay.
    """
    return "".join(map(_escape, text.replace("\r\n", "\n")))


def visible_error(message: str) -> str:
    """Return `visible` of an error message, which may quote a long text, without the middle of a long message."""
    half = _MAX_ERROR_CHARS // 2
    return visible(message if len(message) <= 2 * half else f"{message[:half]} [...] {message[-half:]}")


def _escape(char: str) -> str:
    if char in "\n\t" or not (char in "\u2028\u2029" or unicodedata.category(char).startswith("C")):
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
