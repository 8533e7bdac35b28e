"""Safe scoring by reasoning-gym's generators, some of which evaluate answers as Python or sympy.

Scorers run in a separate process with limits of time and memory. Those that evaluate only receive literals or formulas.
"""

from __future__ import annotations

import ast
import atexit
import itertools
import json
import operator
import os
import pickle
import queue
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from forge_agents.sources import parse_source
from forge_envs.adapters.contained import Randomness, failure

PYTHON_SCORERS = frozenset(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"))
"""Generators of reasoning-gym 0.1.25 that call `eval` on the answer, which is replaced by `literal`."""

SYMPY_SCORERS = frozenset(
    ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
)
"""Generators that pass the answer to `sympy.parse_expr`, which also evaluates it as Python."""

ARITHMETIC_SCORERS = frozenset(("countdown", "puzzle24"))
"""Sympy scorers whose answers need only numbers and the four operations."""

_MOVE_SCORERS = frozenset(("rubiks_cube", "rush_hour"))
"""Generators that repeat a move as often as the answer says. Right answers repeat one less than 100 times."""

_HEXADECIMAL_ANSWERS = frozenset(("base_conversion", "bitwise_arithmetic"))
"""Generators whose right answers may look like a number with an exponent, such as 0x7e316868. None is read as one."""

MAX_CHARS = 20_000
_MAX_FORMULA = {"polynomial_multiplication": (10_000, 1e100)}
"""Maximum number of characters and limit of numbers of a formula by generator, if not `_USUAL_FORMULA`. Right answers
of polynomial_multiplication have up to 6,000 characters, with numbers of up to 83 digits."""
_USUAL_FORMULA = (1000, 1e40)
_FUNCTIONS = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs Rational".split()  # noqa: SIM905
)
_POWERS = (ast.Pow, ast.BitXor)  # `^` is not a power in sympy, but is refused by the same rules
_SUM = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.UAdd)
_FORMULA = (*_SUM, *_POWERS, ast.Name, ast.Call, ast.Load)
_LITERAL = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub)
_OPENERS = re.compile(r"[-+~(\[{](?:\s*[-+~(\[{]){49}")

_NO_NUMBER = re.compile(r"(?<![^\W\d_])(nan|inf|infinity)j?(?![^\W\d_])", re.IGNORECASE)
"""Words that Python reads as a number that is not finite."""

SCORE_S = 4.0
"""Maximum processor time per answer. Ordinary answers take milliseconds, sympy's simplification sometimes a second."""
_WAIT_S = 60.0
"""Maximum wait for an answer's score, on a busy machine."""
START_S = 120.0
"""Maximum seconds to import reasoning-gym and sympy, which takes two seconds on an idle machine."""
MEMORY_MB = 4096
"""Maximum address space in MiB, most of which the libraries only reserve."""
_MAX_PROCESSES = 4
_PROGRAM = "from forge_envs.adapters import reasoning_gym, scoring; scoring.serve(reasoning_gym.make_dataset)"
_COMMAND = (sys.executable, "-P", "-c", _PROGRAM)
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
"""Environment variables of the scoring process. Keys are not passed on."""


def score(source: Mapping[str, Any], entry: dict[str, Any], answer: str) -> tuple[float, dict[str, str]]:
    """Return the generator's score in [0, 1], and the reason under ``"refused"`` or ``"error"`` if it did not score.

    Args:
        source: Generator, level, settings and seed of the question, from which the process makes the data set again.
        entry: The question, as in reasoning-gym's data set.
        answer: The answer.
    """
    if reason := refusal(answer, source["generator"]):
        return 0.0, {"refused": reason}
    scorer = _scorers.get()
    try:
        return scorer.ask(source, entry, answer)
    finally:
        _scorers.put(scorer)


