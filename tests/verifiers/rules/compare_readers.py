r"""Accuracy and time of `MathEqual` and of math-verify alone, as in docs/results/verifiers.md.

``python tests/verifiers/rules/compare_readers.py PATH`` takes the folder of the tests of math-verify
(https://github.com/huggingface/Math-Verify), which are not part of this project. Without a path, those tests are left
out.
"""

from __future__ import annotations

import argparse
import ast
import logging
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import answer_styles
import maths_pairs

Case = tuple[str, str, bool]  # gold answer, text, whether it is right
Judge = Callable[[list[Case]], list[bool]]

FILES = "test_all test_numina_cases test_open_thoughts test_strict test_boxed test_yujianll"
_TABLE = r"""
    5 = x ⇒ 5 ¦ 0.5 = y ⇒ 1/2 ¦ 5 = x ⇒ x = 5 ¦ 5 = x ⇏ 6 ¦ \boxed 7 ⇒ 7 ¦ The answer is $\boxed 7$. ⇒ 7
    \boxed\frac12 ⇒ \frac{1}{2} ¦ [0,2]\cup[1,3] ⇒ [0,3] ¦ [0,2]\cup[1,3] ⇏ [0,3) ¦ [0,1]\cup[2,3] ⇏ [0,3]
    (-\infty,\infty) ⇒ \mathbb{R} ¦ x \in \mathbb R ⇒ (-\infty,\infty) ¦ \mathbb{R} ⇏ \mathbb{Z} ¦ \lg 100 ⇒ 2
    \lg 100 ⇏ 3 ¦ The answer is (A). ⇒ A ¦ A) Paris ⇒ A ¦ The answer is (A) or (B). ⇏ A ¦ (A) is wrong. ⇏ A
    A... no, wait, B ⇒ B ¦ A⏎B⏎C⏎D ⇏ D ¦ \boxed{42} \boxed{43} ⇏ 43 ¦ 答えは42です。 ⇒ 42 ¦ 정답은 42입니다. ⇒ 42
    उत्तर ४२ है। ⇒ 42 ¦ الإجابة هي ٤٢. ⇒ 42 ¦ 答案不是42。 ⇏ 42 ¦ café ⇒ café
"""
REPORTED: list[Case] = [(gold, text, right) for text, gold, right in answer_styles.read_table(_TABLE)]


def cases_of_math_verify(folder: Path) -> list[Case]:
    """Gold answers, texts and verdicts that the tests of math-verify hold as literals."""
    result: list[Case] = []
    for name in FILES.split():
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            for mark in (node for node in function.decorator_list if isinstance(node, ast.Call) and len(node.args) > 1):
                try:
                    names, rows = (ast.literal_eval(argument) for argument in mark.args[:2])
                except ValueError:  # computed values
                    continue
                for values in rows:
                    row = dict(zip((name.strip() for name in names.split(",")), values, strict=True))
                    if row.get("strict", True):
                        result.append((row["gold"], row["pred"], bool(row.get("expected", row.get("result")))))
    return result


def ours(cases: list[Case]) -> list[bool]:
    """The verdicts of `MathEqual`."""
    from forge_agents.types import Trajectory, Turn
    from forge_verifiers import MathEqual

    def trajectory(gold: str, text: str) -> Trajectory:
        turn = Turn(agent="a", index=0, observation="", action=text, reward=0.0)
        return Trajectory(agent="a", policy="p", turns=(turn,), env_id="t", seed=0, info={"answer": gold})

    scores = MathEqual().score([trajectory(gold, text) for gold, text, _ in cases])
    return [bool(score == 1) for score in scores]


def theirs(cases: list[Case], *, as_given: bool = False) -> list[bool]:
    """The verdicts of math-verify alone. A short text without dollar signs gets them, because formulas need them."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def read(text: str) -> list[object]:
        is_bare = not as_given and len(text) < 100 and not {"$", "\n"} & {*text}
        return list((is_bare and parse(f"${text}$", config)) or parse(text, config))

    return [verify(read(gold), read(text)) for gold, text, _ in cases]


def accuracy(cases: list[Case], judge: Judge) -> str:
    """Right verdicts, and the two kinds of wrong ones."""
    verdicts = judge(cases)
    right = sum(verdict is is_right for verdict, (_, _, is_right) in zip(verdicts, cases, strict=True))
    accepted = sum(verdict and not is_right for verdict, (_, _, is_right) in zip(verdicts, cases, strict=True))
    return f"{right} of {len(cases)} right, {accepted} wrong answers accepted"


def milliseconds(cases: list[Case], judge: Judge) -> float:
    """Processor time for one case, of this process and its children, without the start of the workers."""
    from forge_verifiers.rules.maths.worker import WORKERS

    def used() -> float:
        return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

    def once(chosen: list[Case]) -> float:
        WORKERS.close()
        start = used()
        judge(chosen)
        WORKERS.close()  # only an ended child is counted
        return used() - start

    few, many = cases[: len(cases) // 3], cases[len(cases) // 3 :]
    return 1000 * (once(many) - once(few)) / (len(many) - len(few))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, help="folder of the tests of math-verify")
    path = parser.parse_args().path
    logging.disable()
    plain = [(gold, text, equal) for rows in maths_pairs.PAIRS.values() for text, gold, equal in rows]
    own = cases_of_math_verify(path) if path else []
    styles = [(case.gold, case.text, case.is_right) for case in dict.fromkeys(answer_styles.cases())]
    start = 100 + time.time_ns() % 7
    speeds: dict[str, list[Case]] = {
        "integers": [(str(k), f"The answer is {k}.", True) for k in range(start, start + 500)],
        "fractions": [(f"{k}/7", rf"\boxed{{\frac{{{k}}}{{7}}}}", True) for k in range(start, start + 500)],
        "roots": [(rf"\sqrt{{{k}}}+{k}", rf"$\boxed{{{k}+\sqrt{{{k}}}}}$", True) for k in range(start, start + 300)],
        "intervals": [(f"[0,{k}]", rf"\boxed{{[0,{k - 1}]\cup[1,{k}]}}", True) for k in range(start, start + 300)],
    }
    lines = []
    for name, judge, judge_own in (("MathEqual", ours, ours), ("math-verify", theirs, partial(theirs, as_given=True))):
        lines += [f"{name:12} reported: {accuracy(REPORTED, judge)}", f"{name:12} pairs: {accuracy(plain, judge)}"]
        lines += [f"{name:12} tests of math-verify: {accuracy(own, judge_own)}"] if own else []
        lines += [f"{name:12} styles: {accuracy(styles, judge)}"]
        lines += [f"{name:12} {kind}: {milliseconds(cases, judge):.2f} ms" for kind, cases in speeds.items()]
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
