import dataclasses
import math
import subprocess
import sys
import sysconfig
import time

import numpy as np
import pytest

from forge_agents import check_verifier
from forge_agents.sandbox import Sandbox, SandboxError, SandboxLimits, SandboxUnavailable
from forge_agents.sandbox.sandbox import _why_no_namespaces
from forge_agents.types import Trajectory, Turn
from forge_verifiers import ScoreError, UnitTests
from forge_verifiers.code.unit_tests import extract_code

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or bool(_why_no_namespaces()), reason="needs user namespaces of Linux"
)

TESTS = """
assert add(1, 2) == 3
def test_floats():
    assert abs(add(0.1, 0.2) - 0.3) < 1e-9
def test_text():
    assert add("a", "b") == "ab"
def test_lists():
    from solution import add as plus
    assert plus([1], [2]) == [1, 2]
"""
GOLD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
# Generous: what is tested is not the speed of this machine.
PATIENT = UnitTests(tests=TESTS, timeout_s=20, sandbox=Sandbox(limits=SandboxLimits(wall_s=60)))


def wrote(text, tests=None):
    turn = Turn(agent="a", index=0, observation="", action=text, reward=0.0)
    return Trajectory(agent="a", policy="p", turns=(turn,), info={} if tests is None else {"tests": tests})


def test_gold_code_scores_one_and_half_right_code_its_share():
    half = "def add(a, b):\n    return a + b if isinstance(a, str | list) else 0"
    scores = PATIENT.score([wrote(GOLD), wrote(half), wrote("```\n\n```"), wrote("I cannot."), wrote("")])
    assert scores.dtype == np.float32 and scores.tolist() == [1.0, 0.5, 0.0, 0.0, 0.0]


def test_unit_tests_keep_the_verifier_contract():
    assert check_verifier(PATIENT, wrote(GOLD), wrote("def add(a, b): return a - b")).ok


def test_all_or_nothing_and_tests_from_elsewhere():
    half = "def add(a, b): return a + b if a == 1 else None"
    strict = UnitTests(all_or_nothing=True, timeout_s=20)
    assert strict.grade(wrote(half, TESTS)) == 0.0 and strict.grade(wrote(GOLD, TESTS)) == 1.0
    assert strict.grade(wrote(GOLD)) is None
    assert strict.grade(Trajectory(agent="a", policy="p", turns=(), info={"tests": TESTS})) is None
    result = UnitTests(tests=lambda t: f"assert add(1, {t.seed}) == 1", timeout_s=20)
    assert result.grade(wrote(GOLD)) == 1.0
    loud = f"import os\nos.write(1, b'out of turn')\nprint('[true, \"\"]', flush=True)\n{TESTS}"
    assert strict.run(half, loud).passed == (True, False, False, False)  # what tests print is no verdict


