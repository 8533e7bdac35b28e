"""Memory of an engine: weights, activations and KV cache in bytes, and checks of what a model allows."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_agents.errors import ModelNotFoundError
from forge_agents.models.families import adapted_layers, decoder_config, is_recurrent, recurrent_sizes
from forge_agents.models.resolve import dtype_of, read_json
from forge_agents.models.sizes import ModelSize
from forge_agents.policy import LoRA
from forge_agents.runtime.machine import has_fast_bfloat16, visible_gpus
from forge_agents.serving.config import EngineConfig

OVERHEAD_BYTES = 2_500_000_000
"""Memory of a GPU process in addition to tensors: CUDA context, workspaces, CUDA graphs. Assumed, not measured."""
USUAL_SHARE = 0.9
"""Fraction of a GPU that an engine uses if it has the GPU alone."""
ITERATION_TOKENS = 8192
"""Maximum number of tokens per forward pass on a GPU by vLLM's default."""
_USUAL_KV_BYTES = 1_000_000_000
_BLOCK = 128
"""Tokens of the largest block of vLLM's cache."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM allocates memory for."""
CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that the kernels of vLLM 0.32's CPU attention are compiled for. vLLM's own list,
`CPUAttentionBackend.get_supported_head_sizes`, is never read and lacks 48."""
_RECURRENT_HEAD_SIZES = (64, 128)
"""Head sizes that the kernels of vLLM 0.32's recurrent layers on CPU are compiled for."""
_LATENT_SIZES = 512, 64
"""kv_lora_rank and qk_rope_head_dim that the kernel of vLLM 0.32's latent attention on CPU is compiled for."""
_ALLOW_LONG_CONTEXT = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""Variable with which vLLM accepts more tokens than a model has positions."""


def kv_bytes(size: ModelSize, tokens: int, *, item: int = 2, tp: int = 1) -> int:
    """Size of a cache for `tokens` on one of `tp` ranks, in whole blocks with vLLM's spare one.

    With recurrent layers, a block of keys and values is as large as a state, which is float32.
    """
    if size.recurrence is None:
        return (math.ceil(tokens / _BLOCK) + 2) * _BLOCK * size.kv_per_token(tp) * item
    per_layer = size.kv_per_token(tp) * item // max(1, size.attention_layers)
    block = _BLOCK * math.ceil(4 * size.recurrence.state / tp / (_BLOCK * max(1, per_layer)))
    blocks = size.attention_layers * (math.ceil(tokens / block) + 2) + 3 * size.recurrence.layers
    return blocks * block * per_layer


def usual_kv_bytes(size: ModelSize, *, context: int, sequences: int, item: int = 2, tp: int = 1) -> int:
    """Default size of a cache in host memory: at least one full conversation, and up to 1 GB for more."""
    most = kv_bytes(size, context * sequences, item=item, tp=tp)
    return max(kv_bytes(size, context, item=item, tp=tp), min(_USUAL_KV_BYTES, most))


def pass_bytes(size: ModelSize, tokens: int, *, item: int = 2, tp: int = 1) -> int:
    """Activations of one forward pass over `tokens`."""
    per_token = size.hidden * 4 + (size.heads + 2 * size.kv_heads) * size.head_dim // tp + 3 * size.feed_forward // tp
    return tokens * per_token * item


def adapter_weights(size: ModelSize, lora: LoRA) -> int:
    """Number of weights of an adapter: of each layer, `rank` times the sum of inputs and outputs. Experts have none."""
    hidden, latent, recurrence = size.hidden, size.latent, size.recurrence
    attention, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    wide = size.plain_channels if size.num_experts else size.feed_forward
    gate = attention if recurrence is not None else 0
    counts = {
        "q_proj": size.attention_layers * (hidden + attention + gate),
        "k_proj": size.attention_layers * (hidden + kv),
        "v_proj": size.attention_layers * (hidden + kv),
        "qkv_proj": size.attention_layers * (hidden + attention + 2 * kv),
        "o_proj": size.attention_layers * (hidden + attention),
        "gate_up_proj": size.plain_layers * (hidden + 2 * wide),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), size.plain_layers * (hidden + wide)),
    }
    if latent is not None:
        counts |= {
            "q_a_proj": size.layers * (hidden + latent.query_rank),
            "q_b_proj": size.layers * (latent.query_rank + attention),
            "kv_a_proj_with_mqa": size.layers * (hidden + latent.compressed),
            "o_proj": size.layers * (hidden + size.heads * latent.value),
        }
    if recurrence is not None:
        counts |= {
            "in_proj_qkv": recurrence.layers * (hidden + recurrence.mixed),
            "in_proj_z": recurrence.layers * (hidden + recurrence.values),
            "out_proj": recurrence.layers * (hidden + recurrence.values),
        }
    query_rank = None if latent is None else latent.query_rank
    layers = adapted_layers(lora.targets, fused=size.fused, recurrent=recurrence is not None, latent=query_rank)
    return lora.rank * sum(counts[name] for name in layers)


def adapter_rank(loras: Iterable[LoRA]) -> int:
    """Rank that vLLM allocates for each of these adapters: the largest one, rounded up to a supported rank."""
    largest = max(lora.rank for lora in loras)
    return next(rank for rank in _RANKS if rank >= largest)


def served_adapter_weights(size: ModelSize, loras: Sequence[LoRA]) -> int:
    """Number of weights that an engine allocates for adapters: each gets the largest rank and all targets."""
    if not loras:
        return 0
    targets = tuple(sorted({target for lora in loras for target in lora.targets}))
    return len(loras) * adapter_weights(size, LoRA(rank=adapter_rank(loras), targets=targets))


def engine_dtype(stored: str, config: EngineConfig, *, is_fixed: bool) -> str:
    """Return the data type in which an engine computes on this machine, for a model that is stored in `stored`.

    `is_fixed` says that vLLM has kernels for this type only: for recurrent layers on CPU, and for quantized weights.
    """
    if config.dtype != "auto":
        return config.dtype
    return "float32" if stored == "bfloat16" and not (is_fixed or visible_gpus() or has_fast_bfloat16()) else stored


def dtype_in_use(folder: Path, config: EngineConfig) -> str:
    """Return the data type in which an engine computes the model in `folder` on this machine."""
    settings = read_json(folder / "config.json")
    is_quantized = "quantization_config" in {**settings, **decoder_config(settings)}
    return engine_dtype(dtype_of(folder), config, is_fixed=is_quantized or is_recurrent(settings))


def item_bytes(dtype: str, config: EngineConfig) -> int:
    """Bytes per number in an engine on a GPU whose model is stored in `dtype`."""
    return 4 if (dtype if config.dtype == "auto" else config.dtype) == "float32" else 2


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Properties of an engine's model that determine its memory."""

    size: ModelSize
    dtype: str = "bfloat16"
    """Data type of the stored model, which the engine uses unless its settings name another."""
    tp: int = 1
    """Number of ranks."""
    adapters: Sequence[LoRA] = ()

    def fixed(self, config: EngineConfig) -> dict[str, int]:
        """Bytes of one rank without its cache, by part. Norms, which every rank holds, are not counted.

        The logits of all sequences that are decoded at once exist in float32, three times while they are sampled.
        """
        item = item_bytes(self.dtype, config)
        logits = 3 * config.max_num_seqs * self.size.vocab * 4
        parts = {
            "weights": self.size.weights * item // self.tp,
            "activations": pass_bytes(self.size, ITERATION_TOKENS, item=item, tp=self.tp) + logits,
            "overhead": OVERHEAD_BYTES,
            "adapters": served_adapter_weights(self.size, self.adapters) * item // self.tp,
        }
        return {name: count for name, count in parts.items() if count}

    def least_cache(self, config: EngineConfig) -> int:
        """Minimum size of the cache in bytes: the configured size, or one conversation."""
        if config.kv_cache_gb is not None:
            return int(config.kv_cache_gb * 1e9)
        context = config.max_model_len or self.size.context
        return kv_bytes(self.size, context, item=item_bytes(self.dtype, config), tp=self.tp)

    def needs(self, config: EngineConfig) -> dict[str, int]:
        """Minimum bytes of one rank, by part."""
        cache = "engine.kv_cache_gb"
        if config.kv_cache_gb is None:
            cache = f"one conversation of {config.max_model_len or self.size.context} tokens"
        return {**self.fixed(config), cache: self.least_cache(config)}


