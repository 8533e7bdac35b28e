"""A random chat model with a few hundred thousand parameters, for tests that need a real model without a download."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from forge_agents.imports import lean_transformers

Family: TypeAlias = Literal[
    "llama", "qwen3", "qwen3_moe", "qwen2", "smollm3", "mistral", "phi3", "gemma3", "qwen3_5", "qwen3_5_moe", "gpt_oss",
    "deepseek_v3", "glm4_moe_lite",
]  # fmt: skip
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]

HIDDEN = 128
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 256
EXPERTS = 4
EXPERTS_PER_TOKEN = 2
EXPERT_INTERMEDIATE = 64
SMALL_EXPERTS, SMALL_INTERMEDIATE = 8, 32
"""Experts of Qwen3.5, not as many as value heads. Its shared expert has the size of others' experts."""
RECURRENT_HEADS = 2, 4
"""Key and value heads of a recurrent layer."""
RECURRENT_HEAD_DIM = 64  # vLLM's kernels for CPU know 64 and 128
CONV_WIDTH = 4
CONTEXT = 4096

CONTROL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
"""Ids 256, 257, 258: special tokens, dropped when text is decoded without special tokens."""
TEXT_TOKENS = ("<tool_call>", "</tool_call>")
"""Ids 259, 260: ordinary tokens, kept when text is decoded, as in Qwen's tokenizers."""
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}
_LATENT_FAMILIES = ("deepseek_v3", "glm4_moe_lite")
_GPT_OSS = {
    "attention_bias": True,
    "intermediate_size": EXPERT_INTERMEDIATE,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "swiglu_limit": 7.0,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 128},
}  # fmt: skip
"""Settings of gpt-oss that differ from those of Llama."""
_LATENT = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,  # vLLM's kernel for CPU knows this size, and 64 rotated channels
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 32,
    "rope_interleave": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 2 * EXPERTS,
    "n_shared_experts": 2,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "moe_intermediate_size": EXPERT_INTERMEDIATE,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
}
"""Settings of latent attention, shared experts and routers with correction biases."""
_DEEPSEEK = {
    "rms_norm_eps": 1e-6,
    "n_group": EXPERTS,
    "topk_group": 2,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                        "mscale": 1.0, "mscale_all_dim": 0.8, "original_max_position_embeddings": 128},
}  # fmt: skip
_QWEN3_MOE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "moe_intermediate_size": EXPERT_INTERMEDIATE,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.0,
}
_FIRST = (
    "embed_tokens", "model.norm", "input_layernorm", "post_attention_layernorm", "q_proj.weight", "k_proj.weight",
    "v_proj.weight", "o_proj.weight", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "A_log",
    "dt_bias", "linear_attn.norm", "out_proj", "gate_proj", "up_proj", "down_proj", "q_norm",
)  # fmt: skip
"""Parts of the names of weights, in the order in which they are drawn. Others follow by name."""
_SCALES = {"conv1d": 4, "A_log": 10, "dt_bias": 10, "sinks": 10}
"""Factors of small weights, so that layers differ in their decays and sinks take a share of the attention."""
VOCAB = 264  # a multiple of 8, so that tensor parallelism can split it

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_model(
    folder: Path,
    *,
    family: Family = "llama",
    seed: int = 0,
    dtype: Dtype = "float32",
    tied: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random chat model that transformers, vLLM and TorchTitan load.

    Ids 0 to 255 are bytes. The model has two layers, four query heads and two key/value heads of 32 channels, so that
    two tensor-parallel ranks can share it. No weight has its default value: norms differ from one as well.

    Args:
        folder: Target folder, created if missing. Existing files are replaced.
        family: ``"llama"``, ``"qwen3"`` (normalized queries and keys), ``"qwen3_moe"`` (four experts per layer, two
            per token), ``"qwen2"`` (biases on queries, keys and values), ``"smollm3"`` (positions
            in the first layer only), ``"mistral"``, ``"phi3"`` (fused weights), ``"gemma3"`` (a sliding window of 64
            positions in the first layer), ``"qwen3_5"`` (a recurrent state in the first layer), ``"qwen3_5_moe"``
            (the same with experts: eight per layer, two per token, and a shared one), ``"gpt_oss"`` (sinks, biases,
            four experts per layer, and a window as Gemma's), ``"deepseek_v3"`` or ``"glm4_moe_lite"`` (latent
            attention, and eight experts in the second layer). The last three do not support `tied`.
        seed: Seed of the weights. Equal seeds give equal bytes.
        dtype: Dtype of the stored weights and of ``config.json``.
        tied: Whether the output head shares the embedding. Otherwise ``lm_head.weight`` is stored as well.
        settings: Changes of config.json, such as ``{"head_dim": 64}``.

    Raises:
        ValueError: `family` or `dtype` is not one of the above.
    """
    if family not in _ARCHITECTURES:
        raise ValueError(f"family={family!r} is not a tiny model. Use one of {', '.join(_ARCHITECTURES)}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={dtype!r} is not supported. Use 'float32', 'bfloat16' or 'float16'")
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    tied = tied and family not in ("gpt_oss", *_LATENT_FAMILIES)
    config = _config(family, dtype, tied) | dict(settings or {})
    _write_weights(folder, family, seed, dtype, config)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": _token_id("<|im_end|>"), "pad_token_id": _token_id("<|pad|>"), "do_sample": True},
    )
    _write_tokenizer(folder)
    return folder


def _token_id(token: str) -> int:
    return 256 + (*CONTROL_TOKENS, *TEXT_TOKENS).index(token)


def _config(family: Family, dtype: Dtype, tied: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": _token_id("<|im_end|>"),
        "pad_token_id": _token_id("<|pad|>"),
        "dtype": dtype,
        "use_cache": True,
    }
    if family in ("llama", "smollm3"):
        config["mlp_bias"] = False
    if family == "smollm3":
        config |= {"no_rope_layers": [1, 0], "use_sliding_window": False, "sliding_window": None}
    if family in ("mistral", "phi3"):
        config["sliding_window"] = None
    if family == "gemma3":
        config |= {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        }
        del config["hidden_act"]
    if family.startswith("qwen3_5"):
        config |= {
            "model_type": f"{family}_text",
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": RECURRENT_HEADS[0],
            "linear_num_value_heads": RECURRENT_HEADS[1],
            "linear_key_head_dim": RECURRENT_HEAD_DIM,
            "linear_value_head_dim": RECURRENT_HEAD_DIM,
            "linear_conv_kernel_dim": CONV_WIDTH,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                                "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        }  # fmt: skip
    elif family.startswith("qwen"):
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": LAYERS}
    if family == "gpt_oss":
        config |= _GPT_OSS
    if family in _LATENT_FAMILIES:
        del config["head_dim"]
        config |= _LATENT | (_DEEPSEEK if family == "deepseek_v3" else {})
    if family == "qwen3_moe":
        config |= _QWEN3_MOE
    if family == "qwen3_5_moe":
        del config["intermediate_size"]
        config |= {
            "num_experts": SMALL_EXPERTS,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "moe_intermediate_size": SMALL_INTERMEDIATE,
            "shared_expert_intermediate_size": EXPERT_INTERMEDIATE,
        }
    return config


def _write_weights(folder: Path, family: Family, seed: int, dtype: Dtype, config: dict[str, Any]) -> None:
    """Write random weights with the names and shapes that transformers gives the model of a ``config.json``."""
    import torch
    from safetensors.torch import load_file, save_file

    with lean_transformers():
        from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    with torch.random.fork_rng([]):
        own_config = AutoConfig.for_model(**copy.deepcopy(config))  # it adds keys to inner mappings
        model = AutoModelForCausalLM.from_config(own_config, dtype=torch.float32)
    # files of Qwen3.5 have all experts of a layer in one tensor, as its model in memory
    model.save_pretrained(folder, save_original_format=family != "qwen3_5_moe")
    if shows_progress:
        logging.enable_progress_bar()
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name in sorted(weights, key=_drawn):
        noise = torch.randn(weights[name].shape, generator=generator)
        if name.endswith("norm.weight"):  # which is 0 if the model adds 1
            weights[name] = (weights[name] + 0.1 * noise).to(getattr(torch, dtype))
            continue
        # 0.08 makes next-token distributions so peaked that greedy tests are stable across kernels
        weight = (0.08 * noise).to(getattr(torch, dtype))
        weight *= next((scale for part, scale in _SCALES.items() if part in name), 1)
        weights[name] = weight.float() if name.endswith("e_score_correction_bias") else weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _drawn(name: str) -> tuple[int, int, str]:
    """Sort key of weights: the order in which they are drawn. Results depend on the order."""
    layer = int(name.split(".")[2]) if ".layers." in name else LAYERS if name.startswith("lm_head") else -1
    return layer, next((place for place, part in enumerate(_FIRST) if part in name), len(_FIRST)), name


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocab(), merges=[]))  # BPE without merges: one token per byte
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TEXT_TOKENS])
    # every id must decode to a text, because a random model samples all of them
    reserved = [f"<|reserved_{i}|>" for i in range(VOCAB - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in reserved])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _byte_vocab() -> dict[str, int]:
    """Map GPT-2's printable character for each byte to the byte and token id."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one of a model's JSON files."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
