import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from forge_agents.bench import statistics
from forge_agents.bench.statistics import (
    detectable_difference,
    difference,
    holm,
    mean,
    mean_rate,
    pass_at_k,
    rate,
    smallest_p,
    wilson,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_agrees_with_scipy_and_holds_the_estimate(case):
    hits, trials = case
    expected = stats.binomtest(hits, trials).proportion_ci(method="wilson")
    low, high = wilson(hits, trials)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= low <= hits / trials <= high <= 1


def test_a_rate_of_single_trials_is_wilsons_up_to_the_unbiased_variance():
    hits = [1.0] * 30 + [0.0] * 70
    result = rate(hits, [1.0] * 100)
    expected = stats.binomtest(30, 100).proportion_ci(method="wilson")
    assert result.value == 0.3 and result.n == 100
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high), abs=2e-3)


def test_correlated_trials_of_a_seed_count_once():
    together = rate([4.0] * 5 + [0.0] * 5, [4.0] * 10)
    apart = rate([1.0] * 5 + [0.0] * 5, [1.0] * 10)
    assert (together.low, together.high) == pytest.approx((apart.low, apart.high))
    spread = rate([2.0] * 10, [4.0] * 10)
    assert spread.value == 0.5 and spread.high - spread.low < together.high - together.low
    assert rate([0.0] * 10, [4.0] * 10).high == pytest.approx(wilson(0, 10)[1]), "agreement counts once a seed"


def test_rates_without_trials_are_unknown():
    assert math.isnan(rate([], []).value) and math.isnan(rate([0.0], [0.0]).value)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=20))
def test_rates_stay_between_0_and_1(pairs):
    result = rate([min(h, t) for h, t in pairs], [t for _, t in pairs])
    assert 0 <= result.low <= result.value <= result.high <= 1


def test_the_interval_of_a_mean_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = [(i := mean(rng.exponential(size=40).tolist())).low <= 1 <= i.high for _ in range(120)]
    assert 0.86 <= np.mean(covered) <= 1.0


def test_the_interval_of_a_mean_is_near_students_for_many_values():
    values = np.random.default_rng(1).normal(3, 2, size=200)
    result = mean(values.tolist())
    low, high = stats.t.interval(0.95, 199, values.mean(), stats.sem(values))
    assert result.value == pytest.approx(values.mean())
    assert (result.low, result.high) == pytest.approx((low, high), abs=0.06)
    assert result == mean(values.tolist()), "seeded"


def test_many_values_take_linear_memory_and_their_interval_is_that_of_all_at_once(monkeypatch):
    """The jackknife of n values has n times n, and 1,000 sign flips have 1,000 times n."""
    values = np.random.default_rng(0).exponential(size=3000).tolist()
    few, whole = dict(enumerate(values[:300])), mean(values)
    zeros = dict.fromkeys(few, 0.0)
    at_once = mean(values[:300]), difference(few, zeros).interval  # imports scipy, too
    monkeypatch.setattr(statistics, "_MAX_ARRAY", 3000)
    monkeypatch.setattr(statistics, "PERMUTATIONS", 1000)
    tracemalloc.start()
    in_parts = mean(values[:300]), difference(few, zeros).interval
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert in_parts == at_once and peak < 20 * 8 * 3000
    monkeypatch.setattr(statistics, "_MAX_JACKKNIFE", 100)
    without = mean(values)
    assert without.low == pytest.approx(whole.low, rel=2e-3) and without.value == whole.value


def test_means_of_equal_and_of_single_values():
    assert (mean([2.0, 2.0]).low, mean([2.0, 2.0]).high) == (2.0, 2.0)
    assert mean([2.0]).value == 2.0 and math.isnan(mean([2.0]).low)
    assert math.isnan(mean([]).value)


def test_a_difference_flips_signs_exactly():
    gaps = [1.0, 2.0, -0.5, 3.0, 0.25]
    result = difference(dict(enumerate(gaps)), dict.fromkeys(range(5), 0.0))
    means = [np.mean(np.multiply(gaps, signs)) for signs in itertools.product((1, -1), repeat=5)]
    exact = np.mean([abs(m) >= np.mean(gaps) - 1e-12 for m in means])
    assert result.p_value == pytest.approx(exact) and result.interval.value == pytest.approx(1.15)


