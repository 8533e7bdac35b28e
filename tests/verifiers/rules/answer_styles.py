r"""Answers of several kinds in many styles, and a table of who reads them: our rules, and math-verify.

``python tests/verifiers/rules/answer_styles.py`` prints a table of accuracy. A *right* text finally states the
gold answer; a *wrong* one states another, two of them, or denies the right one. The texts were written before either
side was run on them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

# {g} is the answer parse_answer, {w} another one; {gt} and {wt} the same in LaTeX.
STATED = (
    "{g}",
    "It is {g}.",
    "It's {g}",
    "I think it's {g}",
    "I believe that it is {g}.",
    "**{g}**",
    "The answer is {g}.",
    "The answer is **{g}**.",
    "The answer is: {g}",
    "**Answer:** {g}",
    "**Answer**: {g}",
    "Answer: {g}",
    "ANSWER: {g}",
    "### Answer\n\n{g}",
    "## Final answer\n**{g}**",
    "First, 12 items. Then 7 more.\n#### {g}",
    "Two steps, 2 and 3, give it.\n\n\\boxed{{{gt}}}",
    "The answer is $\\boxed{{{gt}}}$.",
    "\\[\n\\boxed{{{gt}}}\n\\]",
    "The answer is ${gt}$.",
    "The answer is \\({gt}\\).",
    "The answer is:\n\\[ {gt} \\]",
    "Final Answer: The final answer is ${gt}$. I hope it is correct.",
    "<answer>{g}</answer>",
    "<answer>\n**{g}**\n</answer>",
    "<think>Could it be {w}? No, that fails.</think>\n<answer>{g}</answer>",
    "<think>The answer is {w}.</think>The answer is {g}.",
    "{w} is tempting, but the answer is {g}.",
    "The answer is {w}. Wait, no: {g}",
    "The answer is {w}. Actually, it is {g}.",
    "\\boxed{{{wt}}}\nWait, I made a mistake in step 2.\n\\boxed{{{gt}}}",
    "The answer is {w}.\n\nLet me check. No, the answer is {g}.",
    "The answer is not {w} but {g}.",
    "The answer is {g}, not {w}.",
    "{g} is the answer.",
    "So {g} is the final answer.",
    "The answer is {g} because step 2 leaves nothing else.",
    "The answer is {g}, which is what 3 of us found.",
    "Therefore, the answer to question 7 is {g}.",
    "1. Read the question.\n2. Do it.\n\nTherefore, the result is {g}.",
    "Hence the value is ${gt}$.",
    "The answer is {g}!\n\nI hope this helps.",
)
UNDECIDED = (
    "{g} or {w}",
    "It is {g} or {w}.",
    "It is {w} or {g}.",
    "The answer is {g} or {w}.",
    "The answer is either {w} or {g}.",
    "Maybe {w}, maybe {g}.",
    "\\boxed{{{gt}}} or \\boxed{{{wt}}}",
    "The answer is {w}. Or maybe {g}.",
    "The answer is {g}, but it could be {w}.",
    "The answer is not {g}.",
    "I don't think the answer is {g}.",
    "It is not {g}.",
    "The answer lies between {w} and {g}.",
    "I do not know.",
)


class Gold(NamedTuple):
    """An answer to be parse_answer in every style, and one that must not pass for it."""

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
    "chain_sum",
    "fraction_simplification",
    "decimal_arithmetic",
    "simple_equations",
    "gcd",
    "leg_counting",
    "products",
    "simple_geometry",
    "complex_arithmetic",
    "power_function",
    "intermediate_integration",
    "polynomial_multiplication",
)
# (text, gold, whether it is right): the same answer written in another way, or nearly the same.
WRITINGS = [
    ("It is 0.5.", "1/2", True),
    ("2", "1/2", False),
    ("It is 7/2", "1/2", False),
    ("It is 1/12", "1/2", False),
    (r"The answer is $\frac{1}{2}$, or 0.5.", "1/2", True),
    ("The answer is 50%.", "0.5", True),
    ("The probability is 0.05.", "0.5", False),
    ("3", "10^3", False),
    ("The answer is 1000.", "10^3", True),
    ("The answer is 1,000.", "10^3", True),
    ("3-5", "5", False),
    ("It is 3-5.", "5", False),
    ("The answer is 3 to 5.", "5", False),
    ("At least 5", "5", False),
    ("Between 4 and 5", "5", False),
    ("The answer is \u22125.", "-5", True),
    ("The answer is 5.", "-5", False),
    ("Der Wert ist 3,14.", "3.14", True),
    ("3,14", "314", False),
    ("1.234,56", "1234.56", True),
    ("1 234 567", "1234567", True),
    ("1,234", "1.234", False),
    ("The answer is 12,345.", "12345", True),
    ("The answer is 5,000 m.", "5 km", True),
    ("The answer is 5 m.", "5 km", False),
    ("The total is $5.00.", "5", True),
    ("She pays 18 dollars.", "$18", True),
    ("She pays 18 euros.", "$18", False),
    ("It costs 75 cents.", "$0.75", True),
    (r"\boxed{2\frac{3}{4}}", "11/4", True),
    ("2 3/4", "2.75", True),
    ("2 3/4", "3/2", False),
    ("6 * 7 = 42", "42", True),
    ("6 * 7 = 42", "7", False),
    ("6 times 7 is 42.", "42", True),
    ("42 is 6 times 7.", "42", True),
    ("42 is 6 times 7.", "7", False),
    ("x = 5 or x = 3", "5", False),
    ("x = 5 or x = 3", r"\{3, 5\}", True),
    (r"The answer is $x = 5$ and $x = 3$.", "3, 5", True),
    ("The answer is (C).", "C", True),
    ("The answer is C) 42", "C", True),
    ("The answer is (D).", "C", False),
    ("The answer is 2.5e-3.", "0.0025", True),
    (r"$2.5 \times 10^{-3}$", "0.0025", True),
    (r"$2.5 \times 10^{3}$", "0.0025", False),
    (r"\boxed{\dfrac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", True),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}", True),
    (r"\boxed{(1, 2)}", "(2, 1)", False),
    (r"\boxed{x \ge 2}", r"[2, \infty)", True),
    (r"\boxed{x > 2}", r"[2, \infty)", False),
    ("She has 3 apples and buys 4, so she has 7 apples.", "7", True),
    ("She has 3 apples and buys 4, so she has 7 apples.", "4", False),
    ("Natalia sold 48/2 = 24 clips in May, 48+24 = 72 altogether.\n#### 72", "72", True),
    ("If there are 3 or 4 cars, the total is 7.", "7", True),
    ("The solutions are 3 and 5.", "5", False),
    ("The answer is 5. The answer is 6.", "5", False),
    ("Is it 5? No, it is 6.", "5", False),
    ("I got 5, no, 6.", "6", True),
    ("I doubt the answer is 5.", "5", False),
    # As models write that were not asked for a form, and as solutions of GSM8K end.
    ("So Janet makes 9 * 2 = $18 every day at the farmer's market.", "18", True),
    ("So Janet makes 9 * 2 = $18 every day at the farmer's market.", "2", False),
    ("Janet makes **$18** per day.", "18", True),
    ("Therefore, she makes $18 dollars each day.", "$18", True),
    ("Therefore, Michael spent \u20ac98 + \u20ac66 = \u20ac164 for the school supplies.", "164", True),
    ("It is $483,800 - $440,000 = $43,800 more than Mrs. Lee's budget.", "43800", True),
    ("Therefore, there are 132 - 112 = 20 bananas that do not fit.", "20", True),
    ("Therefore, there are 132 - 112 = 20 bananas that do not fit.", "112", False),
    ("Now add the two amounts: 132 kg + 296 kg = 428 kg", "428", True),
    ("130 spools / 250 spools * 100% = 52%", "52", True),
    ("80 students play and 7 dance, so 80+7 = 87 students will be leaving early", "87", True),
    ("80 students play and 7 dance, so 80+7 = 87 students will be leaving early", "80", False),
    ("Bruce slew 0.25 as many ogres as Arthur, or 200*0.25=50 ogres.", "50", True),
    ("Since the fraction is 87/128, she used 87/128*512 = 348", "348", True),
    ("John is 5 years older than Mary. Mary is 10, so John is 15.", "15", True),
    ("John is 5 years older than Mary. Mary is 10, so John is 15.", "10", False),
    ("The total cost is 5 * 100 = $500, and the total profit is $125.", "125", True),
    ("It will take 2+1=3 bolts of blue and white fiber.", "3", True),
    ("Thus, 75% of the students are girls.", "75", True),
    ("It is 5 times as large.", "5", True),
    ("The company made 5 million dollars.", "5000000", True),
    ("The company made 5 million dollars.", "5", False),
    ("The answer is 3.5 x 10^5.", "350000", True),
    ("The answer is 3.5 \u00d7 10\u2075.", "350000", True),
    ("The answer is 10\u00b2\u00b3.", "10^{23}", True),
    ("The answer is 10\u00b2\u00b3.", "10^8", False),
    ("The probability is 3 out of 4.", "3/4", True),
    ("The probability is 1/3 or approximately 33.3%.", "1/3", True),
    ("The answer is 18, assuming that each of the 3 kids eats 6.", "18", True),
    ("The answer is 18 (3 kids times 6).", "18", True),
    ("So the answer is 18.<|im_end|>", "18", True),
    ("The answer is: **18** \u2705", "18", True),
    ("\\begin{align*}\nx &= 12 + 6 \\\\\n&= 18\n\\end{align*}", "18", True),
    (r"The solutions are \(\boxed{2}\) and \(\boxed{3}\).", "2, 3", True),
    (r"The solutions are \(\boxed{2}\) and \(\boxed{3}\).", "3", False),
    (r"\boxed{y = 3, x = 2}", "(2, 3)", True),
    (r"\boxed{y = 2, x = 3}", "(2, 3)", False),
    ("The train arrives at 3:30 PM.", "3:30 PM", True),
    ("The train arrives at 3:30 PM.", "3:30 AM", False),
    ("**B. Paris**", "B", True),
    ("The correct answer is **B. Paris**.", "B", True),
    ("The correct answer is **B. Paris**.", "A", False),
    (r"\boxed{\textbf{(B)}\ 42}", "B", True),
    ("Option C is correct.", "C", True),
    ("Yes, it is prime.", "yes", True),
    ("Yes, it is prime.", "no", False),
    ("No, 15 is not prime.", "no", True),
    ("The statement is true.", "True", True),
    ("It is not so that the statement is true.", "True", False),
    # Dates, scores and times are no sums.
    ("The date is 2020-01-05.", "2020-01-05", True),
    ("The date is 2020-02-04.", "2020-01-05", False),
    ("2015", "2020-01-04", False),
    ("The answer is 05/01/2021.", "5/1/2021", True),
    ("The answer is 02/02/2021.", "01/01/2021", False),
    ("The score was 3-2.", "3-2", True),
    ("The score was 2-1.", "3-2", False),
    ("It arrives at 03:30.", "3:30", True),
    ("It arrives at 4:40.", "3:30", False),
    ("The ratio is 5:10.", "1:2", True),
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
    found: list[Case] = []
    for kind, values in kinds.items():
        for gold in values:
            swapped = Gold(gold.wrong, gold.wrong_latex, gold.plain, gold.latex)
            for style in STATED:
                found += [
                    Case(kind, _said(style, gold), gold.plain, True),
                    Case(kind, _said(style, swapped), gold.plain, False),
                ]
            found += [Case("undecided, denied", _said(style, gold), gold.plain, False) for style in UNDECIDED]
    return found + [Case("other writings", *one) for one in WRITINGS]


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


def table(rows: list[Case], readers: dict[str, dict[Case, bool]]) -> str:
    """Markdown: by kind, how many right texts are accepted and how many wrong ones."""
    kinds = list(dict.fromkeys(case.kind for case in rows))
    heads = [f"right accepted: {name}" for name in readers] + [f"wrong accepted: {name}" for name in readers]
    lines = [f"| kind | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for kind in [*kinds, "all"]:
        cells = []
        for is_right in (True, False):
            chosen = [case for case in rows if kind in {case.kind, "all"} and case.is_right is is_right]
            cells += [f"{sum(read[case] for case in chosen):,} of {len(chosen):,}" for read in readers.values()]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ours(case: Case) -> bool:
    """What `MathEqual` says, without asking math-verify about anything."""
    from forge_agents.types import Trajectory, Turn
    from forge_verifiers import MathEqual

    turn = Turn(agent="a", index=0, observation="", action=case.text, reward=0.0)
    said = Trajectory(agent="a", policy="p", turns=(turn,), env_id="t", seed=0, info={"answer": case.gold})
    return bool(MathEqual().score([said])[0] == 1)


def theirs(case: Case) -> bool:
    """The result of math-verify. The gold answer is passed as it is, and in dollar signs if it is not parsed."""
    from math_verify import parse, verify

    gold = parse(f"${case.gold.replace('$', '')}$") or parse(case.gold)
    return bool(verify(gold, parse(case.text)))


def main() -> None:
    """Prints the table and what is misread."""
    rows = list(dict.fromkeys(cases()))
    readers = {"ours": {case: ours(case) for case in rows}, "math-verify": {case: theirs(case) for case in rows}}
    print(table(rows, readers))  # noqa: T201
    for case in rows:
        if readers["ours"][case] is not case.is_right:
            print("ours misreads", case)  # noqa: T201


if __name__ == "__main__":
    main()
