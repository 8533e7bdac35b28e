"""Layouts that ``gpu-check`` tries on a number of GPUs, and its report."""

from __future__ import annotations

import json
import types

import pytest

from forge_agents.cli.main import main
from forge_agents.errors import HostError
from forge_agents.models.sizes import ModelSize
from forge_agents.runtime.machine import visible_gpus
from forge_agents.serving.memory import OVERHEAD_BYTES
from forge_trainers import gpu_check
from forge_trainers.gpu_check import Layout, expected_bytes, layouts, placement_of, row, table

SMOL = ModelSize.from_config(
    {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30,
     "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}
)  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "found"),
    [(1, ["shared", "turns"]), (2, ["shared", "separate", "turns"]),
     (4, ["shared", "separate", "2 and 2", "engine of 3 ranks", "turns"]),
     (8, ["shared", "separate", "4 and 4", "engine of 3 ranks", "turns"])],
)  # fmt: skip
def test_ways_fit_the_gpus(gpus, found):
    tried = layouts(gpus, SMOL)
    assert [layout.name for layout in tried] == found
    assert all(layout.learner_procs + layout.replicas * layout.tp <= gpus for layout in tried if not layout.shared)


def test_row_has_bandwidth_and_expected_memory():
    metrics = {"time/sync_s": 0.5, "time/step_s": 2.0, "learner/mfu": 0.25, "learner/peak_device_bytes": 4e9,
               "engines/peak_device_bytes": 50e9, "engines/device_used_bytes": 70e9}  # fmt: skip
    expected = {"learner GB": 5_000_000_000, "engine GB": 60_000_000_000, "GPU GB": 76_000_000_000}
    told = row(Layout(name="shared"), metrics, expected=expected, weights=1_000_000_000)
    assert told["weights back GB/s"] == 2.0 and told["learner GB expected"] == 5.0 and told["learner GB peak"] == 4.0
    assert [told[name] for name in ("engine GB expected", "engine GB peak")] == [60.0, 50.0]
    assert [told[name] for name in ("GPU GB expected", "GPU GB in use")] == [76.0, 70.0]
    assert told["MFU"] == 0.25 and told["tokens/s"] is None
    assert table([told]).row_count == len(told) - 1


def test_missing_gpu_is_reported(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["doctor", "--gpu"]) == 1
    assert "this machine has no visible GPU" in capsys.readouterr().err


def test_expected_and_measured_memory_match_in_scope(tiny_llama):
    total = 16_000_000_000
    shared, alone = layouts(1, SMOL)
    result = placement_of(shared, str(tiny_llama), [total])
    learner, engine = result.processes
    told = expected_bytes(result)
    assert told["learner GB"] == learner.bytes - OVERHEAD_BYTES  # what torch counts
    assert told["engine GB"] == engine.bytes - OVERHEAD_BYTES
    assert told["GPU GB"] == learner.bytes + engine.bytes == pytest.approx(0.95 * total, rel=1e-3)
    turns = placement_of(alone, str(tiny_llama), [total])
    assert [one.sleeps for one in turns.engines.values()] == [True]  # though they would fit side by side
    parked = expected_bytes(turns)
    assert parked["GPU GB"] == OVERHEAD_BYTES + parked["engine GB"] + OVERHEAD_BYTES
    assert parked["engine GB"] > told["engine GB"] + 0.9 * told["learner GB"]
    assert expected_bytes(placement_of(shared, str(tiny_llama), [0])).keys() == {"learner GB"}


def test_runs_see_the_requested_gpus(monkeypatch, tmp_path, tiny_llama):
    seen = []
    requests = []

    class Trainer:
        def __init__(self, *args, out_dir, config):
            requests.append(config)
            out_dir.mkdir(parents=True)

        def __enter__(self):
            return self

        def __exit__(self, *exc: object) -> None: ...

        def fit(self, *args, **settings):
            seen.append(visible_gpus())
            return types.SimpleNamespace(metrics=[{}])

    monkeypatch.setattr(gpu_check, "GRPOTrainer", Trainer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    monkeypatch.setattr(gpu_check, "gpu_bytes", lambda gpus: (80_000_000_000,) * len(gpus))
    one, turns = gpu_check.gpu_check(str(tiny_llama), str(tmp_path / "one"), gpus=1)
    assert one["GPU GB expected"] == pytest.approx(76, abs=0.1)
    assert json.loads((tmp_path / "one" / "gpu-check.json").read_text()) == [one, turns]
    assert [one["layout"], turns["layout"]] == ["shared", "turns"] and seen == [("GPU-a",)] * 2
    assert [(config.colocate, config.engine.sleeps) for config in requests] == [(False, False), (True, True)]
    gpu_check.gpu_check(str(tiny_llama), str(tmp_path / "all"))
    shared, *others, last = seen[2:]
    assert shared == last == ("GPU-a",) and set(others) == {("GPU-a", "GPU-b", "GPU-c")} == {visible_gpus()}
    for gpus in (0, 4):
        with pytest.raises(HostError, match=f"gpus={gpus}, and 3 are visible. Give 1 to 3"):
            gpu_check.gpu_check(str(tiny_llama), str(tmp_path), gpus=gpus)