def _score_here(dataset: Any, entry: dict[str, Any], answer: str) -> tuple[float, dict[str, str]]:
    """Score an accepted answer in this process."""
    module = type(dataset).__module__
    if module.rpartition(".")[2] in PYTHON_SCORERS:
        vars(sys.modules[module])["eval"] = literal  # shadows the builtin in the scorer's module
    try:
        with Randomness(0).contained():
            generator = module.rpartition(".")[2]
            value = min(float(dataset.score_answer(answer, entry)), _highest(generator, answer, entry))
            if value < 1 and (effortless := _effortless(generator, entry)):
                scores = [float(dataset.score_answer(each, entry)) for each in effortless]
                least = max((each for each in scores if each < 1), default=0.0)  # sometimes one of them is right
                value = (value - least) / (1 - least)
    except Exception as error:  # noqa: BLE001  # library code on model-written text
        return 0.0, {"error": failure(error)}
    return (min(1.0, max(0.0, value)), {}) if np.isfinite(value) else (0.0, {"error": f"scored {value}"})


def _highest(generator: str, answer: str, entry: dict[str, Any]) -> float:
    """Return the highest score of an answer, for scorers of reasoning-gym 0.1.25 that accept wrong answers."""
    if _NO_NUMBER.search(answer) and not _NO_NUMBER.search(str(entry["answer"])):
        return 0.0  # no distance to NaN exceeds a tolerance
    match generator:
        case "coin_flip":  # its part of equal digits is that of the shorter number: "0" equals 0.3125
            given, gold = (float(Fraction(text.replace(",", ""))) for text in (answer, str(entry["answer"])))
            texts = [f"{number:.10g}" for number in (given, gold)]
            is_equal = abs(given - gold) <= 1e-4
            equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
            return 1.0 if is_equal else len(list(equal)) / max(map(len, texts))
        case "codeio":  # its edit distance counts a character once, the length that divides it also its escape
            return 0.01 if _has_escapes(answer) and not _has_escapes(str(entry["answer"])) else 1.0
        case "game_of_life_halting":  # it compares whether the texts are empty
            return float(answer.strip(" .").casefold() == str(entry["answer"]).casefold())
        case "boxnet":  # it skips impossible moves, so that one text would solve every question
            return 1.0 if _all_boxes_move(json.loads(answer), entry["metadata"]["initial_state"]) else 0.05
        case "rush_hour":  # it skips blocked moves, so that a long text is a random search
            return 1.0 if _all_cars_move(answer, entry["metadata"]["board_config"]) else 0.01
        case "puzzle24":  # it compares neither the numbers nor the fraction of the result
            tree = _parse(answer)
            values = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            numbers = [value for value in values if isinstance(value, int)]
            return 1.0 if sorted(numbers) == sorted(entry["metadata"]["numbers"]) and _exact(tree.body) == 24 else 0.01
    return 1.0


def _all_boxes_move(steps: Any, state: dict[str, list[str]]) -> bool:
    """Return whether each move of an answer to boxnet has an effect."""
    from reasoning_gym.games.boxnet import action_from_response

    for move in ({place: action} for step in steps for place, action in step.items()):
        before, state = state, action_from_response(state, [move])
        if state == before:
            return False
    return True


def _all_cars_move(answer: str, board: str) -> bool:
    """Return whether no move of an answer to rush_hour is blocked."""
    from reasoning_gym.games.rush_hour import Board

    position = Board(board)
    for car, sign, number in re.findall(r"([A-Z])([+-])(\d+)", answer):
        for _ in range(int(number)):
            before = str(position)
            position.move(car, int(f"{sign}1"))
            if str(position) == before:
                return False
    return True


def _has_escapes(text: str) -> bool:
    """Return whether the JSON object in a text has characters that JSON escapes by number."""
    match = re.search(r"\{.*\}", text, re.DOTALL)
    try:
        return match is not None and "\\u" in json.dumps(json.loads(match[0]))
    except ValueError:
        return False


