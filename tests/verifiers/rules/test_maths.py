import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_verifiers.rules.maths import equal, worker
from forge_verifiers.rules.maths.equal import MathEqual, Numeric, equal_answers
from forge_verifiers.rules.maths.formula import latex
from forge_verifiers.rules.maths.quantity import read_quantity

from .helpers import limit_long_formulas, pairs, said  # noqa: TID252 (tests are no installed package)
from .maths_pairs import PAIRS  # noqa: TID252


def maths_equal(answer, gold):
    return equal_answers([(answer, gold)])[answer, gold] is True


@pytest.mark.parametrize("topic", PAIRS)
def test_pairs_of_answers_get_the_expected_result(topic):
    wrong = [pair for pair in PAIRS[topic] if {maths_equal(*pair[:2]), maths_equal(pair[1], pair[0])} != {pair[2]}]
    assert not wrong


def test_the_table_of_pairs_is_large_and_has_enough_unequal_ones():
    rows = [pair for topic in PAIRS.values() for pair in topic]
    assert len(set(rows)) == len(rows) >= 120
    assert sum(not equal for _, _, equal in rows) >= 0.4 * len(rows)


@pytest.mark.parametrize(
    ("one", "other"),
    pairs(r"""
        2\sqrt{2} ≡ \sqrt{8} ¦ \sin^2 x + \cos^2 x ≡ 1 ¦ \tan^2 y + 1 ≡ \sec^2 y ¦ \tan^{-1} 1 ≡ \pi/4 ¦ \sin \pi ≡ 0
        2^100 + 1 ≡ 1267650600228229401496703205377 ¦ \sqrt[3]{-8} ≡ -2 ¦ \frac{1}{\sqrt[3]{x}^2} ≡ x^{-2/3}
        log_10(1000) ≡ 3 ¦ (x, y) = (1, 2) ≡ (1,2) ¦ x = 2 + 3 = 5 ≡ 5 ¦ x = \frac13 \approx 0.33 ≡ 1/3
        x < 1 \text{ or } x > 4 ≡ (-\infty,1)\cup(4,\infty) ¦ 2, 3 or 5 ≡ \{5, 2, 3\}
        20 degrees Celsius ≡ 20^\circ\text{C} ¦ 1/2 hour ≡ 30 min ¦ 9.8 m/s^2 ≡ 9.8 meters per second squared
        60 mph ≡ 60 miles per hour ¦ 28 percent ≡ 28\% ¦ 5 dozen ≡ 60 ¦ $5 million ≡ 5,000,000
        y = 150 cm ≡ y = 1.5 m ¦ \frac{12,500}{2} ≡ 6250 ¦ $\$12.50$ ≡ 12.5 dollars ¦ \[ 9. \] ≡ $9$
        \left[\begin{array}{cc}1&2\\3&4\end{array}\right] ≡ \begin{pmatrix}1&2\\3&4\\\end{pmatrix}
        1000.99 m² ≡ 1,000.99 ¦ 5 = x ≡ 5 ¦ 10 = f(5) ≡ 10 ¦ x+1 = f(x) ≡ x+1 ¦ 1/2 = P(A) ≡ 0.5 ¦ 5 = a_{10} ≡ 5
        12 cm = AB ≡ 12 ¦ \sum_{n=1}^{\infty} \frac{1}{n^2} ≡ \frac{\pi^2}{6} ¦ \int_0^{\infty} e^{-x} dx ≡ 1
        1 ≡ \sum_{n=1}^{\infty} \frac{1}{2^n} ¦ \mathbb{R}-\{1\} ≡ (-\infty,1)\cup(1,\infty) ¦ 0.5=y ≡ 1/2
        5 = x ≡ x = 5 ¦ \(5 = x\) ≡ 5 ¦ 3 = \sqrt{9} ≡ 3 ¦ [0,2]\cup[1,3] ≡ [0,3] ¦ (0,2)\cup[2,4) ≡ (0,4)
        [1,4)\cup\{4\} ≡ [1,4] ¦ (-\infty,1)\cup(-1,\infty) ≡ \mathbb{R} ¦ \mathbb{R} ≡ (-\infty,\infty)
        \mathbb R ≡ x \in (-\infty, +\infty) ¦ ℝ ≡ all real numbers
        \mathbb{R} \setminus \{0\} ≡ (-\infty,0)\cup(0,\infty) ¦ x \ne 0 ≡ (-\infty,0) ∪ (0,∞)
        \{1,2\}\cup\{3\} ≡ \{1,2,3\} ¦ [0,2] \cap [1,3] ≡ [1,2] ¦ 1 \le x \le 5 ≡ [1,5]
        \{x \mid x > 2\} ≡ (2,\infty) ¦ \{x \in \mathbb{R} : 1 < x < 2\} ≡ (1,2) ¦ \lg 100 ≡ 2 ¦ lg(1000) ≡ 3
        \lg x ≡ \log_{10} x ¦ \lg 5 + \lg 2 ≡ 1 ¦ 5 \geq x ≡ x \leq 5 ¦ x_1 = 2, x_2 = 3 ≡ 3, 2
        \frac{\pi}{2} \text{ cm} ≡ 5\pi \text{ mm} ¦ $5 million per year ≡ 5,000,000
        1000\pi ≡ 3141.593 ¦ x = 1000\pi ≡ 3141.593 ¦ 577.35027 ≡ \frac{1000}{\sqrt{3}} ¦ 2.71828 ≡ e
        (1000\pi, 2) ≡ (3141.593, 2) ¦ [0, 1000\pi] ≡ [0, 3141.593] ¦ \frac{2}{3}x ≡ 0.6666667x
        ]-\infty, 2] ≡ (-\infty, 2] ¦ [0, +\infty[ ≡ [0,\infty) ¦ ]0,1[ \cup ]2,3[ ≡ (0,1)\cup(2,3)
        [0; 1,5] ≡ [0, 1.5]
        x<1 and x>0 ≡ (0,1) ¦ x\geq0 \land x\leq 1 ≡ [0,1] ¦ x \le -1 \vee x \ge 1 ≡ (-\infty,-1]\cup[1,\infty)
        [0,1) \text{ or } (2,3] ≡ [0,1)\bigcup(2,3] ¦ \text{all real numbers except } 2 ≡ \mathbb R \backslash \{2\}
        log2(8) ≡ 3 ¦ {1 \over 2} ≡ 1⁄2 ¦ ∛8 ≡ cbrt(8) ¦ {5 \choose 2} ≡ 10 ¦ 6{,}02 ≡ 6.02 ¦ 1’000’000 ≡ 1_000_000
        USD 5 ≡ $5 ¦ US$5 ≡ 5 dollars ¦ ₹500 ≡ 500 rupees ¦ 37 ℃ ≡ 37 °C ¦ 5 newtons ≡ 5 N ¦ 2 L ≡ 2000 mL
        10 Ω ≡ 10 ohms
        45^{o} ≡ 45^\circ ¦ 3∶4 ≡ 3:4 ¦ \langle 1,2 \rangle ≡ (1,2) ¦ {1,3} \cup {2,4} ≡ \{1,2,3,4\}
        \lbrace 1,2 \rbrace ≡ \{1,2\} ¦ 0.1666... ≡ 1/6
        [[1,2],[3,4]] ≡ \begin{smallmatrix}1&2\\3&4\end{smallmatrix} ¦ (y, x) = (2, 1) ≡ x=1, y=2 ¦ 0.(3) ≡ 0.\dot{3}
        ‑3 ≡ -3 ¦ (101)_2 ≡ 101_2 ¦ x = k\pi, k \in \mathbb{Z} ≡ k\pi ¦ f(3) = 42 ≡ 42
        \overline{AB}=42 ≡ 42 ¦ |AB| = 42 ≡ 42
        three eighths ≡ 3/8 ¦ an eighth ≡ 1/8 ¦ x \in \mathbb{Z} ≡ \mathbb{Z}
        seven ≡ 7 ¦ forty-two ≡ 42 ¦ Forty two apples ≡ 42 ¦ one hundred and five ≡ 105 ¦ two thirds ≡ 2/3 ¦ half ≡ 0.5
        three and a half ≡ 3.5 ¦ minus seven ≡ -7 ¦ two dozen ≡ 24 ¦ twelve hundred ≡ 1200 ¦ two million ≡ 2000000
        \cos\frac{\pi}{7} - \cos\frac{2\pi}{7} + \cos\frac{3\pi}{7} ≡ \frac12
        \sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}} ≡ 0 ¦ \sin^2 x+\cos^2 x-1 ≡ 0 ¦ e^{i\pi}+1 ≡ 0
        \sqrt{2}\cdot 10^{-30} ≡ \frac{2}{\sqrt{2}}\cdot 10^{-30}
        \frac{\pi}{3}\cdot 10^{-20} ≡ 1.0471976 \times 10^{-20}
        Sin(x) ≡ sin(x) ¦ Paris ≡ paris ¦ UK ≡ uk ¦ Apollo 11 ≡ apollo 11 ¦ A, C ≡ a, c ¦ 5 KG ≡ 5 kg ¦ 'x' ≡ x
        x^\prime ≡ x' ¦ y″ ≡ y'' ¦ x_1'+1 ≡ 1+x_{1}^{\prime} ¦ f'(x) = 2x ≡ 2x ¦ f'(2) = \sqrt{3} ≡ \sqrt{3}
        f^{-1}(x) = x/2 ≡ x/2 ¦ (1+r)^T ≡ (r+1)^{T} ¦ E_k = \frac{1}{2}mv^2 ≡ E_{k} = mv^2/2 ¦ I_1+I_2 ≡ I_2+I_{1}
        \begin{pmatrix}1&2\end{pmatrix}^T ≡ \begin{pmatrix}1\\2\end{pmatrix} ¦ V = I R ≡ V = R I
    """),
)
def test_equal_answers_are_equal(one, other):
    assert maths_equal(one, other) and maths_equal(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [("", "0"), *pairs(r"""
        .5 ≢ 5 ¦ 1 1/2 ≢ 11/2 ¦ 5 8 ≢ 58 ¦ 1,2 ≢ 1.2 ¦ 2^100 ≢ 1267650600228229401496703205377 ¦ 2^3000 ≢ \pi
        6.6e-34 ≢ 6.7e-34 ¦ 1/0 ≢ 2/0 ¦ 1011_x ≢ 1011 ¦ 2 xyz ≢ 2 ¦ 2 thirds ≢ 2 ¦ 5 dozen ≢ 5 ¦ 5 or more ≢ 5
        about 5 ≢ 6 ¦ 3 p.m. ≢ 3 a.m. ¦ 20 degrees Celsius ≢ 20°F ¦ x=1, y=2 ≢ 1, 2 ¦ 5, 5 ≢ 5 ¦ -3 < x < 3 ≢ (-3, 3]
        x \neq 3 ≢ x = 3 ¦ f(x) = x ≢ g(x) = x ¦ y = 5 cm ≢ y = 5 m ¦ 2y + x = 5 cm ≢ 2y + x = 5 m
        (x, y) = (1, 2) ≢ (y, x) = (1, 2) ¦ x < 1 \text{ or } y > 4 ≢ (-\infty,1)\cup(4,\infty) ¦ \infty ≢ \infty + 1
        -2^2 ≢ (-2)^2 ¦ top dog ≢ god pot ¦ cats and dogs ≢ dogs and rats ¦ 5 = x ≢ 6 ¦ 10 = f(5) ≢ 5 ¦ 5 = AB ≢ AB
        \sum_{n=1}^{\infty} \frac{1}{n} ≢ 5 ¦ 5 = x ≢ y = 5 ¦ 5 \geq x ≢ 5 ¦ [0,1]\cup[2,3] ≢ [0,3]
        [0,2]\cup[1,3] ≢ [0,3) ¦ \mathbb{R} ≢ \mathbb{Z} ¦ \mathbb{R} ≢ (0,\infty) ¦ \mathbb{R} ≢ R
        \{x \mid x > 2\} ≢ [2,\infty) ¦ \lg 100 ≢ 3 ¦ \lg 100 ≢ \ln 100 ¦ (1, 2) ≢ 1, 2 ¦ 1 2 ≢ 3 ¦ 1011_7 ≢ 1011
        x<1 and x>0 ≢ \mathbb{R} ¦ x>0 and x>1 ≢ (0,\infty) ¦ ]0,1[ ≢ [0,1] ¦ [0; 1,5] ≢ [0, 15] ¦ 0.1666... ≢ 0.1666
        \frac{1}{2004!} ≢ \frac{1}{2006!} ¦ n=2, 3, 4 ≢ n=1, 2, 3 ¦ D = (0, 1) ≢ D = (0, 1.5) ¦ 12:00 ≢ 1:00
        0.(3) ≢ 0.3 ¦ 5 N ≢ 5 J ¦ [[1,2],[3,4]] ≢ [[1,2],[4,3]] ¦ f(3) = 42 ≢ f(2) = 42 ¦ seven hundred ≢ 7
        two three ≢ 5 ¦ two sevenths ≢ 2 ¦ 2 ninths ≢ 2 ¦ one eighth ≢ 1 ¦ one twentieth ≢ 1 ¦ two hundredths ≢ 2
        three fourteenths ≢ 3 ¦ x>0, x\in\mathbb{Z} ≢ x>0
        twenty-third ≢ 20/3 ¦ one of them is left ≢ 1 ¦ nineteen eighty-four ≢ 103 ¦ seven or eight ≢ 7 ¦ US$5 ≢ €5
        2 \text{ or } 3 ≢ 2 ¦ 1, 2, 3, 4, 5 ≢ 5 ¦ 1/0 ≢ 0
        0 ≢ e^{-50} ¦ 0 ≢ \frac{\pi}{10^{16}} ¦ 0 ≢ x \cdot 10^{-18} ¦ 0 ≢ 1.38 \times 10^{-23} T ¦ 0 ≢ e^{-40x^2}
        m ≢ M ¦ 2m+1 ≢ 2M+1 ¦ F = ma ≢ F = Ma ¦ W = mgh ≢ W = MGh ¦ \sin X ≢ \sin x ¦ x = 3 ≢ X = 3
        \Delta x ≢ \delta x ¦ Δ ≢ δ ¦ m_1 ≢ M_1 ¦ x' ≢ x ¦ x'+1 ≢ x+1 ¦ y''+y ≢ y'+y ¦ A' ≢ A ¦ \theta' ≢ \theta
        f'(x) = 2x ≢ f(x) = 2x ¦ f'(2) ≢ f(2) ¦ f^{-1}(x) = x ≢ f(x) = x ¦ (1+r)^T ≢ 1+r ¦ e^T ≢ e
        I_1 ≢ I_2 ¦ I_1 ≢ i ¦ E_k ≢ E_p
        10^{400}i ≢ 42 ¦ 400!\cdot i ≢ x+1 ¦ \sqrt{-10^{999}} ≢ \pi ¦ (1+i)^{9999} ≢ 1+i
        IV ≢ VI ¦ NY ≢ YN ¦ II ≢ -1 ¦ \angle ABC ≢ \angle ACB
        10^{-15} ≢ \pi \cdot 10^{-16} ¦ \sqrt{2} \cdot 10^{-20} ≢ \sqrt{3} \cdot 10^{-20} ¦ i \cdot 10^{-20} ≢ 0
    """)],
)  # fmt: skip
def test_unequal_answers_are_unequal(one, other):
    assert not maths_equal(one, other) and not maths_equal(other, one)


