import asyncio
import functools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_trainers.rl.prefetch import Prefetch, TakenGroups, ahead_and_late
from forge_trainers.rl.weight_sync import WeightSync


def batches_of(staleness, playing, loading, judging=None):
    """Return ``(step, number, age)`` of the groups of every batch; delays are iterations of the event loop.

    Args:
        playing: By step, the delays of its groups.
        loading: By step, the delay of its weights on their way to the engines.
        judging: By step, the delay of its reward.
    """
    learner = engines = 0
    judging = [0] * len(playing) if judging is None else judging

    async def wait(turns):
        for _ in range(turns):
            await asyncio.sleep(0)

    async def group(step, number, put):
        sampled_with = engines
        await wait(playing[step][number])
        put(number, (step, number, sampled_with))

    async def collect(step, numbers, put):
        await weights.done()
        await asyncio.gather(*(group(step, number, put) for number in range(len(playing[step]))))

    async def judge(step, groups):
        judged.append(step)
        await wait(judging[step])
        return step, groups

    async def load(version, published):
        nonlocal engines
        await wait(loading[version - 1] // 2)
        assert version == learner  # the learner has not trained meanwhile
        published()
        await wait(loading[version - 1] - loading[version - 1] // 2)
        engines = version

    async def main():
        nonlocal learner
        for step in range(len(playing)):
            batch = ahead.batch(step)
            groups = await batch.collected
            assert await batch.scored == (step, groups)
            result.append([(at, number, learner - version) for at, number, version in groups])
            await asyncio.sleep(0)
            learner += 1
            await weights.publish(SimpleNamespace(sync=functools.partial(load, learner)))
        await weights.done()
        assert engines == len(playing)

    result, judged = [], []
    ahead = Prefetch(collect, judge, staleness=staleness, steps=len(playing), size=len(playing[0]))
    weights = WeightSync(max_staleness=1, timeout_s=60)
    asyncio.run(asyncio.wait_for(main(), 60))
    assert judged == list(range(len(playing)))
    return result


async def as_they_are(step, groups):
    """Return the groups unchanged."""
    return groups


STEPS = 8
DELAYS = st.lists(st.integers(0, 3), min_size=STEPS, max_size=STEPS)
GROUPS = st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=3), min_size=1, max_size=STEPS)


@settings(max_examples=150, deadline=None)
@given(staleness=st.integers(0, 4), playing=GROUPS, loading=DELAYS, judging=DELAYS)
def test_every_group_is_used_once_within_the_policy_lag(staleness, playing, loading, judging):
    result = batches_of(staleness, playing, loading, judging)
    assert sorted((at, number) for batch in result for at, number, _ in batch) == [
        (at, number) for at in range(len(playing)) for number in range(3)
    ]
    ahead, late = ahead_and_late(staleness)
    for step, batch in enumerate(result):
        assert len(batch) == 3 and batch == sorted(batch)
        assert all(step - late <= at <= step + ahead for at, _, _ in batch)
        assert all(0 <= age <= staleness for _, _, age in batch)
        if staleness < 2:
            assert {at for at, _, _ in batch} == {step}


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_policy_lag_of_10_000_groups_is_bounded_and_reached(staleness):
    rng = np.random.default_rng(staleness)
    result = batches_of(staleness, rng.integers(0, 12, (1250, 8)), rng.integers(0, 12, 1250), rng.integers(0, 12, 1250))
    ages = [age for batch in result for _, _, age in batch]
    assert len(ages) == 10_000
    assert min(ages) >= 0 and max(ages) == staleness


@pytest.mark.parametrize(("staleness", "expected"), [(0, (0, 0)), (1, (1, 0)), (2, (1, 1)), (3, (2, 1)), (5, (4, 1))])
def test_one_of_two_versions_is_for_slow_groups(staleness, expected):
    assert ahead_and_late(staleness) == expected


def test_slow_group_does_not_delay_the_batch():
    slow, quick = 200, 1
    playing = [[quick, slow, quick]] + [[quick] * 3] * 3
    one, two = (batches_of(staleness, playing, [0] * 4) for staleness in (1, 2))
    assert [[at for at, _, _ in batch] for batch in one] == [[0] * 3, [1] * 3, [2] * 3, [3] * 3]
    assert [[at for at, _, _ in batch] for batch in two][:2] == [[0, 0, 1], [0, 1, 1]]
    assert two[1][0][:2] == (0, 1)  # the slow group is one step late


@pytest.mark.parametrize(("staleness", "ahead"), [(0, [0]), (1, [0, 1])])
def test_collection_and_scoring_overlap_with_training(staleness, ahead):
    started, scored = [], []

    async def collect(step, numbers, put):
        started.append(step)
        put(0, step)

    async def score(step, groups):
        scored.append(step)

    async def main():
        prefetch = Prefetch(collect, score, staleness=staleness, steps=5, size=1)
        await prefetch.batch(0).scored
        for _ in range(100):  # the learner trains
            await asyncio.sleep(0)
        await prefetch.cancel()

    asyncio.run(main())
    assert started == scored == ahead


