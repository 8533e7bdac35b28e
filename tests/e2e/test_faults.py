"""A run in which either rank of an engine, the learner, the weight store and an environment's worker are killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)

SESSION = "sample-2-engine-ranks"
FAULTS = Path(__file__).parents[1] / "perf" / "faults.py"


def test_killed_processes_are_replaced_without_losing_a_step(tmp_path):
    subprocess.run([sys.executable, str(FAULTS), SESSION, "--out", str(tmp_path)], check=True, timeout=1780)
    session = json.loads((tmp_path / f"{SESSION}.json").read_text())
    log = (tmp_path / "runs" / SESSION / "log-1").read_text()[-3000:]
    assert session["finished"] and len(session["ends"]) == 1, log  # one controller from start to end
    assert session["orphans"] == 0

    rows = session["rows"]
    assert [row["step"] for row in rows] == list(range(6))  # the harness counts from 0
    assert [row["learner/version"] for row in rows] == list(range(1, 7))  # steps were repeated, not skipped
    assert all(row["groups/failed"] == 0 and row["staleness/max"] == 0 for row in rows)
    # every rank of every engine, new ones included, samples from the newest weights
    assert all(row["learner/logprob_gap_mean"] < 1e-3 for row in rows if row["groups/used"])
    assert set(session["episodes"].values()) == {4} and len(session["episodes"]) == 12

    struck = {event["fault"]: event["time"] for event in session["events"] if event["event"] == "fault"}
    noticed = [row for row in session["noticed"] if row["event"] == "noticed"]
    assert [row["who"] for row in noticed] == ["team", "team-learner", "weights", "team"]
    assert [row["who"] for row in session["noticed"] if row["event"] == "recovered"] == [row["who"] for row in noticed]
    for fault, row in enumerate(noticed):
        assert row["time"] - struck[fault] < 10, row  # by the kernel, not by its silence
    failed = [event for event in session["events"] if event["event"] == "episode failed"]
    assert failed and {event["kind"] for event in failed} == {"WorkerDiedError"}  # and then played again
