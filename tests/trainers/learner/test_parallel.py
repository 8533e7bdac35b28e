"""Parallel equals serial: the learner's steps do not depend on how it is spread over processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "perf" / "parallel_table.py"


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """The rows of `parallel_table`, by layout."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(SCRIPT), "--json", "--steps=3"],
        capture_output=True,
        text=True,
        timeout=920,
        check=False,
    )
    # A rank that ends makes the others fail later, so the cause is at the beginning. With faulthandler an aborted rank
    # prints where it was.
    assert done.returncode == 0, f"{done.stderr[:12_000]}\n...\n{done.stderr[-2000:]}"
    return {row["layout"]: row for row in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    "layout",
    [
        "DDP 2",
        "FSDP 2",
        "FSDP 2, microbatches",
        "TP 2",
        "FSDP 2 x TP 2",
        "HSDP 2 x 2",
        "DDP 2 x TP 2",
        "moments in bfloat16, FSDP 2 x TP 2",
        "6 optimizer steps per batch, FSDP 2",
        "6 optimizer steps per batch, TP 2",
        "adapter, FSDP 2",
        "adapter, TP 2",
        "experts, FSDP 2",
        "experts, FSDP 2, EP 2",
        "experts, TP 2, EP 2",
        "experts, FSDP 2 x TP 2, EP 2",
        "Gemma, TP 2",
        "Phi, FSDP 2",
        "Phi, adapter, FSDP 2",
        "Qwen3.5, FSDP 2",
    ],
)
def test_a_layout_computes_what_one_process_does(rows, layout):
    row = rows[layout]
    # the norm after Qwen3.5's recurrence raises small outputs
    assert row["loss"] <= (5e-6 if "Qwen3.5" in layout else 1e-6)
    assert row["norm"] <= 1e-5
    assert row["weights"] <= 1e-5
    assert row["logprobs"] <= 1e-4
    assert row["adapter"] <= 1e-3  # as engines get it


def test_a_checkpoint_of_any_layout_resumes_in_another(rows):
    assert {name: row["resumed"] for name, row in rows.items() if not 0 <= row["resumed"] <= 1e-5} == {}


def test_each_rank_of_tensor_parallelism_keeps_a_part_of_the_vocabulary(rows):
    seen = {name: row["logits"] for name, row in rows.items()}
    assert seen == {name: 132 if "TP 2" in name else 264 for name in rows}


def test_gradients_were_accumulated(rows):
    assert rows["FSDP 2, microbatches"]["microbatches"] >= 3 > rows["FSDP 2"]["microbatches"]
