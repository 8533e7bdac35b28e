import asyncio
import time

import pytest

from forge_agents.runtime.colocation import Colocation
from forge_agents.runtime.threads import BusyTime
from forge_trainers.learner.client import Learner, LearnerConfig
from forge_trainers.run.supervision import Stopwatch


def test_idle_fractions_complement_busy_times(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    engines, learner = BusyTime(), BusyTime()
    watch = Stopwatch(lambda: {"engines": engines.seconds, "learner": learner.seconds})
    engines.seconds, now[0] = 6.0, 6.0
    watch.lap("collect")
    learner.seconds, now[0] = 2.0, 8.0
    watch.lap("learn")
    assert watch.times == {
        "time/collect_s": 6.0, "time/learn_s": 2.0, "time/step_s": 8.0, "idle/engines": 0.25, "idle/learner": 0.75
    }  # fmt: skip
    now[0] = 9.0
    watch.lap("collect")  # a stage may come in two parts
    assert (watch.times["time/collect_s"], watch.times["time/step_s"]) == (7.0, 9.0)


def test_a_learner_that_waits_for_its_turn_on_a_gpu_is_idle(monkeypatch):
    """As for engines. Requests of one process are busy together, not each at its place in the queue."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    async def goes():
        pass

    async def waits_for_engines():
        now[0] += 3.0

    async def computes(endpoint, *_, **__):
        now[0] += 1.0
        return [{"version": 1.0, "step_s": 1.0}]

    async def play():
        turns = Colocation("gpu", 60)
        engines = turns.register("engines", offload=waits_for_engines, onload=goes)
        learners = turns.register("learner", offload=goes, onload=goes)
        about = {"config": LearnerConfig(), "procs": None, "actors": None, "world_size": 1, "heartbeat": None}
        about |= {"max_sample_tokens": 8, "compute_dtype": "float32"}
        busy = BusyTime()
        settings = {"device_access": learners, "busy": busy, **about}
        pair = [Learner("learner", learner_name=name, **settings) for name in ("a", "b")]
        for one in pair:
            one._call_ranks = computes
        async with engines():
            pass
        watch = Stopwatch(lambda: {"learner": sum(one.busy_s for one in pair) / 2})
        await asyncio.gather(*(one.train_step({}) for one in pair))
        watch.lap("learn")
        return watch.times

    times = asyncio.run(play())
    assert times["time/step_s"] == 5.0 and times["idle/learner"] == pytest.approx(0.6)


def test_part_of_a_lap_is_moved_to_another_stage(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    now[0] = 3.0
    watch.lap("score")
    watch.move(2.0, source="score", target="resample")
    now[0] = 4.0
    watch.lap("score")
    assert watch.times == {"time/score_s": 2.0, "time/resample_s": 2.0, "time/step_s": 4.0}
    watch.move(9.0, source="score", target="resample")  # it began before anybody waited
    assert watch.times == {"time/score_s": 0.0, "time/resample_s": 4.0, "time/step_s": 4.0}