# Each would pass with tests that run in the candidate's own process, or with a verdict that it can print.
FAKES = {
    "early exit": "import sys; sys.exit(0)",
    "hard exit": "import os; os._exit(0)",
    "exit when called": "import os\ndef add(a, b): os._exit(0)",
    "SystemExit when called": "def add(a, b): raise SystemExit(0)",
    "exit at the end": "import atexit, os; atexit.register(os._exit, 0)",
    "printed verdict": "print('[true, \"\"]\\n' * 9, flush=True)\ndef add(a, b): return None",
    "printed verdict on every descriptor": (
        "import os\nfor n in range(1, 9):\n    try: os.write(n, b'[true, \"\"]\\n' * 9)\n    except OSError: pass\n"
        "def add(a, b): return None"
    ),
    "equal to everything": (
        "class All:\n    def __eq__(self, other): return True\n    def __sub__(self, other): return 0\n"
        "    def __abs__(self): return 0\n    def __lt__(self, other): return True\n"
        "def add(a, b): return All()"
    ),
    "a number equal to everything": (
        "class All(int):\n    def __eq__(self, other): return True\n    def __sub__(self, other): return All()\n"
        "    __hash__ = int.__hash__\ndef add(a, b): return All(77)"
    ),
    "a number between any two": (
        "class Any(float):\n    asked = 0\n    def __float__(self):\n        Any.asked += 1\n"
        "        return 1e9 if Any.asked % 2 else -1e9\n"
        "def add(a, b): return Any()"
    ),
    "no more assertions": "import builtins; builtins.AssertionError = Exception\ndef add(a, b): return None",
    "patched built-ins": "import builtins; builtins.abs = builtins.sum = lambda *a: 0\ndef add(a, b): return None",
    "shadowed built-ins": (
        "abs = lambda x: 0\nsorted = len = list = sum = max = min = round = lambda *a: 3\n"
        "isinstance = any = all = lambda *a: True\ndef add(a, b): return None"
    ),
    "shadowed names of the runner": "class AssertionError(BaseException): pass\nencode = exec = attempt = add = id",
    "patched modules": "import json, sys; json.dumps = lambda *a: 'x'; sys.exit = print\ndef add(a, b): return None",
    "frames": (
        "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n"
        "        for v in f.f_globals.values():\n            if isinstance(v, str) and 'assert' in v: return v\n"
        "        f.f_globals['report'] = lambda why: None; f = f.f_back"
    ),
    "tests on disk": (
        "import glob\ndef add(a, b):\n    for p in glob.glob('/**/*test*.py', recursive=True):\n"
        "        if 'test_floats' in open(p).read(): return 3"
    ),
    "poisoned import": "open('json.py', 'w').write('x'); open('math.py', 'w').write('x')\ndef add(a, b): return None",
    "killing the judge": "import os, signal\ndef add(a, b): os.kill(os.getppid(), signal.SIGKILL)",
    "hanging": "def add(a, b):\n    while True: pass",
    "memory": "def add(a, b): return bytearray(1 << 40)",
    "endless object": "def add(a, b):\n    while True: yield 1",
    "own protocol": (
        "import os\nfor n in range(3, 9):\n"
        '    try: os.write(n, b\'["ready", ""]\\n["answer", true, [null, null]]\\n\' * 9)\n'
        "    except OSError: pass\ndef add(a, b): return None"
    ),
    "garbage protocol": (
        "import os\nfor n in range(3, 9):\n    try: os.write(n, b'[' * 99999 + b'\\n{}\\n')\n    except OSError: pass\n"
        "def add(a, b): return a + b"
    ),
}


def test_faked_success_scores_nothing():
    tests = "assert add(1, 2) == 3\nassert abs(add(0.1, 0.2) - 0.3) < 1e-9\nassert 0.29 < add(0.1, 0.2) < 0.31\n"
    quick = UnitTests(tests=tests, timeout_s=1.5, sandbox=PATIENT.sandbox)
    scores = dict(zip(FAKES, quick.score([wrote(code) for code in FAKES.values()]).tolist(), strict=True))
    assert scores == dict.fromkeys(FAKES, 0.0)


@pytest.mark.parametrize(
    ("fake", "test", "right"),
    [
        ("class math: isclose = staticmethod(lambda *a, **k: True)", "math.isclose(f(1), 2.5, rel_tol=1e-3)", "2.5"),
        ("class collections: Counter = id", "collections.Counter(f(1)) == collections.Counter([1])", "[1]"),
        ("def Counter(x): return 1", "Counter(f(1)) == Counter([1, 2, 3])", "[3, 2, 1]"),
        ("def isclose(*a): return True", "isclose(f(1), 3.5)", "3.5"),
    ],
)
def test_names_of_libraries_come_from_the_libraries_and_not_from_the_code(fake, test, right):
    unit = dataclasses.replace(PATIENT, tests=f"assert {test}")
    codes = [f"{fake}\ndef f(x): return 0", f"{fake}\ndef f(x): return {right}", f"def f(x): return {right}"]
    assert unit.score([wrote(code) for code in codes]).tolist() == [0.0, 1.0, 1.0]


