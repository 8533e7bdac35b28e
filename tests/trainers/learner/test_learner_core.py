"""The learner of one rank against transformers and against itself."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import check_resume, config, equal, gradients, hf_logprobs, moments_of, relative_gap, weights
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter

from forge_agents import files as sums_of_files
from forge_agents.errors import ModelNotFoundError, RunFolderError
from forge_agents.models.sizes import ModelSize
from forge_agents.models.tiny import tiny_model
from forge_agents.policy import LoRA
from forge_trainers.batch import layout
from forge_trainers.learner import checkpoint, precision, titan
from forge_trainers.learner import config as learner_config
from forge_trainers.learner import model as titan_model
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.degrees import check_degrees, shards_of
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.losses.policy_loss import PolicyLoss


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"family": "llama"},
        {"family": "qwen3"},
        {"family": "llama", "tied": False},
        {"family": "qwen3_moe"},
        {"family": "phi3", "tied": False},
        {"family": "gemma3"},
        {"family": "qwen3_5"},
        {"family": "qwen3_5_moe", "tied": False},
        {"family": "gpt_oss"},
        {"family": "deepseek_v3"},
    ],
    ids=str,
)
def test_logprobs_equal_transformers(tiny_models, random_batch, options, share):
    model, batch = tiny_models(**options), random_batch()
    core = LearnerCore(config(model, share_prefixes=share, temperature=0.8))
    assert (core.logprobs(batch) - hf_logprobs(model, batch, 0.8)).abs().max() < 1e-3


def test_a_step_learns_at_the_temperature_that_its_batch_was_sampled_at(tiny_llama, random_batch):
    batch = random_batch()
    core = LearnerCore(config(tiny_llama, kl_coef=0.1))
    set_before = LearnerCore(config(tiny_llama, kl_coef=0.1, temperature=0.6))
    first, expected = core.train_step(batch, 0.6), set_before.train_step(batch)
    names = ("loss", "entropy", "kl", "logprob_gap_mean", "grad_norm", "temperature")
    assert {name: first[name] for name in names} == {name: expected[name] for name in names}
    assert first["temperature"] == 0.6
    assert core.train_step(batch)["temperature"] == 1.0  # the step's own, and not the last one's


@pytest.mark.parametrize(
    ("batch", "changes", "close"),
    [
        ({}, {"share_prefixes": False}, 1e-5),
        ({}, {"loss_chunk_tokens": 7}, 1e-5),
        ({"groups": 6}, {"max_tokens_per_microbatch": 100}, 1e-5),
        ({"prompt": 80}, {"max_tokens_per_microbatch": 64}, 1e-5),  # a longer sample is computed by itself
        ({}, {"activation_checkpointing": "selective"}, 1e-6),
        ({}, {"activation_checkpointing": "full"}, 1e-6),
    ],
    ids=str,
)
def test_layout_and_recomputation_change_no_gradient(tiny_llama, random_batch, batch, changes, close):
    batch = random_batch(**batch)
    plain, changed = LearnerCore(config(tiny_llama)), LearnerCore(config(tiny_llama, **changes))
    assert plain.max_sample_tokens == changed.max_sample_tokens == 4096  # the model's context
    assert relative_gap(gradients(changed, batch), gradients(plain, batch)) < close
    a, b = changed.logprobs(batch), plain.logprobs(batch)
    assert (a - b).norm() < 1e-5 * b.norm()


def test_shared_prefixes_are_computed_once(tiny_llama, random_batch):
    shared, alone = (LearnerCore(config(tiny_llama, share_prefixes=share)) for share in (True, False))
    assert shared._plan(random_batch())[1]["positions"] < 0.7 * alone._plan(random_batch())[1]["positions"]


@pytest.mark.parametrize("room", [2048, 150])
def test_instructions_that_groups_share_change_nothing(tiny_llama, random_batch, monkeypatch, room):
    batch = random_batch(groups=6, siblings=3)
    starts, groups = batch["samples"]["start"], batch["samples"]["group"]
    for start, group in zip(starts.tolist(), groups.tolist(), strict=True):  # half of the prompt, in two versions
        batch["tokens"]["ids"][start : start + 10] = torch.arange(10, 20) + group % 2
    core = LearnerCore(config(tiny_llama, max_tokens_per_microbatch=room))
    (_, facts), with_them = core._plan(batch), core.logprobs(batch)
    result = gradients(core, batch)
    monkeypatch.setattr(layout, "with_openings", lambda batch, blocks: blocks)
    (_, facts_without), without = core._plan(batch), core.logprobs(batch)
    assert facts["positions"] <= facts_without["positions"] - 10 * (2 if room == 150 else 4)
    assert (with_them - without).norm() < 1e-5 * without.norm()
    assert relative_gap(result, gradients(core, batch)) < 1e-5


def test_equal_samples_are_computed_once_and_change_nothing(tiny_llama, random_batch, monkeypatch):
    batch = random_batch(groups=6, siblings=3)
    for start, length in zip(*(batch["samples"][name].tolist() for name in ("start", "length")), strict=True):
        # equal tokens by length, of which there are fewer than samples; loss masks and advantages stay
        batch["tokens"]["ids"][start : start + length] = torch.arange(length) + length
    core = LearnerCore(config(tiny_llama))
    (_, facts), logprobs, result = core._plan(batch), core.logprobs(batch), gradients(core, batch)
    monkeypatch.setattr(layout, "equal_samples", lambda batch, samples: None)
    (_, facts_without), without = core._plan(batch), core.logprobs(batch)
    assert facts["positions"] < facts_without["positions"]
    assert (logprobs - without).norm() < 1e-5 * without.norm()
    assert relative_gap(result, gradients(core, batch)) < 1e-5


def test_a_checkpoint_knows_the_sums_of_its_files_without_reading_them(tiny_llama, random_batch, tmp_path, monkeypatch):
    monkeypatch.setattr(sums_of_files, "CHUNK_BYTES", 100_000)
    core = LearnerCore(config(tiny_llama))
    core.train_step(random_batch())
    before = bytes_read()
    core.start_save(tmp_path / "step-1")
    sums = core.finish_save()
    files = {path.name: path for path in (tmp_path / "step-1").iterdir()}
    written = sum(path.stat().st_size for path in files.values())
    assert bytes_read() - before < 0.05 * written
    assert sums.keys() == files.keys() and max(map(len, sums.values())) > 40
    for name, path in files.items():
        own = sums_of_files.Checksums()
        own.add(path.read_bytes())
        assert sums[name] == own.all
    assert sums_of_files.find_damage(tmp_path / "step-1", sums, chunk_bytes=100_000) == ""
    (file,) = (tmp_path / "step-1").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[250_000] ^= 1
    file.write_bytes(content)
    result = sums_of_files.find_damage(tmp_path / "step-1", sums, chunk_bytes=100_000)
    assert result.startswith(f"{file.name} has CRC-32 ") and "from byte 200000 on" in result


def test_single_rank_loads_and_saves_without_collectives(tiny_llama, tmp_path, monkeypatch):
    """Plans of a real model that go through gloo leave its thread a team of OpenMP, and the learner waits asleep."""

    def asks(*_: object, **__: object) -> None:
        raise AssertionError("a collective of torch's distributed checkpoint")

    for name in ("gather_object", "scatter_object_list", "broadcast_object_list", "all_gather_object", "barrier"):
        monkeypatch.setattr(torch.distributed, name, asks)
    core = LearnerCore(config(tiny_llama))
    core.save(tmp_path / "saved")
    assert core.load(tmp_path / "saved") == 0


def bytes_read() -> int:
    """By this process so far, from files and elsewhere."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": "full", "lora": LoRA(rank=4)}], ids=str)
