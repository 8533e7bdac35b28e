"""Patterns of libraries have a time limit, and match as Python's `re`."""

import copy
import re
import sys
import threading
import time
import types

import pytest

import forge_agents as fa
from forge_envs.adapters import patterns
from forge_envs.adapters.patterns import bound_patterns, bounded_re

CUBIC = r"\[Offer:?\s*(?:I\s+(?:give|offer)\s+)?([^\[\]]+?)\s*\.*\]"
HOSTILE = "[Offer: " + " " * 4000
SLOW_TEXTS = (
    HOSTILE,
    "show " * 800,
    "[" + " " * 4000,
    "[1" + " 1" * 2000,
    "[Whisper to Player 1: " + " " * 4000,
    "[Player 1" * 400,
    "<answer>" * 500,
    "<answer>" + " " * 4000,
    "->" * 2000,
    "1 Wood " * 550,
    "\n\t " * 1300,
)


def short_limit(monkeypatch):
    monkeypatch.setitem(patterns._LIMITS, "timeout", 0.2)


def test_slow_pattern_times_out_and_releases_the_gil(monkeypatch):
    short_limit(monkeypatch)
    ticks, end = [], threading.Event()

    def tick():
        while not end.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(20):  # on a busy machine, the other thread may get no time during a search
            before = len(ticks)
            with pytest.raises(TimeoutError):
                bounded_re.compile(CUBIC, re.IGNORECASE | re.DOTALL).search(HOSTILE)
            if len(ticks) > before + 5:
                break
        else:
            pytest.fail("the other thread ran in none of 20 searches")
        with pytest.raises(TimeoutError):
            bounded_re.search(CUBIC, HOSTILE)
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("search", (r"(\d+) (?P<what>\w+)", "12 apples, 3 pears")),
        ("match", (r"a.b", "A\nb", re.IGNORECASE | re.DOTALL)),
        ("fullmatch", (r"\w+", "Äpfel", re.ASCII)),
        ("fullmatch", (r"\w+", "Äpfel")),
        ("findall", (r"\[(\w+)\]", "[a] [b] [c")),
        ("sub", (r"[.,!?]+$", "", "Yes!?")),
        ("sub", (r"(a)(b)", r"\2\1", "abab", 1)),
        ("subn", (r"x", lambda match: match[0] * 2, "axa")),
        ("split", (r"\s*->\s*", "1 Wood -> 2 Sheep")),
        ("split", (r"(,)", "a,b,c", 1)),
    ],
)
def test_bounded_functions_find_what_re_finds(name, args):
    expected, result = getattr(re, name)(*args), getattr(bounded_re, name)(*args)
    if hasattr(expected, "groups"):
        expected, result = ((m.span(), m.groups(), m.groupdict()) for m in (expected, result))
    assert result == expected
    flags = [arg for arg in args if isinstance(arg, re.RegexFlag)]
    rest = [arg for arg in args[1:] if not isinstance(arg, re.RegexFlag)]
    compiled = copy.deepcopy(bounded_re.compile(args[0], *flags))
    again = getattr(compiled, name)(*rest)
    assert (again and again.span()) == result[0] if hasattr(again, "span") else again == result
    assert bounded_re.compile(re.compile(args[0])).pattern == args[0]


def test_all_patterns_of_a_package_are_bounded(monkeypatch):
    source = (
        "import re\nfrom re import search\nPATTERN = re.compile('a+')\n"
        "class Game:\n    pattern = re.compile('b+')\n    def read(self, text): return re.findall('c+', text)\n"
    )
    module = types.ModuleType("patterns_of_a_stranger")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source, vars(module))
    module.Game.__module__ = module.__name__
    bound_patterns(module.__name__)
    patterns._bounded.discard(module.__name__)
    assert module.re is bounded_re and module.search is bounded_re.search
    assert all(isinstance(value, patterns.BoundedPattern) for value in (module.PATTERN, module.Game.pattern))
    assert module.Game().read("cc c") == ["cc", "c"]


@pytest.mark.skipif(not fa.list_envs("textarena"), reason="no TextArena")
@pytest.mark.parametrize("game", ["SimpleNegotiation", "SimpleBlindAuction", "SecretMafia", "Mastermind"])
def test_no_text_stalls_a_game(game, monkeypatch):
    short_limit(monkeypatch)
    env = fa.make(f"textarena/{game}-v0")
    for text in SLOW_TEXTS:
        env.reset(seed=0)
        started = time.process_time()
        for _ in range(3):
            if not env.terminations[env.agent_selection]:
                env.step(text)
        assert time.process_time() - started < 20  # seconds of this process; `re` takes minutes


@pytest.mark.skipif(not fa.list_envs("reasoning-gym"), reason="no reasoning-gym")
def test_final_answer_matches_reasoning_gym():
    from reasoning_gym.utils import extract_answer

    from forge_envs.adapters.reasoning_gym import final_answer

    one = "<answer>1</answer>"
    for text in (f"{one}<answer> 2 </answer>", "<answer>a<answer>b</answer>", f"{one}<answer>2"):
        assert final_answer(text) == extract_answer(text)
    assert final_answer(" none ") == "none" and extract_answer(" none ") is None
    started = time.process_time()
    assert final_answer("<answer>" * 8000) == "<answer>" * 8000
    assert time.process_time() - started < 1
