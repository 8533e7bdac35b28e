import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_trainers.selfplay.matchmaking import Standings

RULES = ("latest", "uniform", "pfsp", "pfsp_even", "near", "regret")


def with_snapshots(count, *, pool=8, anchors=("random",)):
    standings = Standings(anchors=anchors, start="p-0", pool=pool)
    for version in range(1, count + 1):
        standings.add(f"p-{version}", version)
    return standings


steps = st.lists(
    st.one_of(
        st.just("snapshot"),
        st.tuples(st.integers(0, 30), st.lists(st.sampled_from([0, 0.5, 1]), min_size=1, max_size=12)),
    ),
    max_size=25,
)


def margins(results, pick=0):
    """Margins of games with these results: 1 for a win, 0.5 for a draw, 0 for a loss."""
    return [(2 * result - 1) * (1 + pick / 10) for result in results]


def played(history, *, pool=4, anchors=("random", "caller")):
    """Standings after a history of snapshots and games, and the newest version."""
    standings, version = Standings(anchors=anchors, start="p-0", pool=pool), 0
    for event in history:
        if event == "snapshot":
            version += 1
            standings.add(f"p-{version}", version)
        else:
            pick, scores = event
            name = standings.opponents[pick % len(standings.opponents)].name
            standings.record({name: margins(scores, pick)})
    return standings, version


