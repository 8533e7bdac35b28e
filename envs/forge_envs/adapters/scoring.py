"""Scores of reasoning-gym's generators, some of which evaluate an answer as Python or sympy or compute without end.

In: a question of a generator and a text that a model wrote. Out: its score, and why it is 0 where the generator did not
say so. A text is refused where it is more than a literal or a formula; what then still computes does so in a process
beside this one. Waits for that process, at most `SCORE_S`, and `START_S` more where it must be started.
"""

from __future__ import annotations

import ast
import atexit
import json
import os
import pickle
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np

from forge_envs.adapters.contained import Randomness, failure

PYTHON_SCORERS = frozenset(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"))
"""Generators of reasoning-gym 0.1.25 that call `eval` on the answer; theirs is replaced by `literal`."""

SYMPY_SCORERS = frozenset(
    ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
)
"""Generators that hand the answer to `sympy.parse_expr`, which evaluates it as Python, too."""

ARITHMETIC_SCORERS = frozenset(("countdown", "puzzle24"))
"""Those of them whose answers need no more than numbers and the four operations."""

COMPUTING_SCORERS = PYTHON_SCORERS | SYMPY_SCORERS | {"coin_flip", "rubiks_cube"}
"""All of these, and those whose work grows with a number in the answer: a fraction's exponent, a move's repeats. They
score in a process of their own, within limits."""

MAX_CHARS = 20_000
_MAX_FORMULA_CHARS = 1000
_FUNCTIONS = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs Rational".split()  # noqa: SIM905
)
_POWERS = (ast.Pow, ast.BitXor)  # `^` is none to sympy, but costs as much to refuse
_SUM = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.UAdd)
_FORMULA = (*_SUM, *_POWERS, ast.Name, ast.Call, ast.Load)
_LITERAL = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub)
_OPENERS = re.compile(r"[-+~(\[{](?:\s*[-+~(\[{]){49}")

SCORE_S = 10.0
"""One answer; honest ones take milliseconds, sympy's simplification at times a second."""
START_S = 120.0
"""To import reasoning-gym and sympy, which takes two seconds on an idle machine."""
MEMORY_MB = 4096
"""Address space, most of which the libraries only reserve."""
_PROGRAM = "from forge_envs.adapters.scoring import serve; serve()"
_COMMAND = (sys.executable, "-P", "-c", _PROGRAM)
_KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")


def score(dataset: Any, entry: dict[str, Any], answer: str, generator: str) -> tuple[float, dict[str, str]]:
    """The generator's score in [0, 1], and why it is 0 where the generator did not say so."""
    if why := refusal(answer, generator):
        return 0.0, {"refused": why}
    return (_scorer.ask if generator in COMPUTING_SCORERS else _scored_here)(dataset, entry, answer)


def _scored_here(dataset: Any, entry: dict[str, Any], answer: str) -> tuple[float, dict[str, str]]:
    """The generator's score of an answer that may be handed to it, and the error that it raised."""
    home = type(dataset).__module__
    if home.rpartition(".")[2] in PYTHON_SCORERS:
        vars(sys.modules[home])["eval"] = literal  # what the scorer calls by that name
    try:
        with Randomness(0).contained():
            value = float(dataset.score_answer(answer, entry))
    except Exception as error:  # noqa: BLE001  # the generator's code, on text that a model wrote
        return 0.0, {"error": failure(error)}
    return (min(1.0, max(0.0, value)), {}) if np.isfinite(value) else (0.0, {"error": f"scored {value}"})


# ---- what may be handed to a scorer


def refusal(answer: str, generator: str) -> str:
    """Why `answer` is not handed to the scorer of `generator`; empty where it is harmless."""
    if len(answer) > MAX_CHARS:
        return f"longer than {MAX_CHARS} characters"
    if re.search(r"[eE][+-]?[\d_]{4,}", answer):
        return "a number with a huge exponent"
    if generator == "rubiks_cube" and re.search(r"\d{3}", answer):
        return "a move repeated without end"
    if generator not in PYTHON_SCORERS | SYMPY_SCORERS:
        return ""
    try:
        tree = _parsed(answer)
    except (SyntaxError, ValueError) as why:
        if "deep" in str(why):
            return str(why)
        # Not even Python: the scorer may compare it with the right text, and its `eval` reads literals only.
        return "" if generator in PYTHON_SCORERS else "no formula"
    if generator in PYTHON_SCORERS:
        odd = next((node for node in ast.walk(tree) if not isinstance(node, _LITERAL)), None)
        return "" if odd is None else f"Python code ({type(odd).__name__}), not a literal"
    return _formula(answer, tree, generator)


def literal(text: str) -> Any:
    """What stands in for `eval` in the scorers that call it: lists, texts and numbers, no more.

    Raises:
        ValueError: `text` is no literal, or too long or too deep a one.
        SyntaxError: It is not Python.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    return ast.literal_eval(_parsed(text))


def _parsed(text: str) -> ast.Expression:
    if _OPENERS.search(text):  # also keeps Python's own parser from its limits, which depend on the stack
        raise ValueError("nested too deep")
    try:
        return ast.parse(text.strip(), mode="eval")
    except (RecursionError, MemoryError) as why:
        raise ValueError("nested too deep") from why


def _formula(answer: str, tree: ast.Expression, generator: str) -> str:
    """Arithmetic with known functions, single-letter variables and small exponents."""
    if len(answer) > _MAX_FORMULA_CHARS:
        return f"longer than {_MAX_FORMULA_CHARS} characters"
    if re.search(r"[^\w \t+\-*/().,^]", answer, re.ASCII):  # sympy reads other signs its own way
        return "characters that no formula here needs"
    arithmetic = generator in ARITHMETIC_SCORERS
    allowed = _SUM if arithmetic else _FORMULA
    try:
        for node in ast.walk(tree):
            if not isinstance(node, allowed):
                what = node.__class__.__name__
                return f"more than numbers and the four operations ({what})" if arithmetic else f"no formula ({what})"
            if why := _odd(node):
                return why
        return "functions nested too deep" if _depth(tree, ast.Call) > 2 else ""
    except RecursionError:
        return "nested too deep"


def _odd(node: ast.AST) -> str:
    """What is wrong with one part of a formula."""
    match node:
        case ast.Constant(value=value):
            small = type(value) is not bool and isinstance(value, int | float) and abs(value) < 1e40
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
    """What the size of an exponent cannot exceed, with 1 for each variable; infinity where that is not clear."""
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
    """How many nodes of these kinds stand inside each other; operators count for their operation."""
    own = isinstance(node, kinds) or (isinstance(node, ast.BinOp) and isinstance(node.op, kinds))
    children = (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.operator))
    return own + max((_depth(child, *kinds) for child in children), default=0)


# ---- the process beside this one


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


def serve() -> None:
    """Answer questions on standard input until it ends: the other process."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints is no reply
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB << 20, MEMORY_MB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while size := sys.stdin.buffer.read(8):
        question = pickle.loads(sys.stdin.buffer.read(int.from_bytes(size, "big")))  # noqa: S301  # from our own parent
        signal.setitimer(signal.ITIMER_REAL, SCORE_S)  # not handled: it ends the process, whatever it computes
        reply = _scored_here(*question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