def test_a_rank_by_itself_learns_what_fsdp_would(tiny_llama, random_batch, monkeypatch, dtype, changes):
    batch, close = random_batch(), {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    options = {"compute_dtype": dtype, "max_tokens_per_microbatch": 100, "loss_chunk_tokens": 20, **changes}
    alone = LearnerCore(config(tiny_llama, **options))
    monkeypatch.setattr(titan_model, "needs_fsdp", lambda _: True)
    wrapped = LearnerCore(config(tiny_llama, **options))
    for _ in range(3):
        result, expected = alone.train_step(batch), wrapped.train_step(batch)
        for name in ("loss", "grad_norm", "entropy", "logprob_gap_mean"):
            assert result[name] == pytest.approx(expected[name], rel=close, abs=close * 1e-2)
    assert result["microbatches"] >= 3
    trained = [weight for weight in alone.model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in trained} == {torch.float32} and all(w.grad is None for w in trained)
    assert relative_gap(weights(alone), weights(wrapped)) < close


def test_gradients_and_moments_keep_their_memory(tiny_llama, random_batch, monkeypatch):
    core = LearnerCore(config(tiny_llama, compute_dtype="bfloat16", max_tokens_per_microbatch=100))
    places: list[set[int]] = []
    update = core._update

    def moments() -> set[int]:
        return {value.data_ptr() for held in moments_of(core).values() for value in held}

    def seen(*given: Any) -> dict[str, float]:
        places.append({weight.grad.data_ptr() for weight in core.model.parameters()} | moments())
        return update(*given)

    before = moments()
    assert len(before) == 2 * len(list(core.model.parameters())), "moments are there before activations are"
    monkeypatch.setattr(core, "_update", seen)
    for _ in range(2):
        core.train_step(random_batch())
    assert places[0] == places[1] and before < places[0]


def test_gradients_of_a_copy_add_up_in_float32():
    weight, total = torch.nn.Parameter(torch.zeros(2500, 3)), torch.full((2500, 3), float("nan"))
    parts = [torch.randn(2500, 3, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3)]
    for part in parts:
        copy = torch.nn.Parameter(torch.zeros(2500, 3, dtype=torch.bfloat16))
        copy.grad = part
        precision._take_gradient(weight, total, copy)
        assert copy.grad is None
    assert weight.grad is total
    assert torch.equal(total, parts[0].float() + parts[1].float() + parts[2].float())


def test_learning_raises_the_probability_of_better_tokens(tiny_llama, random_batch):
    batch = random_batch()
    core = LearnerCore(config(tiny_llama))
    batch["tokens"]["logprobs"] = core.logprobs(batch)
    before = batch["tokens"]["logprobs"]
    metrics = [core.train_step(batch) for _ in range(3)]
    gain = (core.logprobs(batch) - before) * batch["tokens"]["advantages"]
    assert float(gain.sum()) > 0
    assert metrics[0]["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics[0]["logprob_gap_max"] < 1e-5
    assert metrics[0]["version"] == 1
    assert core.version == 3


def test_a_learning_rate_of_zero_changes_no_weight(tiny_llama, random_batch):
    core = LearnerCore(config(tiny_llama, lr=0.0))
    before = weights(core)
    assert core.train_step(random_batch())["grad_norm"] > 0
    assert equal(before, weights(core))


@pytest.mark.parametrize(("lora", "lr"), [(None, 1e-3), (LoRA(rank=4, alpha=8), 3e-3)], ids=["weights", "adapter"])
def test_the_kl_term_is_the_divergence_from_the_start_model(tiny_llama, random_batch, lora, lr):
    batch = random_batch()
    core = LearnerCore(config(tiny_llama, kl_coef=0.1, lora=lora, lr=lr))
    assert (core._reference.model is core.model) == (lora is not None)  # no second copy next to an adapter
    assert core.train_step(batch)["kl"] == pytest.approx(0.0, abs=1e-9)
    core.train_step(batch)
    start, now = hf_logprobs(tiny_llama, batch), core.logprobs(batch)  # k3, from log-probabilities computed apart
    k3 = float(((start - now).exp() - (start - now) - 1)[batch["tokens"]["loss_mask"]].mean())
    assert core.train_step(batch)["kl"] == pytest.approx(k3, rel=1e-3) and k3 > (1e-4 if lora else 1e-6)


@pytest.mark.parametrize(("lora", "lr"), [(None, 1e-3), (LoRA(rank=4, alpha=8), 3e-3)], ids=["weights", "adapter"])
def test_the_reference_becomes_the_weights_of_every_second_step(tiny_llama, random_batch, lora, lr):
    batch = random_batch()
    mask = batch["tokens"]["loss_mask"]
    core = LearnerCore(config(tiny_llama, kl_coef=0.1, reference=2, lora=lora, lr=lr))
    others = [] if lora is None else [LearnerCore(core.config, base=core)]
    before, reference = weights(core), core.logprobs(batch)
    assert equal(before, weights(core))
    for step in range(5):
        now = core.logprobs(batch)
        k3 = float(((reference - now).exp() - (reference - now) - 1)[mask].mean())
        assert core.train_step(batch)["kl"] == pytest.approx(k3, rel=0.02, abs=1e-9)
        assert (k3 > (1e-4 if lora else 1e-7)) == (step in (1, 3))
        for other in others:  # shares the model, and has a reference of its own
            other.train_step(random_batch(seed=step))
        if core.version % 2 == 0:
            reference = core.logprobs(batch)


@pytest.mark.parametrize("kl", ["k2", "exact"])
def test_reference_that_has_not_moved_yet_is_the_start_model_in_bfloat16(tiny_llama, random_batch, kl):
    """The learner computes with bfloat16 copies of an adapter, and the divergence from an earlier one was 0."""
    settings = {"kl": kl, "kl_coef": 0.1, "lora": LoRA(rank=4, alpha=8), "lr": 3e-3, "compute_dtype": "bfloat16"}
    moving, start = (LearnerCore(config(tiny_llama, reference=each, **settings)) for each in (9, "start"))
    steps = [[core.train_step(random_batch(seed=seed)) for seed in range(3)] for core in (moving, start)]
    for own, other in zip(*steps, strict=True):
        assert own["kl"] == pytest.approx(other["kl"], rel=1e-3, abs=1e-9)
    assert steps[0][2]["kl"] > 1e-5 and equal(weights(moving), weights(start))


@pytest.fixture(params=[False, True], ids=["alone", "fsdp"])
def with_or_without_fsdp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titan_model, "needs_fsdp", lambda _: request.param)


@pytest.mark.usefixtures("with_or_without_fsdp")
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_resuming_continues_bit_for_bit(tiny_llama, random_batch, tmp_path, moments):
    settings = config(tiny_llama, warmup_steps=3, optimizer_state_dtype=moments)
    _, resumed = check_resume(settings, random_batch, tmp_path / "step-2")
    types = {name: {str(value.dtype) for value in held} for name, held in moments_of(resumed).items()}
    assert types == {name: {f"torch.{moments}"} for name in ("exp_avg", "exp_avg_sq")}


@pytest.mark.usefixtures("with_or_without_fsdp")
@pytest.mark.parametrize("lora", [None, LoRA(rank=4, alpha=8)], ids=["weights", "adapter"])
def test_a_reference_that_moved_is_resumed(tiny_llama, random_batch, tmp_path, lora):
    """With the start model as the reference, the loss after the checkpoint would differ."""
    settings = config(tiny_llama, kl_coef=100.0, reference=2, lora=lora, lr=3e-3)
    check_resume(settings, random_batch, tmp_path / "step-2")
    other = LearnerCore(replace(settings, reference="start"))
    other.load(tmp_path / "step-2")
    resumed = LearnerCore(settings)
    resumed.load(tmp_path / "step-2")
    batch = random_batch(seed=2)
    assert other.train_step(batch)["kl"] > 100 * resumed.train_step(batch)["kl"] + 1e-6


@pytest.mark.parametrize("lora", [None, LoRA(rank=4, alpha=8)], ids=["weights", "adapter"])
def test_reference_added_to_a_run_begins_at_its_weights(tiny_llama, random_batch, tmp_path, lora, caplog):
    """A divergence from the start model would undo what the run has learned."""
    settings = config(tiny_llama, lora=lora, lr=3e-3)
    first = LearnerCore(settings)
    for seed in range(2):
        first.train_step(random_batch(seed=seed))
    first.save(tmp_path / "step-2")
    resumed = LearnerCore(replace(settings, kl_coef=0.1, reference=9))
    resumed.load(tmp_path / "step-2")
    assert "holds no reference" in caplog.text
    divergences = [resumed.train_step(random_batch(seed=seed))["kl"] for seed in (2, 3)]
    assert abs(divergences[0]) < 1e-9 and divergences[1] > 1e-7


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_run_that_goes_on_with_other_settings_of_the_optimiser_has_those(moments, tiny_llama, random_batch, tmp_path):
    first = LearnerCore(config(tiny_llama, optimizer_state_dtype=moments))
    first.train_step(random_batch())
    first.save(tmp_path / "step-1")
    new = {"betas": (0.5, 0.9), "weight_decay": 50.0, "optimizer_state_dtype": moments}
    resumed, same = LearnerCore(config(tiny_llama, **new)), LearnerCore(config(tiny_llama, **new))
    resumed.load(tmp_path / "step-1")
    before = {name: value.clone() for name, value in weights(resumed).items()}
    resumed.train_step(random_batch(seed=1))
    (group,) = [group for optimizer in resumed._optimizers for group in optimizer.param_groups]
    (fresh,) = [group for optimizer in same._optimizers for group in optimizer.param_groups]
    assert all(group[name] == fresh[name] for name in ("betas", "weight_decay", "eps"))
    shrunk = 1 - resumed.config.lr * 50
    name, large = max(before.items(), key=lambda item: float(item[1].abs().max()))
    at = int(large.abs().argmax())
    assert float(weights(resumed)[name].flatten()[at]) == pytest.approx(shrunk * float(large.flatten()[at]), rel=0.1)


@pytest.mark.parametrize("values", [{"maximize": True}, {"eps": "x", "amsgrad": [1]}, {"capturable": True}])
def test_a_checkpoint_chooses_no_setting_of_the_optimizer(tiny_llama, random_batch, tmp_path, values):
    """A stranger's checkpoint could otherwise train in the wrong direction, or end the training."""
    first = LearnerCore(config(tiny_llama, lr=1e-2))
    first.train_step(random_batch())
    for step, changes in enumerate(({}, values), 1):
        for group in (group for optimizer in first._optimizers for group in optimizer.param_groups):
            group.update(changes)
        first.save(tmp_path / f"step-{step}")
    own, strange = (LearnerCore(config(tiny_llama, lr=1e-2)) for _ in range(2))
    own.load(tmp_path / "step-1")
    strange.load(tmp_path / "step-2")
    for core in (own, strange):
        core.train_step(random_batch(seed=1))
    assert relative_gap(weights(own), weights(strange)) == 0


@pytest.mark.parametrize(
    ("ending", "value"),
    [
        (".exp_avg", math.nan),
        (".exp_avg", -math.inf),
        (".exp_avg_sq", math.inf),
        (".exp_avg_sq", -1.0),
        (".step", -1.0),
        (".step", math.nan),
        ("norm.weight", math.nan),
    ],
)
def test_checkpoint_with_numbers_that_no_training_writes_is_refused(tiny_llama, random_batch, tmp_path, ending, value):
    """One step with such moments made all weights NaN. If it was the last one, they were exported."""
    core = LearnerCore(config(tiny_llama))
    core.train_step(random_batch())
    state = core._state()
    tensors = {**state["optimizer"], **state["model"]}
    next(tensors[name] for name in tensors if name.endswith(ending)).view(-1)[-1:] = value
    core._writer.start(state, tmp_path / "step-1")
    core.finish_save()
    with pytest.raises(RunFolderError, match=rf"step-1 is damaged: .*{re.escape(ending)} has numbers that no training"):
        LearnerCore(config(tiny_llama)).load(tmp_path / "step-1")


def test_weights_that_are_not_finite_are_not_exported(tiny_llama, tmp_path):
    core = LearnerCore(config(tiny_llama))
    with torch.no_grad():
        core.model.norm.weight[0] = math.inf
    with pytest.raises(RunFolderError, match=r"weights in norm\.weight are not finite: the training diverged"):
        core.export(tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_permissions_of_an_export_follow_the_umask(tiny_llama, tmp_path, lora):
    """safetensors writes files that other users cannot read, so that they could not serve the model."""
    before = os.umask(0o027)
    try:
        LearnerCore(config(tiny_llama, lora=lora)).export(tmp_path / "export")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "export").rglob("*") if file.is_file()}
    assert modes == {0o640}


