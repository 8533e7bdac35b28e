"""Hidden unit tests of the code that an agent wrote.

In: trajectories. Out: the share of tests passed, in [0, 1]. Waits for the sandbox, at most its wall-clock limit.
"""

from __future__ import annotations

import ast
import json
import math
import os
import textwrap
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from forge_agents.sandbox import Sandbox, SandboxError, SandboxUnavailable
from forge_agents.types import Trajectory
from forge_verifiers.core.markdown import answer_section, code_blocks, indented_blocks
from forge_verifiers.core.verifier import Assessment, Cost, ScoreError, Scores, TrajectoryRule

MAX_CODE_CHARS = 100_000
"""Longer answers have failed."""
_PYTHON = frozenset({"", "python", "python3", "py", "py3"})
"""Languages of fenced blocks that are read as Python."""
_SANDBOX_SLACK_S = 20.0
"""Beyond its limit: for a sandbox to start, and to be given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestReport:
    """What came of one answer."""

    __test__ = False  # no test, whatever pytest thinks of the name

    passed: tuple[bool, ...]
    """One per test, in order of execution."""
    reasons: tuple[str, ...]
    """Why a test failed; empty where it passed."""
    limit: str
    """The limit of the sandbox that ended it; empty where none did."""


@dataclass(frozen=True, kw_only=True)
class UnitTests(TrajectoryRule):
    """The share of hidden tests that the last action's code passes.

    The code is in the fenced blocks of the last action, see `extract_code`. Tests are Python source: each top-level
    `assert`, each function ``test_*`` and each top-level call of a function that the tests define is one test; all else
    prepares them. Names that the tests do not define are the code's, and so is ``from solution import name``.

    The tests run in one process, the code in another: the code never sees the tests, and what it returns is compared
    as data. Ending early, hanging or crashing fails the test at hand. Both are shut in one sandbox.
    """

    exact = True
    name: str = "unit-tests"
    cost: Cost = "expensive"
    tests: str | Callable[[Trajectory], str | None] | None = None
    """The tests, or what finds them; None = in ``Trajectory.info["tests"]``. It abstains where there are none."""
    all_or_nothing: bool = False
    """Whether a single failed test makes the score 0."""
    timeout_s: float = 2.0
    """Seconds for one test."""
    sandbox: Sandbox = field(default_factory=Sandbox)
    """Its limits hold for all tests of one answer together."""
    max_parallel: int = 0
    """Sandboxes at one time; 0 = one per processor."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s} of {self.name!r} must be above 0 and finite")
        if self.max_parallel < 0:
            raise ValueError(f"max_parallel={self.max_parallel} of {self.name!r} must not be negative")
        if isinstance(self.tests, str):
            _units(self.tests)

    def grade(self, trajectory: Trajectory) -> float | None:
        """The share of tests passed; None without tests or without a decision. Raises as `run`."""
        tests = self._tests(trajectory)
        if tests is None or not trajectory.turns:
            return None
        code = extract_code(trajectory.turns[-1].action, _names_of_tests(tests))
        if not code:
            return 0.0
        passed = self.run(code, tests).passed
        return float(all(passed)) if self.all_or_nothing else sum(passed) / len(passed)

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """`grade` of each trajectory, float32 [n], several at a time; NaN where it abstained or the sandbox failed."""
        return self.assess(trajectories).scores

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """The same, and where the sandbox itself failed.

        Raises:
            SandboxUnavailable: This machine has no sandbox as asked.
            ScoreError: The tests of a trajectory are no Python or hold no test.
        """
        import numpy as np

        failed: dict[int, str] = {}

        def graded(row: int) -> float:
            try:
                grade = self.grade(trajectories[row])
            except SandboxUnavailable:
                raise
            except SandboxError as error:
                failed[row] = str(error)
                return math.nan
            return math.nan if grade is None else grade

        with ThreadPoolExecutor(self._workers(), thread_name_prefix=self.name) as pool:
            grades = list(pool.map(graded, range(len(trajectories))))
        return Assessment(scores=np.array(grades, np.float32), failed=failed)

    def longest_s(self, trajectories: Sequence[Trajectory], otherwise_s: float) -> float:
        """The sandbox's limit, as often as sandboxes start one after the other."""
        rounds = math.ceil(len(trajectories) / self._workers())
        return rounds * (self.sandbox.limits.wall_s + _SANDBOX_SLACK_S)

    def _workers(self) -> int:
        return self.max_parallel or os.cpu_count() or 1

    def run(self, code: str, tests: str) -> TestReport:
        """Run tests on code.

        Raises:
            SandboxUnavailable: This machine has no sandbox as asked.
            SandboxError: The sandbox itself failed.
            ScoreError: The tests are no Python or hold no test.
        """
        units = _units(tests)
        num = sum(counts for _, counts, _ in units)
        request = json.dumps({"source": code, "units": units, "timeout_s": self.timeout_s})
        result = self.sandbox.run(_judge(), stdin=request)
        lines = [json.loads(line) for line in result.stdout.split("\n")[:-1]][:num]
        missing = result.limit or result.stderr.strip()[-200:] or "the tests were ended"
        lines += [[False, missing]] * (num - len(lines))
        passed, reasons = zip(*lines, strict=True)
        return TestReport(passed=passed, reasons=reasons, limit=result.limit)

    def _tests(self, trajectory: Trajectory) -> str | None:
        if self.tests is None:
            found = trajectory.info.get("tests")
            return None if found is None else str(found)
        return self.tests if isinstance(self.tests, str) else self.tests(trajectory)


