"""What runs in the sandbox of `math_verify`: math-verify, which works through sympy, on texts that nobody trusts.

In: pairs of texts on standard input, as JSON. Out: a line ``[number, verdict]`` for each. Waits for nothing.
"""

import json
import os
import sys
from typing import Any

from math_verify import parse, verify

_DEADLINE_S = 1


def _read(text: str) -> list[Any]:
    for written in (f"${text}$", text):
        found = parse(written, parsing_timeout=_DEADLINE_S)
        if found:
            return list(found)
    return []


def _main() -> None:
    golds: dict[str, list[Any]] = {}
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no verdict
    for number, (answer, gold) in enumerate(json.load(sys.stdin)):
        if gold not in golds:
            golds[gold] = _read(gold)
        verdict = verify(golds[gold], _read(answer), timeout_seconds=_DEADLINE_S) if golds[gold] else None
        print(json.dumps([number, verdict]), file=verdicts, flush=True)


_main()
