"""On one host, no run listens beyond the loopback interface."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "perf" / "ports_table.py"


@pytest.mark.timeout(1800)
def test_training_with_several_ranks_listens_on_loopback_only(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kinds", "ranks", "view"],
        cwd=tmp_path, capture_output=True, text=True, timeout=1700, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "team-learner: tcp 127.0.0.1" in done.stdout  # gloo's, so the ranks were seen