def test_a_checkpoint_before_the_first_step_leaves_that_step_as_it_is(tiny_llama, random_batch, tmp_path):
    batch = random_batch(seed=1)
    alone, saved = (LearnerCore(config(tiny_llama, lr=1e-2)) for _ in range(2))
    saved.save(tmp_path / "step-0")
    loaded = LearnerCore(config(tiny_llama, lr=1e-2))
    loaded.load(tmp_path / "step-0")
    for core in (alone, saved, loaded):
        core.train_step(batch)
        core.train_step(batch)
    assert relative_gap(weights(alone), weights(saved)) == relative_gap(weights(alone), weights(loaded)) == 0


@pytest.mark.parametrize("version", [-7, 2**54, 10**400, 1.5, math.inf, "3", None, True], ids="{!r:.9}".format)
def test_checkpoint_with_a_version_that_no_learner_has_is_refused(tiny_llama, tmp_path, version):
    """Engines and batches hold versions as 64-bit numbers."""
    core = LearnerCore(config(tiny_llama))
    core.version = version
    core.save(tmp_path / "step-9")
    core.version = 2
    with pytest.raises(RunFolderError, match=r"step-9 has version=.*Expected a whole number from 0 to 2\^53"):
        core.load(tmp_path / "step-9")
    assert core.version == 2


