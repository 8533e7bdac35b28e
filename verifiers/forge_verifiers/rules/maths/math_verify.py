"""Asks math-verify about answers that our own reader cannot read, shut in a sandbox with limits.

In: pairs of texts. Out: which are equal. Waits for the sandbox, at most the limit that is given.

math-verify evaluates through sympy what a model wrote: `9^{9^{9}}` fills the memory of the process that asks. So it
runs in a process without network, files or privilege, which is ended when its time is over.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from forge_agents.sandbox import Sandbox, SandboxError, SandboxLimits, SandboxUnavailable

MISSING = "math-verify is not installed; pip install 'forge-agents-rl[maths]'"
_MEMORY_MB = 2048
_MAX_REMEMBERED = 8192
_MAX_PAIRS = 512
_remembered: dict[tuple[str, str], bool] = {}
_lock = threading.Lock()


def compare(pairs: Iterable[tuple[str, str]], *, limit_s: float) -> tuple[dict[tuple[str, str], bool], str]:
    """Which pairs of (answer, gold) are equal, and why some are missing from the result; no text where none is.

    A pair is missing where the gold answer cannot be read by math-verify either, and where time or memory ran out.
    """
    asked = dict.fromkeys(pairs)
    with _lock:
        known = {pair: _remembered[pair] for pair in asked if pair in _remembered}
    left = sorted((pair for pair in asked if pair not in known), key=lambda pair: len(pair[0]))[:_MAX_PAIRS]
    if not left:
        return known, ""
    if limit_s <= 0:
        return known, "math-verify is not asked: fallback_s=0"
    found, reason = _ask(left, limit_s)
    with _lock:
        if len(_remembered) > _MAX_REMEMBERED:
            _remembered.clear()
        _remembered.update(found)
    return known | found, reason


def _ask(pairs: list[tuple[str, str]], limit_s: float) -> tuple[dict[tuple[str, str], bool], str]:
    spec = importlib.util.find_spec("math_verify")
    if spec is None or spec.origin is None:
        return {}, MISSING
    limits = SandboxLimits(wall_s=limit_s, cpu_s=max(1, round(limit_s)), memory_mb=_MEMORY_MB)
    sandbox = Sandbox(limits=limits, import_paths=(str(Path(spec.origin).parents[1]),))
    try:
        result = sandbox.run(_program(), stdin=json.dumps(pairs))
    except (SandboxError, SandboxUnavailable) as error:
        return {}, str(error).partition("\n")[0]
    verdicts = dict(json.loads(line) for line in result.stdout.split("\n")[:-1])
    found = {pairs[number]: bool(verdict) for number, verdict in verdicts.items() if verdict is not None}
    if len(verdicts) < len(pairs):
        why = f"its limit {result.limit}" if result.limit else (result.stderr.strip()[-200:] or "nothing")
        return found, f"math-verify was ended by {why} after {len(verdicts)} of {len(pairs)} pairs"
    return found, "" if len(found) == len(pairs) else "math-verify cannot read them either"


@cache
def _program() -> str:
    return Path(__file__).with_name("_math_verify_program.py").read_text(encoding="utf-8")