@settings(max_examples=40, deadline=None)
@given(history=steps, rule=st.sampled_from(RULES))
def test_probabilities_sum_to_one(history, rule):
    standings, _ = played(history)
    chances = standings.probabilities(rule)
    assert chances.shape == (len(standings.opponents),)
    assert (chances >= 0).all() and chances.sum() == pytest.approx(1, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(history=steps, pool=st.integers(2, 5))
def test_pool_is_bounded_and_keeps_pinned_opponents(history, pool):
    standings, version = played(history, pool=pool)
    names = [one.name for one in standings.opponents]
    assert {"p-0", "random", "caller", f"p-{version}"} <= set(names)
    assert sum(one.version >= 0 for one in standings.opponents) <= pool
    assert standings.latest.version == version


@settings(max_examples=25, deadline=None)
@given(history=steps, later=steps)
def test_restored_standings_are_bit_equal(tmp_path_factory, history, later):
    standings, version = played(history)
    file = tmp_path_factory.mktemp("league") / "league.npz"
    np.savez(file, allow_pickle=False, **standings.state_dict())
    restored = Standings(anchors=("random", "caller"), start="p-0", pool=4)
    with np.load(file, allow_pickle=False) as saved:
        restored.load_state_dict(dict(saved))
    for number, event in enumerate(later):
        for one in (standings, restored):
            if event == "snapshot":
                one.add(f"p-{version + number + 1}", version + number + 1)
            else:
                name = one.opponents[event[0] % len(one.opponents)].name
                one.record({name: margins(event[1], event[0])})
    assert restored.opponents == standings.opponents
    assert (restored.mu, restored.sigma) == (standings.mu, standings.sigma)
    for rule in RULES:
        assert restored.probabilities(rule).tolist() == standings.probabilities(rule).tolist()


def test_pfsp_weighs_as_published():
    standings = with_snapshots(1)
    standings.record({"random": [1] * 8, "p-1": [-1] * 3 + [1]})
    start, random, first = 0.5, 9 / 10, 2 / 6  # with a prior of two draws
    hard = np.array([(1 - start) ** 2, (1 - random) ** 2, (1 - first) ** 2])
    even = np.array([start * (1 - start), random * (1 - random), first * (1 - first)])
    assert [one.name for one in standings.opponents] == ["p-0", "random", "p-1"]
    np.testing.assert_allclose(standings.probabilities("pfsp"), hard / hard.sum())
    np.testing.assert_allclose(standings.probabilities("pfsp_even"), even / even.sum())


def test_latest_and_uniform_matchmaking():
    standings = with_snapshots(2)
    assert standings.probabilities("latest").tolist() == [0, 0, 0, 1]
    assert standings.probabilities("uniform").tolist() == [0.25] * 4
    assert Standings(start="p-0").probabilities("latest").tolist() == [1], "before the first snapshot the start model"


def test_near_prefers_those_of_a_like_rating():
    standings = with_snapshots(2)
    standings.record({"random": [1] * 30})  # far below
    standings.record({"p-2": [1, -1] * 10})
    start, random, _, second = standings.probabilities("near")
    assert second > start > random


def test_regret_prefers_opponents_that_win_much_to_those_that_win_often():
    standings = with_snapshots(1)
    assert standings.probabilities("regret").tolist() == [1 / 3] * 3, "before the first game"
    for _ in range(5):  # p-1 wins often and little, random seldom and much
        standings.record({"p-0": [1] * 8, "random": [1] * 7 + [-31], "p-1": [-0.5] * 7 + [1.5]})
    start, random, first = standings.probabilities("regret")
    assert start == pytest.approx(0.1 / 3) and random == pytest.approx(0.9 + 0.1 / 3) and first == pytest.approx(start)
    assert np.argmax(standings.probabilities("pfsp")) == 2


def test_regrets_are_those_of_regret_matching_plus():
    standings = with_snapshots(1, anchors=())
    standings.record({"p-0": [1] * 8, "p-1": [-0.5] * 8})
    margins = np.array([8, -4]) / 10  # with a prior of two draws
    regrets = np.maximum(0, margins.mean() - margins)
    assert [one.regret for one in standings.opponents] == pytest.approx(regrets.tolist()) == [0, 0.6]
    standings.record({"p-0": [-2] * 8})
    margins = np.array([(0.9 * 8 - 16) / (0.9 * 8 + 8 + 2), -0.4])
    gain = np.array([0.05, 0.95]) @ margins - margins
    expected = np.maximum(0, regrets + gain)
    assert [one.regret for one in standings.opponents] == pytest.approx(expected.tolist()) and expected.min() > 0.07
    np.testing.assert_allclose(standings.probabilities("regret"), 0.9 * expected / expected.sum() + 0.05)


def test_checkpoint_of_an_earlier_version_has_no_regrets():
    standings = with_snapshots(1)
    standings.record({"p-1": [-0.5] * 8})
    state = standings.state_dict()
    del state["regrets"]
    restored = Standings(anchors=("random",), start="p-0")
    restored.load_state_dict(state)
    assert restored.probabilities("regret").tolist() == [1 / 3] * 3 and restored.opponents[-1].games == 8


def test_nearest_opponent_is_chosen_if_all_are_far_away():
    standings = with_snapshots(1, anchors=())
    state = standings.state_dict()
    state["numbers"][:, 0], state["numbers"][:, 1] = [-9000, -8000], 0.01
    state["own"][:] = [9000, 0.01]
    standings.load_state_dict(state)
    assert standings.probabilities("near").tolist() == [0, 1]


def test_weakest_snapshot_leaves_first():
    standings = with_snapshots(3, pool=4)
    standings.record({"p-1": [-1, -1], "p-2": [1, 1], "p-3": [1, -1]})
    assert [one.name for one in standings.add("p-4", 4)] == ["p-2"]
    standings.record({"p-4": [0], "p-3": [0, 0]})
    assert [one.name for one in standings.add("p-5", 5)] == ["p-3"], "of equal ones the oldest"


def test_checkpoint_with_more_snapshots_than_the_pool_holds_keeps_the_strongest():
    """A file of a stranger with 5,000 snapshots stopped the event loop for 45 s."""
    large = with_snapshots(6, pool=9)
    large.record({"p-1": [-1], "p-2": [1], "p-3": [-1], "p-4": [1], "p-5": [0], "p-6": [1]})
    small = Standings(anchors=("random",), start="p-0", pool=3)
    small.load_state_dict(large.state_dict())
    assert [one.name for one in small.opponents] == ["p-0", "random", "p-1", "p-3"]
    assert [one.name for one in small.add("p-7", 7)] == ["p-1"], "of equal ones the oldest"
    assert [one.name for one in large.add("p-7", 7)] == [], "a pool with room"


def test_earlier_results_count_less():
    standings = with_snapshots(1)
    for _ in range(20):
        standings.record({"p-1": [-1] * 4})
    for _ in range(20):
        standings.record({"p-1": [1] * 4})
    last = standings.opponents[-1]
    assert last.win_rate > 0.85 and last.games == 160


def test_snapshot_inherits_the_rating():
    standings = with_snapshots(0)
    standings.record({"random": [1] * 20})
    rating = standings.mu
    standings.add("p-1", 1)
    assert rating > 25 and standings.opponents[-1].mu == rating
    standings.record({"p-1": [1] * 10, "random": [1]})
    by_name = {one.name: one.mu for one in standings.opponents}
    assert standings.mu > by_name["p-1"] > by_name["random"]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="pool=1 has no room"):
        Standings(pool=1)
    with pytest.raises(ValueError, match="different names"):
        Standings(anchors=("start",))
    standings = with_snapshots(2)
    with pytest.raises(ValueError, match="already"):
        standings.add("p-1", 9)
    with pytest.raises(ValueError, match="not newer than 2"):
        standings.add("p-x", 2)
    with pytest.raises(ValueError, match="has the anchors"):
        Standings(anchors=("other",), start="p-0").load_state_dict(standings.state_dict())
    for name in ("own", "numbers", "regrets"):
        odd = standings.state_dict()
        odd[name] = np.full_like(odd[name], np.nan)
        with pytest.raises(ValueError, match="holds nan. Expected finite"):
            standings.load_state_dict(odd)
    before = standings.state_dict()
    standings.record({"gone": [1, 1]})
    assert {key: value.tolist() for key, value in standings.state_dict().items()} == {
        key: value.tolist() for key, value in before.items()
    }