def test_a_broken_checkpoint_is_refused(tiny_llama, tmp_path):
    core = LearnerCore(config(tiny_llama))
    core.save(tmp_path / "step-9")
    with pytest.raises(RunFolderError, match="no complete checkpoint"):
        core.load(tmp_path / "step-8")
    (tmp_path / "step-9" / ".metadata").write_bytes(b"\x80")
    with pytest.raises(RunFolderError, match="does not fit this model"):
        core.load(tmp_path / "step-9")
    (tmp_path / "step-9" / ".metadata").unlink()  # as after a kill in mid-write
    with pytest.raises(RunFolderError, match="no complete checkpoint"):
        core.load(tmp_path / "step-9")


def test_a_checkpoint_holds_the_state_at_its_start_whatever_is_learned_meanwhile(
    tiny_llama, random_batch, tmp_path, monkeypatch
):
    core, write, waited = LearnerCore(config(tiny_llama)), FileSystemWriter.write_data, []
    core.train_step(random_batch())
    before, wait, update_waits = weights(core), core._writer.wait, threading.Event()

    def noted() -> float:
        update_waits.set()
        return wait()

    def slowly(*args: Any) -> Any:
        assert update_waits.wait(60)
        time.sleep(0.3)
        written = write(*args)
        waited.append(core.version)
        return written

    monkeypatch.setattr(FileSystemWriter, "write_data", slowly)
    core.start_save(tmp_path / "step-1")
    monkeypatch.setattr(core._writer, "wait", noted)
    began = time.perf_counter()
    after = core.train_step(random_batch(seed=1))
    took_s = time.perf_counter() - began
    assert waited == [1]  # the weights of version 2 came after the last byte of version 1
    assert after["save_wait_s"] > 0 and after["step_s"] + after["save_wait_s"] <= took_s  # which is not learning
    assert after["tokens_per_s"] == pytest.approx(after["tokens"] / after["step_s"])
    core.finish_save()
    assert core.train_step(random_batch(seed=2))["save_wait_s"] == 0
    fresh = LearnerCore(config(tiny_llama))
    assert fresh.load(tmp_path / "step-1") == 1
    assert equal(before, weights(fresh))
    assert fresh.train_step(random_batch(seed=1))["grad_norm"] == after["grad_norm"]