@pytest.mark.parametrize(
    "text",
    [
        *("9^9^9^9^9", "9!!!!!!", "(" * 900, "1+" * 400, "__import__('os').system('x')", "x^" * 300 + "1", "|" * 500),
        *("\\frac" * 150, "1e9999999", "\\binom{1000000}{500000}", "\\{" * 300, ",".join("x" * 400), "1 1/" * 240),
        *("= \u2248" * 300, "1" * 999 + "_2", "5 " + "square " * 140, "\\begin{matrix}" * 70),
    ],
)
def test_hostile_mathematics_costs_no_time_and_is_wrong(text, monkeypatch):
    limit_long_formulas(monkeypatch)
    start = time.process_time()
    assert not maths_equal(text, "3") and not maths_equal(text, "x^2+y^2")
    assert time.process_time() - start < 60  # each of them took minutes, or all the memory, once


def test_what_is_too_large_for_an_answer_is_not_read():
    assert latex("1" * 2000) is None and read_quantity("1" * 2000) is None
    assert read_quantity("1" * 301) is None and read_quantity("1e999") is None and read_quantity("10^9999") is None
    assert latex("x^9^9^9^9") is None and latex("(10^9)!!") is None


@given(st.text(alphabet="0123456789xy+-*/^()[]{}|!%=,._:<>&°±$ \\fraceinpmcoS", max_size=60))
def test_comparison_never_raises_and_is_symmetric(text):
    assert maths_equal(text, "17/23") is maths_equal("17/23", text)