def test_a_difference_uses_common_seeds_only_and_is_antisymmetric():
    one, two = {1: 1.0, 2: 3.0, 3: 9.0}, {2: 1.0, 3: 2.0, 4: 50.0}
    there, back = difference(one, two), difference(two, one)
    assert there.interval.n == 2 and there.interval.value == 4.5 == -back.interval.value
    assert there.p_value == back.p_value
    same = difference(one, one)
    assert same.p_value == 1 and same.interval.value == 0
    assert math.isnan(difference(one, {1: 0.0}).p_value)


def test_rounding_errors_are_no_differences():
    one, two = dict.fromkeys(range(20), 0.1 + 0.2), dict.fromkeys(range(20), 0.3)
    result = difference(one, two)
    assert result.p_value == 1 and (result.interval.value, result.interval.low) == (0, 0)
    assert mean([*one.values(), *two.values()]).low == pytest.approx(0.3)
    assert difference({0: 1e-9, 1: 1e-9}, {0: 0.0, 1: 0.0}).interval.value == 1e-9


def test_gaps_that_cancel_up_to_rounding_have_p_value_1():
    gaps = [1 / 6, 2 / 3 - 1 / 2, 1 / 6, -0.5] * 6
    result = difference(dict(enumerate(gaps)), dict.fromkeys(range(24), 0.0))
    assert result.p_value == 1 and result.interval.value == 0
    assert result.interval.low < 0 < result.interval.high


def test_holm_by_hand():
    assert holm([0.01, 0.04, math.nan, 0.03]) == pytest.approx([0.03, 0.06, math.nan, 0.06], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_counts_all_choices(case):
    n, c, k = case
    draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_a_mean_of_rates_counts_every_seed_of_every_environment():
    """One success of 112, 8 seeds of 14 environments: the seeds are not 8 trials."""
    nothing, once = ([0.0] * 8, [1.0] * 8), ([1.0] + [0.0] * 7, [1.0] * 8)
    result, expected = mean_rate([once] + [nothing] * 13), wilson(1, 112)
    assert result.value == pytest.approx(1 / 112) and result.n == 112
    assert (result.low, result.high) == pytest.approx(expected, abs=3e-3) and result.high < 0.055
    assert mean_rate([nothing] * 14).high == pytest.approx(wilson(0, 112)[1])
    assert mean_rate([once]) == rate(*once)
    assert math.isnan(mean_rate([once, ([], [])]).value) and math.isnan(mean_rate([]).value)


def test_an_environment_counts_as_much_as_another_however_many_trials_it_has():
    assert mean_rate([([4.0] * 3, [4.0] * 3), ([0.0], [1.0])]).value == 0.5
    one_seed = mean_rate([([1.0], [1.0]), ([0.0], [1.0])])
    assert (one_seed.low, one_seed.high) == wilson(1, 2)


@pytest.mark.parametrize("seeds", [2, 4, 8, 16])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
@pytest.mark.parametrize("rates", [[0.01] * 14, [0.1, 0.5, 0.9], [0.3]], ids=["rare", "mixed", "single"])
def test_intervals_of_clustered_rates_hold_the_truth_as_often_as_they_say(seeds, correlation, rates):
    """Four episodes of a seed end as the seed decides with probability `correlation` (docs/decisions/verifiers.md)."""
    rng, held, times = np.random.default_rng([seeds, len(rates)]), 0, 300
    for _ in range(times):
        strata = []
        for p in rates:
            fate, own = rng.random((seeds, 1)) < p, rng.random((seeds, 4)) < p
            hits = np.where(rng.random((seeds, 4)) < correlation, fate, own).sum(1)
            strata.append((hits.astype(float).tolist(), [4.0] * seeds))
        result = mean_rate(strata)
        held += result.low - 1e-12 <= np.mean(rates) <= result.high + 1e-12
    assert held / times >= 0.92


def test_what_sign_flips_can_show():
    for n in (3, 4, 8, 20):
        assert difference(dict.fromkeys(range(n), 1.0), dict.fromkeys(range(n), 0.0)).p_value == pytest.approx(
            smallest_p(n), rel=1e-6
        )


def test_the_gap_that_is_found_is_found_so_often():
    rng, seeds, pairs = np.random.default_rng(3), 32, 6
    gap = detectable_difference(seeds, pairs)
    result = [stats.ttest_1samp(rng.normal(gap, 1, size=seeds), 0).pvalue * pairs <= 0.05 for _ in range(1000)]
    assert 0.7 <= np.mean(result) <= 0.85, "the test by signs is about as strong as Student's"
