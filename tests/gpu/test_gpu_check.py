"""On a machine with GPUs: `forge-agents doctor --gpu`, and what it must show."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_agents.runtime.machine import visible_gpus
from forge_trainers.gpu_check import gpu_check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not visible_gpus(), reason="no GPU is visible here"),
]


@pytest.mark.timeout(1800)
def test_every_way_trains_and_its_memory_is_what_was_expected(tmp_path: Path) -> None:
    rows = gpu_check(out_dir=str(tmp_path / "check"))
    assert len(rows) == 2 if len(visible_gpus()) == 1 else len(rows) >= 3
    for row in rows:
        assert row["logprob gap"] < 0.2, row["layout"]  # sampler and learner hold the same weights
        assert row["learner GB peak"] <= row["learner GB expected"], row["layout"]
        assert row["GPU GB in use"] <= row["GPU GB expected"], row["layout"]
        if row["layout"] in ("shared", "turns"):  # elsewhere vLLM measures what it may take
            assert row["engine GB peak"] <= row["engine GB expected"], row["layout"]
        assert row["tokens/s"] > 0 and row["MFU"] > 0