@given(st.fractions(max_denominator=10_000), st.integers(2, 9))
def test_fractions_equal_their_expansions_and_nothing_else(value, factor):
    wide = f"{value.numerator * factor}/{value.denominator * factor}"
    assert maths_equal(wide, str(value))
    assert not maths_equal(wide, str(value + 1))


@given(st.integers(1, 99), st.integers(1, 98), st.integers(2, 99))
def test_mixed_numbers_are_sums(whole, top, bottom):
    top, bottom = sorted((top, bottom + top))
    assert maths_equal(f"{whole}\\frac{{{top}}}{{{bottom}}}", f"{whole * bottom + top}/{bottom}")


def test_inequalities_reverse_with_their_sign():
    for slope, bound, (sign, turned) in itertools.product((-50, -1, 0, 1, 7), (-3, 0, 50), ("<>", ("<=", ">="))):
        if slope or bound:
            assert maths_equal(f"{slope}x {sign} {bound}y", f"{-slope}x {turned} {-bound}y")
            assert not maths_equal(f"x {sign} {bound}", f"x {turned} {bound}")


def test_answers_are_compared_in_any_thread():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(maths_equal("x > 41", r"(41, \infty)")))
    thread.start()
    thread.join(timeout=120)
    assert verdicts == [True]


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [("x = 3", "y = 3", 0), ("3 = x", "y = 3", 0), ("x = 3", "x = 3.0", 1), ("3", "y = 3", 1), ("y = 3", "3", 1)],
)
def test_numeric_compares_the_names_of_variables(answer, gold, score):
    assert Numeric().score([said(f"\\boxed{{{answer}}}", gold)]).tolist() == [score]


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        *(
            (text, 42, 0)
            for text in (r"6 \times 7", "50-8", "6*7", r"\sum_{k=1}^{42} 1", r"\frac{100-16}{2}", "x = 6*7")
        ),
        *((text, 42, 0) for text in ("6\u22c57", r"6\,\times 7", r"6\ *7", "6~*7", "600%*7", r"50 \text{-} 8")),
        *((text, 42, 0) for text in (r"6*7*\sqrt{1}", r"6*7+0\pi", "6*7*e^0", r"\sqrt{36*49}")),
        *((text, "2.414213562", 1) for text in ("sqrt(2)+1", "2^{0.5}+1", "2**(1/2)+1", r"2^{\frac{1}{2}}+1")),
        *(("pi-1", "2.141592654", 1), (r"6 \times 7 \approx 42", 42, 1), (r"\approx -42", -42, 1)),
        *((r"2.5 \times {10}^{3}", 2500, 1), ("5*10**(-2)", "0.05", 1)),
        *((text, 42, 1) for text in ("6*7 = 42", r"42 = 6 \cdot 7", "84/2", r"\sqrt{1764}", r"4.2 \times 10^1")),
        *(("1+1", "1+1", 1), ("1+1", "2", 0), (r"1+\sqrt{2}", "2.414213562", 1), (r"2^{1/3}+1", "2.25992105", 1)),
        *((r"\frac{\pi}{2}-1", "0.5707963268", 1), ("-42", "-42", 1), (r"\lim_{x \to 0} x = 0", "0", 1)),
    ],
)
def test_calculation_that_is_not_carried_out_is_no_number(answer, gold, score):
    """It may be a copy of the question."""
    assert Numeric().score([said(f"\\boxed{{{answer}}}", gold)]).tolist() == [score]


