"""Small programming tasks with reference solutions and random inputs. Arguments and results are JSON values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A function to write."""

    description: str
    solution: Callable[..., Any]
    """Reference solution. Its name is the required name."""
    draw: Callable[[np.random.Generator], tuple[Any, ...]]
    """Draws the arguments of a test."""

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.solution.__name__

    def test(self, rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """Return arguments and the expected result."""
        arguments = self.draw(rng)
        return arguments, self.solution(*arguments)


TASKS: list[Task] = []
_WORDS = "ant bee cat dog eel fox gnu hen ibis jay kid lynx mole newt owl pig ray seal toad wasp".split()  # noqa: SIM905


def _task(*draw: Callable[[np.random.Generator], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a solution to `TASKS`, with a generator per argument. Its docstring is the description that models read."""

    def add(solution: Callable[..., Any]) -> Callable[..., Any]:
        arguments = lambda rng: tuple(argument(rng) for argument in draw)  # noqa: E731  # a field of the task
        TASKS.append(Task(description=solution.__doc__ or "", solution=solution, draw=arguments))
        return solution

    return add


def _int(low: int, high: int) -> Callable[[np.random.Generator], int]:
    return lambda rng: int(rng.integers(low, high + 1))


def _ints(low: int, high: int, *, min_size: int = 0, max_size: int = 8) -> Callable[[np.random.Generator], list[int]]:
    return lambda rng: rng.integers(low, high + 1, size=int(rng.integers(min_size, max_size + 1))).tolist()


def _words(rng: np.random.Generator) -> list[str]:
    return [_WORDS[i] for i in rng.integers(len(_WORDS), size=int(rng.integers(1, 7)))]


def _text(rng: np.random.Generator) -> str:
    words = (word.title() if rng.random() < 0.3 else word for word in _words(rng))
    return " ".join(words) + ("", ".", "!")[int(rng.integers(3))]


def _brackets(rng: np.random.Generator) -> str:
    text = "".join("()[]"[i] for i in rng.integers(4, size=int(rng.integers(0, 7))))
    closing = "".join({"(": ")", "[": "]"}.get(char, "") for char in reversed(text))
    return text + closing if rng.random() < 0.6 else text


def _ab(rng: np.random.Generator) -> str:
    return "".join("ab"[i] for i in rng.integers(2, size=int(rng.integers(0, 9))))


@_task(_ints(-9, 9))
def sum_even(numbers: list[int]) -> int:
    """Return the sum of the even numbers in the list."""
    return sum(number for number in numbers if number % 2 == 0)


@_task(_text)
def count_vowels(text: str) -> int:
    """Return how many vowels (a, e, i, o, u) are in the text; capitals count too."""
    return sum(char in "aeiou" for char in text.lower())


@_task(_text)
def reverse_text(text: str) -> str:
    """Return the text backwards."""
    return text[::-1]


@_task(_int(-2, 60))
def is_prime(n: int) -> bool:
    """Return whether n is a prime number."""
    return n > 1 and all(n % k for k in range(2, n))


@_task(_int(0, 12))
def factorial(n: int) -> int:
    """Return n factorial, the product of 1 to n. Of 0 it is 1."""
    return n * factorial(n - 1) if n > 1 else 1


@_task(_int(0, 20))
def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number; the 0th is 0 and the 1st is 1."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


@_task(_int(1, 60), _int(1, 60))
def common_divisor(a: int, b: int) -> int:
    """Return the greatest common divisor of two positive numbers."""
    while b:
        a, b = b, a % b
    return a


@_task(_ints(0, 4))
def unique(numbers: list[int]) -> list[int]:
    """Return the list without repetitions, in the order in which each number first appears."""
    return list(dict.fromkeys(numbers))


@_task(_ints(0, 9))
def second_largest(numbers: list[int]) -> int:
    """Return the second largest of the different numbers in the list, or -1 if there is none."""
    different = sorted(set(numbers))
    return different[-2] if len(different) > 1 else -1


@_task(_words)
def longest_word(words: list[str]) -> str:
    """Return the longest word of the list; of several the first one."""
    return max(words, key=len)


@_task(_ints(-9, 9))
def running_sums(numbers: list[int]) -> list[int]:
    """Return the running sums: the i-th is the sum of the first i + 1 numbers."""
    return [sum(numbers[: i + 1]) for i in range(len(numbers))]


@_task(_brackets)
def balanced(text: str) -> bool:
    """Return whether the brackets ( ) and [ ] in the text are balanced and properly nested."""
    opened: list[str] = []
    for char in text:
        if char in "([":
            opened.append(char)
        elif not opened or opened.pop() + char not in ("()", "[]"):
            return False
    return not opened


@_task(_text, _int(0, 25))
def caesar(text: str, k: int) -> str:
    """Shift each lower-case letter by k places in the alphabet, from z on to a. Keep all else."""
    return "".join(chr((ord(char) - 97 + k) % 26 + 97) if "a" <= char <= "z" else char for char in text)


@_task(_int(-9999, 9999))
def digit_sum(n: int) -> int:
    """Return the digits of n added together. A minus sign does not count."""
    return sum(int(digit) for digit in str(abs(n)))


@_task(_int(0, 300))
def to_binary(n: int) -> str:
    """Return n in binary, as text without a prefix. 0 is '0'."""
    return f"{n:b}"


@_task(_ints(0, 9), _ints(0, 9))
def shared_numbers(first: list[int], second: list[int]) -> list[int]:
    """Return the numbers that are in both lists, without repetitions, in rising order."""
    return sorted(set(first) & set(second))


@_task(_ints(0, 9), _int(0, 12))
def turn_right(numbers: list[int], k: int) -> list[int]:
    """Turn the list by k places to the right: what leaves at the end comes in front."""
    k = k % len(numbers) if numbers else 0
    return numbers[len(numbers) - k :] + numbers[: len(numbers) - k]


@_task(_ints(-9, 9, min_size=1))
def best_run(numbers: list[int]) -> int:
    """Return the largest sum of neighbouring numbers, at least one of them."""
    return max(sum(numbers[i:j]) for i in range(len(numbers)) for j in range(i + 1, len(numbers) + 1))


@_task(_ab)
def run_lengths(text: str) -> str:
    """Write runs of the same letter as the letter and their length: 'aab' becomes 'a2b1'."""
    out, i = "", 0
    while i < len(text):
        j = i
        while j < len(text) and text[j] == text[i]:
            j += 1
        out, i = out + text[i] + str(j - i), j
    return out


@_task(_ab, _ab)
def differences(first: str, second: str) -> int:
    """Return at how many places the two texts differ; places that only one of them has count too."""
    return abs(len(first) - len(second)) + sum(a != b for a, b in zip(first, second, strict=False))


@_task(_ints(-9, 9, min_size=1))
def lower_median(numbers: list[int]) -> int:
    """Return the middle number of the sorted list; of an even count the lower of the two."""
    return sorted(numbers)[(len(numbers) - 1) // 2]


@_task(_int(1, 40))
def collatz_steps(n: int) -> int:
    """Return how many steps n needs to reach 1: halve it if even, else take 3n + 1."""
    return 0 if n == 1 else 1 + collatz_steps(n // 2 if n % 2 == 0 else 3 * n + 1)


@_task(_ints(0, 6), _int(0, 10))
def pairs_with_sum(numbers: list[int], target: int) -> int:
    """Return how many pairs of places i < j hold numbers that add up to the target."""
    return sum(a + b == target for i, a in enumerate(numbers) for b in numbers[i + 1 :])


@_task(_words)
def acronym(words: list[str]) -> str:
    """Return the words' first letters as capitals, joined."""
    return "".join(word[0].upper() for word in words)