def extract_code(text: str, wanted: Collection[str] = ()) -> str:
    """The Python program in a text.

    The program consists of the last fenced block that defines each wanted name and of the blocks that those blocks
    need. A block that only imports a name defines it if no other block does. If no block defines a wanted name, the
    program is the last block. Blocks in other languages are ignored. A text without a fenced block is a program as a
    whole, or its indented blocks are; of a text with an ``<answer>`` section only this section counts.

    Args:
        text: Markdown with Python, or Python.
        wanted: Names that the program has to define, for example the function that the tests call.

    Returns:
        Python source; empty if there is none or the text has more than `MAX_CODE_CHARS` characters.
    """
    if len(text) > MAX_CODE_CHARS:
        return ""
    text = answer_section(text)
    blocks = [block for block in code_blocks(text) if block.language in _PYTHON] or code_blocks(text)
    if not blocks and _names_of(text) is None:
        blocks = indented_blocks(text)
    sources = [textwrap.dedent(block.text).strip() for block in blocks]
    names = {number: each for number, source in enumerate(sources) if (each := _names_of(source))}
    chosen: set[int] = set()
    needed = set(wanted)
    while needed:
        name = needed.pop()
        places = [number for number in names if name in names[number].bound]
        places = places or [number for number in names if name in names[number].imported]
        defining = places[-1] if places else None
        if defining is not None and defining not in chosen:
            chosen.add(defining)
            needed |= names[defining].used
    if chosen:
        return "\n\n".join(sources[number] for number in sorted(chosen))
    return sources[[*names][-1] if names else -1] if sources else text.strip()


class _Names(NamedTuple):
    """Names of a program."""

    bound: set[str]
    """Names that it defines or assigns at its top level."""
    imported: set[str]
    used: set[str]
    """Names that it reads."""


def _names_of(source: str) -> _Names | None:
    """The names of a program; None if it is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    bound: set[str] = set()
    imported: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        else:
            bound.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            imports = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            imported.update((name.asname or name.name).partition(".")[0] for each in imports for name in each.names)
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return _Names(bound, imported, used)


@lru_cache(maxsize=4096)
def _names_of_tests(tests: str) -> frozenset[str]:
    """Names that the tests expect from the program."""
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError):
        return frozenset()  # `UnitTests.run` reports it
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "solution"]
    imported = {name.name for each in imports for name in each.names}
    attributes = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "solution"
    }
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound, others, used = _names_of(tests) or (set(), set(), set())
    return frozenset((used - bound - others - stored) | imported | attributes)


@cache
def _judge() -> str:
    return Path(__file__).with_name("_runner.py").read_text(encoding="utf-8")


@lru_cache(maxsize=4096)
def _units(tests: str) -> tuple[tuple[str, bool, str], ...]:
    """The statements of the tests; whether each is a test; its name, for a function that is one."""
    try:
        body = ast.parse(tests).body
    except (SyntaxError, ValueError) as error:
        raise ScoreError(f"tests are no Python: {error}; source {tests[:80]!r}") from error
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    checks = {name for name in functions if not name.startswith("test_")}
    units = []
    for node in body:
        called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        name = node.name if isinstance(node, ast.FunctionDef) and node.name not in checks else ""
        counts = bool(name) or isinstance(node, ast.Assert) or (isinstance(called, ast.Name) and called.id in checks)
        units.append((ast.unparse(node), counts, name))
    if not any(counts for _, counts, _ in units):
        raise ScoreError(f"no test in {tests[:80]!r}; write top-level asserts or functions called test_*")
    return tuple(units)
