import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_trainers.rl.credit import Baselines, Credit, Overlong, Scored

rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)
nan = float("nan")


def one(reward, *, group=0, role="a", turns=None, tokens=None, noise=None):
    """Return a trajectory: `turns` are rewards of turns, `tokens` lengths of responses."""
    tokens = tokens or [1] * (1 if turns is None else len(turns))
    scores = None if turns is None else np.array(turns, np.float32)
    return Scored(group=group, role=role, reward=reward, response_tokens=tokens, turns=scores, noise=noise)


def keys_of(trajectory):
    return {"seed": trajectory.group, "role": trajectory.role}


def by_turn(*turns, **kwargs):
    return [one(0.0, turns=own, **kwargs) for own in turns]


def assigned(credit, scored, baselines=None):
    return [None if own is None else own.tolist() for own in credit.assign(scored, baselines)]


def test_grpo_advantages_are_standard_scores():
    got = Credit().advantages(np.array([0.0, 1.0, 1.0, 0.0]))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [-0.8660254, 0.8660254, 0.8660254, -0.8660254], rtol=1e-6)


def test_leave_one_out_compares_with_the_others():
    got = Credit(baseline="leave_one_out", scale="none").advantages(np.array([3.0, 1.0, 2.0]))
    np.testing.assert_allclose(got, [3 - 1.5, 1 - 2.5, 2 - 2.0], rtol=1e-6)


def test_without_a_baseline_rewards_are_advantages():
    np.testing.assert_array_equal(Credit(baseline="none", scale="none").advantages(np.array([1.0, 1.0])), [1, 1])


@pytest.mark.parametrize("equal", [[0.5, 0.5, 0.5], [1.0]])
def test_equal_rewards_have_no_advantages(equal):
    assert Credit().advantages(np.array(equal)) is None
    assert assigned(Credit(), [one(r) for r in equal]) == [None] * len(equal)


@pytest.mark.parametrize("bad", [[0.0, nan], [[1.0], [2.0]]])
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


RULES = [
    Credit(),
    Credit(scale="none"),
    Credit(scale="batch_std"),
    Credit(baseline="leave_one_out", scale="none"),
    Credit(by=("role",)),
    Credit(by=()),
    Credit(by=("seed", "role", "turn")),
]


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from(RULES))
def test_advantages_sum_to_zero_and_do_not_depend_on_order(seed, credit):
    rng = np.random.default_rng(seed)
    scored = [one(float(rng.integers(-2, 3)), group=s, role=role) for s in range(3) for role in "ab" for _ in range(4)]
    result = credit.assign(scored)
    flat = np.array([0.0 if own is None else own[0] for own in result])
    sums = {}
    for advantage, s in zip(flat, scored, strict=True):
        part = tuple(keys_of(s)[name] for name in credit.by if name != "turn")
        sums[part] = sums.get(part, 0.0) + advantage
    assert max(map(abs, sums.values())) < 1e-4
    order = rng.permutation(len(scored))
    again = credit.assign([scored[i] for i in order])
    np.testing.assert_allclose([0.0 if own is None else own[0] for own in again], flat[order], atol=1e-5)


@pytest.mark.parametrize("by", [("seed", "role"), ("seed",), ("role",), ()], ids=str)
def test_by_selects_the_compared_trajectories(by):
    scored = [
        one(0, group=0, role="a"), one(1, group=0, role="a"), one(5, group=0, role="b"), one(15, group=0, role="b"),
        one(0, group=1, role="a"), one(2, group=1, role="a"), one(9, group=1, role="b"), one(7, group=1, role="b"),
    ]  # fmt: skip

    for own, s in zip(assigned(Credit(by=by, scale="none"), scored), scored, strict=True):
        alike = [o.reward for o in scored if all(keys_of(o)[name] == keys_of(s)[name] for name in by)]
        assert own == pytest.approx([s.reward - sum(alike) / len(alike)])


def test_spread_below_the_noise_has_no_advantages():
    rewards, noise = np.array([0.50, 0.52, 0.48, 0.50]), np.full(4, 0.05)
    assert Credit().advantages(rewards, noise) is not None
    assert Credit(noise_multiple=1.0).advantages(rewards, noise) is None
    assert Credit(noise_multiple=1.0).advantages(rewards) is not None
    assert Credit(noise_multiple=1.0).advantages(np.array([0.4, 0.6, 0.4, 0.6]), noise) is not None
    assert Credit(noise_multiple=3.0).advantages(np.array([0.4, 0.6, 0.4, 0.6]), noise) is None
    scored = [one(r, noise=0.05) for r in rewards]
    assert assigned(Credit(noise_multiple=1.0), scored) == [None] * 4
    assert None not in assigned(Credit(noise_multiple=1.0), [*scored[:3], one(0.5)])