def check_tp(size: ModelSize, tp: int, model: str) -> None:
    """Raise ValueError if `tp` ranks cannot share the heads of `model`. The message lists the possible numbers."""
    if not size.divides(tp):
        possible = [str(ranks) for ranks in range(1, size.heads + 1) if size.divides(ranks)]
        raise ValueError(
            f"engine.tp={tp} does not divide the {size.heads} query and {size.kv_heads} key heads of {model}; "
            f"choose {' or '.join(possible)}"
        )


def check_context(size: ModelSize, max_model_len: int | None, model: str) -> None:
    """Raise ValueError if `model` has fewer positions than `max_model_len`."""
    if max_model_len is not None and max_model_len > size.context and not os.environ.get(_ALLOW_LONG_CONTEXT):
        raise ValueError(
            f"engine.max_model_len={max_model_len} is more than the {size.context} tokens that {model} has positions "
            "for. Lower it, or leave it out"
        )


def check_cache(size: ModelSize, config: EngineConfig, model: str, *, dtype: str, tp: int = 1) -> None:
    """Raise ValueError if the configured cache on CPU does not hold one conversation. `dtype` is the stored model's."""
    if config.kv_cache_gb is None:
        return
    item = 4 if engine_dtype(dtype, config, is_fixed=size.recurrence is not None) == "float32" else 2
    context, per_token = config.max_model_len or size.context, size.kv_per_token(tp) * item
    if (needed := context * per_token) > config.kv_cache_gb * 1e9:
        raise ValueError(
            f"engine.kv_cache_gb={config.kv_cache_gb:g} holds {int(config.kv_cache_gb * 1e9 // per_token)} tokens of "
            f"{model}, and a conversation may have {context}, which take {needed / 1e9:.2g} GB. Raise it, leave it "
            "out, or lower engine.max_model_len"
        )


