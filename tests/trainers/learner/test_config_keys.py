"""No key of config.json changes what a model computes without the learner: it computes the same, or names the key."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from learner_helpers import by_expert, compute
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from forge_agents.errors import ModelNotFoundError
from forge_agents.models import families
from forge_agents.models.resolve import read_json
from forge_agents.models.tiny import Family, tiny_model
from forge_trainers.batch.layout import Span
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.plan import LearnerPlan

IDS = torch.randint(0, 256, (1, 48), generator=torch.Generator().manual_seed(0))
WINDOWS = {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}
"""Settings that make windows matter, for families that have some."""
HARMLESS: dict[str, Any] = {
    "initializer_range": 0.5, "use_cache": False, "bos_token_id": 3, "eos_token_id": [3, 4], "pad_token_id": 5,
    "output_router_logits": True, "router_aux_loss_coef": 0.5, "pretraining_tp": 2, "num_nextn_predict_layers": 1,
    "moe_router_dtype": "float32", "mamba_ssm_dtype": "float32", "auto_map": {"AutoConfig": "code.Config"},
    "transformers_version": "4.45.0", "max_window_layers": 1, "cache_implementation": "hybrid", "ep_size": 8,
}  # fmt: skip
"""Keys that change nothing, all at once."""
SHAPES = {"vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "moe_intermediate_size",
          "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "linear_key_head_dim", "linear_value_head_dim",
          "num_local_experts", "num_experts", "num_hidden_layers", "rope_parameters"}  # fmt: skip
"""Keys that change weights, with which a model is loaded, and RoPE's settings, see `ROPES`."""
VALUES: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,), "head_dim": (64, None), "rms_norm_eps": (1e-2,), "hidden_act": ("gelu", "relu"),
    "hidden_activation": ("silu", "gelu"), "max_position_embeddings": (256,), "rope_theta": (5e5,),
    "original_max_position_embeddings": (64,), "partial_rotary_factor": (0.5,), "rope_local_base_freq": (5e5,),
    "attention_bias": (True, False), "mlp_bias": (True,), "attention_dropout": (0.1,), "resid_pdrop": (0.1,),
    "embd_pdrop": (0.1,), "tie_word_embeddings": (True,), "is_causal": (False,), "sliding_window": (None, 5),
    "use_sliding_window": (False, True), "max_window_layers": (0, 2),
    "layer_types": (["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention", "sliding_attention"],
                    ["full_attention", "linear_attention"], ["chunked_attention"] * 2, ["full_attention"], None),
    "sliding_window_pattern": (2,), "_sliding_window_pattern": (2,), "query_pre_attn_scalar": (100,),
    "attn_logit_softcapping": (5.0,), "final_logit_softcapping": (5.0,), "use_bidirectional_attention": (True,),
    "no_rope_layers": ([1, 1], [0, 1], None), "no_rope_layer_interval": (2,), "norm_topk_prob": (True, False),
    "n_routed_experts": (12,), "num_experts_per_tok": (1, 3), "shared_expert_intermediate_size": (32,),
    "n_shared_experts": (1,), "decoder_sparse_step": (2,), "mlp_only_layers": ([0],), "first_k_dense_replace": (0, 2),
    "mlp_layer_types": (["dense"] * 2, ["dense", "sparse"]), "moe_layer_freq": (2,), "n_group": (1, 2),
    "topk_group": (1,), "routed_scaling_factor": (3.0,), "scoring_func": ("softmax",), "topk_method": ("greedy",),
    "q_lora_rank": (32, None), "v_head_dim": (64, 256), "qk_head_dim": (64,), "rope_interleave": (False,),
    "swiglu_alpha": (1.0,), "swiglu_limit": (0.5,), "linear_num_key_heads": (4,), "linear_num_value_heads": (8,),
    "linear_conv_kernel_dim": (3,), "full_attention_interval": (2,), "attn_output_gate": (False,),
    "logit_scale": (0.5,), "llama_4_scaling": ({"beta": 0.1},), "dual_chunk_attention_config": ({"chunk_size": 16},),
    "quantization_config": ({"quant_method": "fp8"},), "rope_scaling": ({"rope_type": "linear", "factor": 4.0},),
}  # fmt: skip
"""Values of each other key that may matter. Most differ from those of a tiny model."""
LOUD = {"bias", "qkv_bias", "qk_norm", "layer_scale", "index_topk", "ada_rms_norm_t_cond", "ada_rms_norm_t_cond_dim",
        "index_head_dim", "index_n_heads", "index_skip_topk_offset", "index_topk_freq", "index_topk_pattern",
        "indexer_rope_interleave"}  # fmt: skip
