import asyncio
import contextlib
import os
import signal
import threading
import time

import pytest

from forge_agents.runtime.waits import Busy
from forge_trainers.run.supervision import Interrupt, LoopRunner, Stopwatch


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
    now[0] = 9.0
    watch.lap("collect")  # a stage may come in two parts
    assert (watch.times["time/collect_s"], watch.total_s) == (7.0, 9.0)
