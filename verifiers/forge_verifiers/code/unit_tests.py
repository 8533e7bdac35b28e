"""`UnitTests`: the fraction of hidden unit tests that an agent's code passes in a sandbox."""

from __future__ import annotations

import ast
import builtins
import json
import math
import os
import re
import textwrap
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from forge_agents.sandbox import Sandbox, SandboxError, SandboxUnavailable
from forge_agents.sources import parse_source
from forge_agents.types import Trajectory
from forge_verifiers.core.markdown import answer_section, code_blocks, indented_blocks
from forge_verifiers.core.verifier import Assessment, Cost, ScoreError, TrajectoryRule

MAX_CODE_CHARS = 100_000
"""Longer answers score 0."""
_PYTHON = frozenset({"", "python", "python3", "py", "py3"})
"""Languages of fenced blocks that count as Python."""
_TOP_LEVEL = re.compile(r"^(?=(?:async +)?def |class |from +[\w.]+ +import |import +\w|@\w|[A-Za-z_]\w* *=[^=])")
"""Start of a statement outside of functions that is not prose."""
_MAX_STATEMENTS, _MAX_LINES = 200, 500
"""Limits of a program between lines of prose, so that the work is bounded."""
_MODULES = {
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
    "json", "math", "operator", "re", "statistics", "string", "typing",
}  # fmt: skip
_ALIASES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "scipy": "scipy"}
_FUNCTIONS = {
    "Counter": "collections", "OrderedDict": "collections", "defaultdict": "collections", "deque": "collections",
    "isclose": "math", "deepcopy": "copy", "Decimal": "decimal", "Fraction": "fractions",
}  # fmt: skip
"""Names of libraries that tests of data sets use without an import: modules, their aliases and functions."""
_MAX_CLOSING = 3
"""Number of lines without indentation that may close a bracket."""
_SANDBOX_SLACK_S = 20.0
"""Time for the start and stop of a sandbox, in addition to its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestReport:
    """Test results of one answer."""

    __test__ = False  # not a test class of pytest

    passed: tuple[bool, ...]
    """Result of each test in order of execution."""
    reasons: tuple[str, ...]
    """Error of each test, or empty if it passed."""
    limit: str
    """Limit of the sandbox that ended the run, or empty if none did."""


@dataclass(frozen=True, kw_only=True)
class UnitTests(TrajectoryRule):
    """The fraction of hidden tests that the code of the last action passes.

    The code is in the fenced blocks of the last action, see `extract_code`. Tests are Python source. Each top-level
    `assert`, each function ``test_*`` and each top-level call of a function that the tests define is one test. Other
    statements are setup. Names that the tests do not define belong to the code, also by ``from solution import name``.
    A name such as ``sum`` is Python's, unless the tests import it from `solution` or it is the only name they call.

    Tests and code run in two processes in one sandbox. The code never sees the tests, and its results are compared as
    data. A test fails if the code exits, hangs or crashes.
    """

    exact = True
    name: str = "unit-tests"
    cost: Cost = "expensive"
    tests: str | Callable[[Trajectory], str | None] | None = None
    """The tests, or a function that returns them. By default ``Trajectory.info["tests"]``. Abstains without tests."""
    all_or_nothing: bool = False
    """True if one failed test makes the score 0."""
    timeout_s: float = 2.0
    """Timeout in seconds of one test."""
    sandbox: Sandbox = field(default_factory=Sandbox)
    """The sandbox, whose limits apply to all tests of one answer together."""
    max_parallel: int = 0
    """Maximum number of concurrent sandboxes. 0 for one per processor."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s} of {self.name!r} must be above 0 and finite")
        if self.max_parallel < 0:
            raise ValueError(f"max_parallel={self.max_parallel} of {self.name!r} must not be negative")
        if isinstance(self.tests, str):
            _units(self.tests)
            _builtin_of_code(self.tests)

    def grade(self, trajectory: Trajectory) -> float | None:
        """The fraction of tests passed, or None without tests or turns. Raises as `run`."""
        tests = self._tests(trajectory)
        if tests is None or not trajectory.turns:
            return None
        code = extract_code(trajectory.turns[-1].action, _names_of_tests(tests))
        if not code:
            return 0.0
        passed = self.run(code, tests).passed
        return float(all(passed)) if self.all_or_nothing else sum(passed) / len(passed)

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """`grade` of each trajectory, in parallel, and failures of the sandbox itself and of tests that cannot be run.

        Raises:
            SandboxUnavailable: This machine does not support the sandbox.
            ScoreError: The tests of all trajectories are no Python or hold no test.
        """
        import numpy as np

        failed: dict[int, str] = {}
        errors: list[ScoreError] = []

        def graded(row: int) -> float:
            try:
                grade = self.grade(trajectories[row])
            except SandboxUnavailable:
                raise
            except (SandboxError, ScoreError) as error:  # tests may be rows of a data set
                errors.extend([error] if isinstance(error, ScoreError) else [])
                failed[row] = str(error)
                return math.nan
            return math.nan if grade is None else grade

        with ThreadPoolExecutor(self._workers(), thread_name_prefix=self.name) as pool:
            grades = list(pool.map(graded, range(len(trajectories))))
        if errors and len(failed) == len(trajectories):
            raise errors[0]
        return Assessment(scores=np.array(grades, np.float32), failed=failed)

    def max_duration_s(self, trajectories: Sequence[Trajectory], default_s: float) -> float:
        """The sandbox's limit times the number of sequential rounds."""
        rounds = math.ceil(len(trajectories) / self._workers())
        return rounds * (self.sandbox.limits.wall_s + _SANDBOX_SLACK_S)

    def _workers(self) -> int:
        return self.max_parallel or os.cpu_count() or 1

    def run(self, code: str, tests: str) -> TestReport:
        """Run tests on code.

        Raises:
            SandboxUnavailable: This machine does not support the sandbox.
            SandboxError: The sandbox itself failed.
            ScoreError: The tests are no Python, hold no test or call no function of the code.
        """
        units = _units(tests)
        num = sum(counts for _, counts, _ in units)
        own = _builtin_of_code(tests)
        request = json.dumps({"source": code, "units": units, "timeout_s": self.timeout_s, "own": own})
        result = self.sandbox.run(_runner_source(), stdin=request)
        lines = [json.loads(line) for line in result.stdout.split("\n")[:-1]][:num]
        missing = result.limit or result.stderr.strip()[-200:] or "the tests were ended"
        lines += [[False, missing]] * (num - len(lines))
        passed, reasons = zip(*lines, strict=True)
        return TestReport(passed=passed, reasons=reasons, limit=result.limit)

    def _tests(self, trajectory: Trajectory) -> str | None:
        if self.tests is None:
            tests = trajectory.info.get("tests")
            return None if tests is None else str(tests)
        return self.tests if isinstance(self.tests, str) else self.tests(trajectory)