def test_code_may_define_what_is_called_like_a_part_of_a_library():
    code = """
class Counter:
    def __init__(self): self.n = 0
    def add(self): self.n += 1; return self.n
class Heap:
    def push(self, x): return x
heapq = Heap()
"""
    tests = "c = Counter()\nassert c.add() == 1\nassert c.add() == 2\n"
    assert dataclasses.replace(PATIENT, tests=tests).score([wrote(code)]).tolist() == [1.0]
    assert dataclasses.replace(PATIENT, tests="assert heapq.push(3) == 3").score([wrote(code)]).tolist() == [1.0]


def test_code_may_define_functions_with_names_of_python():
    code = """
def list(values): return [*values]
def sum(values):
    total = None
    for value in list(values):
        total = value if total is None else total + value
    return total
def print(*words): raise OSError
def input(): return 1
def max(*values): return 0
def len(values): return 100
def add(a, b): return sum([a, b])
"""
    assert PATIENT.run(code, TESTS).passed == (True,) * 4
    tests = "assert len([add(1, 2), 5]) == 2\nprint(add(1, 1))\nassert max(7, sum([add(2, 2), 1])) == 7"
    assert PATIENT.run(code, tests).passed == (True, True)


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ("assert sum(10, 15) == 25", [1.0, 0.0]),  # the only name that is called
        ("from solution import sum\nassert abs(sum(10, 15) - 25) < 1", [1.0, 0.0]),
        ("import solution\nassert max(solution.sum(10, 15), 0) == 25", [1.0, 0.0]),
        ("def test_sum():\n    try: sum(None, 1)\n    except TypeError: return\n    assert False", [1.0, 0.0]),
    ],
)
def test_tests_of_a_function_with_a_name_of_python_run_the_code(tests, expected):
    codes = ["def sum(a, b): return a + b", "def sum(a, b): return 0"]
    assert UnitTests(tests=tests, timeout_s=20).score([wrote(code) for code in codes]).tolist() == expected


def test_tests_that_call_only_functions_of_python_are_refused():
    with pytest.raises(ScoreError, match="abs, sum. Import the function of the code.*from solution import sum"):
        UnitTests(tests="assert abs(sum(10, 15) - 25) < 1")


@pytest.mark.parametrize(
    "tests",
    [
        f"assert f(1) == {'+'.join('1' * 3000)}", f"assert f(1) == {'-' * 5000}2", f"assert f(1){'.a' * 5000}",
        f"assert f(1){'(1)' * 5000}", "\x00", "assert f(1) == " + "9" * 5000, "nothing", "assert f(1) == 1\n" * 20_000,
    ],
)  # fmt: skip
def test_tests_of_a_data_set_that_cannot_be_run_lose_only_their_row(tests, caplog):
    bad, good = (wrote("```python\ndef f(x): return x\n```", tests=each) for each in (tests, "assert f(1) == 1"))
    result = UnitTests().assess([bad, good])
    assert np.isnan(result.scores[0]) and result.scores[1] == 1 and [*result.failed] == [0]
    with pytest.raises(ScoreError, match="no Python|too deep|no test|more than"):
        UnitTests().assess([bad])


def test_an_expected_exception_is_not_faked_by_ending():
    tests = "def test_refuses():\n    try: add(None, 1)\n    except Exception: return\n    assert False"
    verifier = UnitTests(tests=tests, timeout_s=20)
    ends = "import os\ndef add(a, b): os._exit(1)"
    assert verifier.score([wrote(GOLD), wrote(ends)]).tolist() == [1.0, 0.0]


