import time

from forge_agents.runtime.waits import Busy
from forge_trainers.run.supervision import Stopwatch


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