def extract_code(text: str, names: Collection[str] = ()) -> str:
    """The Python program in a text.

    The program consists of the last fenced block that defines each required name, and of the blocks that these blocks
    need. A block that only imports a name defines it if no other block does. If no block defines a required name, the
    program is the last block. Blocks in other languages are ignored. A text without fenced blocks is a program as a
    whole, or its definitions between prose are, or its indented blocks. If the text has an ``<answer>`` section, only
    this section counts.

    Args:
        text: Markdown with Python, or Python.
        names: Names that the program must define, for example the function that the tests call.

    Returns:
        Python source, or empty if there is none or the text has more than `MAX_CODE_CHARS` characters.
    """
    if len(text) > MAX_CODE_CHARS:
        return ""
    text = answer_section(text)
    blocks = [block for block in code_blocks(text) if block.language in _PYTHON] or code_blocks(text)
    if not blocks and _names_of(text) is None:
        sources = _code_in_prose(text) or [block.text for block in indented_blocks(text)]
    else:
        sources = [block.text for block in blocks]
    sources = [textwrap.dedent(source).strip() for source in sources]
    defined = {number: each for number, source in enumerate(sources) if (each := _names_of(source))}
    chosen: set[int] = set()
    needed = set(names)
    while needed:
        name = needed.pop()
        places = [number for number in defined if name in defined[number].bound]
        places = places or [number for number in defined if name in defined[number].imported]
        defining = places[-1] if places else None
        if defining is not None and defining not in chosen:
            chosen.add(defining)
            needed |= defined[defining].used
    if chosen:
        return "\n\n".join(sources[number] for number in sorted(chosen))
    return sources[[*defined][-1] if defined else -1] if sources else text.strip()


def _code_in_prose(text: str) -> list[str]:
    """The program that the functions, classes, imports and assignments between lines of prose form, if there is one."""
    lines, statements, end = text.splitlines(), list[str](), 0
    starts = [at for at, line in enumerate(lines) if _TOP_LEVEL.match(line)]
    for at in starts[:_MAX_STATEMENTS]:
        if at >= end:
            statement = _first_statement(lines[at : at + _MAX_LINES])
            statements += statement
            end = at + len(statement)
    program = "\n".join(statements)
    return [program] if re.search(r"^(?:(?:async +)?def|class) ", program, re.MULTILINE) else []