def share_of_draws(matchmaking, win_rate, fails):
    """Mean probability of "bad" after 50 of 100 steps, where the policy wins `win_rate` of the games against all.

    Args:
        fails: Whether "bad" fails in a game, given whether the policy wins it.
    """
    drawn = []
    for seed in range(3):
        standings, rng = Standings(anchors=("first", "second", "bad"), start="p-0"), np.random.default_rng(seed)
        if matchmaking != "near":  # no other rule reads the ratings, which take half the time
            standings._rate = lambda opponent, _: (opponent.mu, opponent.sigma)
        for step in range(100):
            probabilities = standings.probabilities(matchmaking)
            margins = {}
            for pick in rng.choice(4, size=4, p=probabilities):
                name = standings.opponents[pick].name
                won = rng.random(4) < win_rate
                margins.setdefault(name, []).extend(np.where((name == "bad") & fails(won, rng), np.nan, 2.0 * won - 1))
            standings.record(margins)
            drawn += [probabilities[3]] * (step >= 50)
    assert standings.opponents[3].name == "bad" and standings.opponents[3].games > 0
    return float(np.mean(drawn))


@pytest.mark.parametrize("win_rate", [0.3, 0.75])
@pytest.mark.parametrize("matchmaking", ["pfsp", "pfsp_even", "near", "regret"])
def test_opponent_is_not_drawn_more_often_for_its_failures(matchmaking, win_rate):
    """An opponent that failed whenever it was about to lose was drawn in half or nearly all of the games."""
    assert share_of_draws(matchmaking, win_rate, lambda won, rng: won) < 0.36
    assert share_of_draws(matchmaking, win_rate, lambda won, rng: rng.random(4) < 0.5) < 0.36
    assert share_of_draws(matchmaking, win_rate, lambda won, rng: won | True) < 0.1


def test_failed_game_counts_as_a_win_by_the_usual_margin():
    standings = with_snapshots(1)
    standings.record({"p-0": [1.5, -3.5], "p-1": [math.nan, -4]})
    first = standings.opponents[-1]
    assert (first.name, first.games, first.recent_games, first.recent_score) == ("p-1", 2, 2.0, 1.0)
    assert first.recent_margin == -4.0 + 3.0
    restored = Standings(anchors=("random",), start="p-0")
    restored.load_state_dict(standings.state_dict())
    restored.record({"p-1": [math.nan]})  # the margin of earlier steps
    assert restored.opponents[-1].recent_margin == pytest.approx(0.9 * -1.0 + 3.0)
    restored.record({"p-0": [9] * 50})
    restored.record({"random": [0.5]})
    restored.record({"p-1": [math.nan]})  # at least as easy as the easiest other
    easiest = max(one.margin for one in restored.opponents[:-1])
    assert easiest > 8 and restored.opponents[-1].recent_margin == pytest.approx(0.9 * 2.1 + easiest)
