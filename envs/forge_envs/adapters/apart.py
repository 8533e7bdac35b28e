"""A process beside this one that runs the scorers whose work a text can make endless.

In: a question and an answer. Out: the score, or why there is none. Waits for the scorer, at most `SCORE_S`,
and `START_S` more where the process must be started.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

SCORE_S = 10.0
"""One answer; honest ones take milliseconds, sympy's simplification at times a second."""
START_S = 120.0
"""To import reasoning-gym and sympy, which takes two seconds on an idle machine."""
MEMORY_MB = 4096
"""Address space, most of which the libraries only reserve."""
_PROGRAM = "from forge_envs.adapters import apart, reasoning_gym; apart.serve(reasoning_gym.scored_here)"
_COMMAND = (sys.executable, "-c", _PROGRAM)
_KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")


class _Scorer:
    """The process, started at first need and anew once it has died. It ends when its standard input does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._busy = threading.Lock()

    def ask(self, *question: Any) -> tuple[float, dict[str, str]]:
        packed = pickle.dumps(question)  # ours; what comes back is JSON
        with self._busy:
            process = self._running()
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(len(packed).to_bytes(8, "big") + packed)
                process.stdin.flush()
                waiting = select.poll()
                waiting.register(process.stdout, select.POLLIN)
                reply = process.stdout.readline() if waiting.poll((START_S + SCORE_S) * 1000) else b""
            except BrokenPipeError:
                reply = b""
            if not reply.endswith(b"\n"):
                self._end()
                return 0.0, {"error": f"the scorer broke its limits: {SCORE_S:g} s, {MEMORY_MB} MiB"}
        value, why = json.loads(reply)
        return value, why

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            found = {name: os.environ[name] for name in _KEPT if name in os.environ}  # no keys, whatever it may run
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**found, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is the controller's
            )
            atexit.register(self._end)
        return self._process

    def _end(self) -> None:
        atexit.unregister(self._end)
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_scorer = _Scorer()


def scored_apart(dataset: Any, entry: dict[str, Any], answer: str) -> tuple[float, dict[str, str]]:
    """The score in [0, 1] of an answer that `refusal` lets through, and why it is 0 where the scorer did not say so."""
    return _scorer.ask(dataset, entry, answer)


def serve(score: Callable[[Any, dict[str, Any], str], tuple[float, dict[str, str]]]) -> None:
    """Answer questions on standard input with `score` until it ends: the other side of `scored_apart`."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints is no reply
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB << 20, MEMORY_MB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while size := sys.stdin.buffer.read(8):
        question = pickle.loads(sys.stdin.buffer.read(int.from_bytes(size, "big")))  # noqa: S301  # from our own parent
        signal.setitimer(signal.ITIMER_REAL, SCORE_S)  # not handled: it ends the process, whatever it computes
        reply = score(*question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
