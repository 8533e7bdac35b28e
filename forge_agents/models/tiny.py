"""A random chat model with a few hundred thousand parameters, for tests that need a real model without a download."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

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
    from safetensors.torch import save_file

    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    tied = tied and family not in ("gpt_oss", *_LATENT_FAMILIES)
    config = _config(family, dtype, tied) | dict(settings or {})
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": _token_id("<|im_end|>"), "pad_token_id": _token_id("<|pad|>"), "do_sample": True},
    )
    _write_tokenizer(folder)
    weights = _weights(family, seed, dtype, tied, config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
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


def _weights(family: Family, seed: int, dtype: Dtype, tied: bool, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    import torch

    generator, head_dim = torch.Generator().manual_seed(seed), config.get("head_dim", HEAD_DIM)

    def matrix(*shape: int) -> torch.Tensor:
        # 0.08 makes next-token distributions so peaked that greedy tests are stable across kernels
        return (0.08 * torch.randn(*shape, generator=generator)).to(getattr(torch, dtype))

    def norm(size: int) -> torch.Tensor:
        offset = 0 if family in ("gemma3", "qwen3_5", "qwen3_5_moe") else 1  # the model adds 1
        return (offset + 0.1 * torch.randn(size, generator=generator)).to(getattr(torch, dtype))

    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": norm(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": norm(HIDDEN),
            prefix + "post_attention_layernorm.weight": norm(HIDDEN),
        }
        recurrent = family.startswith("qwen3_5") and layer == 0
        if family in _LATENT_FAMILIES:
            weights |= _latent(prefix, config, matrix, norm, sparse=layer > 0)
            continue
        weights |= _recurrent(prefix, matrix, norm) if recurrent else _attention(prefix, family, matrix, head_dim)
        if family == "gpt_oss":
            weights |= _biased(prefix, matrix, head_dim)
        else:
            weights |= (_mixture if family == "qwen3_5_moe" else _feed_forward)(prefix, family, matrix)
        if family == "gemma3":
            weights[prefix + "pre_feedforward_layernorm.weight"] = norm(HIDDEN)
            weights[prefix + "post_feedforward_layernorm.weight"] = norm(HIDDEN)
        if family in ("qwen3", "qwen3_moe", "gemma3", "qwen3_5", "qwen3_5_moe") and not recurrent:
            weights |= {f"{prefix}self_attn.{x}_norm.weight": norm(head_dim) for x in "qk"}
        if family == "qwen2":
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                weights[f"{prefix}self_attn.{name}_proj.bias"] = matrix(heads * head_dim)
        if family == "phi3":
            _fuse(weights, prefix)
    if not tied:
        weights["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    return weights


def _attention(prefix: str, family: Family, matrix: Any, head_dim: int) -> dict[str, torch.Tensor]:
    """Projections of a layer's attention."""
    queries = (2 if family.startswith("qwen3_5") else 1) * HEADS * head_dim  # each with a gate
    return {
        prefix + "self_attn.q_proj.weight": matrix(queries, HIDDEN),
        prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
        prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
        prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head_dim),
    }


def _feed_forward(prefix: str, family: Family, matrix: Any) -> dict[str, torch.Tensor]:
    """A layer's feed-forward, or its experts and their router."""
    weights: dict[str, torch.Tensor] = {}
    hidden = EXPERT_INTERMEDIATE if family == "qwen3_moe" else INTERMEDIATE
    for expert in [f"experts.{i}." for i in range(EXPERTS)] if family == "qwen3_moe" else [""]:
        weights |= {
            f"{prefix}mlp.{expert}gate_proj.weight": matrix(hidden, HIDDEN),
            f"{prefix}mlp.{expert}up_proj.weight": matrix(hidden, HIDDEN),
            f"{prefix}mlp.{expert}down_proj.weight": matrix(HIDDEN, hidden),
        }
    if family == "qwen3_moe":
        weights[prefix + "mlp.gate.weight"] = matrix(EXPERTS, HIDDEN)
    return weights


def _mixture(prefix: str, _: Family, matrix: Any) -> dict[str, torch.Tensor]:
    """Experts of a layer of Qwen3.5, each kind of weight in one tensor, their router, and the shared expert."""
    prefix += "mlp."
    return {
        prefix + "gate.weight": matrix(SMALL_EXPERTS, HIDDEN),
        prefix + "experts.gate_up_proj": matrix(SMALL_EXPERTS, 2 * SMALL_INTERMEDIATE, HIDDEN),
        prefix + "experts.down_proj": matrix(SMALL_EXPERTS, HIDDEN, SMALL_INTERMEDIATE),
        prefix + "shared_expert.gate_proj.weight": matrix(EXPERT_INTERMEDIATE, HIDDEN),
        prefix + "shared_expert.up_proj.weight": matrix(EXPERT_INTERMEDIATE, HIDDEN),
        prefix + "shared_expert.down_proj.weight": matrix(HIDDEN, EXPERT_INTERMEDIATE),
        prefix + "shared_expert_gate.weight": matrix(1, HIDDEN),
    }