def test_slow_alternatives_take_no_time_from_other_answers(monkeypatch):
    requests = []

    def request(self, message, timeout_s):
        requests.append(message["answer"])
        if "int" in message["answer"]:
            time.sleep(0.2)
            raise TimeoutError
        return message["answer"] != "x+1"

    monkeypatch.setattr(worker._Worker, "request", request)
    monkeypatch.setattr(equal, "WORKERS", worker.Workers())
    slow = [said("\\boxed{" + " or ".join(rf"\int x^{k} dx" for k in range(at, at + 8)) + "}", "x+2") for at in (2, 20)]
    honest = [said("\\boxed{x+1}", "x+2"), said(f"\\boxed{{{'x+' * 60}1}}", "x+2")]
    assert MathEqual(timeout_s=30).score([*slow, *honest]).tolist() == [0, 0, 0, 1]
    assert sum("int" in request for request in requests) == 4, "one alternative of each answer, and the answer"
    assert "int" not in requests[0] + requests[1]
    many = " or ".join(f"x+{k}" for k in range(9))
    requests.clear()
    assert MathEqual().score([said(f"\\boxed{{{many}}}", "y+2")]).tolist() == [1] and len(requests) == 1


@pytest.fixture
def late(monkeypatch):
    """Requests of workers, each of which takes 0.3 s of a clock that stands still otherwise, and exceeds its limit."""
    requests = []

    def request(self, message, timeout_s):
        requests.append(message["answer"])
        raise TimeoutError

    clock = SimpleNamespace(monotonic=lambda: 0.3 * len(requests))
    monkeypatch.setattr(worker, "time", clock)
    monkeypatch.setattr(equal, "time", clock)
    monkeypatch.setattr(worker._Worker, "request", request)
    monkeypatch.setattr(equal, "WORKERS", worker.Workers())
    return requests


