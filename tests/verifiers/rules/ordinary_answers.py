# ruff: noqa: RUF001
"""Ordinary answers of many kinds, right and nearly right. The texts were written before any rule was run on them.

Each table has cells ``text ⇒ gold`` for right answers and ``text ⇏ gold`` for wrong ones, with ``⏎`` for a line end.
"""

from __future__ import annotations

TABLES = {
    "dates": r"""
        The treaty was signed on 4 July 1776. ⇒ July 4, 1776 ¦ The answer is July 4th, 1776. ⇒ July 4, 1776
        The date is 1776-07-04. ⇒ July 4, 1776 ¦ It happened on July 5, 1776. ⇏ July 4, 1776
        The answer is July 4, 1777. ⇏ July 4, 1776 ¦ The answer is 4 June 1776. ⇏ July 4, 1776
        Answer: March 3 ⇒ March 3 ¦ Answer: March 13 ⇏ March 3 ¦ Answer: 3 March ⇒ March 3 ¦ The year was 1969. ⇒ 1969
        It was in 1968, not in 1969. ⇏ 1969 ¦ The war ended in 1945, not 1944. ⇒ 1945
        The date is not 2020-01-05. ⇏ 2020-01-05 ¦ The meeting is on Monday, March 3. ⇒ Monday, March 3
    """,
    "times": r"""
        The train leaves at 7:45 a.m. ⇒ 7:45 AM ¦ The train leaves at 7:45 p.m. ⇏ 7:45 AM ¦ It is 14:30. ⇒ 14:30
        It is 2:30 PM. ⇒ 14:30 ¦ It is 2:30 AM. ⇏ 14:30 ¦ It arrives at 9:05. ⇏ 9:50 ¦ She finished at 3 o'clock. ⇒ 3:00
        The trip takes 2 hours and 30 minutes. ⇒ 2 hours 30 minutes
        The trip takes 2 hours and 30 minutes. ⇒ 150 minutes ¦ The trip takes 2 h 30 min. ⇒ 2.5 hours
        The trip takes 2 hours and 20 minutes. ⇏ 150 minutes ¦ The trip takes 2 hours and 30 minutes. ⇏ 2
        It takes 90 seconds. ⇒ 1.5 minutes ¦ It takes 90 seconds. ⇏ 90 minutes ¦ Her birthday is May 5. ⇒ 5 May
        It starts at 10:15 p.m. ⇒ 22:15 ¦ It starts at 10:15 p.m. ⇏ 10:15 a.m. ¦ 12:00 AM ⇒ 0:00 ¦ 12:30 PM ⇒ 12:30
        12:30 PM ⇏ 0:30 ¦ Monday ⇏ Tuesday ¦ The meeting is at 9 a.m. on 3 May 2021. ⇏ 3 May 2020
        The year is 2021. ⇏ 3 May 2021 ¦ It happened on the 3rd of May 2021. ⇒ May 3, 2021
        The date is 12/25/2020. ⇏ 12/24/2020 ¦ It ran from 1914 to 1918. ⇏ 1918 ¦ 1914–1918 ⇒ 1914-1918
        It lasted 3 weeks and 2 days. ⇒ 23 days ¦ It lasted 3 weeks and 2 days. ⇏ 3 weeks
        It lasted 2 days and 3 weeks. ⇏ 2 days ¦ 3 hours, 15 minutes ⇒ 3.25 hours ¦ 1 min 5 s ⇒ 65 s
        He ran 5 km in 20 minutes. ⇏ 5/20
    """,
    "chemistry and prefixes of units": r"""
        The ion is Ca2+. ⇒ Ca2+ ¦ The answer is Ca+. ⇏ Ca2+ ¦ \boxed{Fe^{3+}} ⇒ Fe3+ ¦ \boxed{Fe^{2+}} ⇏ Fe3+
        Answer: SO4^{2-} ⇒ SO4^2- ¦ Answer: Ca²⁺ ⇒ Ca2+ ¦ Answer: [Cu(NH3)4]^{2+} ⇒ [Cu(NH3)4]2+ ¦ Answer: Na- ⇏ Na+
        The answer is CO2. ⇒ CO2 ¦ The dose is 5 Mg. ⇏ 5 mg ¦ The dose is 5 mg. ⇒ 5 mg ¦ The power is 5 mW. ⇏ 5 MW
        It is 5 KM away. ⇒ 5 km ¦ The clock runs at 5 mhz. ⇒ 5 MHz ¦ Answer: 5 mA ⇒ 0.005 A ¦ Answer: 5 Ms ⇏ 5 ms
    """,
    "words after units": r"""
        It is 300 cm long. ⇒ 300 cm long ¦ It is 300 cm. ⇒ 300 cm long ¦ He is 12 years old. ⇒ 12 years
        He is twelve years old. ⇒ 12 ¦ He is 13 years old. ⇏ 12 years ¦ The lake is 50km away. ⇒ 50 km
        The lake is 50 km away. ⇏ 50 miles ¦ It is 3 mm thick. ⇒ 3 mm ¦ The plane is 2 hours late. ⇒ 120 minutes
        The plane is 2 hours late. ⇏ 2 hours early ¦ She walked 5 km north. ⇒ 5 km ¦ She walked 5 km north. ⇒ 5 km north
        She walked 5 km south. ⇏ 5 km north ¦ The speed is 30 m/s upward. ⇒ 30 m/s ¦ It is 20% faster. ⇒ 0.2
        It is 20% slower. ⇏ 20% faster ¦ It costs 5 dollars less. ⇒ 5 dollars
        It costs 5 dollars less. ⇏ 5 dollars more ¦ Answer: 5 more apples ⇒ 5 apples ¦ Answer: 5 more ⇒ 5
        Answer: 5 more ⇏ 5 less ¦ 12 eggs total ⇒ 12 eggs ¦ Answer: 45 minutes later ⇒ 45 minutes
        Answer: 180 cm tall ⇒ 1.8 m ¦ It is 6 feet, 2 inches tall. ⇒ 74 inches
    """,
    "currencies": r"""
        She earns eighteen dollars. ⇒ 18 ¦ She earns eighteen dollars per day. ⇒ 18 ¦ She earns nineteen dollars. ⇏ 18
        She doesn't earn eighteen dollars. ⇏ 18 ¦ She earns eighteen or nineteen dollars. ⇏ 18
        The cost is $1.2 million. ⇒ 1200000 ¦ The cost is €1.200,50. ⇒ 1200.50 ¦ The price is 45 EUR. ⇒ 45 euros
        The price is 45 USD. ⇏ 45 euros ¦ They made a profit of $250. ⇒ 250 ¦ The total comes to £12.50. ⇒ £12.50
        The total comes to $12.50. ⇏ £12.50 ¦ The refund is -$40. ⇒ -40 ¦ The refund is $40. ⇏ -40 ¦ ¥5000 ⇒ 5000 yen
        5000 won ⇏ 5000 yen ¦ The bill is $18.50, of which $2 is tax. ⇒ 18.50 ¦ It costs 3 dollars and 50 cents. ⇒ 3.50
        It costs 3 dollars and 50 cents. ⇏ 3 ¦ Answer: CHF 20 ⇒ 20 CHF
    """,
    "ranges of prices": r"""
        -5 ⇏ $5-$10 ¦ $5-$10 ⇒ $5-$10 ¦ The price is $5 to $10. ⇒ $5-$10 ¦ $5–$10 ⇒ $5 - $10 ¦ 5-10 ⇒ $5-$10
        \boxed{\$5-\$10} ⇒ $5-$10 ¦ $5-$12 ⇏ $5-$10 ¦ -4.5 ⇏ $5.50-$10 ¦ $5.50-$10 ⇒ $5.50 to $10.00 ¦ -5 ⇏ €5-€10
        $5-$10 ⇏ -5 ¦ $5-$10 ⇏ 5 ¦ €5-€10 ⇏ $5-$10 ¦ $5-€10 ⇏ $5-$10 ¦ $5 to $10 ⇏ €5-€10 ¦ 5-10 dollars ⇒ $5-$10
        5-10 euros ⇏ $5-$10 ¦ 5 - 10 euros ⇒ €5-€10 ¦ 5€-10€ ⇒ €5-€10 ¦ 1-5-10 ⇏ $5-$10 ¦ $\$5-\$10$ ⇒ $5-$10
    """,
    "fractions in words": r"""
        She ate three quarters of the pie. ⇒ 3/4 ¦ The probability is one third. ⇒ 1/3
        The probability is one in three. ⇒ 1/3 ¦ The answer is two and a half. ⇒ 2.5
        The answer is minus one half. ⇒ -1/2 ¦ The answer is one half. ⇏ -1/2 ¦ The answer is five eighths. ⇏ 8/5
        3 out of 8 ⇒ 3/8 ¦ 3 out of 8 ⇏ 3 ¦ The chance is one in six. ⇏ 1/3 ¦ It is two-thirds. ⇒ 2/3
        There are twelve eggs. ⇒ 12 ¦ There are twelve eggs. ⇏ 20 ¦ A total of thirty-one students passed. ⇒ 31
        He has one hundred twenty marbles left. ⇒ 120 ¦ None of the twelve eggs broke. ⇏ 12 ¦ Seven. ⇒ 7 ¦ seventy ⇏ 7
        The number is six, not seven. ⇏ 7 ¦ The number is six, not seven. ⇒ 6 ¦ Zero ⇒ 0 ¦ There are no solutions. ⇏ 0
        There were fifteen birds, and four flew away, so eleven are left. ⇒ 11
        There were fifteen birds, and four flew away, so eleven are left. ⇏ 15
        She has twice as many, so she has twenty-four. ⇒ 24 ¦ It takes forty minutes, not fifty. ⇒ 40
        It takes forty minutes, not fifty. ⇏ 50 ¦ It does not take forty minutes. ⇏ 40
        It takes either forty or fifty minutes. ⇏ 40 ¦ More than forty people came. ⇏ 40
        At least twelve are needed. ⇏ 12 ¦ One third of the class is absent. ⇒ 1/3 ¦ About a hundred people came. ⇏ 101
        Thirteen is wrong. ⇏ 13 ¦ If he bought ten, he would have ten left. ⇏ 11 ¦ The twins are six. ⇒ 6
        The Magnificent Seven ⇒ The Magnificent Seven ¦ The film is Twelve Angry Men. ⇒ Twelve Angry Men
        The two cities are Paris and Rome. ⇏ Paris ¦ The answer is one hundred and one. ⇒ 101
        The answer is one hundred and one. ⇏ 100 ¦ a quarter ⇒ 25%
    """,
    "intervals, ranges": r"""
        x is between 2 and 5 ⇏ 5 ¦ The solution set is $[2, 5)$. ⇒ [2,5) ¦ The solution set is $(2, 5]$. ⇏ [2,5)
        2 ≤ x < 5 ⇒ [2,5) ¦ The solution is x ≥ 3. ⇒ [3, \infty) ¦ The solution is x > 3. ⇏ [3, \infty)
        x < -2 or x > 2 ⇒ (-\infty,-2) \cup (2,\infty) ¦ x < -2 and x > 2 ⇏ (-\infty,-2) \cup (2,\infty) ¦ 10-15 ⇒ 10–15
        The range is 10 to 15 minutes. ⇏ 15 ¦ 10 to 15 ⇒ 10-15 ¦ from 10 to 15 ⇏ 10 ¦ Pages 12-18 ⇏ 18 ¦ at most 7 ⇏ 7
        The answer lies in (0, 1). ⇒ (0, 1) ¦ \boxed{(-\infty, 3) \cup (3, \infty)} ⇒ x \neq 3
        \boxed{-1 \le x \le 1} ⇒ [-1, 1] ¦ \boxed{-1 < x \le 1} ⇏ [-1, 1]
    """,
    "sets and lists": r"""
        The roots are 2 and -3. ⇒ \{-3, 2\} ¦ The roots are 2 and 3. ⇏ \{-3, 2\} ¦ The roots are 2 and -3. ⇏ 2
        x = 2, x = -3 ⇒ -3, 2 ¦ The set is {1, 2, 3}. ⇒ {3, 2, 1} ¦ The set is {1, 2}. ⇏ {3, 2, 1}
        The primes are 2, 3, 5, and 7. ⇒ 2, 3, 5, 7 ¦ The primes are 2, 3, 5, 7 and 9. ⇏ 2, 3, 5, 7
        The solutions are x=1 and x=4 ⇒ 1, 4 ¦ The factors are:⏎- 2⏎- 3⏎- 7 ⇒ 2, 3, 7
        red, green and blue ⇒ red, green, blue ¦ red and green ⇏ red, green, blue
        Answer: red, green, and blue. ⇒ red, green, blue ¦ \boxed{\{0, \pm 1\}} ⇒ \{-1, 0, 1\}
        \boxed{\emptyset} ⇏ \{0\}
    """,
    "matrices and vectors": r"""
        \boxed{\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}} ⇒ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
        \boxed{\begin{bmatrix} 1 & 3 \\ 2 & 4 \end{bmatrix}} ⇏ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
        The matrix is [[1, 2], [3, 4]]. ⇒ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
        \boxed{\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}} ⇒ -2 ¦ The vector is (1, -2, 3). ⇒ (1,-2,3)
        The vector is (1, 2, 3). ⇏ (1,-2,3)
        \boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}} ⇒ \begin{bmatrix} 1 \\ 2 \end{bmatrix}
    """,
    "units": r"""
        The mass is 2.5 kg. ⇒ 2500 g ¦ The mass is 2.5 g. ⇏ 2.5 kg ¦ The speed is 20 m/s. ⇒ 72 km/h
        The speed is 20 km/h. ⇏ 20 m/s ¦ The area is 12 square meters. ⇒ 12 m^2 ¦ The area is 12 meters. ⇏ 12 m^2
        The volume is 3 liters. ⇒ 3000 mL ¦ The volume is 3 L ⇏ 3 mL ¦ The force is 10 N to the left. ⇒ 10 N
        The pressure is 101 kPa. ⇒ 101000 Pa ¦ The pressure is 101 Pa. ⇏ 101 kPa ¦ 5 feet 6 inches ⇒ 66 inches
        5 feet 6 inches ⇏ 5 feet ¦ The temperature is -5 °C. ⇒ -5°C ¦ The temperature is 5 °C. ⇏ -5°C
        The energy is 3.2 × 10^4 J. ⇒ 32000 J ¦ The energy is 3.2 × 10^4 J. ⇒ 32 kJ
        The energy is 3.2 × 10^5 J. ⇏ 32000 J ¦ The current is 250 mA. ⇒ 0.25 A ¦ The current is 250 A. ⇏ 250 mA
        The concentration is 0.5 mol/L. ⇒ 0.5 mol/L ¦ The wavelength is 500 nm. ⇒ 5e-7 m
        The wavelength is 500 nm. ⇏ 500 mm ¦ The frequency is 2.4 GHz. ⇒ 2400 MHz ¦ The angle is 45 degrees. ⇒ 45^\circ
        The angle is \frac{\pi}{4} radians. ⇒ \frac{\pi}{4} ¦ 6 ft ⇒ 2 yards ¦ 8 GB ⇏ 8 MB ¦ 100 acres ⇏ 100 hectares
        The length is 3 mm. ⇒ 0.3 cm ¦ The power is 1.5 kW. ⇒ 1500 W ¦ The capacity is 2 MB. ⇏ 2 GB
        The density is 1.2 g/cm^3. ⇒ 1200 kg/m^3 ¦ It weighs 5 pounds 4 ounces. ⇒ 84 ounces ¦ 5 cm ⇏ 5 cm^2
        30 miles per hour ⇒ 30 mph ¦ There are 5 in total. ⇒ 5 ¦ There are 5 in the box. ⇒ 5
        The board is 5 ft long. ⇒ 5 ft
    """,
    "chemical formulas": r"""
        The answer is H2O. ⇒ H2O ¦ The formula is H₂O. ⇒ H2O ¦ The formula is $\mathrm{H_2O}$. ⇒ H2O
        The formula is H2O2. ⇏ H2O ¦ The product is CO2. ⇒ CO2 ¦ The product is CO. ⇏ CO2 ¦ The gas is CO_2 ⇒ CO2
        NaCl ⇒ NaCl ¦ The compound is Ca(OH)2. ⇒ Ca(OH)2 ¦ The ion is Na+ ⇏ Na- ¦ The ion is SO4^2- ⇒ SO4^{2-}
        Fe2O3 ⇏ Fe3O4 ¦ The formula is C6H12O6. ⇒ C_6H_{12}O_6 ¦ x^{2}y ⇏ x^{2y} ¦ \frac{1}{2+x} ⇏ \frac{1}{2}+x
        a_{12} ⇏ a_{1}2 ¦ a_1 + 2 ⇏ a_{1+2} ¦ apples, pears, and plums ⇒ apples, pears and plums
        apples, pears, and plums ⇏ apples and plums ¦ salt and pepper ⇒ salt and pepper
        pepper and salt ⇏ salt or pepper ¦ The point is (2, -1). ⇒ (2,-1) ¦ The point is not (2, -1). ⇏ (2,-1)
        It lies on (2, -1) and (3, 4). ⇏ (2,-1) ¦ 0x1F ⇏ 0 ¦ H2SO4 ⇏ H2SO3 ¦ OH- ⇏ OH+
    """,
    "names with initials": r"""
        John F. Kennedy ⇒ John F. Kennedy ¦ The answer is John F. Kennedy. ⇒ John F. Kennedy
        The president was John F. Kennedy. ⇒ John F. Kennedy ¦ It was J. R. R. Tolkien who wrote it. ⇒ J. R. R. Tolkien
        It was J. R. R. Tolkien. ⇒ J. R. R. Tolkien ¦ The answer is J.K. Rowling. ⇒ J.K. Rowling
        The answer is J. K. Rowling. ⇒ J.K. Rowling ¦ The answer is Martin Luther King Jr. ⇒ Martin Luther King Jr.
        The answer is Robert F. Kennedy. ⇏ John F. Kennedy ¦ The answer is not John F. Kennedy. ⇏ John F. Kennedy
        John F. Kennedy or Lyndon B. Johnson ⇏ John F. Kennedy ¦ The answer is George W. Bush. ⇏ George H. W. Bush
        The author is W. E. B. Du Bois. ⇒ W. E. B. Du Bois ¦ Answer: Mr. Darcy ⇒ Mr. Darcy
        Answer: Mrs. Darcy ⇏ Mr. Darcy ¦ The answer is St. Louis. ⇒ St. Louis ¦ The answer is Mt. Everest. ⇒ Mt. Everest
        The answer is Washington, D.C. ⇒ Washington, D.C. ¦ The answer is the U.S. ⇒ the U.S.
        **Samuel L. Jackson** ⇒ Samuel L. Jackson ¦ The actor is Samuel L. Jackson, I believe. ⇒ Samuel L. Jackson
        The first president was George Washington. ⇒ George Washington
        The inventor is Thomas A. Edison, who lived in New Jersey. ⇒ Thomas A. Edison
        The answer is Edgar A. Poe. He wrote The Raven. ⇒ Edgar A. Poe
        The answer is Louis B. Mayer, not Samuel Goldwyn. ⇒ Louis B. Mayer ¦ It is Samuel B. Morse. ⇏ Samuel F. Morse
        It was T. S. Eliot. ⇒ T. S. Eliot ¦ The poet is not T. S. Eliot. ⇏ T. S. Eliot
        I doubt that it was T. S. Eliot. ⇏ T. S. Eliot ¦ The answer is Prof. Moriarty. ⇒ Prof. Moriarty
        The answer is Mr. Smith. He left at 5. ⇒ Mr. Smith ¦ The company is Apple Inc. ⇒ Apple Inc.
        The answer is Vitamin C. Oranges contain it. ⇒ Vitamin C
    """,
    "yes/no with reasons": r"""
        Yes, because 7 is prime. ⇒ yes ¦ No, because 9 is divisible by 3. ⇒ no ¦ No, because 9 is divisible by 3. ⇏ yes
        Yes. The triangle is not acute. ⇒ yes ¦ The answer is no, since it is not closed. ⇒ no
        The answer is yes. However, it is not unique. ⇒ yes ¦ Not necessarily. ⇏ yes ¦ Yes and no. ⇏ yes
        I would say yes, but I am not sure. ⇏ no ¦ The answer is not yes. ⇏ yes ¦ The answer is not "no". ⇏ no
        No, it is false. ⇏ true ¦ False. The sum is even. ⇒ false ¦ The claim is false. ⇒ false
        The claim is not true. ⇏ true ¦ The claim is not false. ⇏ false ¦ True or false? It is false. ⇒ false
        Yes: all of them do. ⇒ yes ¦ Maybe yes, maybe no. ⇏ yes
    """,
    "multi-part": r"""
        The length is 5 and the width is 3. ⇏ 5 ¦ The length is 5 cm and the width is 3 cm, so the area is 15 cm². ⇒ 15
        x = 3 and y = 4 ⇒ x=3, y=4 ¦ x = 3 and y = 4 ⇒ (3, 4) ¦ x = 4 and y = 3 ⇏ (3, 4) ¦ (a) 5 (b) 7 ⇏ 5
        (a) 5⏎(b) 7 ⇏ 7 ¦ Part 1: 12⏎Part 2: 15⏎⏎The answer is 27. ⇒ 27 ¦ a) 3, b) 4 ⇏ 4
        First 3 apples, then 4 apples, so 7 apples. ⇒ 7 ¦ The mean is 4 and the median is 5. ⇏ 4
    """,
    "scientific notation": r"""
        3.0 × 10^8 m/s ⇒ 3e8 ¦ The speed of light is 3 × 10⁸ m/s. ⇒ 3 \times 10^8 m/s
        The value is 6.02E23. ⇒ 6.02 \times 10^{23} ¦ The value is 6.02E22. ⇏ 6.02 \times 10^{23}
        1.6 x 10^-19 C ⇒ 1.6 \times 10^{-19} ¦ 1.6 x 10^19 ⇏ 1.6 \times 10^{-19} ¦ 10^{-3} ⇒ 0.001
        The answer is 2.5·10^3. ⇒ 2500 ¦ approximately 6.02 × 10²³ ⇒ 6.02e23
    """,
    "negative percentages": r"""
        The change is -12%. ⇒ -12\% ¦ The change is −12 %. ⇒ -12% ¦ The change is ➖12%. ⇒ -12%
        The change is ➖12%. ⇏ 12% ¦ The change is ‒12%. ⇒ -12% ¦ The change is 12%. ⇏ -12%
        It is a decrease of 12%. ⇏ -12% ¦ It fell by 12 percent. ⇏ -12% ¦ The change is minus 12 percent. ⇒ -12%
        -0.12 ⇒ -12% ¦ The rate is 5.5%. ⇒ 0.055 ¦ The rate is 5.5 percentage points ⇏ 55%
    """,
    "markdown": r"""
        | item | cost |⏎|---|---|⏎| pen | 3 |⏎| book | 9 |⏎⏎**Total: 12** ⇒ 12
        | step | value |⏎|---|---|⏎| 1 | 4 |⏎| **Answer** | **16** | ⇒ 16 ¦ - **Final answer:** 12 ⇒ 12
        1. Add 3 and 4.⏎2. The sum is 7.⏎⏎**7** ⇒ 7 ¦ **The answer is 7.** ⇒ 7 ¦ __7__ ⇒ 7 ¦ *Answer*: _7_ ⇒ 7
        ## 7 ⇒ 7 ¦ `7` ⇒ 7 ¦ ```⏎7⏎``` ⇒ 7 ¦ **Answer**⏎⏎> 7 ⇒ 7 ¦ ***7*** ⇒ 7 ¦ ~~6~~ 7 ⇒ 7 ¦ ~~7~~ 6 ⇏ 7
        The answer is ~~7~~ 6. ⇏ 7 ¦ The answer is ~~6~~ **7**. ⇒ 7 ¦ <b>7</b> ⇒ 7 ¦ The answer is <b>7</b>. ⇒ 7
        Answer: 7  ⏎ ⇒ 7 ¦ - [ ] 6⏎- [x] 7 ⇒ 7
    """,
    "boxes": r"""
        \boxed{\text{The answer is }\boxed{7}} ⇒ 7 ¦ $\boxed{\boxed{7}}$ ⇒ 7 ¦ \boxed{x = \boxed{7}} ⇒ 7
        \boxed{5} is the first, but the final result is \boxed{7}. ⇒ 7 ¦ \boxed{7}, not \boxed{5} ⇒ 7
        \boxed{5}, not \boxed{7} ⇏ 7 ¦ I first got \boxed{5}. After checking, \boxed{7}. ⇒ 7
        \boxed{7 \text{ or } 8} ⇏ 7 ¦ \boxed{7} (see above) ⇒ 7 ¦ \boxed{\textbf{7}} ⇒ 7 ¦ \boxed{\dfrac{7}{1}} ⇒ 7
        \boxed{7\text{ apples}} ⇒ 7 ¦ \boxed{\$7} ⇒ 7 ¦ \boxed{} ⇏ 7 ¦ \boxed{?} ⇏ 7 ¦ \fbox{7} ⇒ 7
        \boxed{\color{red}{7}} ⇒ 7 ¦ \boxed{\textcolor{blue}{7}} ⇒ 7 ¦ \boxed{~7~} ⇒ 7 ¦ \boxed{-7} ⇏ 7
        \boxed{7^\circ} ⇒ 7 ¦ \boxed{70} ⇏ 7 ¦ \boxed{\not 7} ⇏ 7 ¦ \boxed{\neq 7} ⇏ 7 ¦ \boxed{> 7} ⇏ 7
        \boxed{\text{not } 7} ⇏ 7 ¦ \boxed{\approx 7} ⇒ 7 ¦ \boxed{\text{Answer: } 7} ⇒ 7
        The answer is not \boxed{5}. ⇏ 5 ¦ It isn't \boxed{5}; it is \boxed{6}. ⇒ 6
        It isn't \boxed{5}; it is \boxed{6}. ⇏ 5 ¦ The answer cannot be \boxed{5}. ⇏ 5 ¦ \boxed{5} is wrong. ⇏ 5
        \boxed{5} is correct, and \boxed{6} is wrong. ⇏ 6 ¦ This does not matter. \boxed{5} ⇒ 5
        The sum is not 6 but \boxed{5}. ⇒ 5 ¦ \boxed{\textbf{(A) } 5} ⇒ A ¦ \boxed{5\ \text{or}\ 6} ⇏ 6
    """,
    "final answer then note": r"""
        The answer is 7. Note that 8 would be too many. ⇒ 7 ¦ The answer is 7.⏎⏎Note: I assumed 8 hours per day. ⇒ 7
        Answer: 7⏎⏎(This uses 8 hours a day.) ⇒ 7 ¦ 7⏎⏎Let me know if you need more help! ⇒ 7
        The answer is 7. P.S. I used 3 steps. ⇒ 7 ¦ The answer is 7. If you meant hours, it is 8. ⇏ 8
        The answer is 7 (seven). ⇒ 7 ¦ The answer is 7 [see step 3]. ⇒ 7 ¦ Answer: 7 ± 0.5 ⇏ 7
        The answer is 7; this agrees with the estimate of 8. ⇒ 7 ¦ The answer is 7, which is less than 8. ⇒ 7
        The answer is 8, which is more than 7. ⇏ 7
    """,
    "hedges and denials": r"""
        41 and 42 is wrong ⇏ 41 ¦ 41 and 42 are wrong ⇏ 41 ¦ 41 and 42 are wrong ⇏ 42 ¦ 41, and 42 is wrong ⇏ 42
        41 is right, and 42 is wrong ⇒ 41 ¦ 41 is right and 42 is wrong ⇒ 41 ¦ Both 41 and 42 are wrong. ⇏ 42
        Neither 41 nor 42 ⇏ 41 ¦ Neither 41 nor 42 is right. ⇏ 42 ¦ 41 is wrong and 42 is right ⇒ 42
        It could be 41. ⇏ 42 ¦ I am not sure, but it could be 41 or 42. ⇏ 41 ¦ It's definitely not 42. ⇏ 42
        It can't be 42. ⇏ 42 ¦ It is hardly 42. ⇏ 42 ¦ I would not say 42. ⇏ 42 ¦ The answer isn't 42, it's 43. ⇏ 42
        The answer isn't 42, it's 43. ⇒ 43 ¦ Is it 42? ⇏ 41 ¦ Unless it is 42, I do not know. ⇏ 42
        42 would be wrong. ⇏ 42 ¦ 42 is too high. ⇏ 42 ¦ 42 cannot be right. ⇏ 42 ¦ Anything except 42. ⇏ 42
        The opposite of 42 ⇏ 42 ¦ I refuse to say 42. ⇏ 42 ¦ Almost 42 ⇏ 43 ¦ The answer is 42 or so. ⇏ 43
        Tom says 42, but he is wrong. ⇏ 42 ¦ Some people say 42, but the answer is 43. ⇒ 43
        If x were 42, we would get a contradiction. ⇏ 42 ¦ 42, but he is wrong ⇏ 42 ¦ She got 42, but she is wrong. ⇏ 42
        She got 42, but he is taller. ⇒ 42 ¦ 42 is too many, so it must be 41. ⇒ 41
        42 is too many, so it must be 41. ⇏ 42 ¦ Unless I am mistaken, it is 42. ⇒ 42
        If I am right, the answer is 42. ⇒ 42 ¦ If you add 40 and 2, you get 42. ⇒ 42 ¦ Suppose x = 3. Then y = 42. ⇒ 42
        None of them is 42. ⇏ 42 ¦ 41 or 42 is wrong, it is 43. ⇒ 43 ¦ 41, 42 and 43 are all wrong. ⇏ 41
        Both 41 and 42 are right. ⇏ 42 ¦ The first guess of 41 and the second of 42 are wrong. ⇏ 41
    """,
    "decimal commas and other languages": r"""
        La respuesta es 3,5. ⇒ 3.5 ¦ La respuesta es 3,5. ⇏ 35 ¦ Die Antwort ist 1.234,56 Euro. ⇒ 1234.56
        La réponse est 1 234,56 €. ⇒ 1234.56 ¦ La réponse est 0,75. ⇒ 3/4 ¦ Das Ergebnis beträgt 12,5 %. ⇒ 12.5%
        Das Ergebnis ist 12,5. ⇒ 12.5 ¦ Der Preis ist 12,50 €. ⇒ 12.5 ¦ Ответ: 3,14 ⇒ 3.14 ¦ Ответ: −3,14 ⇏ 3.14
        La risposta è -2. ⇒ -2 ¦ A resposta é 2,5 kg. ⇒ 2.5 kg ¦ El resultado es 42, no 41. ⇒ 42
        Le résultat n'est pas 42. ⇏ 42 ¦ Das Ergebnis ist nicht 42. ⇏ 42 ¦ Il y a 42 pommes. ⇒ 42
        Hay 42 manzanas. ⇒ 42
    """,
    "options with text": r"""
        B. Mitochondria ⇒ B ¦ (B) Mitochondria, because they make ATP. ⇒ B
        The answer is B: mitochondria, not C: ribosomes. ⇒ B ¦ The statement that is NOT true is B ⇒ B
        The statement that is not true is B. ⇒ B ¦ The statement that is not true is B. ⇏ A
        The one that does not belong is C. ⇒ C ¦ The incorrect statement is D. ⇒ D ¦ The false statement is (D). ⇒ D
        Which is false? B is false. ⇏ A ¦ The exception is B. ⇒ B ¦ All are true except B. ⇒ B
        All of them are mammals except (C). ⇒ C ¦ The odd one out is D. ⇒ D
        The statement that is NOT true is not B ⇏ B ¦ The option that cannot be right is B, so the answer is C. ⇒ C
        The answer that is wrong is B. ⇏ A ¦ None of the above ⇒ None of the above
        The answer is none of the above. ⇒ None of the above ¦ E. None of the above ⇒ E ¦ (E) none of these ⇒ E
        None of the above ⇏ A ¦ (B) and (C) ⇏ B ¦ (B) and (C) ⇏ C ¦ (B) and (C) ⇒ (B) and (C) ¦ B and C ⇒ B, C
        The answers are B and C. ⇒ B, C ¦ The answers are B and D. ⇏ B, C ¦ B only ⇒ B ¦ Only B is true. ⇒ B
        I only ⇏ B ¦ I and III only ⇒ I and III ¦ I and III only ⇏ I and II ¦ Option B (not C). ⇒ B
        B is correct, C is not. ⇒ B ¦ C is correct, B is not. ⇏ B ¦ A is not correct, so B ⇒ B
        Not A, not C, not D. ⇏ A ¦ The correct answer is option (d): 42 ⇒ D ¦ My final choice: **C** ⇒ C
        My final choice is C, although B is close. ⇒ C ¦ Answer: (B) & (C) ⇏ B ¦ B > C ⇏ B
        Statement A contradicts the text. ⇏ A ¦ All except B ⇏ B ¦ It must be either B or C, and B is impossible. ⇏ B
        The answer is option B, "Paris". ⇒ B ¦ The answer is option "B". ⇒ B ¦ Let me pick D then. ⇒ D
        D, as C is false. ⇒ D ¦ Vitamin C ⇏ C ¦ Vitamin C is the answer. ⇒ Vitamin C ¦ Hepatitis B ⇒ Hepatitis B
        Plan B ⇒ Plan B ¦ The only statement that isn't correct is C. ⇒ C
        The sentence which contains an error is B. ⇒ B ¦ The only one that doesn't fit is (A). ⇒ A
        The word that cannot be a verb is D. ⇒ D ¦ The answer that I reject is D. ⇏ D
        The option I would rule out is A. ⇏ A ¦ The wrong option is A. ⇏ A ¦ The wrong one is A. ⇏ A
        The true statement is not B. ⇏ B ¦ The capital of France is in option B. ⇒ B
        All of the statements are correct except A. ⇒ A ¦ All options are wrong except C. ⇒ C ¦ Everything but A ⇏ A
        If the statement that is false is B, we are lost. ⇏ B ¦ Is the false statement B? ⇏ B
        The false statement is B or C. ⇏ B ¦ The false statement is B. Wait, it is C. ⇒ C
        The false statement is B. Wait, it is C. ⇏ B ¦ I think (B), but not (C). ⇒ B
        I think (B), but (C) is possible. ⇏ B ¦ Answer: ~~A~~ B ⇒ B ¦ - [ ] A⏎- [x] B⏎- [ ] C ⇒ B
        - [ ] A⏎- [x] B⏎- [x] C ⇏ B ¦ The answer is <b>B</b>. ⇒ B ¦ None of the options, so E. ⇒ E
    """,
    "words": r"""
        The capital is Paris, not Lyon. ⇒ Paris ¦ The capital is Lyon, not Paris. ⇏ Paris
        It is called photosynthesis. ⇒ photosynthesis ¦ The process is called photosynthesis. ⇒ photosynthesis
        The capital of Australia is Canberra (not Sydney). ⇒ Canberra
        The capital of Australia is not Canberra. ⇏ Canberra ¦ Sydney is not the capital; Canberra is. ⇏ Sydney
        The author is William Shakespeare. ⇒ William Shakespeare ¦ William Shakespeare wrote it. ⇏ Shakespeare
        The color is blue-green. ⇒ blue-green ¦ The answer is "to be or not to be". ⇒ to be or not to be
        The answer is New York or Boston. ⇏ New York ¦ The answer is probably Paris. ⇏ London
        The answer isn't Paris. ⇏ Paris ¦ The word is not "cat" but "dog". ⇏ cat ¦ The sea is blue. ⇒ blue
        The sea isn't blue. ⇏ blue ¦ The sea is never blue. ⇏ blue ¦ The sea is hardly blue. ⇏ blue
        The sea is blue or green. ⇏ blue ¦ The sea is anything but blue. ⇏ blue
        The sea is blue, but that is wrong. ⇏ blue ¦ The sea is said to be blue. ⇏ blue
        The winner was called Bolt. ⇒ Bolt ¦ If the winner is Bolt, we lose. ⇏ Bolt
    """,
    "formulas": r"""
        The derivative is 2x + 3. ⇒ 2x+3 ¦ The derivative is 2x - 3. ⇏ 2x+3
        The integral is x^2/2 + C. ⇒ \frac{x^2}{2}+C ¦ The slope is -3/4. ⇒ -0.75 ¦ The slope is 3/4. ⇏ -0.75
        y = 2x + 1 ⇒ y=2x+1 ¦ The equation is y = 2x - 1. ⇏ y=2x+1 ¦ f(x) = x^2 + 1 ⇒ x^2+1 ¦ n = 4k + 1 ⇒ 4k+1
        The ratio is 2:3. ⇒ 2/3 ¦ The ratio is 3:2. ⇏ 2:3 ¦ \boxed{2^{10}} ⇒ 1024 ¦ \boxed{e^{2}} ⇒ e^2
        \boxed{5!} ⇒ 120 ¦ \boxed{\binom{5}{2}} ⇒ 10 ¦ \boxed{0.333} ⇏ 1/3 ¦ \boxed{\sqrt{50}} ⇒ 5\sqrt{2}
        \boxed{\pm 3} ⇒ 3, -3 ¦ \boxed{\pm 3} ⇏ 3 ¦ \boxed{x = \pm 3} ⇒ x=3 or x=-3 ¦ \boxed{1,000} ⇒ 1000
        \boxed{1,00} ⇏ 100 ¦ log 100 ⇏ 3 ¦ 101_2 ⇒ 101_2 ¦ 0b101 ⇏ 101 ¦ 0xFF ⇒ 0xFF ¦ 0xFF ⇏ 0xFE ¦ XIV ⇒ XIV
        XVI ⇏ XIV
    """,
    "risks": r"""
        The statement that is not B is true. ⇏ B ¦ The one thing I know is that it isn't B. ⇏ B
        The reason is A bird. ⇏ A ¦ The only letter left is C. ⇒ C ¦ The sum of A and B is C. ⇏ A ¦ The grade is B. ⇒ B
        The false answer is B. ⇏ B ¦ The correct answer is not the one that is B. ⇏ B ¦ The trap is B. ⇏ B
        The distractor is B. ⇏ B ¦ The mistake is B. ⇏ B ¦ The worst is B, the best is C. ⇏ B
        The statement that is true is A, while B is false. ⇒ A ¦ All of these are false except D. ⇒ D
        All of these are false except D and E. ⇏ D ¦ Every one is wrong, including B. ⇏ B
        Only twelve of the fifteen are red. ⇏ 15 ¦ She has three cats and four dogs. ⇏ 3 ¦ Two plus two is four. ⇒ 4
        Two plus two is not five. ⇏ 5 ¦ Two plus two is four, not five. ⇏ 5 ¦ Five is too many. ⇏ 5
        Five is wrong, four is right. ⇏ 5 ¦ I count five, but I am wrong. ⇏ 5 ¦ one ⇒ 1 ¦ It is one. ⇒ 1
        It is not one. ⇏ 1 ¦ one of them ⇏ 1 ¦ second ⇏ 2 ¦ It came in second. ⇏ 2 ¦ a dozen eggs ⇒ 12
        half past three ⇏ 3 ¦ three fifths ⇒ 0.6 ¦ three fifths ⇏ 3/4 ¦ thirty-three and a third ⇒ 100/3
        4 hours 75 minutes ⇏ 4 hours ¦ 3 km 5 s ⇏ 3 km ¦ 5 m 20 ⇏ 5 ¦ 1 hour and 20 minutes ⇏ 1.2 hours ¦ 7:00 ⇏ 7:00 PM
        July 4 ⇏ July 5 ¦ July 4, 1776 ⇏ July 4, 1777 ¦ Before July 4, 1776 ⇏ July 4, 1776
        It was not on July 4, 1776. ⇏ July 4, 1776 ¦ July 4 or July 5 ⇏ July 4 ¦ between July 4 and July 6 ⇏ July 6
        May 2021 ⇏ May 20 ¦ on 4 July, not on 5 July ⇏ July 5 ¦ The answer is (2, 3), not (3, 2). ⇒ (2, 3)
        The answer is (2, 3), not (3, 2). ⇏ (3, 2) ¦ 5 is wrong and 6 is wrong. ⇏ 5 ¦ 5 is wrong and 6 is wrong. ⇏ 6
        It is 5, which she says is wrong. ⇏ 6 ¦ If she is right, 5. If not, 6. ⇏ 5 ¦ red and blue ⇏ red
        red, blue ⇒ red and blue ¦ NO ⇏ NO2 ¦ C2H5OH ⇒ C_2H_5OH ¦ 10² ⇏ 102 ¦ 3 cups ⇒ 3 cups ¦ 3 cups ⇏ 3 spoons
        0.5 l ⇒ 500 ml ¦ \boxed{7} or \boxed{8}? I choose \boxed{8}. ⇒ 8 ¦ I don't think \boxed{7} is right. ⇏ 7
        It would be wrong to say \boxed{7}. ⇏ 7 ¦ The statement "x > 3" is wrong, so \boxed{7}. ⇒ 7
        Do not forget the unit: \boxed{7} ⇒ 7 ¦ This is not hard: \boxed{7}. ⇒ 7 ¦ Not only that: \boxed{7} ⇒ 7
        ~~The answer is 7.~~ The answer is 8. ⇒ 8 ¦ ~~The answer is 7.~~ ⇏ 7 ¦ Mr. Brown ⇏ Mrs. Brown
        J. S. Bach ⇏ C. P. E. Bach ¦ The composer was J. S. Bach, not Handel. ⇒ J. S. Bach
        The composer wasn't J. S. Bach. ⇏ J. S. Bach ¦ The composer is certainly not J. S. Bach. ⇏ J. S. Bach
        The composer is J. S. Bach or Handel. ⇏ J. S. Bach ¦ The composer I would exclude is Bach. ⇏ Bach
        The composer who did not write it is Bach. ⇏ Handel ¦ The winner is none other than Bolt. ⇏ Smith
        The price is forty-two dollars and fifty cents. ⇒ 42.50
    """,
    "first contact": r"""
        Therefore, Weng earned $\$10$ for 50 minutes of babysitting. ⇒ 10
        He spent $5 on apples, so he has $3 left. ⇏ 5 ¦ The line has equation $y = -\frac{2}{3}x + 4$. ⇒ 2x + 3y = 12
        The line has equation $y = \frac{2}{3}x + 4$. ⇏ 2x + 3y = 12 ¦ <final_answer>Paris</final_answer> ⇒ Paris
        <final_answer>Lyon</final_answer> ⇏ Paris ¦ The longest field goal was 48 yards. ⇒ 48-yard
        The longest field goal was 48 feet. ⇏ 48-yard ¦ 7-Eleven ⇏ 7 ¦ The answer is "the Eiffel Tower". ⇒ Eiffel Tower
        The currency of Japan is the yen. ⇒ yen ¦ It is a telescope. ⇒ telescope ¦ a x ⇏ x
        The painting was made by Leonardo da Vinci. ⇒ Leonardo da Vinci
        The painting was not made by Leonardo da Vinci. ⇏ Leonardo da Vinci
        The sorted list is: apple, banana, cherry. ⇒ apple, banana, cherry
        Sorted words: apple banana cherry ⇒ apple banana cherry
        The wrong order is: apple, banana, cherry. ⇏ apple, banana, cherry ¦ The missing brackets are: ] } > ⇒ ] } >
        So the answer is ] ) } ⇒ ] ) } ¦ So the answer is ] } ) ⇏ ] ) } ¦ The answer is: > ] ⇒ > ]
        The speed of the block is $v = \sqrt{2gh} \approx 4.4$ m/s. ⇒ 4.4 m/s
        The speed of the block is $v = \sqrt{2gh} \approx 4.5$ m/s. ⇏ 4.4 m/s
        The acceleration is $9.8\ \mathrm{m\,s^{-2}}$. ⇒ 9.8 m/s^2
        The acceleration is $9.8\ \mathrm{m\,s^{-1}}$. ⇏ 9.8 m/s^2 ¦ R is 8.314 J mol^{-1} K^{-1}. ⇒ 8.314 J/(mol·K)
        The charge is $-1.6 \times 10^{-19}$ C. ⇏ 1.6 \times 10^{-19} C ¦ The mass is 9.1e-31 kg. ⇏ 1.6e-31
        The balanced equation is 2H2 + O2 → 2H2O. ⇒ 2H2 + O2 -> 2H2O
        The total is $3.75, i.e. three dollars and seventy-five cents. ⇒ 3.75 ¦ He gets 75 cents back. ⇒ $0.75
        He gets 75 cents back. ⇏ $75 ¦ The train arrives at 6:15 in the evening. ⇒ 6:15 PM
        The train arrives at 6:15 in the morning. ⇏ 6:15 PM ¦ z = 3 + 4i ⇒ 4i + 3 ¦ z = 3 - 4i ⇏ 4i + 3
        The vector is $\langle 1, -2, 3 \rangle$. ⇒ \begin{pmatrix} 1 \\ -2 \\ 3 \end{pmatrix}
        The vector is $\langle 1, 2, 3 \rangle$. ⇏ \begin{pmatrix} 1 \\ -2 \\ 3 \end{pmatrix}
        The domain is all real numbers except 2. ⇒ (-\infty,2)\cup(2,\infty) ¦ The ratio is 3 to 4. ⇒ 3:4
        The ratio is 4 to 3. ⇏ 3:4 ¦ It is 3 to 4. ⇏ 0.75 ¦ You need 2 1/2 cups of flour. ⇒ 2.5
        You need 2 1/2 cups of flour. ⇏ 1/2 ¦ Q12) What is 5 + 6?⏎A12) 11 ⇒ 11
        Initially I thought it was 24, but after rechecking it is 28. ⇒ 28
        Initially I thought it was 24, but after rechecking it is 28. ⇏ 24
        The company's net income was $3.2B in 2019. ⇒ 3200000000
        The company's net income was $3.2M in 2019. ⇏ 3200000000
        Revenue in 2020 was $45.3 million, compared to $40.1 million in 2019. ⇒ 45.3 million
        Revenue in 2020 was $45.3 million, compared to $40.1 million in 2019. ⇏ 40.1 million
        The angle is 30 degrees, which is π/6 radians. ⇒ 30 ¦ \boxed{2^{100}} ⇏ 2^{100} - 1
        \boxed{2^{100} - 1} ⇒ 2^{100} - 1 ¦ $f^{-1}(x) = \frac{x-3}{2}$ ⇒ \frac{x-3}{2}
        $f^{-1}(x) = \frac{x+3}{2}$ ⇏ \frac{x-3}{2} ¦ The solution set is \{x : x > 3\}. ⇒ (3, \infty)
        The solution set is \{x : x < 3\}. ⇏ (3, \infty) ¦ The eigenvalues are λ₁ = 2 and λ₂ = 5. ⇒ 2, 5
        The eigenvalues are λ₁ = 2 and λ₂ = 4. ⇏ 2, 5 ¦ Did Billy cause the accident? Yes. ⇒ Yes
        Did Billy cause the accident? No. ⇏ Yes ¦ The tax is 8% of $50, which is $4. ⇒ 4
        The tax is 8% of $50, which is $4. ⇏ 8 ¦ She needs 5 more stickers to reach 20. ⇒ 5
        She needs 5 more stickers to reach 20. ⇏ 20 ¦ It takes 5 hours to drive 300 miles. ⇒ 5 hours ¦ T ≈ 1410 K ⇒ 1410
        T ≈ 1401 K ⇏ 1410 K ¦ [H+] = 1.0 × 10^-7 M ⇒ 1e-7 ¦ The element is gold (Au). ⇒ gold
        The element is gold (Au). ⇒ Au ¦ The element is silver (Ag). ⇏ gold ¦ The element is gold (No). ⇏ No
        La capitale de la France est Paris. ⇒ Paris ¦ La capitale de la France n'est pas Paris. ⇏ Paris
        Die Hauptstadt ist nicht Bonn. ⇏ Bonn ¦ Ответ: 36 яблок, а не 35. ⇒ 36 ¦ Ответ: 36 яблок, а не 35. ⇏ 35
        The torque is 5 kg m^2/s^2. ⇒ 5 N·m ¦ The torque is 5 kg m/s^2. ⇏ 5 N·m ¦ The field is 3 V/m. ⇒ 3 N/C
        The volume is 2 dm^3. ⇒ 2 L ¦ The energy is 2 eV. ⇒ 3.204353268e-19 J ¦ The energy is 2 MeV. ⇏ 2 eV
        The answer is 86. Edit: it should be 96. ⇒ 96 ¦ The answer is 86. Edit: it should be 96. ⇏ 86
        Answer: 86 (corrected: 96) ⇏ 86 ¦ My previous answer was 86, but the right one is 96. ⇒ 96
        My previous answer was 86, but the right one is 96. ⇏ 86 ¦ So my earlier answer of 86 was wrong. It is 96. ⇒ 96
        12? 15? I really can't tell. ⇏ 15 ¦ So x = 5? No: 2*5+3 = 13, not 15. So x = 6. ⇒ 6 ¦ No one scored 12. ⇏ 12
        Nobody has 12. ⇏ 12 ¦ 12 is the number of students, so it is not the answer. ⇏ 12
        12 is too small, so it is wrong. ⇏ 12
        I am unable to compute this without more data, e.g. the 12 students' ages. ⇏ 12
        The next step would be to divide 60 by 4. ⇏ 4 ¦ Dividing 60 by 4 gives 15. ⇒ 15
        Tom has 3 times as many as Ann, i.e. 36. ⇒ 36 ¦ Tom has 3 times as many as Ann, i.e. 36. ⇏ 3
        Tom is 3 times as old as Ann. ⇒ 3 ¦ Maria has read 120 pages of the 300-page book. ⇒ 120
        Maria has read 120 pages of the 300-page book. ⇏ 300 ¦ It was the 5th of the 12 months. ⇏ 12
        The flight is 8h 30m long. ⇒ 8 hours 30 minutes ¦ The flight is 8h30. ⇒ 8.5 hours
        The flight is 8h03. ⇏ 8.5 hours ¦ It happened in 44 BC. ⇒ 44 BC ¦ It happened in 44 AD. ⇏ 44 BC
        It happened in the 19th century. ⇒ 19th century ¦ It happened in the 18th century. ⇏ 19th century
        \boxed{3{:}45 \text{ p.m.}} ⇒ 3:45 PM ¦ \boxed{3:45\text{ PM}} ⇒ 15:45 ¦ \boxed{3:45\text{ AM}} ⇏ 15:45
        The answer is Jupiter, the largest planet. ⇒ Jupiter ¦ The answer is Jupiter, the largest planet. ⇏ planet
        Die Hauptstadt ist nicht Bonn, sondern Berlin. ⇒ Berlin ¦ Die Hauptstadt ist nicht Bonn, sondern Berlin. ⇏ Bonn
        Option A is too strong, option B is irrelevant, option D is contradicted. Hence C. ⇒ C
        Option A is too strong, option B is irrelevant, option D is contradicted. Hence C. ⇏ D
        Eliminating A and D leaves B and C. Of these, C fits better. ⇒ C ¦ Eliminating A and D leaves B and C. ⇏ B
        I initially considered A, but B is more accurate. ⇒ B ¦ I initially considered A, but B is more accurate. ⇏ A
        A and B are both plausible, though A is the stronger. ⇒ A
        Choice D is out, choice A is out, choice B is out. That leaves choice C. ⇒ C ¦ <choice>B</choice> ⇒ B
        | Option | Verdict |⏎|---|---|⏎| A | wrong |⏎| B | correct |⏎| C | wrong | ⇒ B
        | Option | Verdict |⏎|---|---|⏎| A | wrong |⏎| B | correct |⏎| C | wrong | ⇏ C ¦ - A: ❌⏎- B: ✅⏎- C: ❌ ⇒ B
        - A: ❌⏎- B: ✅⏎- C: ❌ ⇏ C ¦ C ✔️ ⇒ C ¦ The song was released by Queen in 1975. ⇒ Queen
        The winner of the 1998 World Cup was France. ⇒ France ¦ The winner of the 1998 World Cup was Brazil. ⇏ France
        The 1998 World Cup was won by France, who beat Brazil 3-0. ⇒ France
        The 1998 World Cup was not won by Brazil. ⇏ Brazil ¦ There are 50 states, and the largest is Alaska. ⇒ Alaska
        There are 50 states, and the largest is not Texas. ⇏ Texas
        The first element is hydrogen, with atomic number 1. ⇒ hydrogen
        If the first element is hydrogen, 1 is its number. ⇏ hydrogen ¦ The answer is **H₂SO₄** (sulfuric acid). ⇒ H2SO4
        The answer is **H₂SO₃** (sulfurous acid). ⇏ H2SO4
        The three primary colours are red, yellow, and blue. ⇒ red, yellow, blue
        The three primary colours are red, yellow, and blue. ⇏ red, yellow
        1. Mercury⏎2. Venus⏎3. Earth ⇒ Mercury, Venus, Earth ¦ 1. Venus⏎2. Mercury⏎3. Earth ⇏ Mercury, Venus, Earth
        Alice finished first, so the winner is Alice. ⇒ Alice ¦ I believe the author is Jane Austen. ⇒ Jane Austen
        I doubt the author is Jane Austen. ⇏ Jane Austen ¦ The answer is Alice, I think, or perhaps Bob. ⇏ Alice
        The statement is true because 7 is prime. ⇒ true ¦ The statement is false because 7 is prime. ⇏ true
        We have $a+b=7$ and $ab=12$, so $a^2+b^2 = 49-24 = 25$. ⇒ 25 ¦ Thus $\lim_{x\to 0}\frac{\sin x}{x} = 1$. ⇒ 1
        The answer is $e^{i\pi} = -1$. ⇒ -1 ¦ \boxed{a=1, b=4} ⇏ 4 ¦ \boxed{\text{The maximum value is } 5} ⇒ 5
        \boxed{\text{The maximum value is not } 5} ⇏ 5 ¦ The magnitude is $|\vec{v}| = \sqrt{5}$. ⇒ \sqrt{5}
        The force has magnitude 15 N and points north. ⇒ 15 N ¦ The force has magnitude 15 N and points north. ⇏ 15 J
        The reaction releases 286 kJ per mole of H2. ⇒ 286 kJ/mol
        The reaction releases 286 kJ per mole of H2. ⇏ 286 J/mol
        The final temperature is about 25.4 °C (298.5 K). ⇒ 25.4 °C ¦ The current is I = V/R = 12/4 = 3 A. ⇒ 3 A
        The current is I = V/R = 12/4 = 3 A. ⇏ 3 mA ¦ λ = 500 nm ⇒ 5 \times 10^{-7} m ¦ λ = 500 nm ⇏ 5 \times 10^{-6} m
        12/16 simplifies to 3/4. ⇒ 3/4 ¦ It costs $1 and 50 cents. ⇒ 1.50
        Por lo tanto, Juan tiene 8 caramelos, no 9. ⇒ 8 ¦ Por lo tanto, Juan tiene 8 caramelos, no 9. ⇏ 9
        The trip will take 4 hours at 60 mph. ⇒ 4 hours ¦ The trip will take 4 hours at 60 mph. ⇏ 60
        The investment grows to $1,276.28 after 5 years. ⇒ 1276.28
        The investment grows to $1,276.28 after 5 years. ⇏ 5
        There are $\binom{10}{3} = 120$ possible committees. ⇒ 120
        There are $\binom{10}{3} = 120$ possible committees. ⇏ 10 ¦ n = 59 works, and no smaller n does. ⇒ 59
        There is only one solution. ⇒ 1 ¦ There's exactly one such triangle. ⇒ 1
        There's exactly one such triangle. ⇏ 2 ¦ The expression factors as (x + 2)(x - 5). ⇒ (x-5)(x+2)
        The expression is a product of (x + 2)(x - 5). ⇏ 5 ¦ The expression simplifies to 2x^2 + 3x - 1. ⇒ 2x^2+3x-1
        The expression simplifies to 2x^2 - 3x - 1. ⇏ 2x^2+3x-1
        The solutions are x = 3 and x = -3, but only x = 3 is valid. ⇒ 3
        The solutions are x = 3 and x = -3, but only x = 3 is valid. ⇏ -3 ¦ x = 4. Check: 3(4) + 2 = 14. ⇒ 4
        x = 4. Check: 3(4) + 2 = 14. ⇏ 14 ¦ The probability that neither is red is 1/10. ⇒ 1/10
        The probability of not rolling a six is 5/6. ⇒ 5/6 ¦ So the number that is not prime is 9. ⇒ 9
        The number of students who do not like math is 12. ⇒ 12 ¦ The number that is not the answer is 9. ⇏ 9
        The number that I would not choose is 9. ⇏ 9 ¦ The number of students is not 12. ⇏ 12
        The number that is not prime is not 9. ⇏ 9 ¦ Someone claimed the answer is 20. That is false. ⇏ 20
        The user says the answer is 20. I disagree; it's 25. ⇒ 25
        The user says the answer is 20. I disagree; it's 25. ⇏ 20 ¦ The user says the answer is 20. I disagree. ⇏ 20
        The expected answer is 20, but I get 25. ⇏ 20 ¦ Could the answer be 20? No, since 20 is even. ⇏ 20
        Could the answer be 20? No, it is 25. ⇒ 25 ¦ {"answer": 20, "unit": "dollars"} ⇒ 20
        {"answer": 25, "wrong_answer": 20} ⇒ 25 ¦ {"answer": 25, "wrong_answer": 20} ⇏ 20
        {"answer": 25, "explanation": "5 * 5, and not 20"} ⇒ 25
        {"answer": 25, "explanation": "5 * 5, and not 20"} ⇏ 20 ¦ {"answer": "\\frac{1}{2}", "confidence": 0.9} ⇒ 1/2
        {"answer": [20, 25]} ⇏ 20 ¦ {"answer": null, "guess": 20} ⇏ 20 ¦ 1) 144 ⇒ 144 ¦ #1: 144 ⇒ 144 ¦ (3)(4) ⇏ 4
        >>> 144 ⇒ 144 ¦ > 144 ⇏ 144 ¦ In base 2, it is written as 101₂. ⇒ 101_2
        The answer is California with 54 votes. ⇒ California ¦ The answer is California with 54 votes. ⇏ 54
        Answer: He is left with 5 apples. ⇒ 5 ¦ The boiling point of water is 100°C (212°F). ⇒ 100°C
        The boiling point of water is 100°C (212°F). ⇏ 100°F ¦ The wrong answer is Paris. ⇏ Paris ¦ a man ⇒ man
        a exp ⇏ exp ¦ A fits better than B. ⇒ A ¦ A fits better than B. ⇏ B ¦ \frac{a}{b} = 3 ⇏ 4
        {"answer": 20} is wrong, the answer is 25. ⇒ 25 ¦ {"answer": 20} is wrong, the answer is 25. ⇏ 20
        The answer is silver (Ag), not gold (Au). ⇏ gold ¦ Options: Paris, Lyon, Nice ⇏ Nice ¦ Excluded: Paris ⇏ Lyon
        1. Paris⏎2. Lyon⏎3. Nice ⇏ Paris ¦ The capital is no longer Paris. ⇏ Paris
        Kylar should pay $64 for 16 glasses. ⇒ 64 ¦ Kylar should pay $64 for 16 glasses. ⇏ 16
        The answer is 3.14 (to 2 d.p.). ⇒ 3.14 ¦ The answer is 3.14 (to 2 d.p.). ⇏ 2
    """,
    "lists of candidates, comparisons": r"""
        Candidates:⏎• 40⏎• 41⏎• 42 ⇏ 42 ¦ - 12 apples⏎- 42 apples ⇏ 42 ¦ - It is 41⏎- It is 42 ⇏ 42
        - Maybe 41⏎- Maybe 42 ⇏ 42 ¦ The solutions are:⏎- x = 1⏎- x = 2 ⇏ 2 ¦ The solutions are:⏎- x = 1⏎- x = 2 ⇒ 1, 2
        I see two ways.⏎⏎Possible results:⏎1. 12 apples⏎2. 42 apples ⇏ 42 ¦ Option 1: 12⏎Option 2: 15 ⇏ 15
        Answer:⏎- 41⏎- 42 ⇏ 41 ¦ Answer:⏎- 41⏎- 42 ⇏ 42 ¦ Answer:⏎- 41⏎- 42 ⇏ -41 ¦ **Answer:**⏎1. 41⏎2. 42 ⇏ 42
        **Answer:**⏎1. 41⏎2. 42 ⇏ 1 ¦ **Answer:**⏎1. 41⏎2. 42 ⇏ 41 ¦ The possible answers are:⏎- 3⏎- 5 ⇏ 3
        The possible answers are:⏎- 3⏎- 5 ⇏ 5 ¦ The answer is one of:⏎* 3⏎* 5 ⇏ 5 ¦ The answer is one of:⏎* 3⏎* 5 ⇏ 3
        Possible answers:⏎- 12⏎- 42 ⇏ 12 ¦ Answer:⏎- 42 ⇒ 42 ¦ Answer:⏎- 42 ⇏ -42 ¦ Answer: - 42 ⇒ -42
        Answer:⏎* **42** ⇒ 42 ¦ **Answer**⏎⏎1. 42 ⇒ 42 ¦ <answer>⏎- 41⏎- 42⏎</answer> ⇏ 42
        <answer>⏎- 41⏎- 42⏎</answer> ⇏ 41 ¦ <answer>⏎- 41⏎- 42⏎</answer> ⇏ -41 ¦ <answer>⏎- 42⏎</answer> ⇒ 42
        - 3 + 4 = 7⏎- 7 * 6 = 42 ⇒ 42 ¦ - Cost: 12⏎- Tax: 3⏎- Total: 15 ⇒ 15
        1. He buys 3 apples.⏎2. He buys 4 more.⏎⏎Total: 7 apples ⇒ 7 ¦ Since $4.50 < $5.00, she has enough ⇏ 5
        Since $4.50 < $5.00, she has enough. ⇏ 4.50 ¦ Because 4.5 < 5, yes ⇏ 5 ¦ Since 4 > 3, it works ⇏ 3
        As 3 ≤ 5 it is fine ⇏ 5 ¦ Since 20 \geq 15, enough ⇏ 15 ¦ So 4.5 < 5 and it fits ⇏ 5
        Since 12 is divisible by 4, yes ⇏ 4 ¦ Since 2 + 3 = 5, she has 5 apples ⇒ 5 ¦ Since 6 * 7 = 42, we are done ⇒ 42
        The total is 5. Since 4 < 5, it fits. ⇒ 5 ¦ x > 5 ⇒ x > 5 ¦ So x > 5 ⇒ x > 5 ¦ Since 6 >= 5, she has enough ⇏ 5
        So 4.5 <= 5 and it fits ⇏ 5 ¦ Since 3 != 4, no ⇏ 4 ¦ Adding up, => 42 ⇒ 42 ¦ So x >= 5 ⇒ x >= 5
        The solution is x >= 5. ⇒ x >= 5 ¦ The solution is x >= 5. ⇏ 5 ¦ $5.00 > $4.50, so she has enough ⇏ 5
        Answer: The total is **$42** because of tax ⇒ 42 ¦ Answer:⏎- Paris⏎- Rome ⇏ Paris
        Answer:⏎- Paris⏎- Rome ⇏ Rome ¦ Answer:⏎- Paris ⇒ Paris ¦ Answer:⏎- 41 apples⏎- 42 pears ⇏ 41
        Answer:⏎- 41 apples⏎- 42 pears ⇏ 42 ¦ Answer:⏎- The total is $42⏎- This includes $3 tax ⇒ 42
        Answer: The total is $42 ⇒ 42 ¦ Answer: The value is 42, because 6 * 7 = 42. ⇒ 42 ¦ Antwort:⏎- 42 ⇒ 42
        Antwort:⏎- 41⏎- 42 ⇏ 41 ¦ Antwort:⏎- 41⏎- 42 ⇏ -41 ¦ La respuesta es:⏎- 41⏎- 42 ⇏ 42 ¦ **Respuesta:**⏎1. 42 ⇒ 42
        答案是:⏎- 42 ⇒ 42 ¦ **Respuesta:**⏎1. 41⏎2. 42 ⇏ 1
    """,
    "factorials": r"""
        n! ⇒ n! ¦ n! ⇏ n ¦ \boxed{n!} ⇒ n! ¦ \boxed{n!} ⇏ n ¦ $n!$ ⇒ n! ¦ $n!$ ⇏ n ¦ The answer is $n!$. ⇒ n!
        The answer is $n!$. ⇏ n ¦ The answer is n!. ⇒ n! ¦ There are $n!$ orders. ⇒ n! ¦ n \cdot (n-1)! ⇒ n!
        The answer is $(2n)!$. ⇒ (2n)! ¦ The answer is $(2n)!$. ⇏ 2n ¦ \frac{1}{2}n! ⇒ \frac{n!}{2}
        \boxed{5!} ⇒ 120 ¦ \boxed{5!} ⇏ 5 ¦ $5!$ ⇒ 120 ¦ $5!$ ⇏ 5 ¦ The answer is $5!$. ⇒ 120
        The answer is $5!$. ⇏ 5 ¦ The answer is $5! = 120$. ⇒ 120 ¦ The answer is $120$! ⇒ 120
        The answer is 120! ⇒ 120 ¦ It is **120!** ⇒ 120 ¦ The answer is $n$! ⇒ n ¦ (3, 4)! ⇒ (3, 4)
        The point is x = (2, 3)! ⇒ (2, 3) ¦ It's (5)! ⇒ 5 ¦ \(42\)! ⇒ 42 ¦ x ∈ (0, 5)! ⇒ (0, 5) ¦ e! ⇒ e ¦ i! ⇒ i
        It's 5 m! ⇒ 5 m ¦ So it's **5m**! ⇒ 5m ¦ It's $5$ m! ⇒ 5 m ¦ It's \(5\) m! ⇒ 5 m ¦ 5k! ⇒ 5k ¦ k! ⇒ k!
        It's (x-1)(x+2)! ⇒ (x-1)(x+2) ¦ It's n(n-1)! ⇒ n! ¦ It's n(n-1)! ⇏ n(n-1)
    """,
    "signs and words of other languages": r"""
        90º ⇒ 90° ¦ 90˚ ⇒ 90° ¦ 80º ⇏ 90° ¦ 25 celsius ⇒ 25 °C ¦ 25 Fahrenheit ⇏ 25 °C ¦ 15 Prozent ⇒ 15%
        15 por ciento ⇒ 0.15 ¦ 15 процентов ⇒ 15% ¦ 15パーセント ⇒ 15% ¦ 16 Prozent ⇏ 15% ¦ 1,5·10⁻⁷ ⇒ 1.5e-7
        3,5 \times 10^{-4} ⇒ 0.00035 ¦ 3,5·10⁻⁷ ⇏ 35e-7 ¦ 10**6 ⇒ 1000000 ¦ 1.5*10**-7 ⇒ 1.5e-7 ¦ 10**6 ⇏ 60
        0.333… ⇒ 1/3 ¦ It is 0.333…. ⇒ 1/3 ¦ 0.333… ⇏ 0.333 ¦ 42… ⇒ 42 ¦ 0.1666… ⇒ 1/6 ¦ 0.142857142857… ⇒ 1/7
        1.4422… ⇒ 1.4422 ¦ 2.718281828… ⇒ 2.718281828
    """,
    "denials and bounds after a value": r"""
        42 (incorrect) ⇏ 42 ¦ 42 [wrong] ⇏ 42 ¦ It is 41 (wrong). ⇏ 41 ¦ 42 at least ⇏ 42 ¦ 42 at most ⇏ 42
        42 if n is even and 41 if n is odd ⇏ 42
    """,
}