def test_batch_std_is_one_number_per_role():
    scored = [one(0, group=0), one(2, group=0), one(0, group=1), one(4, group=1), one(0, role="b"), one(100, role="b")]
    spread = np.std([-1, 1, -2, 2])
    result = np.concatenate(Credit(scale="batch_std").assign(scored))
    np.testing.assert_allclose(result, [-1 / spread, 1 / spread, -2 / spread, 2 / spread, -1, 1], rtol=1e-6)
    equal = [one(3, group=2), one(3, group=2)]  # a zero-variance group does not count
    np.testing.assert_array_equal(np.concatenate(Credit(scale="batch_std").assign([*scored, *equal])[:6]), result)
    alike = np.concatenate(Credit(by=("seed",), scale="batch_std").assign(scored[:4]))
    np.testing.assert_allclose(alike, result[:4], rtol=1e-6)


def test_turns_of_a_group_share_one_baseline():
    scored = by_turn([1, 0], [0, 0, 1])
    first, second = Credit(scale="none").assign(scored)
    np.testing.assert_allclose(first, [0.6, -0.4], rtol=1e-6)
    np.testing.assert_allclose(second, [-0.4, -0.4, 0.6], rtol=1e-6)
    to_go = Credit(scale="none", turns="to_go").assign(scored)
    np.testing.assert_allclose(to_go[0], [0.2, -0.4], rtol=1e-5)
    np.testing.assert_allclose(to_go[1], [-0.2, 0.2, 0.6], rtol=1e-5)
    half = Credit(scale="none", turns="to_go", discount=0.5).assign(scored)
    np.testing.assert_allclose(half[1], [-0.4 - 0.2 + 0.15, -0.4 + 0.3, 0.6], rtol=1e-5)


def test_returns_are_summed_before_they_are_compared():
    scored = by_turn([1, 0], [0, 4])
    plain = assigned(Credit(by=("seed", "role", "turn"), scale="none", turns="return", discount=0.5), scored)
    assert plain == [[pytest.approx(1 - 1.5), -2], [pytest.approx(2 - 1.5), 2]]  # returns [1, 0] and [2, 4]
    pooled = assigned(Credit(scale="none", turns="return", discount=0.5), scored)
    assert pooled == [[-0.75, -1.75], [0.25, 2.25]]


def test_turns_of_one_number_are_compared_with_each_other():
    credit = Credit(by=("seed", "role", "turn"), scale="none")
    assert assigned(credit, by_turn([1, 5], [3, 5], [2])) == [[-1, 0], [1, 0], [0]]
    # the total reward, among trajectories with such a turn
    whole = [one(r, tokens=[1] * n) for r, n in ((0.0, 1), (1.0, 2), (5.0, 2))]
    assert assigned(credit, whole) == [[-2], [-1, -2], [3, 2]]


def test_turn_without_a_reward_has_no_advantage():
    assert assigned(Credit(scale="none"), by_turn([nan, 1.0], [0.0])) == [[0.0, 0.5], [-0.5]]
    assert assigned(Credit(), by_turn([nan], [nan])) == [None, None]
    assert assigned(Credit(), by_turn([1.0], [1.0, 1.0])) == [None, None]
    assert assigned(Credit(), by_turn([], [])) == [None, None]


def test_running_baseline_is_per_role():
    credit, running = Credit(baseline="rae", scale="none", rae_decay=0.5), Baselines()
    scored = [one(1.0, group=0), one(3.0, group=1), one(-8.0, role="b")]
    a, b = 0.75 * 2.0, 0.5 * -8.0  # from 0, with weights 0.5**2 and 0.5**1
    assert assigned(credit, scored, running) == [[1 - a], [3 - a], [-8 - b]]
    later = Baselines()
    later.load_state_dict(running.state_dict())
    for resumed in (running, later):
        assert assigned(credit, [one(2.0)], resumed) == [[2 - (0.5 * a + 0.5 * 2.0)]]
    assert assigned(credit, [one(1.0), one(1.0)]) == [[0.25], [0.25]]  # equal rewards still have an advantage