@pytest.mark.parametrize("failing", ["collect", "judge"])
def test_error_of_a_prefetched_step_reaches_the_caller(failing):
    async def collect(step, numbers, put):
        put(0, step)
        if failing == "collect" and step == 1:
            raise OSError("the environment is gone")

    async def judge(step, groups):
        if failing == "judge" and step == 1:
            raise OSError("the judge is gone")
        return groups

    async def main():
        ahead = Prefetch(collect, judge, staleness=1, steps=5, size=1)
        assert await ahead.batch(0).scored == [0]
        with pytest.raises(OSError, match="is gone"):
            await ahead.batch(1).scored
        await ahead.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_too_few_groups_raise_instead_of_hanging():
    async def collect(step, numbers, put):
        put(0, step)

    async def main():
        await Prefetch(collect, as_they_are, staleness=0, steps=1, size=2).batch(0).scored

    with pytest.raises(RuntimeError, match="step 1 has 1 of 2 groups"):
        asyncio.run(asyncio.wait_for(main(), 60))


def test_prefetched_steps_are_cancelled():
    cancelled = []

    async def collect(step, numbers, put):
        try:
            await asyncio.sleep(0 if step == 0 else 60)
        except asyncio.CancelledError:
            cancelled.append(step)
            raise
        put(0, step)

    async def main():
        ahead = Prefetch(collect, as_they_are, staleness=3, steps=5, size=1)
        await ahead.batch(0).scored
        await asyncio.sleep(0)
        await ahead.cancel()

    asyncio.run(main())
    assert sorted(cancelled) == [1, 2]


def weight_sync():
    """Transfers with a policy lag, whose work is `publish(work)`."""
    weights = WeightSync(max_staleness=1, timeout_s=60)
    return weights, lambda work: weights.publish(SimpleNamespace(sync=work))


def test_error_of_a_transfer_reaches_the_waiting_caller():
    order = []

    async def work(name, published, fails=False):
        published()
        await asyncio.sleep(0.01)
        order.append(name)
        if fails:
            raise ValueError(name)

    async def main():
        weights, publish = weight_sync()
        await weights.done()
        await publish(functools.partial(work, "first"))
        order.append("caller")
        await publish(functools.partial(work, "second", fails=True))
        with pytest.raises(ValueError, match="second"):
            await publish(functools.partial(work, "third"))
        waiting = asyncio.ensure_future(weights.done())
        waiting.cancel()
        await weights.cancel()
        assert not weights.is_current
        await weights.done()
        weights.reset()
        await publish(functools.partial(work, "third"))
        await weights.done()
        await weights.cancel()
        await weights.cancel()
        assert weights.is_current
        await publish(functools.partial(work, "never"))
        await weights.cancel()
        assert not weights.is_current

    asyncio.run(main())
    assert order == ["caller", "first", "second", "third"]


def test_cancelled_waiter_does_not_cancel_the_transfer():
    done = []

    async def work(published):
        published()
        await asyncio.sleep(0.02)
        done.append(True)

    async def main():
        weights, publish = weight_sync()
        await publish(work)
        waiting = asyncio.ensure_future(weights.done())
        await asyncio.sleep(0)
        waiting.cancel()
        await weights.done()

    asyncio.run(main())
    assert done == [True]


def test_caller_continues_when_the_weights_are_published():
    order = []

    async def work(published):
        await asyncio.sleep(0.01)
        order.append("published")
        published()
        await asyncio.sleep(0.01)
        order.append("loaded")

    async def fails(published):
        raise ValueError("no store")

    async def main():
        weights, publish = weight_sync()
        await publish(work)
        order.append("caller")
        await publish(fails)  # the error reaches the next waiter
        with pytest.raises(ValueError, match="no store"):
            await weights.done()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert order == ["published", "caller", "loaded"]


@pytest.mark.parametrize("step", [0, 2**50])
def test_late_groups_of_another_step_are_not_collected(step, caplog):
    """A stranger's checkpoint of step 5 may name any step, and collecting a late one has no end."""
    taken = TakenGroups()
    taken.load_state_dict({"owed": np.array([(step, 1)]), "early": np.array([(step + 1, 0)])})
    started = []

    async def collect(step, numbers, put):
        started.append((step, [*numbers]))
        for number in numbers:
            put(number, (step, number))

    async def train():
        ahead = Prefetch(collect, as_they_are, staleness=0, steps=6, size=2, taken=taken)
        return await asyncio.wait_for(ahead.batch(5).scored, 60)

    assert asyncio.run(train()) == [(5, 0), (5, 1)] and started == [(5, [0, 1])]
    assert "does not fit step 6 with 2 groups" in caplog.text


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_resumed_run_may_change_the_number_of_groups(size):
    """The checkpoint has 4 groups per step: one of step 4 is owed, one of step 5 was taken early."""
    taken = TakenGroups()
    taken.load_state_dict({"owed": np.array([(4, 3)]), "early": np.array([(5, 0)])})

    async def collect(step, numbers, put):
        for number in taken.missing(step, size):
            if number < size:  # a step has no other tasks
                put(number, (step, number))

    async def train():
        ahead = Prefetch(collect, as_they_are, staleness=0, steps=7, size=size, taken=taken)
        return [await asyncio.wait_for(ahead.batch(step).scored, 60) for step in (5, 6)]

    first, second = asyncio.run(train())
    assert len(first) == len(second) == size and ((4, 3) in first) == (size > 3)
    assert second == [(6, number) for number in range(size)]
