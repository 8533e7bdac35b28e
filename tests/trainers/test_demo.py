"""The demo's table."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from forge_trainers.demo import Outcome, _table


def test_the_table_fits_a_terminal_of_80_columns():
    flat = SimpleNamespace(reward=0.133, ci=0.125)
    run = Outcome(flat, flat, [{}] * 25, 1331.2)
    shown = io.StringIO()
    Console(width=80, file=shown).print(_table(run, run))
    trained, control = [line for line in shown.getvalue().splitlines() if "0.133 ± 0.125" in line]
    assert trained.split() == ["trained", *["0.133", "±", "0.125"] * 2, "1.0x", "25", "1331", "did", "not", "learn"]
    assert control.split()[-1] == "unmoved"


@pytest.mark.parametrize(
    ("before", "after", "learned"),
    [(0.1, 0.25, True), (0.1, 0.15, False), (0.1, 0.19, False), (0.8, 0.95, True), (0.6, 0.78, False), (0, 0, False)],
)
def test_a_team_learned_that_has_twice_the_reward_or_misses_half(before, after, learned):
    first, last = (SimpleNamespace(reward=reward, ci=0.04) for reward in (before, after))
    assert Outcome(first, last, [], 1.0).learned == learned
