import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.sparse.csgraph import connected_components

from forge_agents.bench.statistics import MEAN, SCALE, Game, _linked, bradley_terry, rate_players


def strengths(wins, **options):
    """Strengths and information of one table."""
    theta, information = bradley_terry(np.array([wins], float), **options)
    return theta[0], information[0]


def test_rating_gap_of_two_players_is_their_log_odds():
    theta, information = strengths([[0, 8], [2, 0]], prior_draws=0)
    error = math.sqrt(np.linalg.pinv(information)[0, 0])
    assert theta[0] - theta[1] == pytest.approx(math.log(4), abs=1e-9)
    assert 2 * error == pytest.approx(math.sqrt(1 / (10 * 0.8 * 0.2)), abs=1e-9), "1 / (n p q) of the difference"


@pytest.mark.parametrize("players", [2, 3, 9])
def test_players_are_linked_as_in_scipys_graph(players):
    wins = np.random.default_rng(players).random((300, players, players)) < 1.2 / players
    components = [connected_components(table, directed=False)[0] for table in wins]
    assert _linked(wins.astype(float)).tolist() == [number == 1 for number in components]
    assert min(components) == 1 < max(components)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=12, max_size=12))
def test_bradley_terry_matches_a_general_optimizer(counts):
    wins = np.zeros((4, 4))
    wins[~np.eye(4, dtype=bool)] = counts

    def loss(x):
        t = np.append(x, -x.sum())
        return float((wins * np.logaddexp(0, t[None, :] - t[:, None])).sum())

    optimum = minimize(loss, np.zeros(3), method="BFGS", options={"gtol": 1e-9}).x
    theta, _ = strengths(wins, prior_draws=0)
    assert theta == pytest.approx([*optimum, -optimum.sum()], abs=1e-5)
    assert theta.sum() == pytest.approx(0, abs=1e-9)
    assert strengths(wins.T, prior_draws=0)[0] == pytest.approx(-theta, abs=1e-9)


def test_prior_keeps_an_unbeaten_player_finite():
    theta, _ = strengths([[0, 9], [0, 0]])
    assert theta[0] - theta[1] == pytest.approx(math.log(9.5 / 0.5), abs=1e-9)


def test_unlinked_players_are_not_rated():
    assert rate_players([Game(0, "a", "b", 1.0), Game(0, "c", "d", 1.0)], "abcd") == {}
    assert rate_players([], ["a", "b"]) == {}


def test_ratings_are_elo_like_ordered_and_seeded():
    games = [Game(seed, "weak", "strong", float(seed % 11 == 0)) for seed in range(110)]
    rated = rate_players(games, ["weak", "strong", "absent"])
    assert list(rated) == ["strong", "weak"] and rated["strong"].games == 110
    gap = rated["strong"].value - rated["weak"].value
    assert gap == pytest.approx(SCALE * math.log(100.5 / 10.5)) and gap == pytest.approx(392, abs=1)
    assert rated["strong"].value + rated["weak"].value == pytest.approx(2 * MEAN)
    assert rated["strong"].low < rated["strong"].value < rated["strong"].high
    assert rated == rate_players(games, ["weak", "strong", "absent"])


def test_always_winning_player_has_an_interval():
    rated = rate_players([Game(seed, "a", "b", 1.0) for seed in range(8)], "ab")["a"]
    assert rated.value - MEAN == pytest.approx(SCALE * math.log(8.5 / 0.5) / 2)
    error = math.sqrt(1 / (9 * (8.5 / 9) * (0.5 / 9))) / 2
    assert rated.high - rated.value == pytest.approx(SCALE * 1.96 * error, rel=1e-4)
    assert math.isnan(rate_players([Game(0, "a", "b", 1.0)], "ab")["a"].low)


def test_games_of_one_seed_count_as_one():
    few = rate_players([Game(s, "a", "b", float(s % 3 > 0)) for s in range(12) for _ in range(10)], "ab")["a"]
    many = rate_players([Game(s, "a", "b", float(s % 3 > 0)) for s in range(120)], "ab")["a"]
    assert few.value == pytest.approx(many.value) and few.high - few.low > 2 * (many.high - many.low)


def test_draws_count_half_for_each_player():
    scores = [1.0, 1.0, 1.0, 0.5, 0.5, 0.0]  # 4 points of 6, as many as 4 wins and 2 losses
    with_draws, without = (
        rate_players([Game(seed, "first", "second", score) for seed, score in enumerate(games)], ["first", "second"])
        for games in (scores, [1.0] * 4 + [0.0] * 2)
    )
    assert with_draws["first"].value == pytest.approx(without["first"].value)
    assert with_draws["first"].games == 6
    drawn = rate_players([Game(seed, "first", "second", 0.5) for seed in range(20)], ["first", "second"])
    assert drawn["first"].value == pytest.approx(MEAN) == drawn["second"].value