def _effortless(generator: str, entry: dict[str, Any]) -> list[str]:
    """Return answers without work that reasoning-gym 0.1.25 pays much if wrong. Only a better one earns a part."""
    match generator:
        case "game_of_life":  # its part of equal cells: most cells do not change, or are dead in the end
            board = json.loads(re.findall(r"\[\[.*?\]\]", str(entry["question"]), re.DOTALL)[-1])
            return [json.dumps(board), json.dumps([[0] * len(row) for row in board])]
        case "sudoku" | "mini_sudoku" | "futoshiki":  # its part of equal cells, most of which the question shows
            puzzle, size = entry["metadata"]["puzzle"], len(entry["metadata"]["puzzle"])
            filled = ([[cell or digit for cell in row] for row in puzzle] for digit in range(1, size + 1))
            return ["\n".join(" ".join(map(str, row)) for row in board) for board in filled]
        case "word_sorting":  # its part of words in their places
            return [", ".join(entry["metadata"]["original_words"])]
        case "time_intervals":  # its distance to the interval, which is often close to the mean
            return ["1:00", "12:00:00", "50 days", "50 days, 12:00"]
        case "rectangle_count":  # its distance to the number, which is small
            return ["1", "2", "3", "4", "5"]
        case "prime_factorization":  # any product that equals the number, such as the number itself
            return [str(entry["metadata"]["number"])]
        case "polynomial_equations":  # its distance to the solutions, which are often small
            return ["0"]
    return []


