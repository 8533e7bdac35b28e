import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_trainers.credit import Credit

rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


def test_grpo_advantages_are_standard_scores():
    got = Credit().advantages(np.array([0.0, 1.0, 1.0, 0.0]))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [-0.8660254, 0.8660254, 0.8660254, -0.8660254], rtol=1e-6)


def test_leave_one_out_compares_with_the_others():
    got = Credit(baseline="leave_one_out", scale="none").advantages(np.array([3.0, 1.0, 2.0]))
    np.testing.assert_allclose(got, [3 - 1.5, 1 - 2.5, 2 - 2.0], rtol=1e-6)


def test_without_a_baseline_rewards_are_advantages():
    np.testing.assert_array_equal(Credit(baseline="none").advantages(np.array([1.0, 1.0])), [1, 1])


@pytest.mark.parametrize("equal", [[0.5, 0.5, 0.5], [1.0]])
def test_siblings_that_do_not_differ_teach_nothing(equal):
    assert Credit().advantages(np.array(equal)) is None


@pytest.mark.parametrize("bad", [[0.0, float("nan")], [[1.0], [2.0]]])
def test_bad_rewards_are_refused(bad):
    with pytest.raises(ValueError, match="finite and"):
        Credit().advantages(np.array(bad))


@given(rewards, st.floats(0.1, 10), st.floats(-5, 5))
def test_standard_scores_ignore_scale_and_offset(values, scale, offset):
    values = np.array(values)
    if np.ptp(values) < 1e-2:
        return
    a, b = Credit().advantages(values), Credit().advantages(values * scale + offset)
    np.testing.assert_allclose(a, b, atol=1e-4)
    assert abs(a.sum()) < 1e-4


def test_a_spread_below_the_noise_teaches_nothing():
    rewards, noise = np.array([0.50, 0.52, 0.48, 0.50]), np.full(4, 0.05)
    assert Credit().advantages(rewards, noise) is not None
    assert Credit(noise_multiple=1.0).advantages(rewards, noise) is None
    assert Credit(noise_multiple=1.0).advantages(rewards) is not None
    assert Credit(noise_multiple=1.0).advantages(np.array([0.4, 0.6, 0.4, 0.6]), noise) is not None
    assert Credit(noise_multiple=3.0).advantages(np.array([0.4, 0.6, 0.4, 0.6]), noise) is None
    with pytest.raises(ValueError, match="noise_multiple=-1"):
        Credit(noise_multiple=-1)


def test_turns_of_a_group_share_one_baseline():
    rewards = [np.array([1.0, 0.0]), np.array([0.0, 0.0, 1.0])]
    first, second = Credit(scale="none").turn_advantages(rewards)
    np.testing.assert_allclose(first, [0.6, -0.4], rtol=1e-6)
    np.testing.assert_allclose(second, [-0.4, -0.4, 0.6], rtol=1e-6)
    to_go = Credit(scale="none", turns="to_go").turn_advantages(rewards)
    np.testing.assert_allclose(to_go[0], [0.2, -0.4], rtol=1e-5)
    np.testing.assert_allclose(to_go[1], [-0.2, 0.2, 0.6], rtol=1e-5)


def test_a_turn_without_a_score_gets_no_advantage_and_does_not_count():
    nan = float("nan")
    first, second = Credit(scale="none").turn_advantages([np.array([nan, 1.0]), np.array([0.0])])
    assert first.tolist() == [0.0, 0.5] and second.tolist() == [-0.5]
    assert Credit().turn_advantages([np.array([nan]), np.array([nan])]) is None
    assert Credit().turn_advantages([np.array([1.0]), np.array([1.0, 1.0])]) is None
    assert Credit().turn_advantages([np.array([]), np.array([])]) is None
