"""A TorchTitan model from a Hugging Face ``config.json``.

In: a model folder. Out: a TorchTitan ``ModelSpec`` of the same shape (Llama or Qwen3). Waits for the disk only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn as nn

from forge_agents.errors import ModelNotFoundError, did_you_mean
from forge_trainers.learner import titan
from forge_trainers.learner.experts import has_experts, moe_config, num_experts

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Values of ``architectures[0]`` in a config.json that the learner can train."""

_ONES = {"weight": nn.init.ones_}
_NORMAL = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
_REQUIRED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
             "max_position_embeddings")  # fmt: skip
_REQUIRED_OF_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")
# Options that TorchTitan's blocks do not compute; any other value would train a different model in silence.
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, 0.0, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
}


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read ``config.json`` of a model folder.

    Raises:
        ModelNotFoundError: The folder or its config.json is missing, or the file is not a JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"{folder} holds no config.json; give the folder of a Hugging Face model (forge-agents download ID)"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelNotFoundError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(config, dict):
        raise ModelNotFoundError(f"{path} holds a {type(config).__name__}, not an object; download the model again")
    return config


def spec_from_config(
    config: Mapping[str, Any], *, inner_attention: Any, max_seq_len: int | None = None, fuse_qkv: bool = True
) -> Any:
    """Build the TorchTitan ``ModelSpec`` of a Hugging Face configuration.

    Tied embeddings, a head_dim other than hidden_size / heads, RMSNorm's epsilon and Llama-3 RoPE scaling are
    taken over. The spec's state-dict adapter converts weights between both naming schemes.

    Args:
        config: The content of config.json.
        inner_attention: TorchTitan attention config, a ``VarlenAttention.Config`` or a subclass.
        max_seq_len: Longest position that will be asked for, in tokens; sizes the RoPE cache. None: the model's own
            ``max_position_embeddings``.
        fuse_qkv: Compute queries, keys and values as one product; adapters need them apart.

    Raises:
        ValueError: The architecture or one of its options is not supported; the message lists what is.
    """
    _check_supported(config)
    is_llama = config["architectures"][0] == "LlamaForCausalLM"
    dim, vocab_size = config["hidden_size"], config["vocab_size"]
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or dim // num_heads
    tied = bool(config.get("tie_word_embeddings", False))

    def norm(size: int) -> Any:
        return titan.RMSNorm.Config(normalized_shape=size, eps=config.get("rms_norm_eps", 1e-6), param_init=_ONES)

    rope = _rope(config, titan.ComplexRoPE if is_llama else titan.CosSinRoPE, head_dim, max_seq_len)
    block = titan.Llama3TransformerBlock if is_llama else titan.Qwen3TransformerBlock
    layers = [
        block.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=titan.make_gqa_config(
                dim=dim, n_heads=num_heads, n_kv_heads=num_kv_heads, fuse_qkv=fuse_qkv, rope=rope,
                # TorchTitan derives head_dim and the default softmax scale from dim / heads when it is None
                head_dim=None if is_llama and head_dim == dim // num_heads else head_dim,
                qk_norm=None if is_llama else norm(head_dim),
                wqkv_param_init=_NORMAL, wo_param_init=_NORMAL, inner_attention=inner_attention,
            ),
            **({"moe": moe_config(config, param_init=_NORMAL["weight"])} if has_experts(config, layer) else
               {"feed_forward": titan.make_ffn_config(
                   dim=dim, hidden_dim=config["intermediate_size"], w1_param_init=_NORMAL, w2w3_param_init=_NORMAL
               )}),
        )
        for layer in range(config["num_hidden_layers"])
    ]  # fmt: skip
    embedding_init = {"weight": titan.skip_param_init} if tied else _NORMAL
    model = (titan.Llama3Model if is_llama else titan.Qwen3Model).Config(
        dim=dim, vocab_size=vocab_size, enable_weight_tying=tied, norm=norm(dim), layers=layers,
        tok_embeddings=titan.Embedding.Config(
            num_embeddings=vocab_size, embedding_dim=dim, param_init=embedding_init
        ),
        lm_head=titan.Linear.Config(in_features=dim, out_features=vocab_size, param_init=_NORMAL),
    )  # fmt: skip
    return titan.ModelSpec(
        name="llama3" if is_llama else "qwen3",
        flavor="hf",
        model=model,
        parallelize_fn=titan.parallelize_llama if is_llama else titan.parallelize_qwen3,
        pipelining_fn=titan.pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=titan.Llama3StateDictAdapter if is_llama else titan.Qwen3StateDictAdapter,
    )


def _check_supported(config: Mapping[str, Any]) -> None:
    names = config.get("architectures") or ["(none named)"]
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"architecture {names[0]!r} cannot be trained; supported: {', '.join(SUPPORTED_ARCHITECTURES)}."
            + did_you_mean(str(names[0]), SUPPORTED_ARCHITECTURES)
        )
    required = (*_REQUIRED, *(_REQUIRED_OF_EXPERTS if num_experts(config) else ()))
    missing = [key for key in required if not isinstance(config.get(key), int)]
    if missing:
        raise ValueError(f"config.json lacks whole numbers for {', '.join(missing)}; download the model again")
    for key, allowed in _ONLY_VALUES.items():
        if key in config and config[key] not in allowed:
            raise ValueError(f"{key}={config[key]!r} is not supported by the learner; supported: {allowed[0]!r}")


def _rope(config: Mapping[str, Any], kind: Any, head_dim: int, max_seq_len: int | None) -> Any:
    # transformers >= 5 writes rope_parameters; older files hold rope_theta and rope_scaling
    given = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    theta = float(given.get("rope_theta", config.get("rope_theta", 10000.0)))
    own_limit = config["max_position_embeddings"]
    if max_seq_len is not None and max_seq_len > own_limit:
        raise ValueError(f"max_seq_len={max_seq_len} exceeds the model's {own_limit} positions; lower it")
    common = {"dim": head_dim, "max_seq_len": max_seq_len or own_limit, "theta": theta}
    scaling = given.get("rope_type", given.get("type", "default"))
    if scaling == "default":
        return kind.Config(**common)
    if scaling == "llama3" and kind is titan.ComplexRoPE:
        keys = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return kind.Config(
            scaling="llama", scaling_factor=given["factor"], **{key: given[key] for key in keys}, **common
        )
    raise ValueError(
        f"RoPE scaling {scaling!r} of {config['architectures'][0]} is not supported; supported: 'default' for both "
        "families and 'llama3' for Llama"
    )
