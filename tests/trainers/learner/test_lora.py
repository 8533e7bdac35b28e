"""Adapters: what they change, what they are, and several of them on one model."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import learner_helpers
import pytest
import torch
from learner_helpers import check_resume, equal, hf_logprobs, hf_model, weights
from safetensors.torch import load_file

from forge_agents.cli.config import parse
from forge_agents.policy import LORA_TARGETS, LoRA, Policy
from forge_agents.types import EpisodeBatch
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.lora import is_adapter
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.run_file import RunConfig

SMALL = LoRA(rank=4, alpha=8)


def config(model: Path, **changes: Any) -> LearnerPlan:
    return learner_helpers.config(model, **{"lr": 3e-3, "lora": SMALL, **changes})


def trained(core: LearnerCore, batch: EpisodeBatch, steps: int = 2) -> LearnerCore:
    for _ in range(steps):
        core.train_step(batch)
    return core


def tensors(core: LearnerCore) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in core.model.state_dict().items()}


def test_training_changes_the_adapter_only(tiny_llama, random_batch):
    core = LearnerCore(config(tiny_llama))
    before = tensors(core)
    metrics = trained(core, random_batch()).train_step(random_batch())
    changed = {name for name, value in tensors(core).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if is_adapter(name)}
    assert metrics["grad_norm"] > 0 and metrics["version"] == 3
    in_optimizer = {name for opt in core._optimizers for group in opt.param_groups for name in group["param_names"]}
    assert in_optimizer == changed


def test_a_new_adapter_changes_nothing(tiny_llama, tiny_qwen3, random_batch):
    batch = random_batch()
    for model in (tiny_llama, tiny_qwen3):
        with_it, without = LearnerCore(config(model)), LearnerCore(config(model, lora=None))
        assert (with_it.logprobs(batch) - without.logprobs(batch)).abs().max() < 1e-5
        assert equal(weights(with_it), weights(without))


@pytest.mark.parametrize(
    "options",
    [
        {"family": "llama"},
        {"family": "qwen3"},
        {"family": "llama", "tied": False},
        {"family": "phi3"},
        {"family": "gemma3"},
        {"family": "qwen3_5"},
    ],
    ids=str,
)
def test_the_export_is_the_merged_model_and_an_adapter_in_pefts_layout(tiny_models, random_batch, tmp_path, options):
    model, batch = tiny_models(**options), random_batch()
    core = trained(LearnerCore(config(model)), batch)
    ours = core.logprobs(batch)
    folder = core.export(tmp_path / "export", dtype=torch.float32)
    assert (ours - hf_logprobs(hf_model(folder), batch)).abs().max() < 1e-4
    start = hf_model(model)
    assert (ours - hf_logprobs(start, batch)).abs().max() > 0.1

    # PEFT: W + lora_alpha / r * B A, under the names of the base model's layers after "base_model.model."
    saved = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert (saved["peft_type"], saved["r"], saved["lora_alpha"]) == ("LORA", 4, 8)
    assert saved["base_model_name_or_path"] == str(model)
    layers = {name.removesuffix(".weight"): module for name, module in start.named_modules()}
    adapted = [name for name in layers if name.rpartition(".")[2] in saved["target_modules"]]
    assert len(adapted) >= 7 or options["family"] == "phi3"
    assert len(stored) == 2 * len(adapted)
    for name in stored:
        if name.endswith(".lora_A.weight"):
            a_RI, b_OR = stored[name], stored[name.replace("lora_A", "lora_B")]
            layer = layers[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
            assert b_OR.shape == (layer.out_features, 4) and a_RI.shape == (4, layer.in_features)
            layer.weight.data += 8 / 4 * b_OR @ a_RI
    assert (ours - hf_logprobs(start, batch)).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_experts_and_shared_experts_have_no_adapter(tiny_models, family):
    with pytest.raises(ValueError, match=r"no linear layers \['gate_proj', 'up_proj', 'down_proj'\]"):
        LearnerCore(config(tiny_models(family=family)))


def test_a_merged_model_is_never_there_whole(tiny_llama):
    held, most = [], 0
    for _, value in LearnerCore(config(tiny_llama))._hf_tensors(torch.float32):
        held.append(weakref.ref(value))
        del value
        most = max(most, sum(one() is not None for one in held[:-1]))
    assert len(held) > 10 and most == 0


def test_the_loss_is_that_of_the_merged_model(tiny_llama, random_batch, tmp_path):
    batch = random_batch()
    core = trained(LearnerCore(config(tiny_llama)), batch)
    merged = LearnerCore(config(core.export(tmp_path / "merged", dtype=torch.float32), lora=None))
    result, expected = core.train_step(batch), merged.train_step(batch)
    for name in ("loss", "entropy", "ratio_mean", "logprob_gap_max"):
        assert result[name] == pytest.approx(expected[name], rel=1e-4)


def test_adapters_on_one_model_learn_as_if_alone(tiny_llama, random_batch, tmp_path):
    batches = [random_batch(seed=seed) for seed in range(2)]
    alone = [trained(LearnerCore(config(tiny_llama, seed=i)), batches[i], 3) for i in range(2)]
    first = LearnerCore(config(tiny_llama, seed=0))
    second = LearnerCore(config(tiny_llama, seed=1), base=first)
    assert second.model is first.model
    for step in range(3):
        first.train_step(batches[0])
        first.start_save(tmp_path / f"step-{step}")  # written while the other one is in the model
        second.train_step(batches[1])
        first.finish_save()
    for shared, own, batch in zip((first, second), alone, batches, strict=True):
        assert torch.equal(shared.logprobs(batch), own.logprobs(batch))
        assert equal(weights(shared), weights(own))
    assert not torch.equal(first.logprobs(batches[0]), second.logprobs(batches[0]))
    second.load(tmp_path / "step-2")
    assert torch.equal(second.logprobs(batches[0]), alone[0].logprobs(batches[0]))
    assert torch.equal(first.logprobs(batches[0]), alone[0].logprobs(batches[0]))


def test_resuming_continues_bit_for_bit_and_stores_the_adapter_only(tiny_llama, random_batch, tmp_path):
    core, resumed = check_resume(config(tiny_llama), random_batch, tmp_path / "step-2")
    assert equal(tensors(resumed), tensors(core))
    size = sum(file.stat().st_size for file in (tmp_path / "step-2").iterdir())
    assert size < (tiny_llama / "model.safetensors").stat().st_size  # the adapter with both moments, and no base


def test_frozen_weights_are_held_in_the_compute_type(tiny_llama, random_batch):
    core = LearnerCore(config(tiny_llama, compute_dtype="bfloat16"))
    before = core.logprobs(random_batch())
    trained(core, random_batch())
    for name, parameter in core.model.named_parameters():
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16)
        assert parameter.requires_grad == is_adapter(name)
    assert (core.logprobs(random_batch()) - before).abs().max() > 0.05


def test_only_the_targets_get_an_adapter(tiny_llama, random_batch):
    core = LearnerCore(config(tiny_llama, lora=LoRA(rank=2, targets=("q_proj", "down_proj"))))
    result = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors(core) if is_adapter(name)}
    assert result == {"wq", "w2"}
    assert core.train_step(random_batch())["grad_norm"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0.*between 1 and 512"),
        ({"rank": 513}, "rank=513"),
        ({"alpha": 0.0}, "alpha=0.0.*positive"),
        ({"alpha": float("inf")}, "alpha=inf"),
        ({"targets": ()}, "nothing to train"),
        ({"targets": ("q_prj",)}, "'q_prj'.*unknown.*Did you mean 'q_proj'"),
        ({"targets": ("lm_head",)}, "'lm_head'.*unknown"),
        ({"targets": ("q_proj", "v_proj")}, "k_proj and v_proj together"),
    ],
)
def test_bad_adapters_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LoRA(**settings)


def test_an_adapter_needs_layers_and_a_policy_that_learns(tiny_llama):
    with pytest.raises(TypeError, match="targets='q_proj' is one text"):
        LoRA(targets="q_proj")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'rival' has a LoRA adapter and trainable=False"):
        Policy(str(tiny_llama), name="rival", trainable=False, lora=SMALL)
    assert LoRA(targets=list(LORA_TARGETS)) == LoRA()  # type: ignore[arg-type]  # as YAML gives them


def test_a_runs_file_sets_adapters(tiny_llama, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"env: forge/Relay-v0\npolicy_mapping: {{asker: a, answerer: b}}\npolicies:\n"
        f"  a: {{model: {tiny_llama}, lora: {{rank: 4, alpha: 8, targets: [q_proj, o_proj]}}}}\n"
        f"  b: {{model: {tiny_llama}}}\n"
    )
    run = parse(RunConfig, [str(file)], prog="train", description="")
    assert run.policies["a"].lora == LoRA(rank=4, alpha=8, targets=("q_proj", "o_proj"))
    assert run.policies["b"].lora is None