def test_running_means_equal_the_paper_for_single_rewards():
    running, b = Baselines(), 0.0
    for reward in (1.0, -1.0, 1.0, 1.0):
        b = 0.95 * b + 0.05 * reward
        assert running.update("x", np.array([reward]), 0.95) == pytest.approx(b)


def test_an_empty_state_is_a_state():
    fresh = Baselines()
    fresh.load_state_dict(Baselines().state_dict())
    assert fresh.state_dict()["names"].dtype.kind == "U" and not len(fresh.state_dict()["means"])


def test_long_responses_are_punished_softly():
    overlong = Overlong(max_tokens=10, cache_tokens=4)
    assert overlong.penalties(np.array([0, 6, 7, 8, 10, 11])).tolist() == [0, 0, -0.25, -0.5, -1, -1]
    credit = Credit(scale="none", overlong=overlong)
    assert assigned(credit, [one(1.0, tokens=[6]), one(1.0, tokens=[10])]) == [[0.5], [-0.5]]
    assert assigned(credit, by_turn([1, 1], [1, 1], tokens=[6, 8])) == [[0.25, -0.25], [0.25, -0.25]]
    assert assigned(credit, [one(1.0, tokens=[6, 10]), one(1.0, tokens=[1, 1])]) == [[-0.25] * 2, [0.25] * 2]
    returns = Credit(by=("seed", "role", "turn"), scale="none", overlong=overlong, turns="return")
    late = [one(0.0, turns=[nan, 1.0], tokens=[n, 1]) for n in (10, 1)]  # also of a turn without a reward of its own
    assert assigned(returns, late) == [[-0.5, 0.0], [0.5, 0.0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Credit(noise_multiple=-1), "noise_multiple=-1"),
        (lambda: Credit(noise_multiple=np.inf), "noise_multiple=inf must be at least 0 and finite"),
        (lambda: Credit(min_spread=np.inf), "min_spread=inf must be at least 0 and finite"),
        (lambda: Credit(discount=1.5), "discount=1.5"),
        (lambda: Credit(rae_decay=1.0), "rae_decay=1.0"),
        (lambda: Credit(by=("seed", "seed")), "at most once"),
        (lambda: Credit(by=("agent",)), r"names 'agent'\. Choose from 'seed', 'role' \(the agent\) and 'turn'"),
        (lambda: Credit(discount=2.0), r"^discount=2\.0 must be in \[0, 1\]$"),
        (lambda: Credit(baseline="rae"), "Set scale to 'batch_std' or 'none'"),
        (lambda: Overlong(max_tokens=4, cache_tokens=5), "cache_tokens=5"),
        (lambda: Credit(baseline="rae", scale="none", noise_multiple=2.0), "has no effect without"),
        (lambda: Credit(baseline="none", scale="batch_std", noise_multiple=2.0), "has no effect without"),
        (lambda: Credit(baseline="none", scale="none", min_spread=0.5), "has no effect without"),
        (lambda: one(nan), "finite"),
        (lambda: one(0.0, turns=[1.0], tokens=[1, 1]), "1 scores for 2 turns"),
    ],
)
def test_invalid_credit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    Credit(baseline="rae", scale="batch_std", min_spread=0.5)


@pytest.mark.parametrize("unscored", [0, 3, 30])
def test_batch_std_uses_only_scored_turns(unscored):
    credit = Credit(by=("role",), baseline="mean", scale="batch_std")
    result = credit.assign(by_turn(*([nan] * unscored + [reward] for reward in (0.0, 1.0, 2.0, 5.0))))
    last = [own[-1] for own in result]
    assert np.std(last) == pytest.approx(1) and all(not own[:-1].any() for own in result)


def test_custom_credit_rule_is_used():
    class Best(Credit):
        """Only the best episode has an advantage."""

        def advantages(self, rewards_n, noise_n=None):
            return np.where(rewards_n == rewards_n.max(), 2.0, 0.0) if len(rewards_n) > 1 else None

    step = [
        Scored(group=group, role=role, reward=reward, response_tokens=[3, 4], noise=0.1)
        for group, role, reward in [(0, "a", 1.0), (0, "a", 5.0), (0, "b", 7.0), (1, "a", 9.0)]
    ]
    given = [None if own is None else own.tolist() for own in Best().assign(step)]
    assert given == [[0.0, 0.0], [2.0, 2.0], None, None]
