"""What ``gpu-check`` tries on so many GPUs, and what it tells of a run."""

from __future__ import annotations

import pytest

from forge_agents.cli.main import main
from forge_agents.models.sizes import ModelSize
from forge_trainers.gpu_check import Way, row, table, ways

SMOL = ModelSize.from_config(
    {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30,
     "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}
)  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "found"),
    [(1, ["shared"]), (2, ["apart"]), (4, ["apart", "2 and 2", "engine of 3 ranks"]),
     (8, ["apart", "4 and 4", "engine of 3 ranks"])],
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
