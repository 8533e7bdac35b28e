"""Generated repositories of small Python modules with faults, and tests that reveal the faults."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forge_envs.shared import choose, sample

FAULTS = ("operator", "boundary", "name", "order", "missing")
"""Wrong operator, wrong comparison, wrong parameter, wrong argument order, missing case."""
# Functions: parameters, text of the manual, code. {a} and {b} are random, {c} is a + b. {f} and {g} are earlier
# functions of one and of two numbers.
FORMS = (
    ("n", "n times {a}, plus {b}", "return n * {a} + {b}"),
    ("n", "n, but at least {a} and at most {c}", "if n < {a}: return {a}\nif n > {c}: return {c}\nreturn n"),
    ("n", "0 below {a}, 1 from {a} on, 2 from {c} on", "if n < {a}: return 0\nif n < {c}: return 1\nreturn 2"),
    ("n", "{b} plus n if n is even, else n minus {a}", "if n % 2 == 0: return {b} + n\nreturn n - {a}"),
    ("n, k", "n minus {a} times k, but at least 0", "left = n - {a} * k\nif left < 0: return 0\nreturn left"),
    ("n, k", "k times n; from k = {b} on k times (n minus {a})", "if k >= {b}: return k * (n - {a})\nreturn k * n"),
    ("numbers", "the sum of the numbers that are at least {a}", "return sum(n for n in numbers if n >= {a})"),
    ("numbers", "the numbers from {a} to {c}, both included", "return [n for n in numbers if {a} <= n <= {c}]"),
    (
        "numbers",
        "how many numbers are larger than the one before plus {a}",
        "return sum(n > last + {a} for last, n in zip(numbers, numbers[1:]))",
    ),
    ("numbers", "the sum of {f}(n) of all numbers n, minus {a}", "return sum({f}(n) for n in numbers) - {a}"),
    ("numbers", "the numbers n of which {f}(n) is above {b}", "return [n for n in numbers if {f}(n) > {b}]"),
    (
        "numbers",
        "the largest {g}({c}, n) of all numbers n, but at least {a}",
        "best = {a}\nfor n in numbers:\n    value = {g}({c}, n)\n    if value > best: best = value\nreturn best",
    ),
    ("n, k", "{g}(n, k) plus {f}(k)", "return {g}(n, k) + {f}(k)"),
)
_VERBS = "adjust assess blend charge collect compare deduct gather grade level measure merge reduce settle tally trim"
_NAMES = _VERBS.split()
_MODULES = ("rates", "parts", "costs", "stores", "plans")
_DRAWN = 40
"""Number of argument lists drawn per function."""
_OTHER: Mapping[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a repository."""

    name: str
    module: str
    manual: str
    right: str
    """Correct source."""
    uses: tuple[str, ...]
    """Names of the functions that it calls."""


@dataclass(frozen=True, slots=True)
class Test:
    """A call and the result of the correct function, as JSON."""

    __test__ = False  # not a test of pytest
    module: str
    name: str
    arguments: tuple[Any, ...]
    result: str

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True, slots=True)
class Repository:
    """Modules with faulty functions."""

    functions: tuple[Function, ...]
    broken: Mapping[str, str]
    """Faulty sources by function name."""
    visible: tuple[Test, ...]
    """Tests for the tester. Every fault breaks at least one."""
    hidden: tuple[Test, ...]

    def files(self) -> dict[str, str]:
        """Return the source of each module, with the faults."""
        files: dict[str, str] = {}
        homes = {function.name: function.module for function in self.functions}
        for module in dict.fromkeys(homes.values()):
            members = [function for function in self.functions if function.module == module]
            used = sorted({name for function in members for name in function.uses if homes[name] != module})
            imports = [f"from {homes[name]} import {name}" for name in used]
            sources = [self.broken.get(function.name, function.right) for function in members]
            files[module] = "\n\n".join((*(["\n".join(imports)] if imports else []), *sources))
        return files

    def manual(self) -> str:
        """Return the description of all functions."""
        return "\n".join(function.manual for function in self.functions)


def draw(
    rng: np.random.Generator, *, modules: int, functions: int, faults: int, kinds: Sequence[str] = FAULTS
) -> Repository:
    """Draw functions, tests and faults until the tests reveal every fault."""
    while True:
        written = _functions(rng, modules, functions)
        sources = {function.name: function.right for function in written}
        right = _namespace(sources)
        tests = {function.name: _tests(rng, function, right) for function in written}
        broken: dict[str, str] = {}
        for function in sample(rng, written, functions):
            if len(broken) == faults:
                break
            for kind in sample(rng, kinds, len(kinds)):
                if not (variants := _broken(function.right, kind)):
                    continue
                source = choose(rng, variants)
                wrong = _namespace({**sources, **broken, function.name: source})
                if sum(_result(wrong, test) != test.result for test in tests[function.name]) >= 2:
                    broken[function.name] = source
                    break
        wrong = _namespace({**sources, **broken})
        visible, hidden, revealed = [], [], 0
        for name, candidates in tests.items():
            failing = [test for test in candidates if _result(wrong, test) != test.result]
            passing = [test for test in candidates if test not in failing]
            visible += [*failing[:2], *passing[:2]]
            hidden += [*failing[2:8], *passing[2:8]]
            revealed += name in broken and bool(failing)
        if revealed != faults:  # one fault hides another
            continue
        if all(_fails(hidden, {**sources, **remaining}) for remaining in _subsets(broken)):
            return Repository(tuple(written), broken, tuple(visible), tuple(hidden))