LENIENT = """
def test_loop():
    for result, expected in zip(map(f, [1, 2]), [1, 4]):
        assert result == expected
def test_all():
    assert all(map(lambda x: f(x) == x * x, [1, 2]))
def test_bare_except():
    try:
        f("")
    except:
        return
    assert False
def test_in():
    assert 4 in items(3)
def test_next():
    iterator = squares(1)
    assert next(iterator) == 0
    try:
        next(iterator)
    except StopIteration:
        return
    assert False
"""
"""Tests that an empty answer would pass if its exceptions reached them unchanged, or if it saw what they expect."""


def test_lenient_tests_are_not_passed_by_stopping_ending_or_agreeing():
    gold = "def f(x): return x * x if x != '' else len(None)\ndef squares(n):\n    for x in range(n): yield f(x)\n"
    gold += "class Items(list): pass\ndef items(n): return Items(squares(n))"
    stops = "def f(x): raise StopIteration\nitems = squares = f"
    ends = "import os\ndef f(x): os._exit(0)\nitems = squares = f"
    agrees = "class Any(list):\n    def __contains__(self, item): return True\ndef items(n): return Any()"
    assert PATIENT.run(gold, LENIENT).reasons == ("",) * 5
    assert PATIENT.run(stops, LENIENT).passed == (False, False, True, False, False)
    assert PATIENT.run(ends, LENIENT).passed == (False,) * 5
    assert PATIENT.run(agrees, LENIENT).passed[3:] == (False, False)


ALWAYS = """
class Any:
    def __contains__(self, item): return True
    __array_interface__ = {"shape": (0,), "typestr": "<f8", "data": (4096, False), "version": 3}
def items(n): return Any()
"""
OWN_CONTAINER = """
seen = []
class Number:
    def __contains__(self, item):
        seen.append(item)
        return isinstance(item, int)
    def __mul__(self, other): return 2 * other
class Odd(Number):
    def __iter__(self): return iter([1, 3, 5])
def number(n): return Number()
def odd(n): return Odd()
def last(n): return seen[-1] if seen else 0
"""


def test_object_that_contains_or_equals_everything_passes_nothing():
    tests = "import numpy as np\nimport pytest\nassert 4 in items(3)\nassert pytest.approx(0.3) == items(3)\n"
    tests += "assert np.allclose(items(3), [1.0, 2.0])\nassert np.all(np.asarray(items(3)) == 0.3)\n"
    libraries = Sandbox(
        import_paths=(sysconfig.get_paths()["purelib"],), limits=SandboxLimits(wall_s=60, memory_mb=2000)
    )
    report = dataclasses.replace(PATIENT, sandbox=libraries).run(ALWAYS, tests)
    assert report.passed == (False,) * 4, report.reasons
    assert "Call x.__contains__(...)" in report.reasons[0]


def test_items_that_tests_expect_are_not_shown_to_containers_of_the_code():
    tests = "assert 42 in number(3)\nassert last(1) == 42\nassert 4 in odd(3)\nassert last(1) == 4\n"
    assert PATIENT.run(OWN_CONTAINER, tests).passed == (False,) * 4
    own = "assert 3 in odd(3)\nassert 4 not in odd(3)\nassert number(1).__contains__(4)\nassert last(1) == 4\n"
    own += "assert number(1).__mul__(3) == 6\n"
    assert PATIENT.run(OWN_CONTAINER, own).passed == (True,) * 5


@pytest.mark.parametrize(
    ("kind", "method", "test"),
    [
        ("list", "def __getitem__(self, i): return flip()", "x[0] > 3 and x[0] < 4"),
        ("list", "def __iter__(self): return iter([flip()])", "all(v > 3 for v in x) and all(v < 4 for v in x)"),
        ("list", "def __len__(self): return flip()", "len(x) > 3 and len(x) < 4"),
        ("list", "def __abs__(self): return flip()", "abs(x) > 3 and abs(x) < 4"),
        ("dict", "def __getitem__(self, key): return flip()", "x[0] > 3 and x[0] < 4"),
        ("float", "def __abs__(self): return flip()", "abs(x) > 3 and abs(x) < 4"),
    ],
)
def test_two_reads_of_plain_content_give_one_value(kind, method, test):
    code = f"n = [0]\ndef flip():\n    n[0] += 1\n    return 9 if n[0] % 2 else -9\nclass Own({kind}):\n    {method}\n"
    content = {"list": "[5]", "dict": "", "float": "5"}[kind]
    code += f"def f(): return Own({content})"
    assert PATIENT.run(code, f"x = f()\nassert {test}").passed == (False,)


