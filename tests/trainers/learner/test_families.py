"""Every family that is trained computes what transformers computes, whatever its config.json turns on."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from image_models import with_images
from learner_helpers import by_expert, compute
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from forge_agents.models.families import FAMILIES, inspect_model
from forge_agents.models.tiny import tiny_model
from forge_agents.policy import LORA_TARGETS, LoRA
from forge_agents.serving._shapes import adapter_shapes, expected_shapes
from forge_agents.weights.publisher import Publisher
from forge_trainers.batch.layout import Span
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.plan import LearnerPlan

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 64.0}  # 4,096 positions of 64 that it began with
LINEAR = {"rope_type": "linear", "factor": 4.0}
LONG = {"rope_type": "longrope", "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.2] * 4,
        "long_factor": [1.0, 2.0, 4.0] * 4}  # fmt: skip
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("llama", {"head_dim": 64}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": LINEAR}),
    ("mistral", {"head_dim": 24}),  # which no engine computes on CPU
    ("mistral", {"sliding_window": 9}),
    ("mistral", {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}),
    ("gemma3", {}),
    ("gemma3", {"sliding_window": 9, "query_pre_attn_scalar": 100, "head_dim": 64}),
    (
        "gemma3",
        {
            "rope_parameters": None,
            "rope_theta": 5e5,
            "rope_local_base_freq": 3e3,
            "layer_types": None,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    ("qwen3_5", {}),
    ("qwen3_5", {"head_dim": 64, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}),
    ("qwen3_5_moe", {}),
    ("qwen3_5_moe", {"head_dim": 64, "num_experts_per_tok": 1}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": None, "rope_theta": 5e4}),
    ("deepseek_v3", {"rope_parameters": YARN, "norm_topk_prob": False, "v_head_dim": 128}),
    ("glm4_moe_lite", {}),
    ("gpt_oss", {}),
    ("gpt_oss", {"head_dim": 64, "sliding_window": 9, "layer_types": None, "num_experts_per_tok": 1}),
    ("phi3", {}),
    ("phi3", {"sliding_window": 9}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 700}),
    ("qwen2", {}),
    ("qwen2", {"rope_parameters": YARN, "head_dim": 64}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"rope_parameters": YARN}),
    ("qwen3", {"rope_parameters": LLAMA3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}),
    ("smollm3", {}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 9}),
    ("smollm3", {"no_rope_layers": [0, 1], "rope_parameters": YARN}),
)
ATTENTION = LoRA(rank=4, targets=LORA_TARGETS[:4])
"""An adapter for mixtures, whose experts have none."""
ORIGINAL = 64
"""Positions before scaling. The compared sequences are longer."""


@pytest.mark.parametrize(("family", "settings"), CASES, ids=str)
def test_logits_equal_transformers_alone_and_packed(tmp_path, family, settings):
    if settings.get("rope_parameters"):
        rope = {"rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL, **settings["rope_parameters"]}
        settings = settings | {"rope_parameters": rope}
    tied = family in {"llama", "smollm3", "gemma3"}
    model = tiny_model(tmp_path, family=family, settings=settings, tied=tied)  # type: ignore[arg-type]
    core = LearnerCore(LearnerPlan(model=str(model), compute_dtype="float32", threads=1))
    core.model._skip_lm_head = False
    ids = torch.randint(0, 256, (1, 600), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits
    whole = compute(core, ids, [Span(start=0, length=600)])
    # transformers' recurrence in chunks differs from its recurrence by token by 2.3e-5
    limit = 4e-5 if family.startswith("qwen3_5") else 2e-5
    assert (whole - theirs).abs().max() < limit
    # 3 x ORIGINAL tokens once, what follows them twice, behind another conversation
    first, split, end = Span(start=0, length=50), 3 * ORIGINAL, 3 * ORIGINAL + 40
    rest = [Span(start=50 + at, length=40, seen=((50, split),)) for at in (split, end)]
    spans = [first, Span(start=50, length=split), *rest]
    packed = compute(core, torch.cat([ids[:, :50], ids[:, :end], ids[:, split:end]], dim=1), spans)
    for result, expected in ((packed[:, :50], theirs[:, :50]), (packed[:, 50 + end :], theirs[:, split:end])):
        assert (result - expected).abs().max() < limit


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "gemma3", "gpt_oss", "phi3", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_moe"]
)
def test_gradients_equal_transformers(tiny_models, family):
    model = tiny_models(family=family)
    core = LearnerCore(LearnerPlan(model=str(model), compute_dtype="float32", threads=1))
    core.model._skip_lm_head = False
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (1, 120), generator=rng)
    # 80 tokens, then twice what follows them
    spans = [Span(start=0, length=80), *(Span(start=at, length=40, seen=((0, 80),)) for at in (80, 120))]
    positions = torch.cat([span.before + torch.arange(span.length) for span in spans])
    logits = core.model(
        torch.cat([ids, ids[:, 80:]], dim=1), positions[None], core._built.masks(spans, positions[None])
    )
    grad = torch.randn(logits.shape, generator=rng)
    logits.backward(grad)
    theirs(ids).logits.backward(torch.cat([grad[:, :80], grad[:, 80:120] + grad[:, 120:]], dim=1))
    with torch.no_grad():
        for weight in core.model.parameters():
            weight.copy_(weight.grad)
    limit = 2e-5 if family.startswith("qwen3_5") else 1e-5
    result = {name: x for name, x in core.hf_state_dict(dtype=torch.float32).items() if "correction_bias" not in name}
    theirs_by_name = {name: weight.grad for name, weight in theirs.named_parameters()}
    expected = theirs_by_name if result.keys() == theirs_by_name.keys() else by_expert(theirs_by_name)
    assert result.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (result[name] - gradient).norm() <= limit * gradient.norm(), name


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *itertools.product(
            ("gemma3", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_5", "smollm3"), (None, LoRA(rank=4))
        ),
        ("qwen3_moe", None),
        *itertools.product(("deepseek_v3", "glm4_moe_lite", "gpt_oss", "qwen3_5_moe"), (None, ATTENTION)),
    ],
)
def test_learned_weights_are_exported_for_transformers(tiny_models, random_batch, tmp_path, family, lora):
    model, batch = tiny_models(family=family), random_batch()
    settings = LearnerPlan(model=str(model), compute_dtype="float32", threads=1, lr=1e-2, lora=lora)
    core = LearnerCore(settings)
    core.train_step(batch)
    core.train_step(batch)  # the first moves only one half of an adapter
    export = AutoModelForCausalLM.from_pretrained(core.export(tmp_path / "export"), dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    core.model._skip_lm_head = False
    ids = batch["tokens"]["ids"][None, :36]
    ours = compute(core, ids, [Span(start=0, length=36)])
    with torch.no_grad():
        assert (ours - export(ids).logits).abs().max() < 2e-5
        assert (ours - before(ids).logits).abs().max() > 1e-2
    moved = [name for name, x in export.state_dict().items() if not torch.equal(x, before.state_dict()[name])]
    assert any(".bias" in name for name in moved) == (family in {"qwen2", "gpt_oss"} and lora is None)
    assert not any("correction_bias" in name for name in moved)
    assert AutoTokenizer.from_pretrained(tmp_path / "export").encode("hi") == [*b"hi"]
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_correction_biases_and_draft_layers_leave_the_learner_unchanged(tiny_models, random_batch, tmp_path):
    model = shutil.copytree(tiny_models(family="deepseek_v3", dtype="bfloat16"), tmp_path / "model")
    bias, draft = "model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.2.enorm.weight"
    before = load_file(model / "model.safetensors")
    before |= {bias: 8.0 + 1e-4 * torch.randn(8), draft: torch.randn(128)}  # bfloat16 would round all biases to 8
    save_file(before, model / "model.safetensors")
    core = LearnerCore(LearnerPlan(model=str(model), threads=1, lr=1e-2))
    core.train_step(random_batch())
    after = load_file(core.export(tmp_path / "export") / "model.safetensors")
    assert before.keys() == after.keys()
    for name in (bias, draft):
        assert after[name].dtype == torch.float32 and torch.equal(before[name], after[name])
    published = dict(core.published(torch.bfloat16))
    assert torch.equal(published[bias], before[bias]) and draft not in published
    publisher = Publisher(SimpleNamespace(heartbeat_timeout_s=60.0), "any")
    specs = {spec[0]: spec[2] for spec in (publisher._spec_of(*pair) for pair in published.items())}
    assert specs.pop(bias) == "float32" and set(specs.values()) == {"bfloat16"}
    assert published.keys() == expected_shapes(str(model)).keys()


@pytest.mark.parametrize(
    ("text", "lora", "published"),
    [
        *itertools.product(
            ({"family": "qwen3_5", "tied": True}, {"family": "qwen3_5", "tied": False}), (None, LoRA(rank=4)), (False,)
        ),
        ({"family": "qwen3_5_moe", "tied": True}, ATTENTION, False),
        ({"family": "qwen3_5_moe", "tied": False}, None, False),
        *itertools.product(({"family": "gemma3", "tied": True},), (None, LoRA(rank=4)), (False, True)),
        ({"family": "gemma3", "tied": False}, None, True),
    ],
    ids=str,
)
def test_text_part_of_a_model_with_images_is_trained(tiny_models, random_batch, tmp_path, text, lora, *, published):
    names = ("language_model.model.", "language_model.lm_head.") if published else ("model.language_model.", "lm_head.")
    text = tiny_models(**text)
    model = with_images(text, tmp_path / "model", published=published)
    settings = LearnerPlan(model=str(model), compute_dtype="float32", threads=1, lr=1e-2, lora=lora)
    core, expected = LearnerCore(settings), LearnerCore(replace(settings, model=str(text)))
    for _ in range(2):
        core.train_step(random_batch())
        expected.train_step(random_batch())
    assert torch.equal(core.logprobs(random_batch()), expected.logprobs(random_batch()))
    weights = dict(core.published(torch.float32))
    assert all(name.startswith("base_model.model.model.language_model." if lora else names) for name in weights)
    expected_names = adapter_shapes(str(model), lora) if lora else expected_shapes(str(model))
    assert weights.keys() == expected_names.keys()
    folder = core.export(tmp_path / "export")
    before, after = (load_file(path / "model.safetensors") for path in (model, folder))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith(names) for name in changed)
    export, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    core.model._skip_lm_head = False
    ids = random_batch()["tokens"]["ids"][None, :36]
    with torch.no_grad():
        assert (compute(core, ids, [Span(start=0, length=36)]) - export(ids).logits).abs().max() < 4e-5


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_5_moe", "qwen3_moe"])
def test_scores_of_experts_are_not_rounded_to_bfloat16(tiny_models, family):
    core = LearnerCore(LearnerPlan(model=str(tiny_models(family=family)), compute_dtype="bfloat16", threads=1))
    gate = next(module for name, module in core.model.named_modules() if name.endswith("router.gate"))
    calls: list[tuple[Any, ...]] = []
    gate.register_forward_hook(lambda _, inputs, output: calls.append((*inputs, gate.weight, gate.bias, output)))
    with core._built.computing():
        compute(core, torch.arange(40)[None], [Span(start=0, length=40)])
    ((x, weight, bias, scores),) = calls
    assert (x.dtype, weight.dtype, scores.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=0)


def test_every_family_that_is_trained_is_tried_here(tiny_models):
    tried = {inspect_model(tiny_models(family=family)).family for family, _ in CASES}
    assert tried == {family for family in FAMILIES if not family.untrainable_reason}


@pytest.mark.parametrize(
    ("family", "settings", "tables"), [("llama", {}, 1), ("smollm3", {"no_rope_layers": [0, 1]}, 2)]
)
def test_layers_with_equal_rope_share_a_table(tmp_path, family, settings, tables):
    model = tiny_model(tmp_path, family=family, settings=settings)
    core = LearnerCore(LearnerPlan(model=str(model), compute_dtype="float32", threads=1))
    result = [layer.attention.rope.cache for layer in core.model.layers.values()]
    assert len(result) > 1 and len({table.data_ptr() for table in result}) == tables
