"""Processes in which math-verify compares formulas, with limits on time and memory.

math-verify works through sympy, which may compute without end on a text such as ``9^{9^{9}}``. Each comparison has a
limit on processor time, kept by the kernel, and one on wall-clock time, kept here. A process that exceeds a limit is
killed and replaced.
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
"""Comparisons for which a further process is worth its start, about a second."""
CPU_S = 3
"""Processor seconds for one comparison."""
_WALL_S = 4 * CPU_S
_START_S = 60.0
_MAX_REMEMBERED = 16_384

Pair = tuple[str, str]
"""An answer and the gold answer, in LaTeX."""


class _Worker:
    """One process, and the pipes to it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], timeout_s: float) -> Any:
        """The verdict on a request.

        Raises:
            TimeoutError: The process exceeded a limit and was killed.
        """
        is_new = self._process is None or self._process.poll() is not None
        if is_new:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
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
        """Kill the process. Twice is no error."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
        self._process = None


class Workers:
    """Up to four processes that compare formulas. Any thread may ask."""

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
        self._remembered: dict[tuple[Pair, float], bool | None] = {}
        self._readable: set[str] = set()

    def close(self) -> None:
        """End the processes; the next comparison starts them again."""
        for worker in self._workers:
            worker.stop()

    def compare(self, pairs: Sequence[Pair], *, tolerance: float, timeout_s: float) -> dict[Pair, bool | None]:
        """Whether the formulas of each pair are equal.

        Args:
            pairs: Answers and gold answers. Short ones are compared first.
            tolerance: Greatest relative difference between decimals that count as equal.
            timeout_s: Seconds for all pairs together.

        Returns:
            True or False by pair; None if math-verify cannot read the gold answer. A pair whose answer exceeds a limit
            is unequal. Pairs for which the time did not suffice are missing.
        """
        end = time.monotonic() + timeout_s
        with self._lock:
            found = {pair: self._remembered[pair, tolerance] for pair in pairs if (pair, tolerance) in self._remembered}
        left = sorted({pair for pair in pairs if pair not in found}, key=lambda pair: (sum(map(len, pair)), pair))
        if not left:
            return found
        num_threads = min(len(self._workers), math.ceil(len(left) / _PAIRS_PER_WORKER))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="maths") as pool:
            verdicts = list(pool.map(lambda pair: self._compare(pair, tolerance, end), left))
        new = {pair: verdict for pair, verdict in zip(left, verdicts, strict=True) if verdict != "late"}
        with self._lock:
            if len(self._remembered) > _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered.update({(pair, tolerance): verdict for pair, verdict in new.items()})
        return found | new

    def number(self, text: str) -> float | None:
        """The value of a formula without variables; None if it has none or exceeds a limit."""
        try:
            value = self._ask({"answer": text}, time.monotonic() + _START_S)
        except (TimeoutError, queue.Empty):
            return None
        return value if isinstance(value, float) else None

    def _compare(self, pair: Pair, tolerance: float, end: float) -> Any:
        """True, False, None, or "late"."""
        answer, gold = pair
        try:
            verdict = self._ask({"answer": answer, "gold": gold, "tolerance": tolerance}, end)
        except queue.Empty:
            return "late"
        except TimeoutError:
            return "late" if time.monotonic() > end else self._is_readable(gold, tolerance, end)
        if verdict == "gold":
            return None
        self._readable.add(gold)
        return verdict

    def _is_readable(self, gold: str, tolerance: float, end: float) -> Any:
        """After a limit was exceeded: False if the gold answer alone keeps it, so that the answer is to blame."""
        if gold in self._readable:
            return False
        try:
            return None if self._ask({"answer": "x", "gold": gold, "tolerance": tolerance}, end) == "gold" else False
        except queue.Empty:
            return "late"
        except TimeoutError:
            return None

    def _ask(self, request: dict[str, Any], end: float) -> Any:
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise queue.Empty
        worker = self._idle.get(timeout=left_s)
        try:
            return worker.ask(request | {"cpu_s": CPU_S}, min(_WALL_S, max(0.1, end - time.monotonic())))
        finally:
            self._idle.put(worker)


WORKERS = Workers()
"""The processes of this one, started at the first comparison."""
