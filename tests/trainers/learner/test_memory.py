"""Expected memory of a learner vs. the tensors that it holds."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from learner_helpers import moments_of
from torch.profiler import ProfilerActivity, profile

from forge_agents.models.sizes import ModelSize
from forge_agents.policy import LORA_TARGETS, LoRA
from forge_agents.types import EpisodeBatch
from forge_trainers.learner import attention
from forge_trainers.learner import model as titan_model
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.memory import RECOMPUTED, _activations, learner_bytes
from forge_trainers.learner.plan import LearnerPlan


def local(tensor: Any) -> torch.Tensor:
    result: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return result


def measured(core: LearnerCore, batch: EpisodeBatch) -> dict[str, float]:
    """Bytes held after a step by part, and those that the trunk's forward pass leaves for the backward pass."""
    core.train_step(batch)
    held = {id(p): p for p in core.model.parameters()}
    microbatches, _ = core._plan(batch)
    own = {local(p).untyped_storage().data_ptr() for p in held.values()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in own and tensor.dim() > 0:
            saved[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    kept: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with core._ranks.context(), core._built.computing(), hooks:
        core._hidden(core._built, microbatches[0].row)
        weights = {
            local(p).untyped_storage().data_ptr()
            for module in core.model.modules()
            for p in module.parameters(recurse=False)
        }
    away = [] if core._adapter is None else core._adapter._away
    return {
        "weights": sum(local(p).nbytes for p in (*held.values(), *away)),
        "optimizer": sum(local(value).nbytes for own in moments_of(core).values() for value in own),
        "activations": sum(count for at, count in saved.items() if at not in weights),
    }


def without_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention without sinks, which take a mask and copies on CPU only."""
    attend = attention.attend

    def without(*args: Any, sinks_N: torch.Tensor | None, **options: Any) -> torch.Tensor:
        return attend(*args, **options)

    monkeypatch.setattr(attention, "attend", without)


def whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of a row with one sample as on GPU: values filled up to the size of keys, and no copies of keys."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, scale: float, **__: Any) -> torch.Tensor:
        q, k, filled = (x.transpose(0, 1)[None] for x in (q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1]))))
        out = F.scaled_dot_product_attention(q, k, filled, is_causal=True, scale=scale)
        return out[0].transpose(0, 1)[..., : v.shape[-1]]

    monkeypatch.setattr(attention, "attend", attend)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "qwen3_moe", "phi3", "gemma3", "qwen3_5", "qwen3_5_moe", "gpt_oss", "deepseek_v3"],
)
def test_expected_bytes_are_those_of_the_tensors(tiny_models, random_batch, monkeypatch, family, dtype):
    monkeypatch.setattr(titan_model, "needs_fsdp", lambda _: True)  # as on a GPU, whose memory is forecast
    (whole_row if family == "deepseek_v3" else without_sinks)(monkeypatch)
    settings: dict[str, Any] = {}  # without windows, which have masks on CPU only
    if family in {"gemma3", "gpt_oss"}:
        settings = (
            {"layer_types": ["full_attention"] * 2}
            if family == "gemma3"
            else {"sliding_window": None, "layer_types": None}
        )
    model = tiny_models(family=family, settings=settings)
    batch = random_batch(groups=1, siblings=1, prompt=1000, longest=60)
    positions = int(batch["samples"]["length"].sum())
    config = LearnerPlan(
        model=str(model), compute_dtype=dtype, threads=1, share_prefixes=False, max_tokens_per_microbatch=positions
    )
    expected = learner_bytes(ModelSize.of(model), config)
    result = measured(LearnerCore(config), batch)
    for part in ("weights", "optimizer", "activations"):
        assert result[part] == pytest.approx(expected[part], rel=0.1), part


def test_a_rank_computes_with_its_own_experts_where_they_are_spread():
    mixture = ModelSize.named("30b-a3b")
    attention = 2048 * 128 * (32 + 4 + 4) + 32 * 128 * 2048
    layer = attention + 2 * 2048 + 2048 * 128  # norms and the router
    experts, ends = 128 * 3 * 2048 * 768, 2 * 151936 * 2048

    def copied(**settings: Any) -> int:
        config = LearnerPlan(activation_checkpointing="full", **settings)
        return learner_bytes(mixture, config, ranks=8)["compute copy"]

    assert copied() == 2 * (2 * layer + ends + 2 * experts)
    assert copied(ep=8) == 2 * (2 * layer + ends + 2 * experts // 8)
    assert copied(tp=2, ep=4) == 2 * ((2 * layer + ends) // 2 + 2 * experts // 4)
    assert copied(tp=2) == 2 * (2 * layer + ends + 2 * experts) // 2
    one = learner_bytes(mixture, LearnerPlan(tp=2, ep=2), ranks=2)["compute copy"]
    assert one == 2 * (mixture.weights // 2)


def test_replicas_keep_the_bytes_of_a_learner_with_fewer_ranks():
    def rank_bytes(ranks: int, **settings: Any) -> Any:
        return learner_bytes(ModelSize.named("8b"), LearnerPlan(**settings), ranks=ranks)

    assert rank_bytes(8, dp_replicate=2) == rank_bytes(4) != rank_bytes(8)
    assert rank_bytes(8, dp_replicate=2, tp=2) == rank_bytes(4, tp=2)
    assert rank_bytes(2, dp_replicate=2) == rank_bytes(1)


def test_ranks_that_share_the_vocabulary_hold_a_part_of_the_logits_each():
    def logits(ranks: int, **settings: Any) -> int:
        return learner_bytes(ModelSize.named("8b"), LearnerPlan(**settings), ranks=ranks)["logits"]

    assert logits(8) == logits(8, tp=2) * 2 == logits(8, tp=8) * 8


def test_backward_counts_the_gradients_of_the_feed_forward_products():
    assert learner_bytes(ModelSize.named("30b-a3b"), LearnerPlan())["backward"] == 2048 * 3 * 2 * 8 * 768


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_5", "deepseek_v3"])
def test_expected_bytes_of_an_adapter_are_those_of_its_tensors(tiny_models, random_batch, family):
    model = tiny_models(family=family)
    targets = LORA_TARGETS[: None if ModelSize.of(model).adapts_feed_forward else 4]
    config = LearnerPlan(model=str(model), threads=1, lora=LoRA(rank=8, targets=targets))
    expected = learner_bytes(ModelSize.of(model), config)
    result = measured(LearnerCore(config), random_batch(groups=1))
    for part in ("weights", "optimizer"):
        assert result[part] == pytest.approx(expected[part], rel=0.1), part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", None),
        ("llama", LoRA(rank=8)),
        ("qwen3_moe", None),
        ("gpt_oss", None),
        ("deepseek_v3", None),
        ("phi3", None),
        ("phi3", LoRA(rank=8)),
        ("qwen3_5", None),
        ("qwen3_5", LoRA(rank=8)),
        ("qwen3_5_moe", None),
    ],
)
def test_selective_checkpointing_keeps_a_part(tiny_models, random_batch, monkeypatch, family, lora):
    monkeypatch.setattr(titan_model, "needs_fsdp", lambda _: True)
    without_sinks(monkeypatch)
    model = tiny_models(family=family)
    batch = random_batch(groups=1, siblings=1, prompt=1000, longest=60)
    positions, size = int(batch["samples"]["length"].sum()), ModelSize.of(model)

    def left(how: Any) -> tuple[int, int, dict[str, float]]:
        """Bytes that the forward pass keeps, bytes expected of its layers, and metrics of a step."""
        config = LearnerPlan(
            model=str(model), compute_dtype="float32", threads=1, lora=lora, activation_checkpointing=how
        )
        core = LearnerCore(config)
        metrics = core.train_step(batch)
        microbatches, _ = core._plan(batch)
        with core._ranks.context(), core._built.computing():
            core._hidden(core._built, microbatches[0].row).sum().backward()  # what is made once is there
            core._optimizers.zero_grad()
            gc.collect()  # what an earlier pass left is not freed within this one's profile
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                hidden = core._hidden(core._built, microbatches[0].row)
        assert profiled.profiler is not None and hidden.requires_grad
        events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        whole = replace(config, activation_checkpointing="none")
        again = 0 if how == "none" else _activations(size, whole, 4, on_cpu=False)
        again = (again - 8 * size.hidden) // size.layers
        expected = _activations(size, config, 4, on_cpu=False) - again
        return sum(event.nbytes() for event in events), positions * expected, metrics

    (most, _, plain), (part, expected, metrics), (least, expected_least, of_least) = map(left, RECOMPUTED)
    assert least < part < most
    assert part - least == pytest.approx(expected - expected_least, rel=0.1)
    for name in ("loss", "grad_norm", "entropy"):
        assert metrics[name] == of_least[name] == pytest.approx(plain[name], rel=1e-6)