"""Keys with which vLLM asks for more tensors, so that it refuses weights of these families."""
NOT_OF_THE_MODEL = {"target_layer_count", "attn_module_list_cfg", "vision_config"}
"""Keys that vLLM reads in other places, such as drafters and encoders of images."""
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.5] * 16, "long_factor": [2.0] * 16}
ROPES: tuple[dict[str, Any], ...] = (
    {}, {"partial_rotary_factor": 0.5}, {"mrope_section": [6, 5, 5]}, {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0}, LLAMA3, {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 8.0},
    YARN, {**YARN, "truncate": False}, {**YARN, "attention_factor": 1.5}, {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "mscale": 0.5, "mscale_all_dim": 1.0}, {**YARN, "mscale": 0.5},
    {"rope_type": "yarn", "factor": 8.0}, LONG, {**LONG, "original_max_position_embeddings": 512},
    {**LONG, "factor": 4.0}, {**LONG, "attention_factor": 1.5}, {**LONG, "long_mscale": 1.5},
)  # fmt: skip
VLLM = {
    "llama": ("llama",), "mistral": ("mistral", "llama"), "phi3": ("phi3", "llama"), "qwen2": ("qwen2",),
    "qwen3": ("qwen3", "qwen2"), "qwen3_moe": ("qwen3_moe",), "gemma3": ("gemma3",), "gpt_oss": ("gpt_oss",),
    "qwen3_5": ("qwen3_5", "qwen3_next"), "qwen3_5_moe": ("qwen3_5", "qwen3_next"),
    "deepseek_v3": ("deepseek_v2",), "glm4_moe_lite": ("glm4_moe_lite", "deepseek_v2"), "smollm3": (),
}  # fmt: skip
"""vLLM's modules of each family."""
OWN = {"architectures", "model_type", "dtype", "torch_dtype"}
"""Keys that say which model it is."""


def settings_of(family: str, tiny: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Changes of a tiny model's config.json. A value of ``...`` removes a key."""
    known = {*CONFIG_MAPPING[tiny["model_type"]]().to_dict(), *tiny, *keys_of_vllm(family), "rope_scaling", "is_causal"}
    yield HARMLESS
    for key in sorted(known & VALUES.keys()):
        yield from ({key: value} for value in VALUES[key])
    for scaling in ROPES if family in {"llama", "phi3", "gemma3", "deepseek_v3"} else ROPES[::3]:
        rope = {"rope_type": "default", "rope_theta": 2e4, **scaling}
        local = {"rope_type": "default", "rope_theta": 1e4}
        nested = {"full_attention": rope, "sliding_attention": local}
        yield {"rope_parameters": nested if family == "gemma3" else rope}
    yield dict.fromkeys(tiny.keys() & HARMLESS.keys(), ...)
    yield from ({key: ...} for key in sorted(tiny.keys() - HARMLESS.keys() - SHAPES - OWN))


def keys_of_vllm(family: str) -> set[str]:
    """Keys that vLLM's module of a family reads."""
    spec = importlib.util.find_spec("vllm")
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    assert folder is not None
    reads = r"\b(?:hf_|text_)?config\.([a-z]\w*)\b(?!\()|getattr\(\s*(?:hf_|text_)?config,\s*\"(\w+)\""
    texts = ((folder / "model_executor/models" / f"{name}.py").read_text() for name in VLLM[family])
    return {name or other for text in texts for name, other in re.findall(reads, text)}


def write(folder: Path, config: Mapping[str, Any], *, stacked: bool) -> torch.Tensor:
    """Write random weights for `config`, as transformers understands it. Returns the logits that it computes."""
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            offset = tensor.mean().round() if name.endswith("norm.weight") else 0.0
            tensor.copy_(offset + 0.1 * torch.randn(tensor.shape, generator=rng))
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        logits: torch.Tensor = model(IDS, return_dict=True).logits
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        del tensors["lm_head.weight"]
    save_file(tensors if stacked else by_expert(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return logits


@pytest.mark.parametrize("family", get_args(Family))
def test_no_key_of_config_json_is_ignored(tmp_path, family):
    tiny = read_json(tiny_model(tmp_path, family=family, tied=False) / "config.json")
    if family in {"mistral", "phi3", "gemma3", "gpt_oss", "qwen2", "qwen3", "qwen3_moe", "smollm3"}:
        tiny |= WINDOWS
    wrong = []
    for changes in settings_of(family, tiny):
        config = {key: value for key, value in (tiny | changes).items() if value is not ...}
        try:
            families.check_trainable(config)
        except ValueError as refusal:
            if not any(key in str(refusal) for key in (*re.findall(r"'(\w+)':", repr(changes)), "layer_types")):
                wrong.append((changes, str(refusal)))
            continue
        try:
            theirs = write(tmp_path, config, stacked=family == "qwen3_5_moe")
        except Exception:  # noqa: BLE001  (transformers refuses it, in many ways)
            continue
        try:
            core = LearnerCore(LearnerPlan(model=str(tmp_path), compute_dtype="float32", threads=1))
        except (ModelNotFoundError, ValueError):  # its weights have other shapes
            continue
        core.model._skip_lm_head = False
        difference = (compute(core, IDS, [Span(start=0, length=IDS.shape[1])]) - theirs).abs().max()
        if not difference < 1e-4:
            wrong.append((changes, difference))
    assert wrong == []


@pytest.mark.parametrize("family", get_args(Family))
def test_every_key_that_matters_is_known(tiny_models, family):
    """An upgrade of transformers or vLLM with a new key fails here."""
    tiny = read_json(tiny_models(family=family) / "config.json")
    theirs = CONFIG_MAPPING[tiny["model_type"]]().to_dict().keys() - PreTrainedConfig().to_dict().keys()
    assert (theirs | keys_of_vllm(family)) - {*VALUES, *HARMLESS, *SHAPES, *OWN, *LOUD, *NOT_OF_THE_MODEL} == set()
