"""Answers of several kinds in many styles. `compare_readers` prints how many of them are read.

A *right* text finally states the gold answer. A *wrong* text states another, two of them, or denies the right one. The
texts were written before either side was run on them.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import NamedTuple


def _texts(table: str) -> list[str]:
    """The texts of a table, separated by ``¦`` and line ends. ``⏎`` is a line end within a text."""
    return [cell.strip().replace("⏎", "\n") for line in table.strip().splitlines() for cell in line.split("¦")]


# {g} is the answer, {w} another one; {gt} and {wt} the same in LaTeX.
STATED = _texts(r"""
    {g} ¦ It is {g}. ¦ It's {g} ¦ I think it's {g} ¦ I believe that it is {g}. ¦ **{g}** ¦ The answer is {g}.
    The answer is **{g}**. ¦ The answer is: {g} ¦ **Answer:** {g} ¦ **Answer**: {g} ¦ Answer: {g} ¦ ANSWER: {g}
    ### Answer⏎⏎{g} ¦ ## Final answer⏎**{g}** ¦ First, 12 items. Then 7 more.⏎#### {g}
    Two steps, 2 and 3, give it.⏎⏎\boxed{{{gt}}} ¦ The answer is $\boxed{{{gt}}}$. ¦ \[⏎\boxed{{{gt}}}⏎\]
    The answer is ${gt}$. ¦ The answer is \({gt}\). ¦ The answer is:⏎\[ {gt} \]
    Final Answer: The final answer is ${gt}$. I hope it is correct. ¦ <answer>{g}</answer>
    <answer>⏎**{g}**⏎</answer> ¦ <think>Could it be {w}? No, that fails.</think>⏎<answer>{g}</answer>
    <think>The answer is {w}.</think>The answer is {g}. ¦ {w} is tempting, but the answer is {g}.
    The answer is {w}. Wait, no: {g} ¦ The answer is {w}. Actually, it is {g}.
    \boxed{{{wt}}}⏎Wait, I made a mistake in step 2.⏎\boxed{{{gt}}}
    The answer is {w}.⏎⏎Let me check. No, the answer is {g}. ¦ The answer is not {w} but {g}.
    The answer is {g}, not {w}. ¦ {g} is the answer. ¦ So {g} is the final answer.
    The answer is {g} because step 2 leaves nothing else. ¦ The answer is {g}, which is what 3 of us found.
    Therefore, the answer to question 7 is {g}. ¦ 1. Read the question.⏎2. Do it.⏎⏎Therefore, the result is {g}.
    Hence the value is ${gt}$. ¦ The answer is {g}!⏎⏎I hope this helps.
""")
UNDECIDED = _texts(r"""
    {g} or {w} ¦ It is {g} or {w}. ¦ It is {w} or {g}. ¦ The answer is {g} or {w}. ¦ The answer is either {w} or {g}.
    Maybe {w}, maybe {g}. ¦ \boxed{{{gt}}} or \boxed{{{wt}}} ¦ The answer is {w}. Or maybe {g}.
    The answer is {g}, but it could be {w}. ¦ The answer is not {g}. ¦ I don't think the answer is {g}.
    It is not {g}. ¦ The answer lies between {w} and {g}. ¦ I do not know.
