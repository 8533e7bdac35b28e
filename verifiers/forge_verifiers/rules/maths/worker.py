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
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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

Pair = tuple[str, str]
"""An answer and a gold answer in LaTeX."""


class _Worker:
    """One process and its pipes."""

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
        self._cache: dict[tuple[Pair, float], bool | None] = {}
        self._numbers: dict[str, float | None] = {}
        self._readable: set[str] = set()

    def close(self) -> None:
        """Stop the processes. The next comparison starts them again."""
        for worker in self._workers:
            worker.stop()

    def compare(self, pairs: Sequence[Pair], *, tolerance: float, timeout_s: float) -> dict[Pair, bool | None]:
        """True or False by pair, or None if math-verify cannot read the gold answer. Short formulas come first.

        A pair whose answer exceeds a limit is unequal. Pairs that were not compared within `timeout_s` are missing.
        """
        end = time.monotonic() + timeout_s
        with self._lock:
            cached = {pair: self._cache[pair, tolerance] for pair in pairs if (pair, tolerance) in self._cache}
        missing = sorted({*pairs} - {*cached}, key=lambda pair: (sum(map(len, pair)), pair))
        if not missing:
            return cached
        num_threads = min(len(self._workers), math.ceil(len(missing) / _PAIRS_PER_WORKER))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="maths") as pool:
            results = list(pool.map(lambda pair: self._compare(pair, tolerance, end), missing))
        new = {pair: result for pair, result in zip(missing, results, strict=True) if result != "late"}
        with self._lock:
            if len(self._cache) > _MAX_CACHED:
                self._cache.clear()
            self._cache.update({(pair, tolerance): result for pair, result in new.items()})
        return cached | new

    def number(self, text: str, end: float) -> float | None:
        """The value of a formula without variables, or None if it has no value or exceeds a limit.

        Raises:
            TimeoutError: `end`, a time of `time.monotonic`, came first.
        """
        with self._lock:
            if text in self._numbers:
                return self._numbers[text]
        value = None
        try:
            value = self._request({"answer": text}, end)
        except queue.Empty:
            raise TimeoutError from None
        except TimeoutError:
            if time.monotonic() > end:
                raise
        number = value if isinstance(value, float) else None
        with self._lock:  # a model may repeat a formula that takes all of the time
            if len(self._numbers) > _MAX_CACHED:
                self._numbers.clear()
            self._numbers[text] = number
        return number

    def _compare(self, pair: Pair, tolerance: float, end: float) -> Any:
        """True, False, None, or "late"."""
        answer, gold = pair
        try:
            result = self._request({"answer": answer, "gold": gold, "tolerance": tolerance}, end)
        except queue.Empty:
            return "late"
        except TimeoutError:
            return "late" if time.monotonic() > end else self._is_readable(gold, tolerance, end)
        if result == "gold":
            return None
        self._readable.add(gold)
        return result

    def _is_readable(self, gold: str, tolerance: float, end: float) -> Any:
        """After an exceeded limit: False if the gold answer alone is readable, so that the answer caused it."""
        if gold in self._readable:
            return False
        try:
            result = self._request({"answer": "x", "gold": gold, "tolerance": tolerance}, end)
        except queue.Empty:
            return "late"
        except TimeoutError:
            return None
        return None if result == "gold" else False

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
