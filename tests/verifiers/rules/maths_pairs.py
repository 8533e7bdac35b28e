"""Pairs of answers with the verdict a careful teacher gives: ``answer ≡ gold`` for equal ones, else ``answer ≢ gold``.

Written before either implementation was run on them. Conventions where taste differs: a unit or a percent sign that one
side leaves out is forgiven, two different ones are not. A list without brackets is a set of answers; brackets matter;
a decimal equals an exact value only to six digits.
"""

_TABLES = {
    "fractions": r"""
        \frac{7}{12} ≡ 7/12 ¦ \dfrac{14}{24} ≡ \frac{7}{12} ¦ \frac38 ≡ 0.375 ¦ -\frac{5}{4} ≡ \frac{-5}{4}
        \frac{5}{-4} ≡ -1.25 ¦ 2\frac{3}{4} ≡ \frac{11}{4} ¦ 2 3/4 ≡ 2.75 ¦ 2\frac{3}{4} ≢ \frac{3}{2}
        \frac{7}{12} ≢ \frac{12}{7} ¦ \frac{1}{3} ≢ 0.33 ¦ 22/7 ≢ \pi ¦ \frac{1}{2+x} ≢ \frac{1}{2}+x
        0.\overline{27} ≡ \frac{3}{11} ¦ 0.\overline{27} ≢ 0.27
    """,
    "numbers": r"""
        12,500 ≡ 12500 ¦ 12{,}500 ≡ 12500 ¦ 12,\!500 ≡ 12500 ¦ 12,500 ≢ 12.5 ¦ (12,500) ≢ 12500 ¦ 0.50 ≡ .5 ¦ -0 ≡ 0
        +17 ≡ 17 ¦ 17 ≢ -17 ¦ 100 ≢ 1000 ¦ 1000001 ≢ 1000000 ¦ 1.4142136 ≡ \sqrt{2} ¦ 1.41 ≢ \sqrt{2}
        1011_2 ≡ 1011_{2} ¦ 1011_2 ≢ 1011_3
    """,
    "scientific": r"""
        2.4e4 ≡ 24000 ¦ 2.4 \times 10^{4} ≡ 24000 ¦ 2.4 \cdot 10^4 ≡ 24 \times 10^3 ¦ 3.0e-2 ≡ 0.03
        2.4 \times 10^{4} ≢ 2.4e5 ¦ 6 \times 10^{-3} ≢ 6 \times 10^{3} ¦ 2e ≢ 2
    """,
    "percent": r"""
        35\% ≡ 0.35 ¦ 35% ≡ \frac{7}{20} ¦ 35\% ≡ 35 ¦ 12.5\% ≡ 12.5% ¦ 35\% ≢ 3.5 ¦ 35% ≢ 53% ¦ 3.5% ≢ 35%
    """,
    "units": r"""
        12 cm ≡ 12 ¦ 12\text{ cm} ≡ 12 cm ¦ 12\,\mathrm{cm} ≡ 12 \text{ centimeters} ¦ 12 cm ≢ 12 m
        12 \text{ cm}^2 ≢ 12 \text{ cm} ¦ 12 \text{ cm}^2 ≡ 12 square centimeters ¦ 12\text{ cm} ≢ 13 ¦ 150 cm ≡ 1.5 m
        90 minutes ≡ 1.5 hours ¦ 40 km/h ≡ 40 ¦ 40 km/h ≢ 40 miles per hour ¦ 8 apples ≡ 8 ¦ 8 apples ≢ 8 oranges
        24 \text{ students} ≡ 24 ¦ 3 days ≢ 3 weeks
    """,
    "currency": r"""
        \$18 ≡ 18 ¦ $18.00 ≡ 18 ¦ 18 dollars ≡ \$18 ¦ \$1{,}250 ≡ 1250 ¦ \$18 ≢ 18 euros ¦ 18 cents ≢ 18 dollars
        75 cents ≡ \$0.75 ¦ \$18 ≢ $81
    """,
    "degrees": r"""
        60^\circ ≡ 60 ¦ 60^{\circ} ≡ 60 degrees ¦ 60° ≡ 60^\circ ¦ \sin 30^\circ ≡ 0.5 ¦ 60^\circ ≢ 30^\circ
        \cos 60 ≢ 0.5 ¦ 20^\circ\text{C} ≢ 20^\circ\text{F}
    """,
    "radicals": r"""
        3\sqrt{5} ≡ \sqrt{45} ¦ \frac{6}{\sqrt{3}} ≡ 2\sqrt{3} ¦ \sqrt{5+2\sqrt{6}} ≡ \sqrt{2}+\sqrt{3}
        \sqrt[3]{54} ≡ 3\sqrt[3]{2} ¦ 2^{1/2} ≡ \sqrt 2 ¦ 5sqrt(2) ≡ 5\sqrt{2} ¦ \sqrt{2}+\sqrt{3} ≢ \sqrt{5}
        5\sqrt{3} ≢ 3\sqrt{5} ¦ \sqrt[3]{2} ≢ 3\sqrt{2} ¦ \sqrt{x^2} ≢ x
    """,
    "functions": r"""
        \log_3 81 ≡ 4 ¦ \log_{2} 10 ≡ \frac{\ln 10}{\ln 2} ¦ \log_3 81 ≢ \log_9 81 ¦ \ln 6 ≡ \ln 2 + \ln 3
        \ln 5 ≢ \ln 2 + \ln 3 ¦ \sin 2x ≡ 2\sin x\cos x ¦ \sin 2x ≢ 2\sin x ¦ \tan\frac{\pi}{4} ≡ 1
        \binom{6}{2} ≡ 15 ¦ \binom{6}{2} ≢ 3 ¦ 6!/4! ≡ 30 ¦ \frac{\pi}{6} ≡ \pi/6 ¦ 6e ≢ 16.31
    """,
    "polynomials": r"""
        (a-b)(a+b) ≡ a^2-b^2 ¦ 3x+2y ≡ 2y + 3x ¦ (x+2)^2 ≢ x^2+4 ¦ 3x+2y ≢ 3y+2x ¦ x^{-2} ≡ \frac{1}{x^2}
        xyz ≡ z y x ¦ 2^{n+1} ≡ 2 \cdot 2^n ¦ x^2y ≢ (xy)^2 ¦ a_1 + a_2 ≡ a_2 + a_1 ¦ a_1 ≢ a_2
    """,
    "equations": r"""
        x = 9 ≡ 9 ¦ 9 ≡ x=9 ¦ x=9 ≢ y=9 ¦ y = 3x - 4 ≡ 3x - y = 4 ¦ y = 3x - 4 ≢ y = 3x + 4
        6x + 9y = 3 ≡ 2x + 3y = 1 ¦ f(x) = x^2 - 1 ≡ x^2 - 1 ¦ x=1, y=2 ≡ y=2, x=1 ¦ x=1, y=2 ≢ x=2, y=1
        x = 3 \text{ or } x = -2 ≡ -2, 3 ¦ x^2+y^2=4 ≢ x^2+y^2=2
    """,
    "inequalities": r"""
        x > 7 ≡ 7 < x ¦ x \geq 7 ≡ x >= 7 ¦ x \ge 7 ≡ [7, \infty) ¦ -1 < x \leq 4 ≡ (-1, 4] ¦ 2x > 14 ≡ x > 7
        x > 7 ≢ x \ge 7 ¦ x > 7 ≢ x < 7 ¦ -x > 7 ≢ x > -7 ¦ x > 7 ≢ y > 7 ¦ x \ge 7 ≢ (7, \infty) ¦ x > 7 ≢ 7
    """,
    "intervals": r"""
        (-\infty, 2] ≡ \left(-\infty,2\right] ¦ [0, 1/2] ≡ [0, 0.5] ¦ x \in [0, 2) ≡ [0,2)
        (-\infty,1) \cup (4,\infty) ≡ (4,\infty)\cup(-\infty,1)
        (-\infty,1) \cup (4,\infty) ≢ (-\infty,1] \cup [4,\infty) ¦ [0,2) ≢ [0,2] ¦ (-\infty, 2] ≢ [2, \infty)
        \infty ≢ -\infty
    """,
    "pairs and lists": r"""
        (3, -1) ≡ \left( 3, -1 \right) ¦ (3, -1) ≢ (-1, 3) ¦ (\sqrt{8}, 1) ≡ (2\sqrt{2}, 1) ¦ (1,2,3) ≢ (1,2)
        (1,2), (3,4) ≡ (3,4),(1,2) ¦ (1,2), (3,4) ≢ (1,4),(3,2) ¦ 5, 8 ≡ 8, 5 ¦ 5 and 8 ≡ 5, 8 ¦ 5, 8 ≢ 58
        5, 8 ≢ 5, 8, 9 ¦ \pm 6 ≡ 6, -6 ¦ 2 \pm \sqrt{3} ≡ 2+\sqrt{3}, 2-\sqrt{3} ¦ \pm 6 ≢ 6 ¦ 3:5 ≡ 3/5 ¦ 3:5 ≡ 6:10
        3:5 ≢ 5:3 ¦ 1:2:3 ≢ 3:2:1
    """,
    "sets": r"""
        \{2, 4, 6\} ≡ \{6,4,2\} ¦ \emptyset ≡ \varnothing ¦ \{\} ≡ \emptyset ¦ \emptyset ≢ 0 ¦ \{2,4\} ≢ (2,4)
        \{2,4\} ≢ \{2,4,5\} ¦ \{(1,2)\} ≢ \{(2,1)\}
    """,
    "matrices": r"""
        \begin{pmatrix} 1 & 0 \\ 2 & 5 \end{pmatrix} ≡ \begin{bmatrix}1&0\\2&5\end{bmatrix}
        \begin{pmatrix} 1/2 \\ -3 \end{pmatrix} ≡ \begin{pmatrix} 0.5 \\ -3 \end{pmatrix}
        \begin{pmatrix}1&0\\2&5\end{pmatrix} ≢ \begin{pmatrix}1&2\\0&5\end{pmatrix}
        \begin{pmatrix}1&2\end{pmatrix} ≢ \begin{pmatrix}1\\2\end{pmatrix}
    """,
    "complex": r"""
        2 - 3i ≡ -3i + 2 ¦ (1+i)^2 ≡ 2i ¦ \frac{1}{i} ≡ -i ¦ 2 + 3i ≢ 2 - 3i ¦ |3+4i| ≡ 5 ¦ \sqrt{-4} ≡ 2i
        e^{i\pi/2} ≡ i ¦ 2 + 3i ≢ 5
    """,
    "choices": r"""
        \text{(C)} ≡ C ¦ (C) ≡ \textbf{C} ¦ C. ≡ C ¦ C ≢ D ¦ \text{(C)} ≢ \text{(D)} ¦ A, C ≡ C, A ¦ A, C ≢ A
    """,
    "words": r"""
        \text{Thursday} ≡ thursday ¦ Thursday ≢ Tuesday ¦ \text{no solution} ≡ No solution. ¦ even ≢ odd
        true ≢ false ¦ stressed ≢ desserts ¦ post ≢ stop ¦ \text{Lee} ≢ \text{Eel} ¦ \text{even} ≢ \text{odd}
    """,
}


def _pair(cell: str) -> tuple[str, str, bool]:
    is_equal = " ≡ " in cell
    answer, gold = cell.strip().split(" ≡ " if is_equal else " ≢ ")
    return answer, gold, is_equal


PAIRS = {topic: [_pair(c) for c in table.strip().replace("\n", "¦").split("¦")] for topic, table in _TABLES.items()}
"""By topic: answer, gold answer, whether they are equal."""
