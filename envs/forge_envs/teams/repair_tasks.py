"""Small repositories of Python modules with faults in them, and tests that find the faults.

In: a generator. Out: a manual, modules right and broken, tests with right results. Waits for nothing.
"""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forge_envs.teams.generated import one, some

FAULTS = ("operator", "boundary", "name", "order", "missing")
"""Another operator, another comparison, another parameter's name, arguments in another order, a case left out."""
# Functions: parameters, what the manual says, code. {a}, {b} and {c} are drawn, c = a + b; {f} and {g} are functions of
# one and of two numbers that are there already.
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
"""Arguments that are tried to find out whether a fault shows."""
_OTHER: Mapping[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Function:
    """One of a repository's."""

    name: str
    module: str
    manual: str
    right: str
    """Its source."""
    uses: tuple[str, ...]
    """Functions that it calls."""


@dataclass(frozen=True, slots=True)
class Test:
    """A call and what it gives where nothing is broken, as JSON."""

    __test__ = False  # no test of pytest's
    module: str
    name: str
    arguments: tuple[Any, ...]
    gives: str

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True, slots=True)
class Repository:
    """Modules of which some functions are broken."""

    functions: tuple[Function, ...]
    broken: Mapping[str, str]
    """Sources of the functions that have a fault, by name."""
    shown: tuple[Test, ...]
    """Tests of which every fault breaks one or more."""
    hidden: tuple[Test, ...]

    def files(self) -> dict[str, str]:
        """Sources by module, faults included."""
        found: dict[str, str] = {}
        homes = {function.name: function.module for function in self.functions}
        for module in dict.fromkeys(homes.values()):
            own = [function for function in self.functions if function.module == module]
            used = sorted({name for function in own for name in function.uses if homes[name] != module})
            imports = [f"from {homes[name]} import {name}" for name in used]
            sources = [self.broken.get(function.name, function.right) for function in own]
            found[module] = "\n\n".join((*(["\n".join(imports)] if imports else []), *sources))
        return found

    def manual(self) -> str:
        """What each function should return."""
        return "\n".join(function.manual for function in self.functions)


def draw(
    rng: np.random.Generator, *, modules: int, functions: int, faults: int, kinds: Sequence[str] = FAULTS
) -> Repository:
    """Draw functions, tests and faults, until every fault shows."""
    while True:
        written = _functions(rng, modules, functions)
        sources = {each.name: each.right for each in written}
        right = _running(sources)
        tests = {each.name: _tests(rng, each, right) for each in written}
        broken: dict[str, str] = {}
        for each in some(rng, written, functions):
            if len(broken) == faults:
                break
            for kind in some(rng, kinds, len(kinds)):
                if not (made := _broken(each.right, kind)):
                    continue
                source = one(rng, made)
                wrong = _running({**sources, **broken, each.name: source})
                if sum(_given(wrong, test) != test.gives for test in tests[each.name]) >= 2:
                    broken[each.name] = source
                    break
        wrong = _running({**sources, **broken})
        shown, hidden, hits = [], [], 0
        for name, own in tests.items():
            apart = [test for test in own if _given(wrong, test) != test.gives]
            alike = [test for test in own if test not in apart]
            shown += [*apart[:2], *alike[:2]]
            hidden += [*apart[2:8], *alike[2:8]]
            hits += name in broken and bool(apart)
        if hits != faults:  # one is made good by another
            continue
        if all(_fails(hidden, {**sources, **left}) for left in _some_left(broken)):
            return Repository(tuple(written), broken, tuple(shown), tuple(hidden))


def _some_left(broken: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The faults that may be left when an editor is done: each, every two of them, and so on."""
    for count in range(1, len(broken) + 1):
        yield from map(dict, itertools.combinations(broken.items(), count))


def _fails(tests: Sequence[Test], sources: Mapping[str, str]) -> bool:
    space = _running(sources)
    return any(_given(space, test) != test.gives for test in tests)


def _functions(rng: np.random.Generator, modules: int, count: int) -> list[Function]:
    names, homes = some(rng, _NAMES, count), some(rng, _MODULES, modules)
    written: list[Function] = []
    parameters: dict[str, str] = {}
    for place, name in enumerate(names):
        f = [other for other in parameters if parameters[other] == "n"]
        g = [other for other in parameters if parameters[other] == "n, k"]
        fitting = [form for form in FORMS if (f or "{f}" not in form[2]) and (g or "{g}" not in form[2])]
        calling = [form for form in fitting if "{f}" in form[2] or "{g}" in form[2]]
        head, manual, code = one(rng, calling if calling and place % 2 else fitting)
        a, b = int(rng.integers(2, 8)), int(rng.integers(2, 8))
        used = {"f": one(rng, f) if f else "", "g": one(rng, g) if g else ""}
        blanks = {"a": a, "b": b, "c": a + b, **used}
        body = code.format(**blanks).replace("\n", "\n    ")
        module = homes[place * modules // count]  # a later module uses earlier ones, never the other way
        right = ast.unparse(ast.parse(f"def {name}({head}):\n    {body}"))
        told = f"{module}.{name}({head}) returns {manual.format(**blanks)}."
        written.append(Function(name, module, told, right, tuple(used[key] for key in used if f"{{{key}}}" in code)))
        parameters[name] = head
    return written


def _tests(rng: np.random.Generator, function: Function, right: Mapping[str, Callable[..., Any]]) -> list[Test]:
    """Tests of a function that differ, of numbers about those that its code compares with."""

    def drawn(head: str) -> tuple[int, ...]:
        count = int(rng.integers(0, 5)) if head == "numbers" else head.count(",") + 1
        return tuple(rng.integers(-2, 18, count).tolist())

    head = function.right.partition("(")[2].partition(")")[0]
    found = list(dict.fromkeys(drawn(head) for _ in range(_DRAWN)))
    tests = [Test(function.module, function.name, ([*each],) if head == "numbers" else each, "") for each in found]
    return [replace(test, gives=_given(right, test)) for test in tests]


def _running(sources: Mapping[str, str]) -> dict[str, Callable[..., Any]]:
    """The functions themselves: texts that were put together here, without a loop that could be endless."""
    space: dict[str, Any] = {}
    exec("\n".join(sources.values()), space)  # noqa: S102  # our own words; what a model edits runs in the sandbox
    return space


def _given(space: Mapping[str, Callable[..., Any]], test: Test) -> str:
    try:
        return json.dumps(["ok", space[test.name](*test.arguments)])
    except Exception as error:  # noqa: BLE001  # a fault may raise anything
        return json.dumps(["error", type(error).__name__])


def _broken(source: str, kind: str) -> list[str]:
    """The source with one fault of a kind, in each place where it fits."""
    nodes = list(ast.walk(ast.parse(source)))
    parameters = sorted(node.arg for node in nodes if isinstance(node, ast.arg))
    found = []
    for place, node in enumerate(nodes):
        if _change(node, kind, parameters):  # it fits: once more, where nothing else is changed
            tree = ast.parse(source)
            _change(list(ast.walk(tree))[place], kind, parameters)
            found.append(ast.unparse(tree))
    return found


def _change(node: ast.AST, kind: str, parameters: Sequence[str]) -> bool:
    """Put a fault into a node, if one of this kind fits there."""
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