def _exact(node: ast.expr) -> Fraction:
    """Return the value of a formula of whole numbers and the four operations. Raises ZeroDivisionError."""
    match node:
        case ast.Constant(value=int() as value):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_exact(operand)
        case ast.UnaryOp(operand=operand):
            return _exact(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATIONS[type(op)](_exact(left), _exact(right))
    raise ValueError("no formula of whole numbers")


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


# ---- accepted answers


def refusal(answer: str, generator: str) -> str:
    """Return why `answer` must not reach the scorer of `generator`. Empty if it is harmless."""
    if len(answer) > MAX_CHARS:
        return f"longer than {MAX_CHARS} characters"
    if generator not in _HEXADECIMAL_ANSWERS and re.search(r"[eE][+-]?[\d_]{4,}", answer):
        return "a number with a huge exponent"
    if generator in _MOVE_SCORERS and re.search(r"\d{3}", answer):
        return "a move repeated without end"
    if generator not in PYTHON_SCORERS | SYMPY_SCORERS:
        return ""
    try:
        tree = _parse(answer)
    except (SyntaxError, ValueError) as error:
        if "deep" in str(error):
            return str(error)
        # Text that is not Python is harmless to Python scorers, whose `eval` accepts only literals.
        return "" if generator in PYTHON_SCORERS else "no formula"
    if generator in PYTHON_SCORERS:
        code = next((node for node in ast.walk(tree) if not isinstance(node, _LITERAL)), None)
        return "" if code is None else f"Python code ({type(code).__name__}), not a literal"
    return _refuse_formula(answer, tree, generator)


def literal(text: str) -> Any:
    """Evaluate lists, strings and numbers only, in place of `eval` in scorers. Raises ValueError or SyntaxError."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    return ast.literal_eval(_parse(text))


def _parse(text: str) -> ast.Expression:
    if _OPENERS.search(text):  # Python's own limits depend on the stack
        raise ValueError("nested too deep")
    try:
        return parse_source(text.strip(), "eval")
    except (RecursionError, MemoryError) as error:
        raise ValueError("nested too deep") from error


def _refuse_formula(answer: str, tree: ast.Expression, generator: str) -> str:
    """Accept arithmetic with known functions, single-letter variables and small exponents, else return the reason."""
    max_chars, highest = _MAX_FORMULA.get(generator, _USUAL_FORMULA)
    if len(answer) > max_chars:
        return f"longer than {max_chars} characters"
    if re.search(r"[^\w \t+\-*/().,^]", answer, re.ASCII):  # sympy interprets other characters in its own way
        return "characters that no formula here needs"
    arithmetic = generator in ARITHMETIC_SCORERS
    if arithmetic and re.search(r"[^\d \t+\-*/()]", answer, re.ASCII):  # the scorers do not see "1_2" and "12e0"
        return "more than whole numbers and the four operations"
    allowed = _SUM if arithmetic else _FORMULA
    try:
        for node in ast.walk(tree):
            if not isinstance(node, allowed):
                what = node.__class__.__name__
                return f"more than numbers and the four operations ({what})" if arithmetic else f"no formula ({what})"
            if reason := _refuse_node(node, highest):
                return reason
        return "functions nested too deep" if _depth(tree, ast.Call) > 2 else ""
    except RecursionError:
        return "nested too deep"


def _refuse_node(node: ast.AST, highest: float) -> str:
    """Return why one node of a formula is refused, as are numbers from `highest` on. Empty if it is accepted."""
    match node:
        case ast.Constant(value=value):
            small = type(value) is not bool and isinstance(value, int | float) and abs(value) < highest
            return "" if small else "a number too large, or none"
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return ""
        case ast.Call():
            return "a call of something other than a known function"
        case ast.Name(id=name) if len(name) > 1 and name not in _FUNCTIONS | {"pi"}:
            return f"the name {name[:40]!r}"
        case ast.BinOp(left=base, op=ast.Pow() | ast.BitXor(), right=exponent):
            limit = 999 if isinstance(base, ast.Constant | ast.Name | ast.Call) else 9
            if _depth(base, *_POWERS) or _depth(exponent, ast.Call, *_POWERS) or not _bound(exponent) <= limit:
                return "a power that may not end"
    return ""


def _bound(node: ast.AST) -> float:
    """Return an upper bound of an exponent's absolute value, with 1 for each variable, or infinity if unknown."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(abs(value)) if abs(value) < 1e40 else float("inf")
        case ast.Name():
            return 1.0
        case ast.UnaryOp(operand=operand):
            return _bound(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return _bound(left) + _bound(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _bound(left) * _bound(right)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int() as value)) if value:
            return _bound(left) / abs(value) if abs(value) < 1e40 else float("inf")
    return float("inf")


def _depth(node: ast.AST, *kinds: type[ast.AST]) -> int:
    """Return the nesting depth of nodes of some kinds. An operator counts for its operation."""
    deepest, waiting = 0, [(node, 0)]
    while waiting:  # a sum of many terms is nested deeper than Python's stack
        each, depth = waiting.pop()
        depth += isinstance(each, kinds) or (isinstance(each, ast.BinOp) and isinstance(each.op, kinds))
        deepest = max(deepest, depth)
        waiting += [(child, depth) for child in ast.iter_child_nodes(each) if not isinstance(child, ast.operator)]
    return deepest


# ---- the scoring process


class _Scorer:
    """A scoring process. Starts at the first use, restarts after its death, and ends with its standard input."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, *question: Any) -> tuple[float, dict[str, str]]:
        packed = pickle.dumps(question)  # replies are JSON, so that this process unpickles nothing
        process = self._running()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(len(packed).to_bytes(8, "big") + packed)
            process.stdin.flush()
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            reply = process.stdout.readline() if poll.poll((START_S + _WAIT_S) * 1000) else b""
        except BrokenPipeError:
            reply = b""
        if not reply.endswith(b"\n"):
            self._end()
            self._running()  # so that it has started when the next answer comes
            return 0.0, {"error": f"the scorer broke its limits: {SCORE_S:g} s, {MEMORY_MB} MiB"}
        value, reasons = json.loads(reply)
        return value, reasons

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            inherited = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C must only reach the controller
            )
            atexit.register(self._end)
        return self._process

    def _end(self) -> None:
        atexit.unregister(self._end)
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_scorers: queue.LifoQueue[_Scorer] = queue.LifoQueue()
"""Idle scoring processes, so that a slow answer delays no others. The last one used is the next, so few are started."""
for _ in range(min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))):
    _scorers.put(_Scorer())


def serve(make_dataset: Callable[[Mapping[str, Any]], Any]) -> None:
    """Run the scoring process: answer questions on standard input until it ends.

    `make_dataset` makes reasoning-gym's data set of one question from its source.
    """

    @lru_cache(maxsize=8)  # some take many megabytes
    def dataset_of(packed: bytes) -> Any:
        return make_dataset(pickle.loads(packed))  # noqa: S301  # from the parent

    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of the library must not mix with replies
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB << 20, MEMORY_MB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while size := sys.stdin.buffer.read(8):
        packed = sys.stdin.buffer.read(int.from_bytes(size, "big"))
        source, entry, answer = pickle.loads(packed)  # noqa: S301  # from the parent
        dataset = dataset_of(pickle.dumps(source))
        signal.setitimer(signal.ITIMER_PROF, SCORE_S)  # the unhandled signal ends the process
        reply = _score_here(dataset, entry, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
