"""Unsupported models are refused by name, broken folders with advice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_agents.errors import ModelNotFoundError
from forge_agents.models.families import check_trainable
from forge_trainers.learner.architecture import read_config, spec_from_config
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.model import build_model, check_weights
from forge_trainers.learner.plan import LearnerPlan


def changed(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**read_config(folder), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalML"]}, "Did you mean 'LlamaForCausalLM'"),
        ({"architectures": ["MixtralForCausalLM"]}, "Mixtral.: TorchTitan has no adapter.* Trainable: LlamaFor"),
        ({"architectures": ["NovelForCausalLM"]}, "'NovelForCausalLM' cannot be trained. It can play as a frozen"),
        ({"architectures": []}, "'.none named.' cannot be trained"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}, "moe_intermediate_size, num_experts_per_tok"),
        ({"architectures": ["Qwen3_5MoeForCausalLM"]}, "num_experts, shared_expert_intermediate_size"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (
            {"rope_parameters": {"type": "dynamic", "factor": 4.0}},
            "rope_type='dynamic' .* 'default', 'linear', 'llama3'",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {"use_bidirectional_attention": True},
            },
            "use_bidirectional_attention=True",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"sliding_attention": {"type": "dynamic"}}},
            "rope_type='dynamic'",
        ),
        ({"architectures": ["Phi3ForCausalLM"], "rope_parameters": {"type": "yarn"}}, "rope_type='yarn'"),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_parameters": {"type": "su", "long_mscale": 1.2}},
            "long_mscale=1.2",
        ),
        ({"hidden_size": None}, "hidden_size"),
        ({"is_causal": False}, "is_causal=False"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"sliding_window": 9}, "sliding_window=9"),
        ({"layer_types": ["sliding_attention"] * 2}, "Its 2 layers begin with .'full_attention', 'full_attention'"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types=.'full_attention'. is",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "ignore the latter, also its rope_theta"),
        ({"architectures": ["GptOssForCausalLM"], "attention_bias": True}, "lacks whole numbers for num_local_experts"),
    ],
)
def test_an_unsupported_model_is_refused(tiny_llama, changes, message):
    with pytest.raises(ValueError, match=message):
        spec_from_config(changed(tiny_llama, **changes), inner_attention=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported by the learner. Supported: 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"scoring_func": ...}, "scoring_func='softmax' .* has no 'scoring_func', so vLLM takes this value"),
        ({"rope_interleave": False}, "rope_interleave=False"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type='llama3' .* 'default', 'yarn'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"v_head_dim": 256}, "v_head_dim=256 is not supported: values are larger than keys"),
        ({"mlp_layer_types": ["sparse", "sparse"]}, "mlp_layer_types=.* from first_k_dense_replace=1 on"),
        ({"kv_lora_rank": None}, "whole numbers for kv_lora_rank"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized .*'fp8'.* not trained. Train a copy in bfloat16"),
        ({"quantization_config": {}}, "quantized .*'None'"),
        ({"quantization_config": 4}, "quantized .*'4'"),
    ],
    ids=str,
)
def test_unsupported_latent_attention_is_refused(tiny_models, changes, message):
    config = changed(tiny_models(family="deepseek_v3"), **changes)
    with pytest.raises(ValueError, match=message):
        check_trainable({name: value for name, value in config.items() if value is not ...})


def test_positions_beyond_the_models_context_are_refused(tiny_llama):
    with pytest.raises(ValueError, match="max_seq_len=99999"):
        spec_from_config(read_config(tiny_llama), inner_attention=None, max_seq_len=99999)


def test_longrope_is_refused_beyond_its_original_length():
    config = {
        "architectures": ["Phi3ForCausalLM"], "hidden_size": 96, "vocab_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "rope_scaling": {"type": "su"},
    }  # fmt: skip
    check_trainable(config, 4096)
    with pytest.raises(ValueError, match="beyond 4096 tokens, LongRoPE .* at most 4096"):
        check_trainable(config, 4097)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match="config.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelNotFoundError, match="config.json cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelNotFoundError, match="holds a list"):
        read_config(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no .safetensors"):
        check_weights(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 8}')
    with pytest.raises(ValueError, match=r"config\.json lacks whole numbers for .*max_position_embeddings"):
        build_model(LearnerPlan(model=str(tmp_path)), None)


def rewritten(folder: Path, to: Path, **tensors: torch.Tensor | None) -> LearnerPlan:
    """A learner of a copy of the model in which tensors are others, or gone."""
    copy = shutil.copytree(folder, to / "model")
    held = {**load_file(copy / "model.safetensors"), **tensors}
    save_file({name: x for name, x in held.items() if x is not None}, copy / "model.safetensors")
    return LearnerPlan(model=str(copy), compute_dtype="float32", threads=1)


@pytest.mark.parametrize(
    ("name", "tensor", "refusal"),
    [  # config.json has a vocabulary of 264
        ("model.embed_tokens.weight", torch.zeros(200, 128), (ModelNotFoundError, r"\[200, 128\].*\(\[264, 128\]\)")),
        ("model.norm.weight", None, (ModelNotFoundError, "lacks 1 of 20 tensors, such as 'model.norm.weight'")),
        ("model.norm.weight", torch.zeros(128, dtype=torch.int8), (ValueError, "holds model.norm.weight as I8")),
    ],
    ids=["shape", "missing", "quantized"],
)
def test_weights_that_do_not_fit_their_config_are_refused(tiny_llama, tmp_path, name, tensor, refusal):
    with pytest.raises(refusal[0], match=refusal[1]):
        LearnerCore(rewritten(tiny_llama, tmp_path, **{name: tensor}))


def test_experts_that_are_stored_apart_are_refused(tiny_models, tmp_path):
    mixture = tiny_models(family="qwen3_5_moe")
    name = "model.layers.0.mlp.experts.down_proj"
    one = load_file(mixture / "model.safetensors")[name][0].clone()
    plan = rewritten(mixture, tmp_path, **{name: None, name.replace("experts", "experts.0") + ".weight": one})
    with pytest.raises(ModelNotFoundError, match=f"stores each expert apart.* such as {name!r}.* save_pre"):
        LearnerCore(plan)


def test_half_written_weights_are_refused(tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:10_000])
    with pytest.raises(ModelNotFoundError, match="is half-written"):
        check_weights(folder)


def test_tensors_that_do_not_cover_their_file_are_refused(tiny_llama, tmp_path):
    weights = shutil.copytree(tiny_llama, tmp_path / "model") / "model.safetensors"
    content = weights.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    header["model.norm.weight"]["data_offsets"][0] += 4
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + content[size:])
    with pytest.raises(ModelNotFoundError, match="is not a safetensors file"):
        check_weights(weights.parent)