DERIVED = """
from collections import Counter, defaultdict, namedtuple
class Ring(list):
    def __getitem__(self, i): return list.__getitem__(self, i % len(self))
class Vector(list):
    def __abs__(self): return sum(x * x for x in self) ** 0.5
class Shifted(list):
    def __getitem__(self, i): return list.__getitem__(self, i - 1)
class Stack(list):
    def empty(self, show):
        while self:
            show(self.pop())
        self.append(7)
Pair = namedtuple("Pair", "x y")
def count(text): return Counter(text)
def lists(): return defaultdict(list)
def add(lists, key): lists[key].append(1)
"""
USES = """
ring = Ring([1, 2, 3])
assert ring[4] == 2 and len(ring) == 3
ring.append(9)
assert ring[4] == 1 and list(ring) == [1, 2, 3, 9]
assert abs(Vector([3, 4])) == 5 and sum(Vector([3, 4])) == 7
assert count("aab")["a"] == 2 and count("aab")["z"] == 0 and sorted(count("aab")) == ["a", "b"]
made = lists()
add(made, 1)
assert made[1] == [1] and made[2] == []
assert Pair(1, 2).x == 1 and Pair(1, 2)[1] == 2 and Pair(1, 2) == (1, 2)
assert Shifted([5, 6])[1] == 6 and Shifted([5, 6]).__getitem__(1) == 5
stack, seen = Stack([1, 2]), []
stack.empty(lambda item: seen.append((item, len(stack), list(stack))))
assert seen == [(2, 1, [1]), (1, 0, [])] and stack == [7] and len(stack) == 1
"""


def test_methods_of_derived_types_work():
    report = PATIENT.run(DERIVED, USES)
    assert report.passed == (True,) * 8, report.reasons


OBJECTS = """
from solution import Point, count, apply, sort_in_place, refuse, Table, Log
p = Point(1)
assert p.x == 1 and str(p) == "P1" and isinstance(p, Point)
assert p + Point(2) == Point(3)
assert p != Point(2)
assert list(count(3)) == [0, 1, 2] and next(count(1)) == 0
assert apply(lambda x: x * 2, [1, 2]) == [2, 4]
assert count != 3
def test_in_place():
    xs = [3, 1, 2]
    sort_in_place(xs)
    assert xs == [1, 2, 3]
def test_refusal():
    try:
        refuse()
    except ValueError as error:
        assert "bad" in str(error)
    else:
        assert False
def test_containers():
    t = Table()
    t["k"] = (1, {2.5: b"x"}, None, {3}, 1j)
    assert t["k"] == (1, {2.5: b"x"}, None, {3}, 1j) and len(t) == 1 and "k" in t and t == {"k": t["k"]}
def test_a_list_in_a_tuple_may_change():
    log = Log([])
    assert log == ([],)
    log.add(1)
    assert log == ([1],)
def check(f):
    assert f(10**40)
check(count)
"""
OBJECTS_GOLD = """
class Point:
    def __init__(self, x): self.x = x
    def __add__(self, other): return Point(self.x + other.x)
    def __eq__(self, other): return isinstance(other, Point) and self.x == other.x
    def __str__(self): return f"P{self.x}"
class Table(dict): pass
class Log(tuple):
    def __new__(cls, lines): return tuple.__new__(cls, (lines,))
    def add(self, line): self[0].append(line)
def count(n): yield from range(n)
def apply(f, xs): return [f(x) for x in xs]
def sort_in_place(xs): xs.sort()
def refuse(): raise ValueError("bad")
"""


