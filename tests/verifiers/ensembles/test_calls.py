import asyncio
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from forge_agents import Ensemble, Rule
from forge_agents.types import Trajectory
from forge_verifiers import Composable
from forge_verifiers.ensemble import panel
from forge_verifiers.ensemble.panel import Caller

ROWS = [Trajectory(agent="a", policy="p", turns=(), env_id="t", seed=seed // 4) for seed in range(12)]


class Meter:
    """Counts concurrent calls. Calls wait until `together` of them have started."""

    def __init__(self, together=0):
        self.lock, self.inside, self.most, self.batches = threading.Lock(), Counter(), Counter(), []
        self.together, self.met = together, threading.Event()

    def verifier(self, name, cost, seconds=0.03, limit_s=60.0):
        meter = self

        class Metered(Composable):
            family = None

            def __init__(self):
                self.name, self.cost = name, cost

            def max_duration_s(self, trajectories, default_s):
                return limit_s

            def score(self, trajectories):
                with meter.lock:
                    meter.batches.append((name, len(trajectories)))
                    meter.inside[cost] += 1
                    meter.most[cost] = max(meter.most[cost], meter.inside[cost])
                    meter.most["all"] = max(meter.most["all"], sum(meter.inside.values()))
                    if meter.most["all"] >= meter.together:
                        meter.met.set()
                meter.met.wait(60)
                time.sleep(seconds)
                with meter.lock:
                    meter.inside[cost] -= 1
                return np.full(len(trajectories), 0.5, np.float32)

        return Metered()


def test_cost_classes_keep_their_limits_and_run_side_by_side(monkeypatch):
    monkeypatch.setattr(panel, "CONCURRENCY", {"cheap": 1, "model": 2, "expensive": 3})
    meter = Meter(together=6)
    verifiers = [meter.verifier(f"{cost}{k}", cost) for cost in ("cheap", "model", "expensive") for k in range(5)]
    Ensemble(verifiers).score(ROWS)
    assert meter.most["cheap"] == 1 and meter.most["model"] == 2 and meter.most["expensive"] == 3
    assert meter.most["all"] == 6
    assert len(meter.batches) == 15


def test_a_verifier_gets_the_rows_of_all_groups_in_one_call():
    meter = Meter()
    Ensemble([meter.verifier("one", "model", 0.0)], cache_rows=0).score(ROWS)
    assert meter.batches == [("one", 12)]


def test_hanging_call_frees_its_slot(monkeypatch):
    monkeypatch.setattr(panel, "CONCURRENCY", {"model": 1})
    meter = Meter()
    slow, quick = meter.verifier("slow", "model", 60.0, limit_s=0.1), meter.verifier("quick", "model", 0.0)
    caller = Caller([slow, quick], timeout_s=60.0)
    start = time.monotonic()
    verdicts = caller.call({0: ROWS, 1: ROWS})
    assert time.monotonic() - start < 50
    assert verdicts[0].failure == "timeout" and "0.1 s" in verdicts[0].failed[0]
    assert verdicts[1].failure == "" and verdicts[1].scores.tolist() == [0.5] * 12
    assert caller.call({0: ROWS})[0].failed[11].startswith("skipped")


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("share", ["all rows", "a row"])
def test_verifier_that_ends_or_cancels_something_fails_at_once(kind, share):
    rows = iter(range(len(ROWS)))

    def ends(trajectory):
        if share == "all rows" or next(rows) == 3:
            raise kind("of a library")
        return 1.0

    result = Caller([Rule(ends, name="ends")], timeout_s=600.0).call({0: ROWS})[0]
    assert result.failure == ("error" if share == "all rows" else "")
    assert set(result.failed) == (set(range(len(ROWS))) if share == "all rows" else {3})
    assert result.failed[3].startswith(f"{kind.__name__}: of a library")


def test_timeout_of_a_waiting_call_begins_at_its_start(monkeypatch):
    class Takes60(Composable):
        family, cost = None, "model"

        def __init__(self, name):
            self.name = name

        def score(self, trajectories):
            now[0] += 60
            time.sleep(0.05)  # who is late already is found to be meanwhile
            return np.full(len(trajectories), 0.5, np.float32)

    now = [0.0]
    monkeypatch.setattr(panel, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(panel, "CONCURRENCY", {"model": 1})
    caller = Caller([Takes60(str(k)) for k in range(3)], timeout_s=100.0)
    verdicts = caller.call(dict.fromkeys(range(3), ROWS))
    assert [v.failure for v in verdicts.values()] == ["", "", ""]
