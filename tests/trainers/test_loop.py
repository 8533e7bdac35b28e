import asyncio
import contextlib
import functools
import os
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_agents._busy import Busy
from forge_trainers.loop import Ahead, Behind, Interrupt, LoopRunner, Stopwatch


def ages_of_groups(staleness, steps, playing, loading):
    """How many versions behind the learner each group was when its step was taken; delays are turns of the loop.

    Args:
        playing: By step, the delays of its groups.
        loading: By step, the delay of its weights on their way to the engines.
    """
    learner = engines = 0

    async def group(delay):
        sampled_with = engines
        for _ in range(delay):
            await asyncio.sleep(0)
        return sampled_with

    async def collect(step):
        await weights.done()
        return step, await asyncio.gather(*map(group, playing[step]))

    async def load(version):
        nonlocal engines
        for _ in range(loading[version - 1]):
            await asyncio.sleep(0)
        engines = version

    async def main():
        nonlocal learner
        for step in range(steps):
            got, sampled_with = await ahead.take(step)
            assert got == step
            ages.extend(learner - version for version in sampled_with)
            await asyncio.sleep(0)
            learner += 1
            await weights.start(functools.partial(load, learner))
        await weights.done()
        assert engines == steps

    ages = []
    ahead, weights = Ahead(collect, staleness, steps), Behind()
    asyncio.run(main())
    return ages


DELAYS = st.lists(st.integers(0, 3), min_size=8, max_size=8)


@settings(max_examples=60, deadline=None)
@given(staleness=st.integers(0, 3), steps=st.integers(1, 8), playing=DELAYS, loading=DELAYS)
def test_no_step_is_collected_with_weights_older_than_the_bound(staleness, steps, playing, loading):
    ages = ages_of_groups(staleness, steps, [[delay] for delay in playing], loading)
    assert len(ages) == steps and 0 <= min(ages) <= max(ages) <= staleness


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_none_of_10_000_groups_is_older_than_the_bound_and_some_are_as_old(staleness):
    rng = np.random.default_rng(staleness)
    ages = ages_of_groups(staleness, 1250, rng.integers(0, 12, (1250, 8)), rng.integers(0, 12, 1250))
    assert len(ages) == 10_000
    assert min(ages) >= 0 and max(ages) == staleness


def test_work_behind_the_back_goes_on_alone_and_its_error_comes_to_whoever_waits():
    order = []

    async def work(name, fails=False):
        await asyncio.sleep(0.01)
        order.append(name)
        if fails:
            raise ValueError(name)

    async def main():
        behind = Behind()
        await behind.done()
        await behind.start(functools.partial(work, "first"))
        order.append("caller")
        await behind.start(functools.partial(work, "second", fails=True))
        with pytest.raises(ValueError, match="second"):
            await behind.start(functools.partial(work, "third"))
        waiting = asyncio.ensure_future(behind.done())
        waiting.cancel()
        assert not await behind.cancel()
        await behind.done()
        await behind.start(functools.partial(asyncio.sleep, 0))
        await behind.done()
        assert await behind.cancel() and await behind.cancel()
        await behind.start(functools.partial(work, "never"))
        assert not await behind.cancel()

    asyncio.run(main())
    assert order == ["caller", "first", "second"]


def test_whoever_stops_waiting_does_not_stop_the_work():
    done = []

    async def work():
        await asyncio.sleep(0.02)
        done.append(True)

    async def main():
        behind = Behind()
        await behind.start(work)
        waiting = asyncio.ensure_future(behind.done())
        await asyncio.sleep(0)
        waiting.cancel()
        await behind.done()

    asyncio.run(main())
    assert done == [True]


def test_without_staleness_nothing_is_collected_ahead():
    started = []

    async def collect(step):
        started.append(step)

    async def main():
        ahead = Ahead(collect, 0, 5)
        await ahead.take(0)
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert started == [0]


def test_what_was_collected_ahead_is_cancelled():
    cancelled = []

    async def collect(step):
        try:
            await asyncio.sleep(0 if step == 0 else 60)
        except asyncio.CancelledError:
            cancelled.append(step)
            raise

    async def main():
        ahead = Ahead(collect, 2, 5)
        await ahead.take(0)
        await asyncio.sleep(0)
        await ahead.cancel()

    asyncio.run(main())
    assert cancelled == [1, 2]


def test_the_first_signal_asks_and_the_second_interrupts():
    said = []
    with Interrupt(said.append) as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.asked and "SIGINT" in said[0]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_runner_keeps_its_loop_between_calls_and_closes_once():
    closed = []

    async def on_close():
        closed.append(asyncio.get_running_loop())

    async def loop():
        return asyncio.get_running_loop()

    runner = LoopRunner(on_close)
    first, second = runner.run(loop()), runner.run(loop())
    runner.close()
    runner.close()
    assert first is second and closed == [first]


def test_inside_a_running_loop_the_work_moves_to_a_thread():
    async def on_close():
        pass

    async def work():
        await asyncio.sleep(0)
        return 3

    async def notebook():
        runner = LoopRunner(on_close)
        try:
            return runner.run(work())
        finally:
            runner.close()

    assert asyncio.run(notebook()) == 3


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_run_that_was_asked_to_stop_says_which_step_is_saved_and_ends_as_the_signal_would(number, error):
    said = []
    with Interrupt(said.append) as interrupt:
        interrupt.stop_if_asked(3)
        os.kill(os.getpid(), number)
        with pytest.raises(error) as ended:
            interrupt.stop_if_asked(3)
    told = said[-1] if error is SystemExit else str(ended.value)
    assert "after step 3; run it again" in told
    assert error is KeyboardInterrupt or ended.value.code == 143


@pytest.mark.parametrize("listens", [True, False])
def test_ctrl_c_in_a_notebook_reaches_the_thread_that_works(listens):
    said, seen = [], []

    async def on_close():
        pass

    async def work():
        with Interrupt(said.append) if listens else contextlib.nullcontext() as interrupt:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                for _ in range(500):
                    await asyncio.sleep(0.01)
                    if listens and interrupt.asked:
                        interrupt.stop_if_asked(3)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

    async def notebook():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio.run has put one of its own
        runner = LoopRunner(on_close)
        try:
            with pytest.raises(KeyboardInterrupt, match="after step 3" if listens else None):
                runner.run(work())
        finally:
            runner.close()

    try:
        asyncio.run(notebook())
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert (["finishing" in line for line in said], seen) == (([True], []) if listens else ([], ["cancelled"]))


def test_parts_that_overlap_are_busy_once_and_idle_for_the_rest(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    engines, learner = Busy(), Busy()
    watch = Stopwatch(lambda: {"engines": engines.seconds, "learner": learner.seconds})
    with engines:
        now[0] = 2.0
        with engines:  # two requests at once
            now[0] = 3.0
        now[0] = 6.0
    watch.lap("collect")
    with learner:
        now[0] = 8.0
        watch.lap("learn")
        assert learner.seconds == 2.0
    assert engines.seconds == 6.0
    assert watch.times == {
        "time/collect_s": 6.0, "time/learn_s": 2.0, "time/step_s": 8.0, "idle/engines": 0.25, "idle/learner": 0.75
    }  # fmt: skip