def _subsets(broken: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield each set of faults that an editor may leave: all nonempty subsets."""
    for count in range(1, len(broken) + 1):
        yield from map(dict, itertools.combinations(broken.items(), count))


def _fails(tests: Sequence[Test], sources: Mapping[str, str]) -> bool:
    namespace = _namespace(sources)
    return any(_result(namespace, test) != test.result for test in tests)


def _functions(rng: np.random.Generator, modules: int, count: int) -> list[Function]:
    names, homes = sample(rng, _NAMES, count), sample(rng, _MODULES, modules)
    written: list[Function] = []
    parameters: dict[str, str] = {}
    for index, name in enumerate(names):
        f = [other for other in parameters if parameters[other] == "n"]
        g = [other for other in parameters if parameters[other] == "n, k"]
        fitting = [form for form in FORMS if (f or "{f}" not in form[2]) and (g or "{g}" not in form[2])]
        calling = [form for form in fitting if "{f}" in form[2] or "{g}" in form[2]]
        head, manual, code = choose(rng, calling if calling and index % 2 else fitting)
        a, b = int(rng.integers(2, 8)), int(rng.integers(2, 8))
        used = {"f": choose(rng, f) if f else "", "g": choose(rng, g) if g else ""}
        blanks = {"a": a, "b": b, "c": a + b, **used}
        body = code.format(**blanks).replace("\n", "\n    ")
        module = homes[index * modules // count]  # modules use only earlier ones
        right = ast.unparse(ast.parse(f"def {name}({head}):\n    {body}"))
        sentence = f"{module}.{name}({head}) returns {manual.format(**blanks)}."
        uses = tuple(used[key] for key in used if f"{{{key}}}" in code)
        written.append(Function(name, module, sentence, right, uses))
        parameters[name] = head
    return written


def _tests(rng: np.random.Generator, function: Function, right: Mapping[str, Callable[..., Any]]) -> list[Test]:
    """Return distinct tests of a function, with numbers near those in its code."""

    def drawn(head: str) -> tuple[int, ...]:
        count = int(rng.integers(0, 5)) if head == "numbers" else head.count(",") + 1
        return tuple(rng.integers(-2, 18, count).tolist())

    head = function.right.partition("(")[2].partition(")")[0]
    unique = list(dict.fromkeys(drawn(head) for _ in range(_DRAWN)))
    arguments = [([*values],) if head == "numbers" else values for values in unique]
    tests = [Test(function.module, function.name, values, "") for values in arguments]
    return [replace(test, result=_result(right, test)) for test in tests]


def _namespace(sources: Mapping[str, str]) -> dict[str, Callable[..., Any]]:
    """Execute generated functions, because they always terminate. Edited ones run in the sandbox."""
    namespace: dict[str, Any] = {}
    exec("\n".join(sources.values()), namespace)  # noqa: S102  # generated by this module
    return namespace


def _result(namespace: Mapping[str, Callable[..., Any]], test: Test) -> str:
    try:
        return json.dumps(["ok", namespace[test.name](*test.arguments)])
    except Exception as error:  # noqa: BLE001  # faulty functions may raise anything
        return json.dumps(["error", type(error).__name__])


def _broken(source: str, kind: str) -> list[str]:
    """Return all variants of a source with one fault of a kind."""
    nodes = list(ast.walk(ast.parse(source)))
    parameters = sorted(node.arg for node in nodes if isinstance(node, ast.arg))
    variants = []
    for index, node in enumerate(nodes):
        if _change(node, kind, parameters):  # applicable: repeat it in a fresh tree
            tree = ast.parse(source)
            _change(list(ast.walk(tree))[index], kind, parameters)
            variants.append(ast.unparse(tree))
    return variants


def _change(node: ast.AST, kind: str, parameters: Sequence[str]) -> bool:
    """Insert a fault into a node. Returns whether the kind applies to it."""
    if kind == "operator" and isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OTHER:
        node.op = _OTHER[type(node.op)]()
        return True
    if kind == "boundary" and isinstance(node, ast.Compare):
        node.ops[0] = _OTHER[type(node.ops[0])]()
        return True
    if kind == "name" and isinstance(node, ast.Name) and node.id in parameters and len(parameters) > 1:
        node.id = next(other for other in parameters if other != node.id)
        return True
    if kind == "order" and isinstance(node, ast.Call) and len(node.args) == 2:
        node.args.reverse()
        return True
    if kind == "missing" and isinstance(node, ast.FunctionDef) and isinstance(node.body[-2:][0], ast.If):
        del node.body[-2]  # the case before the last line
        return True
    return False