def _recurrent(prefix: str, matrix: Any, norm: Any) -> dict[str, torch.Tensor]:
    """Weights of a recurrent layer's attention, with decays of different speed."""
    keys, values = (heads * RECURRENT_HEAD_DIM for heads in RECURRENT_HEADS)
    prefix += "linear_attn."
    return {
        prefix + "in_proj_qkv.weight": matrix(2 * keys + values, HIDDEN),
        prefix + "in_proj_z.weight": matrix(values, HIDDEN),
        prefix + "in_proj_b.weight": matrix(RECURRENT_HEADS[1], HIDDEN),
        prefix + "in_proj_a.weight": matrix(RECURRENT_HEADS[1], HIDDEN),
        prefix + "conv1d.weight": 4 * matrix(2 * keys + values, 1, CONV_WIDTH),
        prefix + "A_log": 10 * matrix(RECURRENT_HEADS[1]),
        prefix + "dt_bias": 10 * matrix(RECURRENT_HEADS[1]),
        prefix + "norm.weight": 1 + norm(RECURRENT_HEAD_DIM),  # the model does not add 1 to this norm
        prefix + "out_proj.weight": matrix(HIDDEN, values),
    }


def _latent(prefix: str, config: Mapping[str, Any], matrix: Any, norm: Any, *, sparse: bool) -> dict[str, torch.Tensor]:
    """Latent attention of a layer, and its feed-forward or experts."""
    nope, rotated, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, query_rank, queries = config["kv_lora_rank"], config["q_lora_rank"], HEADS * (nope + rotated)
    weights: dict[str, torch.Tensor] = {
        "self_attn.kv_a_proj_with_mqa.weight": matrix(rank + rotated, HIDDEN),
        "self_attn.kv_a_layernorm.weight": norm(rank),
        "self_attn.kv_b_proj.weight": matrix(HEADS * (nope + value), rank),
        "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * value),
    }
    if query_rank:
        weights["self_attn.q_a_proj.weight"] = matrix(query_rank, HIDDEN)
        weights["self_attn.q_a_layernorm.weight"] = norm(query_rank)
        weights["self_attn.q_b_proj.weight"] = matrix(queries, query_rank)
    else:
        weights["self_attn.q_proj.weight"] = matrix(queries, HIDDEN)
    sizes = {"mlp.": INTERMEDIATE}
    if sparse:
        sizes = {f"mlp.experts.{i}.": EXPERT_INTERMEDIATE for i in range(config["n_routed_experts"])}
        sizes["mlp.shared_experts."] = config["n_shared_experts"] * EXPERT_INTERMEDIATE
        weights["mlp.gate.weight"] = matrix(config["n_routed_experts"], HIDDEN)
        weights["mlp.gate.e_score_correction_bias"] = matrix(config["n_routed_experts"]).float()
    for block, size in sizes.items():
        weights |= {f"{block}{name}_proj.weight": matrix(size, HIDDEN) for name in ("gate", "up")}
        weights[block + "down_proj.weight"] = matrix(HIDDEN, size)
    return {prefix + name: weight for name, weight in weights.items()}


def _biased(prefix: str, matrix: Any, head_dim: int) -> dict[str, torch.Tensor]:
    """Sinks, biases and experts of a layer of gpt-oss."""
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    hidden = EXPERT_INTERMEDIATE
    return {
        **{f"{prefix}self_attn.{name}_proj.bias": matrix(number * head_dim) for name, number in heads.items()},
        prefix + "self_attn.o_proj.bias": matrix(HIDDEN),
        prefix + "self_attn.sinks": 10 * matrix(HEADS),
        prefix + "mlp.router.weight": matrix(EXPERTS, HIDDEN),
        prefix + "mlp.router.bias": matrix(EXPERTS),
        prefix + "mlp.experts.gate_up_proj": matrix(EXPERTS, HIDDEN, 2 * hidden),
        prefix + "mlp.experts.gate_up_proj_bias": matrix(EXPERTS, 2 * hidden),
        prefix + "mlp.experts.down_proj": matrix(EXPERTS, hidden, HIDDEN),
        prefix + "mlp.experts.down_proj_bias": matrix(EXPERTS, HIDDEN),
    }


def _fuse(weights: dict[str, torch.Tensor], prefix: str) -> None:
    """Stack the weights of a layer that Phi-3 fuses, in place."""
    import torch

    for block, fused, parts in (("self_attn", "qkv", "qkv"), ("mlp", "gate_up", ("gate", "up"))):
        rows = [weights.pop(f"{prefix}{block}.{part}_proj.weight") for part in parts]
        weights[f"{prefix}{block}.{fused}_proj.weight"] = torch.cat(rows)


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
    """Map GPT-2's printable character for each byte to the byte, which is also the token id."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one of a model's JSON files."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
