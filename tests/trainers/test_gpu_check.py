"""What ``gpu-check`` tries on so many GPUs, and what it tells of a run."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

import forge_agents as fa
from forge_agents.cli.main import main
from forge_agents.errors import HostError
from forge_agents.models.sizes import ModelSize
from forge_agents.runtime.processes import visible_gpus
from forge_agents.serving.memory import OVERHEAD_BYTES
from forge_trainers import gpu_check
from forge_trainers.gpu_check import Way, row, table, tensor_bytes, ways
from forge_trainers.learner.memory import learner_bytes

SMOL = ModelSize.from_config(
    {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30,
     "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}
)  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "found"),
    [(1, ["shared"]), (2, ["shared", "apart"]), (4, ["shared", "apart", "2 and 2", "engine of 3 ranks"]),
     (8, ["shared", "apart", "4 and 4", "engine of 3 ranks"])],
)  # fmt: skip
def test_ways_fit_the_gpus(gpus: int, found: list[str]) -> None:
    tried = ways(gpus, SMOL)
    assert [way.name for way in tried] == found
    assert gpus == 1 or all(way.gpus <= gpus for way in tried)


def test_a_row_has_the_bandwidth_of_the_weights_and_the_memory_that_was_expected() -> None:
    metrics = {"time/sync_s": 0.5, "time/step_s": 2.0, "learner/mfu": 0.25, "learner/peak_device_bytes": 4e9}
    told = row(Way(name="shared"), metrics, expected=5_000_000_000, weights=1_000_000_000)
    assert told["weights back GB/s"] == 2.0 and told["learner GB expected"] == 5.0 and told["learner GB peak"] == 4.0
    assert told["MFU"] == 0.25 and told["tokens/s"] is None
    assert table([told]).row_count == len(told) - 1


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["gpu-check"]) == 1
    assert "there is no GPU here to check" in capsys.readouterr().err


def test_what_is_expected_is_of_what_the_peak_is() -> None:
    everything = learner_bytes(SMOL, fa.LearnerConfig(), ranks=2)
    assert tensor_bytes(SMOL, fa.LearnerConfig(), ranks=2) == sum(everything.values()) - OVERHEAD_BYTES


def test_runs_see_as_many_gpus_as_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_llama: Path
) -> None:
    seen: list[tuple[str, ...]] = []

    class Trainer:
        def __init__(self, *args: object, out_dir: Path, **settings: object) -> None:
            out_dir.mkdir(parents=True)

        def __enter__(self) -> Trainer:
            return self

        def __exit__(self, *exc: object) -> None: ...

        def fit(self, *args: object, **settings: object) -> Any:
            seen.append(visible_gpus())
            return types.SimpleNamespace(metrics=[{}])

    monkeypatch.setattr(gpu_check, "GRPOTrainer", Trainer)
    copy_gb_s = gpu_check.copy_gb_s
    monkeypatch.setattr(gpu_check, "copy_gb_s", lambda num_bytes, device: copy_gb_s(num_bytes, "cpu"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    (only,) = gpu_check.gpu_check(str(tiny_llama), str(tmp_path / "one"), gpus=1)
    assert only["plain copy GB/s"] > 0
    assert json.loads((tmp_path / "one" / "gpu-check.json").read_text()) == [only]
    assert only["way"] == "shared" and seen == [("GPU-a",)]
    gpu_check.gpu_check(str(tiny_llama), str(tmp_path / "all"))
    shared, *others = seen[1:]
    assert shared == ("GPU-a",) and set(others) == {("GPU-a", "GPU-b", "GPU-c")} == {visible_gpus()}
    for gpus in (0, 4):
        with pytest.raises(HostError, match=f"gpus={gpus} and 3 are visible here; give 1 to 3"):
            gpu_check.gpu_check(str(tiny_llama), str(tmp_path), gpus=gpus)