def _first_statement(lines: Sequence[str]) -> Sequence[str]:
    """The lines of the Python statement that a text begins with, or none."""
    first = next((k for k, line in enumerate(lines) if not line.startswith("@")), len(lines))
    end = next((k for k in range(first + 1, len(lines)) if lines[k] and not lines[k][0].isspace()), len(lines))
    return next((lines[:k] for k in range(end, end + _MAX_CLOSING) if _names_of("\n".join(lines[:k]))), [])


class _Names(NamedTuple):
    """Names of a program."""

    bound: set[str]
    """Names that it defines or assigns at its top level."""
    imported: set[str]
    used: set[str]
    """Names that it reads."""


def _names_of(source: str) -> _Names | None:
    """The names of a program, or None if it is not Python."""
    try:
        return _names_in(parse_source(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _names_in(tree: ast.Module) -> _Names:
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
        tree = _parsed(tests)
    except ScoreError:
        return frozenset()  # `UnitTests.run` reports it
    return _expected_names(tree)


def _expected_names(tree: ast.Module) -> frozenset[str]:
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "solution"]
    imported = {name.name for each in imports for name in each.names}
    attributes = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "solution"
    }
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound, others, used = _names_in(tree)
    return frozenset((used - bound - others - stored) | imported | attributes)


@lru_cache(maxsize=4096)
def _builtin_of_code(tests: str) -> str:
    """The name of a built-in function that the code must define, or empty if the tests name other functions of it.

    Raises:
        ScoreError: The tests call several built-in functions and nothing of the code.
    """
    nodes = list(ast.walk(_parsed(tests)))
    modules = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
    modules |= {name.name for n in nodes if isinstance(n, ast.Import) for name in n.names}
    if "solution" in modules or any(not hasattr(builtins, name) for name in _names_of_tests(tests)):
        return ""
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    names = sorted(called & _names_of_tests(tests))
    if len(names) > 1:
        raise ScoreError(
            f"tests call only Python's own functions {', '.join(names)}. Import the function of the code, for example "
            f"`from solution import {names[-1]}`. Source {tests[:80]!r}"
        )
    return "".join(names)


@cache
def _runner_source() -> str:
    return Path(__file__).with_name("_runner.py").read_text(encoding="utf-8")


def _parsed(tests: str) -> ast.Module:
    """Parse tests, which may be a stranger's, and add imports that they lack. Raises ScoreError.

    Without an import, a name of a library would be looked up in the code, which could define an ``isclose`` that is
    always true.
    """
    if len(tests) > MAX_CODE_CHARS:
        raise ScoreError(f"tests have {len(tests)} characters, more than {MAX_CODE_CHARS}; source {tests[:80]!r}")
    try:
        tree = parse_source(tests)
        tree.body = [*_missing_imports(tree), *tree.body]
    except (SyntaxError, ValueError) as error:
        raise ScoreError(f"tests are no Python: {error}; source {tests[:80]!r}") from error
    except (RecursionError, MemoryError) as error:
        raise ScoreError(f"tests are nested too deep; source {tests[:80]!r}") from error
    return tree


def _missing_imports(tree: ast.Module) -> list[ast.stmt]:
    """Imports of the libraries that tests use without an import."""
    used = _expected_names(tree)
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    imports = []
    for name in sorted(used & (_MODULES | _ALIASES.keys())):
        attributes = [node.attr for node in owners if node.value.id == name]  # type: ignore[attr-defined]
        is_owner = len(attributes) == sum(node.id == name for node in loads)
        if is_owner and (name in _ALIASES or all(hasattr(import_module(name), each) for each in attributes)):
            imports.append(f"import {_ALIASES.get(name, name)} as {name}")
    if used - _FUNCTIONS.keys() - _MODULES - _ALIASES.keys():  # otherwise the tests may be those of a `Counter`
        imports += [f"from {_FUNCTIONS[name]} import {name}" for name in sorted(used & _FUNCTIONS.keys())]
    return parse_source("\n".join(imports)).body


@lru_cache(maxsize=4096)
def _units(tests: str) -> tuple[tuple[str, bool, str], ...]:
    """Statements of the tests, whether each is a test, and the name of a test function."""
    body = _parsed(tests).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    checks = {name for name in functions if not name.startswith("test_")}
    units = []
    for node in body:
        called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        name = node.name if isinstance(node, ast.FunctionDef) and node.name not in checks else ""
        counts = bool(name) or isinstance(node, ast.Assert) or (isinstance(called, ast.Name) and called.id in checks)
        try:
            units.append((ast.unparse(node), counts, name))
        except (RecursionError, MemoryError) as error:
            raise ScoreError(f"tests are nested too deep; source {tests[:80]!r}") from error
    if not any(counts for _, counts, _ in units):
        raise ScoreError(f"no test in {tests[:80]!r}. Write top-level asserts or functions called test_*")
    return tuple(units)