def check_kernels(folder: Path, model: str, config: EngineConfig, adapters: Collection[object] = ()) -> None:
    """Raise ValueError if vLLM's CPU build lacks a kernel for the model in `folder`, or for its adapters.

    Models with other names for their sizes are left to vLLM.
    """
    try:
        size = ModelSize.of(folder)
    except ModelNotFoundError:
        return
    if size.recurrence is not None:
        _, _, key_size, value_size, _ = recurrent_sizes(read_json(folder / "config.json"))
        dtype = engine_dtype(dtype_of(folder), config, is_fixed=True)
        reasons = {
            f"in {dtype}, only in bfloat16: set engine.dtype": dtype != "bfloat16",
            "with LoRA adapters: leave out Policy.lora": bool(adapters),
            f"with keys of {key_size} and values of {value_size} channels, only with 64 or 128 for both": (
                key_size != value_size or key_size not in _RECURRENT_HEAD_SIZES
            ),
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            raise ValueError(f"{model} has recurrent layers, which vLLM does not compute on CPU {reason}, or use a GPU")
    if (latent := size.latent) is not None and (latent.rank, latent.rotated) != _LATENT_SIZES:
        raise ValueError(
            f"{model} has kv_lora_rank={latent.rank} and qk_rope_head_dim={latent.rotated}, and on CPU vLLM computes "
            f"latent attention (MLA) for {' and '.join(map(str, _LATENT_SIZES))} only. Serve it on a GPU"
        )
    if size.latent is not None and config.enforce_eager is False:
        raise ValueError(
            f"{model} has latent attention (MLA), for which a compiled engine on CPU has returned log-probabilities "
            "that are not numbers. Leave out engine.enforce_eager, or use a GPU"
        )
    head_dim = size.head_dim
    if head_dim not in CPU_HEAD_SIZES and not read_json(folder / "config.json").get("kv_lora_rank"):
        raise ValueError(
            f"{model} has heads of {head_dim} channels, and on CPU vLLM computes attention for "
            f"{', '.join(map(str, CPU_HEAD_SIZES))} only. Take a model with another head_dim, or serve it on a GPU"
        )