def test_failed_checkpoint_is_reported_and_the_old_one_is_kept(tiny_llama, random_batch, tmp_path, monkeypatch):
    core = LearnerCore(config(tiny_llama))
    core.save(tmp_path / "newest")
    core.train_step(random_batch())
    from torch.distributed.checkpoint import filesystem

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "_write_item", full)
        core.start_save(tmp_path / "newest")
        core.train_step(random_batch())  # goes on
        with pytest.raises(RunFolderError, match=r"rank 0: OSError: .*No space left on device \([\d.]+ GB are free"):
            core.finish_save()
    assert LearnerCore(config(tiny_llama)).load(tmp_path / "newest") == 0
    core.save(tmp_path / "newest")
    assert LearnerCore(config(tiny_llama)).load(tmp_path / "newest") == 2


def test_a_checkpoint_without_random_state_loads_with_a_warning(tiny_llama, tmp_path, caplog):
    core = LearnerCore(config(tiny_llama))
    state = core._state()
    del state["random"]
    core._writer.start(state, tmp_path / "old")
    core.finish_save()
    assert core.load(tmp_path / "old") == 0
    assert "holds no random" in caplog.text


def test_a_checkpoint_of_another_model_is_refused(tiny_llama, tiny_qwen3, tmp_path):
    LearnerCore(config(tiny_llama)).save(tmp_path / "step-1")
    with pytest.raises(RunFolderError, match="does not fit this model"):
        LearnerCore(config(tiny_qwen3)).load(tmp_path / "step-1")


def test_export_has_all_chat_templates_and_no_weights_of_the_start_model(tiny_llama, tmp_path):
    from transformers import AutoTokenizer

    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    templates = {"default": tokenizer.chat_template, "tool_use": "{# with tools #}" + tokenizer.chat_template}
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(model)
    for name in ("flax_model.msgpack", "tf_model.h5", "model.onnx", "rust_model.ot", "pytorch_model.bin.index.json"):
        (model / name).write_text("old")
    folder = LearnerCore(config(model)).export(tmp_path / "export")
    assert AutoTokenizer.from_pretrained(folder).chat_template == templates
    assert not [path.name for path in folder.iterdir() if path.is_file() and path.read_bytes() == b"old"]


