"""States in checkpoints of strangers are refused when they are loaded, before a run starts."""

import numpy as np
import pytest

from forge_agents.envs.seeds import HELD_OUT_FROM
from forge_trainers.rl.credit import Baselines
from forge_trainers.rl.curriculum import Progress
from forge_trainers.rl.prefetch import TakenGroups
from forge_trainers.rl.stopping import StoppingCriteria
from forge_trainers.selfplay.matchmaking import Standings
from forge_verifiers.ensemble.ensemble import ScoreWindow
from forge_verifiers.ensemble.panel import ScoreCache


def texts(*values):
    return np.array(values, dtype=np.str_)


def window():
    return ScoreWindow(num_verifiers=2, max_rows=4)


def stopping():
    return StoppingCriteria(3)


def standings():
    return Standings(start="hero-000000")


STATES = {
    TakenGroups: {"early": np.array([[5, 0], [6, 1]]), "owed": np.array([[4, 2], [4, 3]])},
    Baselines: {"names": texts("a", "b"), "means": np.array([0.5, -1e30])},
    Progress: {
        "ids": texts("a", "b"), "success": np.array([[1.0, 2.0], [3.0, 3.0]]),
        "seed_ids": texts("a"), "seeds": np.array([5]), "seed_success": np.array([0.5]),
        "collected_ids": texts("a"), "collected": np.array([3]),
        "last_step": np.array([4]), "last_ids": texts("a", "b"), "last_seeds": np.array([5, 9]),
    },
    stopping: {
        "agents": texts("t", "a").reshape(1, 2), "ranges": np.array([[0.0, 1.0]]), "scoring": texts("")[0],
        "policies": texts("p"), "tokens": np.array([3]), "learned": texts("p"),
    },
    standings: {
        "names": texts("hero-000000", "hero-000004"), "pinned": np.array([True, False]),
        "counts": np.array([[0, 3], [4, 2]]), "numbers": np.array([[25.0, 8.0, 3.0, 3.0], [25.0, 8.0, 0.0, 0.0]]),
        "own": np.array([25.0, 8.0]), "regrets": np.zeros((2, 2)),
    },
    window: {
        "scores": np.array([[0.0, 1.0], [np.nan, 0.5], [0.5, 0.5]]), "queried": np.ones((3, 2), bool),
        "groups": np.array([0, 0, 2]), "labels": np.array([np.nan, 1.0, 0.0]), "calls": np.array(2),
        "next_group": np.array(3),
    },
}  # fmt: skip
"""States that a run may have saved, by what loads them."""
ODD = {
    TakenGroups: {
        "owed": [
            [(step, 0) for step in range(3000)], [(2**62, 0), (2**62, 1)], [(4, -1), (4, 0)], [(4, 2)], (), [5, 6],
        ],
        "early": [[(5, 0), (4, 1)], [(5, 0.5), (5, 1)], [("5", "0"), ("5", "1")]],
    },
    Baselines: {"means": [(np.nan, 0), (np.inf, 0), (1e308, 0), (0,), ("x", "y")], "names": [("a",), (1, 2)]},
    Progress: {
        "success": [
            [(1, 0), (1, 2)], [(1, -1), (1, 2)], [(np.nan, 2), (1, 2)], [(1, np.inf), (1, 2)], [(3, 2), (1, 2)],
            [(-1, 2), (1, 2)], [("x", "y"), ("z", "w")], np.ones((2, 3)),
        ],
        "seeds": [(HELD_OUT_FROM,), (2**62,), (-5,), (0.5,), (1, 2)],
        "seed_success": [(np.nan,), (1,), (0,), (2,)],
        "collected": [(2**62,), (np.nan,), (-1,)],
    },
    stopping: {"ranges": [[(np.nan, 1)], [(0, 1e308)], (0, 1)], "tokens": [(-1,), (0.5,)], "agents": [("t",)]},
    standings: {
        "numbers": [
            [(mu, sigma, games, score), (25, 8, 0, 0)]
            for mu, sigma, games, score in (
                (25, 8, -2, 0), (25, 8, 3, 4), (25, 8, 1e308, 0), (25, 0, 0, 0), (1e308, 8, 0, 0), (25, 8, 0, -1),
            )
        ],
        "own": [(25, -1), (25, 1e308), (np.nan, 8)],
        "counts": [[(0, -3), (4, 2)], [(0, 3), (2**62, 2)], [(0, 3), (0, 2)], [(7, 3), (4, 2)]],
        "names": [("hero-000000", "hero-000000")],
        "regrets": [[(0, -1), (0, 0)], [(0, 1e308), (0, 0)]],
    },
    window: {
        "groups": [(0, 0, 3), (2, 1, 0), (-1, 0, 0), (0, 0)],
        "next_group": [2**62, -1, (3,)],
        "scores": [np.full((3, 2), 1e30), np.full((3, 2), np.inf), np.ones((3, 3))],
        "queried": [np.ones((2, 2))],
        "labels": [(2, 0, 0)],
        "calls": [-1, 0.5],
    },
}  # fmt: skip
"""Values of one array that no run saves."""


@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_state_of_a_run_loads(make):
    part = make()
    part.load_state_dict(STATES[make])
    saved = part.state_dict()
    for name, values in STATES[make].items():
        np.testing.assert_array_equal(np.asarray(saved[name]), values)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(make, name, value) for make, arrays in ODD.items() for name, values in arrays.items() for value in values],
)
def test_state_that_no_run_saves_is_refused_by_name(make, name, value):
    with pytest.raises(ValueError, match=r"Expected|Choose another|holds more successes|must ascend"):
        make().load_state_dict(STATES[make] | {name: np.array(value)})
    if name in ("collected", "regrets"):  # earlier versions did not save them
        return
    with pytest.raises(ValueError, match=f"the state has no {name}"):
        make().load_state_dict({key: array for key, array in STATES[make].items() if key != name})


def test_numbers_of_groups_cost_no_memory():
    rows = window()
    rows.load_state_dict(STATES[window] | {"groups": np.array([0, 0, 2**40]), "next_group": np.array(2**50)})
    rows.add(np.zeros((2, 2), np.float32), np.array([0, 0]), np.full(2, np.nan, np.float32), np.ones((2, 2), bool))
    assert len(rows.groups) <= 4 and rows.groups[-1] in (2**40, 2**50)


def test_cached_scores_lie_in_the_range_of_scores():
    cache = ScoreCache(8)
    cache.put(0, bytes(16), 0.5)
    for score in (1e30, np.nan, -1.0):
        with pytest.raises(ValueError, match="scores holds"):
            ScoreCache(8).load_state_dict(cache.state_dict() | {"scores": np.array([score])})