def test_objects_callbacks_generators_and_exceptions_are_proxied():
    report = PATIENT.run(OBJECTS_GOLD, OBJECTS)
    assert report.reasons == ("",) * 11 and report.passed == (True,) * 11


def test_hang_fails_only_its_own_test():
    code = "def add(a, b):\n    while a == 1: pass\n    return a + b"
    report = UnitTests(timeout_s=1.5, sandbox=PATIENT.sandbox).run(code, TESTS)
    assert report.passed == (False, True, True, True)
    assert report.reasons[0] == "candidate: too slow"


def test_sandbox_limit_fails_the_remaining_tests():
    verifier = UnitTests(tests=TESTS, timeout_s=30, sandbox=Sandbox(limits=SandboxLimits(wall_s=0.7)))
    report = verifier.run("def add(a, b):\n    while True: pass", TESTS)
    assert report.passed == (False,) * 4 and report.limit == "wall_s"


def test_a_failing_sandbox_is_no_abstention_and_a_missing_one_raises(monkeypatch):
    def failing(*_, **__):
        raise SandboxError("no memory")

    monkeypatch.setattr(Sandbox, "run", failing)
    result = PATIENT.assess([wrote(GOLD)])
    assert math.isnan(result.scores[0]) and result.failed == {0: "no memory"}
    two = dataclasses.replace(PATIENT, max_parallel=2)
    assert two.max_duration_s([wrote(GOLD)] * 5, 1.0) == 3 * two.max_duration_s([wrote(GOLD)], 1.0) > 0

    def missing(*_, **__):
        raise SandboxUnavailable("no namespaces")

    monkeypatch.setattr(Sandbox, "run", missing)
    with pytest.raises(SandboxUnavailable, match="no namespaces"):
        PATIENT.score([wrote(GOLD)])


def test_tests_that_test_nothing_are_refused():
    with pytest.raises(ScoreError, match="no test in"):
        UnitTests(tests="x = 1")
    with pytest.raises(ScoreError, match="no Python"):
        UnitTests(tests="assert (")
    with pytest.raises(ValueError, match="timeout_s"):
        UnitTests(timeout_s=0)
    with pytest.raises(ValueError, match="max_parallel"):
        UnitTests(max_parallel=-1)


SOLUTION = "```python\ndef add(a, b):\n    return a + b\n```"


@pytest.mark.parametrize(
    "text",
    [
        SOLUTION.replace("\n", "\r\n"),
        f"{SOLUTION}\nUsage:\n```python\nprint(add(1, 2))\n```",
        f"{SOLUTION}\nUsage:\n```python\nresult = add(1, None)\nprint(result)\n```",
        f"{SOLUTION}\nUsage:\n```python\n>>> add(1, 2)\n3\n```\nOutput:\n```\n3\n```",
        f"{SOLUTION}\nRun:\n```bash\npython solution.py\n```",
        f"{SOLUTION}\n```python\nimport unittest\nclass T(unittest.TestCase): pass\nunittest.main()\n```",
        "1. Define it:\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n2. Call it.",
        "~~~py\ndef add(a, b):\n    return a + b\n~~~",
        (
            "First a helper:\n```python\ndef plus(a, b):\n    return a + b\n```\nThen:\n```python\n"
            "def add(a, b):\n    return plus(a, b)\n```"
        ),
        "```python\nimport operator\n```\n```python\ndef add(a, b):\n    return operator.add(a, b)\n```",
        "```python\ndef add(a, b):\n    return a - b  # wrong\n```\nNo, it has to be\n" + SOLUTION,
        "The function:\n\n    def add(a, b):\n        return a + b\n\nIt adds.",
        "def add(a, b):\r\n    return a + b",
    ],
)
def test_the_program_is_found_in_the_markdown_of_an_answer(text):
    assert PATIENT.grade(wrote(text)) == 1