""")


class Gold(NamedTuple):
    """An answer in every style, and one that must not pass for it."""

    plain: str
    latex: str
    wrong: str
    wrong_latex: str


class Case(NamedTuple):
    """A text and the gold answer it is held against."""

    kind: str
    text: str
    gold: str
    is_right: bool


def _integers(rng: random.Random) -> Iterator[Gold]:
    for _ in range(6):
        a = rng.choice([rng.randint(-99, 99), rng.randint(100, 10**6)])
        b = a + rng.choice([-10, -1, 1, 10, 100])
        yield Gold(str(a), str(a), str(b), str(b))
        yield Gold(f"{abs(a) + 1000:,}", f"{abs(a) + 1000:,}", f"{abs(b) + 2000:,}", f"{abs(b) + 2000:,}")


def _fractions(rng: random.Random) -> Iterator[Gold]:
    for _ in range(6):
        p, q = rng.randint(1, 9), rng.choice([7, 11, 13])
        sign = rng.choice(["", "-"])
        yield Gold(f"{sign}{p}/{q}", rf"{sign}\frac{{{p}}}{{{q}}}", f"{sign}{q}/{p}", rf"{sign}\frac{{{q}}}{{{p}}}")
        x, y = f"{sign}{p}.{q}", f"{sign}{p}.{q + 1}"
        yield Gold(x, x, y, y)


def _money_and_units(rng: random.Random) -> Iterator[Gold]:
    for unit in ("apples", "km", "%", "hours"):
        a = rng.randint(2, 90)
        gap = "" if unit == "%" else " "
        latex = r"\%" if unit == "%" else rf"\text{{ {unit}}}"
        yield Gold(f"{a}{gap}{unit}", f"{a}{latex}", f"{a + 1}{gap}{unit}", f"{a + 1}{latex}")
    yield Gold("$18", r"\$18", "$81", r"\$81")
    yield Gold("$1,250.50", r"\$1{,}250.50", "$1,205.50", r"\$1{,}205.50")


_FORMULAS = [
    ("2sqrt(3)", r"2\sqrt{3}", "3sqrt(2)", r"3\sqrt{2}"),
    ("x^2 + 1", "x^2 + 1", "x^2 - 1", "x^2 - 1"),
    ("pi/4", r"\frac{\pi}{4}", "pi/2", r"\frac{\pi}{2}"),
    ("(3, -1)", "(3, -1)", "(-1, 3)", "(-1, 3)"),
    ("[0, 5)", "[0, 5)", "[0, 5]", "[0, 5]"),
    ("3 + 4i", "3 + 4i", "3 - 4i", "3 - 4i"),
    ("10^3", "10^3", "10^4", "10^4"),
    ("x = 7", "x = 7", "x = 6", "x = 6"),
    ("2^(1/3)", "2^{1/3}", "3^(1/2)", "3^{1/2}"),
]
_GENERATORS = (
    *("chain_sum", "fraction_simplification", "decimal_arithmetic", "simple_equations", "gcd", "leg_counting"),
    *("products", "simple_geometry", "complex_arithmetic", "power_function", "intermediate_integration"),
    "polynomial_multiplication",
)


def read_table(table: str) -> list[tuple[str, str, bool]]:
    """Texts that are right, ``text ⇒ gold``, or wrong, ``text ⇏ gold``."""
    rows = [re.split(" ([⇒⇏]) ", cell) for cell in _texts(table)]
    return [(text, gold, sign == "⇒") for text, sign, gold in rows]


WRITINGS = [  # the same answer written in another way, or nearly the same
    *read_table(r"""
        It is 0.5. ⇒ 1/2 ¦ 2 ⇏ 1/2 ¦ It is 7/2 ⇏ 1/2 ¦ It is 1/12 ⇏ 1/2 ¦ The answer is $\frac{1}{2}$, or 0.5. ⇒ 1/2
        The answer is 50%. ⇒ 0.5 ¦ The probability is 0.05. ⇏ 0.5 ¦ 3 ⇏ 10^3 ¦ The answer is 1000. ⇒ 10^3
        The answer is 1,000. ⇒ 10^3 ¦ 3-5 ⇏ 5 ¦ It is 3-5. ⇏ 5 ¦ The answer is 3 to 5. ⇏ 5 ¦ At least 5 ⇏ 5
        Between 4 and 5 ⇏ 5 ¦ The answer is −5. ⇒ -5 ¦ The answer is 5. ⇏ -5 ¦ Der Wert ist 3,14. ⇒ 3.14 ¦ 3,14 ⇏ 314
        1.234,56 ⇒ 1234.56 ¦ 1 234 567 ⇒ 1234567 ¦ 1,234 ⇏ 1.234 ¦ The answer is 12,345. ⇒ 12345
        The answer is 5,000 m. ⇒ 5 km ¦ The answer is 5 m. ⇏ 5 km ¦ The total is $5.00. ⇒ 5
        She pays 18 dollars. ⇒ $18 ¦ She pays 18 euros. ⇏ $18 ¦ It costs 75 cents. ⇒ $0.75
        \boxed{2\frac{3}{4}} ⇒ 11/4 ¦ 2 3/4 ⇒ 2.75 ¦ 2 3/4 ⇏ 3/2 ¦ 6 * 7 = 42 ⇒ 42 ¦ 6 * 7 = 42 ⇏ 7
        6 times 7 is 42. ⇒ 42 ¦ 42 is 6 times 7. ⇒ 42 ¦ 42 is 6 times 7. ⇏ 7 ¦ x = 5 or x = 3 ⇏ 5
        x = 5 or x = 3 ⇒ \{3, 5\} ¦ The answer is $x = 5$ and $x = 3$. ⇒ 3, 5 ¦ The answer is (C). ⇒ C
        The answer is C) 42 ⇒ C ¦ The answer is (D). ⇏ C ¦ The answer is 2.5e-3. ⇒ 0.0025
        $2.5 \times 10^{-3}$ ⇒ 0.0025 ¦ $2.5 \times 10^{3}$ ⇏ 0.0025
        \boxed{\dfrac{\sqrt{2}}{2}} ⇒ \frac{1}{\sqrt{2}} ¦ \boxed{\{1, 2\}} ⇒ \{2, 1\} ¦ \boxed{(1, 2)} ⇏ (2, 1)
        \boxed{x \ge 2} ⇒ [2, \infty) ¦ \boxed{x > 2} ⇏ [2, \infty)
        She has 3 apples and buys 4, so she has 7 apples. ⇒ 7 ¦ She has 3 apples and buys 4, so she has 7 apples. ⇏ 4
        Natalia sold 48/2 = 24 clips in May, 48+24 = 72 altogether.⏎#### 72 ⇒ 72
        If there are 3 or 4 cars, the total is 7. ⇒ 7 ¦ The solutions are 3 and 5. ⇏ 5
        The answer is 5. The answer is 6. ⇏ 5 ¦ Is it 5? No, it is 6. ⇏ 5 ¦ I got 5, no, 6. ⇒ 6
        I doubt the answer is 5. ⇏ 5
    """),  # noqa: RUF001
    # As models write that were not asked for a form, and as solutions of GSM8K end.
    *read_table(r"""
        So Janet makes 9 * 2 = $18 every day at the farmer's market. ⇒ 18
        So Janet makes 9 * 2 = $18 every day at the farmer's market. ⇏ 2 ¦ Janet makes **$18** per day. ⇒ 18
        Therefore, she makes $18 dollars each day. ⇒ $18
        Therefore, Michael spent €98 + €66 = €164 for the school supplies. ⇒ 164
        It is $483,800 - $440,000 = $43,800 more than Mrs. Lee's budget. ⇒ 43800
        Therefore, there are 132 - 112 = 20 bananas that do not fit. ⇒ 20
        Therefore, there are 132 - 112 = 20 bananas that do not fit. ⇏ 112
        Now add the two amounts: 132 kg + 296 kg = 428 kg ⇒ 428 ¦ 130 spools / 250 spools * 100% = 52% ⇒ 52
        80 students play and 7 dance, so 80+7 = 87 students will be leaving early ⇒ 87
        80 students play and 7 dance, so 80+7 = 87 students will be leaving early ⇏ 80
        Bruce slew 0.25 as many ogres as Arthur, or 200*0.25=50 ogres. ⇒ 50
        Since the fraction is 87/128, she used 87/128*512 = 348 ⇒ 348
        John is 5 years older than Mary. Mary is 10, so John is 15. ⇒ 15
        John is 5 years older than Mary. Mary is 10, so John is 15. ⇏ 10
        The total cost is 5 * 100 = $500, and the total profit is $125. ⇒ 125
        It will take 2+1=3 bolts of blue and white fiber. ⇒ 3 ¦ Thus, 75% of the students are girls. ⇒ 75
        It is 5 times as large. ⇒ 5 ¦ The company made 5 million dollars. ⇒ 5000000
        The company made 5 million dollars. ⇏ 5 ¦ The answer is 3.5 x 10^5. ⇒ 350000
        The answer is 3.5 × 10⁵. ⇒ 350000 ¦ The answer is 10²³. ⇒ 10^{23} ¦ The answer is 10²³. ⇏ 10^8
        The probability is 3 out of 4. ⇒ 3/4 ¦ The probability is 1/3 or approximately 33.3%. ⇒ 1/3
        The answer is 18, assuming that each of the 3 kids eats 6. ⇒ 18 ¦ The answer is 18 (3 kids times 6). ⇒ 18
        So the answer is 18.<|im_end|> ⇒ 18 ¦ The answer is: **18** ✅ ⇒ 18
        \begin{align*}⏎x &= 12 + 6 \\⏎&= 18⏎\end{align*} ⇒ 18
        The solutions are \(\boxed{2}\) and \(\boxed{3}\). ⇒ 2, 3
        The solutions are \(\boxed{2}\) and \(\boxed{3}\). ⇏ 3 ¦ \boxed{y = 3, x = 2} ⇒ (2, 3)
        \boxed{y = 2, x = 3} ⇏ (2, 3) ¦ The train arrives at 3:30 PM. ⇒ 3:30 PM
        The train arrives at 3:30 PM. ⇏ 3:30 AM ¦ **B. Paris** ⇒ B ¦ The correct answer is **B. Paris**. ⇒ B
        The correct answer is **B. Paris**. ⇏ A ¦ \boxed{\textbf{(B)}\ 42} ⇒ B ¦ Option C is correct. ⇒ C
        42 is wrong. ⇏ 42 ¦ 42 is not the answer. ⇏ 42 ¦ 42 is the wrong answer ⇏ 42 ¦ 42 is wrong, it is 43. ⇒ 43
        I doubt it is 42. ⇏ 42 ¦ 42? I don't think so. ⇏ 42 ¦ The answer is 42. No, that is wrong. ⇏ 42
        Everything except 42 ⇏ 42 ¦ The answer is anything but 42. ⇏ 42 ¦ The reciprocal of 42 ⇏ 42
        \boxed{{42}} ⇒ 42 ¦ \boxed{\bf 42} ⇒ 42 ¦ \boxed{\,42\,} ⇒ 42 ¦ \boxed{\underline{42}} ⇒ 42 ¦ \framebox{42} ⇒ 42
        \boxed{\text{The answer is } 42} ⇒ 42 ¦ → 42 ⇒ 42 ¦ ∴ x = 42 ⇒ 42 ¦ It adds up to 42. ⇒ 42 ¦ 42</s> ⇒ 42
        There are seven apples. ⇒ 7 ¦ The answer is forty-two. ⇒ 42 ¦ The capital of France is Paris. ⇒ Paris
        The capital of France is not Paris. ⇏ Paris ¦ The wrong one is Paris. ⇏ Paris ¦ „Paris“ ⇒ Paris
        So she makes $42, and the answer of $20 is wrong. ⇒ 42 ¦ There are 42 eggs, but the label is wrong. ⇒ 42
        The total is 42, which isn't the answer Tom gave. ⇒ 42 ¦ It is 42, which is wrong. ⇏ 42
        42, I think, is wrong ⇏ 42
        The answer is Paris. Actually, Lyon is smaller. ⇒ Paris ¦ The answer is Paris. Actually Paris is old. ⇒ Paris
        The answer is Paris. Wait, it is New Orleans. ⇏ Paris ¦ The answer is Paris, not Lyon. ⇒ Paris
        The only option I exclude is Paris. ⇏ Paris ¦ The city it never was is Paris. ⇏ Paris
        No - it is not. ⇒ no ¦ Yes - it is. ⇒ yes
        The answer is Paris. Wait, Rome. ⇏ Paris ¦ The answer is Paris. No, it is Rome. ⇒ Rome ¦ cafe ⇏ café ¦ 六 ⇏ 五
        Josh makes $200,000 - $130,000 = $70,000 profit. ⇒ 70000 ¦ The answer is (42). ⇒ 42 ¦ ANSWER: 711 ⇏ 11
        The answer is [42] ⇒ 42 ¦ 5 ⇏ -5 ¦ the result is -5 exactly ⇒ -5
        Yes – it is prime. ⇒ yes ¦ Final answer: Yes, it is. ⇒ yes ¦ I doubt the answer is true. ⇏ true
        Yes, it is prime. ⇒ yes ¦ Yes, it is prime. ⇏ no ¦ No, 15 is not prime. ⇒ no ¦ The statement is true. ⇒ True
        It is not so that the statement is true. ⇏ True
    """),  # noqa: RUF001
    # Dates, scores and times are no sums.
    *read_table(r"""
        The date is 2020-01-05. ⇒ 2020-01-05 ¦ The date is 2020-02-04. ⇏ 2020-01-05 ¦ 2015 ⇏ 2020-01-04
        The answer is 05/01/2021. ⇒ 5/1/2021 ¦ The answer is 02/02/2021. ⇏ 01/01/2021 ¦ The score was 3-2. ⇒ 3-2
        The score was 2-1. ⇏ 3-2 ¦ It arrives at 03:30. ⇒ 3:30 ¦ It arrives at 4:40. ⇏ 3:30 ¦ The ratio is 5:10. ⇒ 1:2
    """),
]


def cases(seed: int = 0) -> list[Case]:
    """All texts, by kind."""
    rng = random.Random(seed)
    kinds = {
        "integers": list(_integers(rng)),
        "fractions, decimals": list(_fractions(rng)),
        "money, units, percent": list(_money_and_units(rng)),
        "formulas, tuples, intervals": [Gold(*one) for one in _FORMULAS],
        "reasoning-gym": list(_reasoning_gym(rng)),
    }
    result: list[Case] = []
    for kind, values in kinds.items():
        for gold in values:
            swapped = Gold(gold.wrong, gold.wrong_latex, gold.plain, gold.latex)
            for style in STATED:
                result += [
                    Case(kind, _said(style, gold), gold.plain, True),
                    Case(kind, _said(style, swapped), gold.plain, False),
                ]
            result += [Case("undecided, denied", _said(style, gold), gold.plain, False) for style in UNDECIDED]
    return result + [Case("other writings", *one) for one in WRITINGS]


def _said(style: str, gold: Gold) -> str:
    return style.format(g=gold.plain, gt=gold.latex, w=gold.wrong, wt=gold.wrong_latex)


def _reasoning_gym(rng: random.Random) -> Iterator[Gold]:
    """Gold answers of generators, each with another question's answer as the wrong one."""
    from reasoning_gym import create_dataset

    from forge_envs.adapters.contained import Randomness

    for name in _GENERATORS:
        with Randomness(0).contained():
            answers = [str(entry["answer"]) for entry in create_dataset(name, seed=rng.randrange(1000), size=6)]
        different = list(dict.fromkeys(answers))
        for a, b in itertools.pairwise(different[:3]):
            yield Gold(a, a.replace("**", "^"), b, b.replace("**", "^"))
