"""Worker processes in which math-verify compares formulas, with limits on time and memory.

sympy may compute forever on a text such as ``9^{9^{9}}``. Each comparison therefore has a limit on processor time,
enforced by the kernel, and a wall-clock timeout, enforced here. A process that exceeds a limit is killed and replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import queue
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("_worker_program.py")
_MAX_WORKERS = 4
_PAIRS_PER_WORKER = 16
"""Number of comparisons that justifies the start of another process, about a second."""
CPU_S = 3
"""Processor time in seconds for one comparison."""
_WALL_S = 4 * CPU_S
_START_S = 60.0
_MAX_CACHED = 16_384
_SLOW = re.compile(r"\\(?:int|sum|prod|lim)(?![A-Za-z])")

Pair = tuple[str, str]
"""An answer and a gold answer in LaTeX."""
_Question = tuple[str, str | None, float]
"""An answer, a gold answer unless the value of the answer is asked for, and a tolerance."""
_LATE = object()
_PLAIN = "x"


class _Worker:
    """A process and its pipes."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def request(self, message: dict[str, Any], timeout_s: float) -> Any:
        """The result of a request. Raises TimeoutError if the process exceeded a limit and was killed."""
        is_new = self._process is None or self._process.poll() is not None
        if is_new:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            deadline_s = timeout_s + (_START_S if is_new else 0.0)
            if select.select([process.stdout], [], [], deadline_s)[0] and (line := process.stdout.readline()):
                return json.loads(line)
        except OSError:
            pass
        self.stop()
        raise TimeoutError

    def _start(self) -> None:
        self.stop()
        program = f"import sys; sys.path[:] = {sys.path!r}; exec(open({str(_PROGRAM)!r}).read())"
        command = [sys.executable, "-P", "-c", program]
        environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def stop(self) -> None:
        """Kill the process if it is running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
        self._process = None


def is_slow(formula: str) -> bool:
    """Return whether a formula in LaTeX may take seconds: an integral, a sum, a product or a limit."""
    return bool(_SLOW.search(formula))


def _expected_time(question: _Question) -> tuple[bool, int, str]:
    """Order of questions: integrals, sums and limits, which may take seconds, come last."""
    texts = [text for text in question[:2] if text]
    return any(map(is_slow, texts)), sum(map(len, texts)), str(question)


class Workers:
    """A thread-safe pool of up to four processes that compare formulas."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the pipes belong to the parent
        atexit.register(self.close)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._workers = [_Worker() for _ in range(min(_MAX_WORKERS, os.cpu_count() or 1))]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in reversed(self._workers):
            self._idle.put(worker)
        self._cache: dict[_Question, Any] = {}

    def close(self) -> None:
        """Stop the processes. The next comparison starts them again."""
        for worker in self._workers:
            worker.stop()

    def compare(self, pairs: Sequence[Pair], *, tolerance: float, timeout_s: float) -> dict[Pair, bool | None]:
        """True or False by pair, or None if math-verify cannot read the gold answer. Short formulas come first.

        A pair whose answer exceeds a limit is unequal. Pairs that were not compared within `timeout_s` are missing.
        """
        results = self._results([(*pair, tolerance) for pair in pairs], time.monotonic() + timeout_s)
        return {(answer, gold or ""): result for (answer, gold, _), result in results.items()}

    def number(self, text: str, end: float) -> Fraction | float | None:
        """The value of a formula without variables, or None if it has no value or exceeds a limit.

        Raises:
            TimeoutError: `end`, a time of `time.monotonic`, came first.
        """
        value = self._results([(text, None, 0.0)], end).get((text, None, 0.0), _LATE)
        if value is _LATE:
            raise TimeoutError
        if isinstance(value, str):  # an exact value, such as 2^{100}-1
            return Fraction(value)
        return value if isinstance(value, float) else None

    def _results(self, questions: Sequence[_Question], end: float) -> dict[_Question, Any]:
        """The results, which are remembered because a model may repeat a formula, without those that came late."""
        with self._lock:
            cached = {each: self._cache[each] for each in questions if each in self._cache}
        missing = sorted({*questions} - {*cached}, key=_expected_time)
        if not missing:
            return cached
        num_threads = min(len(self._workers), math.ceil(len(missing) / _PAIRS_PER_WORKER))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="maths") as pool:
            results = pool.map(lambda each: self._result(each, end), missing)
            new = {each: result for each, result in zip(missing, results, strict=True) if result is not _LATE}
        with self._lock:
            if len(self._cache) > _MAX_CACHED:
                self._cache.clear()
            self._cache.update(new)
        return cached | new

    def _result(self, question: _Question, end: float) -> Any:
        """True, False, a number, None for an unreadable gold answer or no number, or `_LATE`."""
        answer, gold, tolerance = question
        try:
            result = self._request({"answer": answer, "gold": gold, "tolerance": tolerance}, end)
        except queue.Empty:
            return _LATE
        except TimeoutError:
            if time.monotonic() > end:
                return _LATE
            if gold is None or answer == _PLAIN:
                return None
            # If the gold answer alone is readable, the answer has caused the exceeded limit.
            alone = self._results([(_PLAIN, gold, tolerance)], end).get((_PLAIN, gold, tolerance), _LATE)
            return alone if alone in (None, _LATE) else False
        return None if result == "gold" else result

    def _request(self, request: dict[str, Any], end: float) -> Any:
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise queue.Empty
        worker = self._idle.get(timeout=left_s)
        try:
            return worker.request(request | {"cpu_s": CPU_S}, min(_WALL_S, max(0.1, end - time.monotonic())))
        finally:
            self._idle.put(worker)


WORKERS = Workers()
"""The worker processes, started by the first comparison."""