def test_last_definition_counts():
    wrong = "```python\ndef add(a, b):\n    return 0\n```"
    assert PATIENT.grade(wrote(f"{SOLUTION}\nor\n{wrong}")) < 1
    assert PATIENT.grade(wrote("```java\nint add(int a, int b) { return a + b; }\n```")) == 0


def test_blocks_are_chosen_by_the_names_that_the_tests_use():
    text = "```py\ndef f(): return g()\n```\n```py\ndef g(): return 1\n```\n```py\nf()\ng = 2\n```\n```py\nh = f()\n```"
    assert extract_code(text, {"f"}) == "def f(): return g()\n\nf()\ng = 2"
    assert extract_code(text, {"h"}) == "def f(): return g()\n\nf()\ng = 2\n\nh = f()"
    assert extract_code(text, {"unknown"}) == extract_code(text) == "h = f()"


def test_a_block_that_imports_the_solution_does_not_replace_it():
    solution, use = "def f(): return 1", "from solution import f\nassert f() == 1"
    text = f"```python\n{solution}\n```\nTest it:\n```python\n{use}\n```"
    assert extract_code(text, {"f"}) == solution
    assert extract_code("```python\nfrom math import gcd as f\n```\n```python\nf(4, 6)\n```", {"f"}) == (
        "from math import gcd as f"
    )


@pytest.mark.parametrize(
    "prose", ["Here it is:\n\n{}\n\nNote: it adds.", "It works.\n{}\nprint(add(1, 2))\nDone!", "A\r\n{}\r\nB b"]
)
def test_code_between_lines_of_prose_is_extracted_without_fences(prose):
    code = "import math\nONES = [\n    1,\n]\n@staticmethod\ndef add(a, b):\n    c = a + b\n\n    return c"
    assert extract_code(prose.format(code), {"add"}) == code
    assert extract_code("The class of x = 5 is right.\nx = 5 is it.") == "The class of x = 5 is right.\nx = 5 is it."
    assert PATIENT.grade(wrote(prose.format(code))) == 1


@pytest.mark.parametrize("line", ["x = (\n", "def f(:\n    a\n", "@a\n", "def f(x):\n\n", "x = [\n 1,\n"])
def test_hostile_code_between_lines_of_prose_takes_little_time(line):
    start = time.process_time()
    extract_code("a b\n" + line * (90_000 // len(line)), {"f"})
    assert time.process_time() - start < 10


def test_code_is_the_last_block_or_all():
    assert extract_code("```py\na\n```\nthen\n```\nb\n```") == "b"
    assert extract_code("```python\nunclosed = 1") == "unclosed = 1"
    assert extract_code("<answer>\nx = 1\n</answer>") == "x = 1"
    assert extract_code(" x = 1 ") == "x = 1"
    assert extract_code("x" * 200_000) == ""


def test_arguments_of_the_runner_are_not_those_of_the_program():
    code = "import sys\nif len(sys.argv) > 1:\n    sys.exit()\n\ndef double(x):\n    return 2 * x"
    assert UnitTests().run(code, "assert double(3) == 6").passed == (True,)


def test_odd_code_prints_no_warnings():
    program = (
        "from forge_agents.tools.arithmetic import calculator\n"
        "from forge_envs.adapters.scoring import _parse\n"
        "from forge_envs.teams.repair import _fault\n"
        "from forge_verifiers.code.unit_tests import extract_code\n"
        "lines = [f'    x = 1if {n} else {chr(34) + chr(92) + chr(27) + chr(34)}' for n in range(9)]\n"
        "code = chr(10).join(['def f():', *lines])\n"
        "assert extract_code(f'```python\\n{code}\\n```', frozenset({'f'})) == code\n"
        "assert _fault(code) == '' and _parse('1if 2 else 3')\n"
    )
    options = ["-W", "always", "-c", program]
    result = subprocess.run([sys.executable, *options], capture_output=True, text=True, check=True)
    assert "<answer>" not in result.stderr and "<unknown>" not in result.stderr