def test_export_stops_at_the_token_that_ends_answers_in_its_template(tiny_llama, tmp_path):
    def exported(name: str, eos: str, **generation: Any) -> dict[str, Any]:
        model = Path(shutil.copytree(tiny_llama, tmp_path / name))
        tokenizer = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": eos}))
        (model / "generation_config.json").write_text(json.dumps(generation))
        folder = LearnerCore(config(model)).export(tmp_path / f"{name} exported")
        return dict(json.loads((folder / "generation_config.json").read_text()))

    # ids of <|pad|>, as of a document's end in base models, and of <|im_end|>, with which the template ends answers
    assert exported("base", "<|pad|>", eos_token_id=256, top_p=0.9) == {"eos_token_id": [256, 258], "top_p": 0.9}
    assert exported("knows", "<|pad|>", eos_token_id=[258, 256]) == {"eos_token_id": [258, 256]}
    assert exported("instruct", "<|im_end|>", eos_token_id=258, top_k=5) == {"eos_token_id": 258, "top_k": 5}
    assert exported("silent", "<|pad|>") == {"eos_token_id": [258]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_export_keeps_the_type_of_the_model_trained(tiny_models, tmp_path, dtype):
    model = tiny_models(family="llama", dtype=dtype)
    folder = LearnerCore(config(model)).export(tmp_path / "export")
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    stored, exported = (load_file(path / "model.safetensors") for path in (model, folder))
    assert equal(stored, exported)


def test_bad_batches_are_refused_and_the_learner_lives_on(tiny_llama, random_batch):
    core = LearnerCore(config(tiny_llama, max_sample_tokens=64))
    bad = random_batch()
    bad["tokens"]["advantages"][25] = float("nan")
    with pytest.raises(ValueError, match="advantages of token 25 is nan"):
        core.train_step(bad)
    bad = random_batch()
    bad["tokens"]["ids"][3] = 10_000
    with pytest.raises(ValueError, match="Sampler and learner use different models"):
        core.train_step(bad)
    with pytest.raises(ValueError, match="at most 64 fit"):
        core.train_step(random_batch(prompt=80))
    assert core.train_step(random_batch())["version"] == 1


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(tiny_llama, random_batch):
    core = LearnerCore(config(tiny_llama))
    before = weights(core)
    batch = random_batch()
    batch["tokens"]["advantages"] *= 1e38
    with pytest.raises(FloatingPointError, match="weights are unchanged"):
        core.train_step(batch)
    assert equal(before, weights(core))
    after, untroubled = (one.train_step(random_batch()) for one in (core, LearnerCore(config(tiny_llama))))
    assert all(after[name] == untroubled[name] for name in ("loss", "grad_norm", "version"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_failed_loss_are_no_part_of_the_next_step(tiny_llama, random_batch, monkeypatch, dtype):
    options = {"compute_dtype": dtype, "max_tokens_per_microbatch": 100, "loss_chunk_tokens": 8}
    core, other = (LearnerCore(config(tiny_llama, **options)) for _ in range(2))
    calls = itertools.count(1)
    plain = PolicyLoss.__call__

    def guarded(*given: Any, **columns: Any) -> Any:
        if next(calls) == 5:
            raise FloatingPointError("a guard of the user's")
        return plain(*given, **columns)

    monkeypatch.setattr(PolicyLoss, "__call__", guarded)
    with pytest.raises(FloatingPointError, match="a guard"):
        core.train_step(random_batch(seed=3))
    monkeypatch.undo()
    after, untroubled = core.train_step(random_batch()), other.train_step(random_batch())
    assert after["microbatches"] > 1
    for name in ("loss", "grad_norm", "ratio_p50"):
        assert after[name] == untroubled[name]


def test_dithering_does_not_depend_on_recomputation(tmp_path):
    model = tiny_model(tmp_path, dtype="bfloat16")
    alike = [
        weights(LearnerCore(config(model, compute_dtype="bfloat16", activation_checkpointing=how)))
        for how in ("none", "full")
    ]
    assert equal(*alike)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in alike[0].values()), "they are spread"


def test_weights_that_were_stored_in_float16_stay(tmp_path):
    model = tiny_model(tmp_path, dtype="float16")
    core = LearnerCore(config(model, compute_dtype="bfloat16", lr=0.0))
    assert all(torch.equal(value, value.half().float()) for value in weights(core).values())


@pytest.mark.parametrize("most", [1e-2, 1e3])
def test_gradients_are_clipped_as_torchtitan_does_and_else_not_touched(tiny_llama, random_batch, monkeypatch, most):
    theirs, ours = (LearnerCore(config(tiny_llama, max_grad_norm=most)) for _ in range(2))

    def clipped() -> float:
        return float(titan.dist_utils.clip_grad_norm_(list(theirs.model.parameters()), most, foreach=True))

    monkeypatch.setattr(theirs, "_clip", clipped)
    expected = theirs.train_step(random_batch())["grad_norm"]
    if expected < most:
        monkeypatch.delattr(torch.nn.utils, "clip_grads_with_norm_")
    assert ours.train_step(random_batch())["grad_norm"] == expected > 1e-2
    assert equal(weights(theirs), weights(ours))


def held_bytes(core: LearnerCore) -> int:
    """Bytes of weights, reference and moments, each counted once."""
    models = (core.model, core._reference.model if core._reference else core.model)
    held = [value for model in models for value in (*model.parameters(), *model.buffers())]
    held += [value for own in moments_of(core).values() for value in own]
    pieces = [getattr(value, "_local_tensor", value).untyped_storage() for value in held]
    return sum({piece._cdata: piece.nbytes() for piece in pieces}.values())


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
def test_offloaded_learners_hold_no_device_memory_and_continue(tiny_llama, random_batch, tmp_path, lora):
    told = []
    for offloads in (False, True):
        first = LearnerCore(config(tiny_llama, kl_coef=0.1, lora=lora))
        cores = [first] if lora is None else [first, LearnerCore(first.config, base=first)]
        for core in cores:
            core.train_step(random_batch())
        if offloads:
            cores[-1].start_save(tmp_path / "saved")
            before = held_bytes(cores[-1])
            for core in (*cores, first):
                core.offload()
            assert held_bytes(first) == held_bytes(cores[-1]) == 0 < before
            for core in (*cores, first):
                core.onload()
            assert held_bytes(cores[-1]) == before
            cores[-1].finish_save()
        told.append([core.train_step(random_batch())[name] for core in cores for name in ("loss", "grad_norm", "kl")])
    assert told[1] == told[0]


def test_padded_rows_give_the_same_gradient(tiny_llama, random_batch, monkeypatch):
    plain = LearnerCore(config(tiny_llama)).train_step(random_batch())
    monkeypatch.setattr(LearnerPlan, "row_multiple", 1000)
    padded = LearnerCore(config(tiny_llama)).train_step(random_batch())
    assert padded["waste"] > plain["waste"]
    assert [padded[name] for name in ("loss", "grad_norm")] == pytest.approx(
        [plain[name] for name in ("loss", "grad_norm")], rel=1e-5
    )


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match="config.json is missing"):
        LearnerCore(config(tmp_path))
    with pytest.raises(ValueError, match="model is empty"):
        LearnerCore(LearnerPlan())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"lr": -1.0}, "lr=-1.0"), ({"max_grad_norm": 0.0}, "max_grad_norm"), ({"clip": (2.0, 0.2)}, "clip=")),
        *(({"temperature": 0.0}, "Greedy samples"), ({"threads": 0}, "threads"), ({"dp_replicate": 0}, "dp_replicate")),
        *(({"compute_dtype": "float16"}, "compute_dtype"), ({"betas": (0.9, 1.0)}, "betas"), ({"ep": 0}, "ep=0")),
        *(({"lr_decay": "step"}, "lr_decay='step'"), ({"lr_min_ratio": 1.5}, "lr_min_ratio")),
        *(({"warmup_steps": -1}, "warmup_steps"), ({"optimizer_state_dtype": "int8"}, "optimizer_state_dtype='int8'")),
        ({"optimizer_state_dtype": "bfloat16", "betas": (0.9, 0.999)}, "betas of at most 0.99, or float32"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing='some'"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LearnerPlan(model="m", **changes)


@pytest.mark.parametrize("degree", ["tp", "dp_replicate", "ep"])
def test_parallel_degrees_must_divide_the_number_of_ranks(tiny_llama, degree):
    with pytest.raises(ValueError, match=f"{degree}=2 of the learner does not divide learner_procs=1"):
        LearnerCore(config(tiny_llama, **{degree: 2}))


@pytest.mark.parametrize(
    ("ranks", "degrees", "shards"),
    [
        (8, {}, 8),
        (8, {"tp": 2}, 4),
        (8, {"dp_replicate": 2}, 4),
        (8, {"dp_replicate": 2, "tp": 2}, 2),
        (8, {"dp_replicate": 2, "ep": 4}, 4),
        (2, {"dp_replicate": 2}, 1),
        (8, {"dp_replicate": 3}, "dp_replicate=3 of the learner does not divide learner_procs=8"),
        (8, {"dp_replicate": 4, "tp": 4}, r"dp_replicate=4 \* tp=4 of the learner does not divide learner_procs=8"),
        (8, {"dp_replicate": 2, "ep": 8}, "ep=8 of the learner does not divide learner_procs=8 / dp_replicate=2"),
    ],
)
def test_ranks_that_other_degrees_leave_shard_the_weights(ranks, degrees, shards):
    if isinstance(shards, int):
        assert shards_of(LearnerPlan(**degrees), ranks) == shards
    else:
        with pytest.raises(ValueError, match=shards):
            shards_of(LearnerPlan(**degrees), ranks)


@pytest.mark.parametrize(
    ("family", "degrees", "message"),
    [
        ("llama", {"tp": 8}, "tp=8 does not divide the model's num_attention_heads=4"),
        ("llama", {"tp": 4}, "tp=4 does not divide the model's num_key_value_heads=2"),
        ("llama", {"ep": 2}, "ep=2 spreads experts, and the model has none"),
        ("qwen3_moe", {"ep": 3}, "ep=3 does not divide the model's num_experts=4"),
        ("qwen3_moe", {"tp": 2}, "Set learner.ep"),
        ("phi3", {"tp": 2}, "tp=2 is not supported for Phi"),
        ("gpt_oss", {"tp": 2, "ep": 2}, "tp=2 is not supported for gpt-oss"),
        ("deepseek_v3", {"tp": 2}, "Set learner.ep"),
        ("deepseek_v3", {"tp": 2, "ep": 2, "lora": LoRA()}, "tp=2 is not supported for LoRA on latent attention"),
        ("qwen3_5", {"tp": 2}, "tp=2 is not supported for Qwen3.5"),
        ("qwen3_5_moe", {"tp": 2, "ep": 2}, "tp=2 is not supported for Qwen3.5"),
        ("qwen3_5", {"compile": True}, "compile=True is not supported for Qwen3.5"),
    ],
)
def test_parallel_degrees_must_divide_the_model(tiny_models, family, degrees, message):
    model = tiny_models(family=family)
    with pytest.raises(ValueError, match=message):
        check_degrees(config(model, **degrees), ModelSize.of(model))


def test_experts_compute_in_the_compute_dtype(tiny_models, random_batch):
    batch = random_batch()
    model = tiny_models(family="qwen3_moe")
    exact, rough = (LearnerCore(config(model, compute_dtype=dtype)) for dtype in ("float32", "bfloat16"))
    gap = (exact.logprobs(batch) - rough.logprobs(batch)).abs()
    assert 1e-3 < gap.max() < 0.5


def test_full_disk_is_reported_and_leaves_no_export(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(checkpoint, "save_torch_state_dict", full)
    with pytest.raises(RunFolderError, match="cannot export to .*out: .*No space left on device. Free disk space"):
        checkpoint.export([("w", torch.ones(2))], tmp_path, tmp_path / "out", dtype=torch.float32)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def stored_rounded(tiny_models: Callable[..., Path]) -> Path:
    """The tiny model, stored in bfloat16."""
    return tiny_models(dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_stored_in_bfloat16_begins_as_it_is_and_every_small_update_counts(stored_rounded, random_batch, dtype):
    core = LearnerCore(config(stored_rounded, compute_dtype=dtype, lr=1e-5))
    stored = load_file(stored_rounded / "model.safetensors")
    begun = core.hf_state_dict(dtype=torch.bfloat16)
    assert all(torch.equal(begun[name], stored[name]) for name in begun)

    before = weights(core)
    core.train_step(random_batch())
    moved = {name: value - before[name] for name, value in weights(core).items()}
    rounded = core.hf_state_dict(dtype=torch.bfloat16)
    seen = {name: value.float() - begun[name].float() for name, value in rounded.items()}
    # an update is far below the distance of bfloat16 numbers, and yet on average as large after rounding
    large = {name: before[name].abs() > 0.01 for name in moved}
    along = sum(float((seen[name] * moved[name].sign())[large[name]].sum()) for name in moved)
    requested = sum(float(moved[name].abs()[large[name]].sum()) for name in moved)
    assert along == pytest.approx(requested, rel=0.1)
    changed = sum(int((seen[name] != 0)[large[name]].sum()) for name in moved)
    assert 0 < changed < 0.25 * sum(int(each.sum()) for each in large.values())


def test_dithering_moves_only_rounded_weights_and_is_reproducible(stored_rounded, tiny_llama):
    def moved(model: Path, **changes: Any) -> float:
        core = LearnerCore(config(model, **changes))
        stored = load_file(model / "model.safetensors")
        gaps = {name: (value - stored[name].float()).abs() for name, value in weights(core).items()}
        # at most half of the distance to the next number, which is 2^-7 of the power of two below
        assert all(bool((gap <= 2**-8 * stored[name].float().abs()).all()) for name, gap in gaps.items())
        return sum(float((gap > 0).float().mean()) for gap in gaps.values()) / len(gaps)

    assert moved(stored_rounded, compute_dtype="float32") == 0
    assert moved(tiny_llama, compute_dtype="bfloat16") < 1e-3  # float32 numbers are between those of bfloat16 already
    assert moved(stored_rounded, compute_dtype="bfloat16") > 0.99
    one, two, other = (
        weights(LearnerCore(config(stored_rounded, compute_dtype="bfloat16", seed=seed))) for seed in (0, 0, 1)
    )
    assert equal(one, two) and not equal(one, other)


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_learner_computes_in_float32_where_bfloat16_is_slow(monkeypatch, tiny_llama, fast, dtype):
    monkeypatch.setattr(learner_config, "has_fast_bfloat16", lambda: fast)
    plan = config(tiny_llama, compute_dtype="auto")
    assert LearnerCore(plan).config.compute_dtype == plan.dtype_on(cpu=True) == dtype
    assert plan.dtype_on(cpu=False) == "bfloat16"
    assert config(tiny_llama, compute_dtype="bfloat16").dtype_on(cpu=True) == "bfloat16"


def test_learner_of_a_recurrent_model_computes_as_its_engines(monkeypatch, tiny_models):
    """On CPU, engines compute such models in bfloat16 only, and would round small updates in float32 away."""
    monkeypatch.setattr(learner_config, "has_fast_bfloat16", lambda: False)
    plan = config(tiny_models(family="qwen3_5"), compute_dtype="auto")
    assert LearnerCore(plan).config.compute_dtype == "bfloat16"