@pytest.mark.parametrize("rule", [MathEqual, Numeric])
def test_slow_answer_without_time_left_is_wrong_unless_the_gold_answer_is_slow(rule, late):
    integrals = [rf"\boxed{{\int_0^1 x^{{{k}}} \sin(x) dx}}" for k in range(20)]
    assert rule(timeout_s=0.5).score([said(each, r"\frac{22}{7}") for each in integrals]).tolist() == [0.0] * 20
    if rule is MathEqual:
        assert np.isnan(rule(timeout_s=0.5).score([said(each, r"\sum_{k=1}^5 k x^k") for each in integrals])[-1])
    assert np.isnan(rule(timeout_s=0.5).score([said(rf"\boxed{{{k}^{{1/3}}+1}}", "3.1234567") for k in range(20)])[-1])


def test_slow_formulas_cost_numeric_their_time_once_and_at_most_timeout_s(late):
    same = [said("\\boxed{9^{9^{9}}}", "3")] * 50
    assert Numeric().score(same).tolist() == [0.0] * 50 and len(late) == 1
    many = [said(f"\\boxed{{9^{{9^{{9}}}} {k}^{{x}} or 9^{{9^{{9}}}} {k}^{{y}}}}", "3") for k in range(100)]
    scores = Numeric(timeout_s=1).score(many)
    assert scores[0] == 0 and np.isnan(scores[-1]) and len(late) == 5
    assert Numeric(timeout_s=1).score([*many, said("3", "3")])[-1] == 1  # plain numbers need no time
    assert len(late) == 9
