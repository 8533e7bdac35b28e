"""What an engine takes of its device's memory, how large its cache of keys and values is, and what it cannot serve.

In: sizes of a model, an engine's limits. Out: bytes. Waits for nothing but the disk.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from forge_agents.errors import ModelNotFoundError
from forge_agents.models.resolve import read_json
from forge_agents.models.sizes import ModelSize
from forge_agents.policy import LoRA
from forge_agents.serving.config import EngineConfig

OVERHEAD_BYTES = 2_500_000_000
"""Of a process on a GPU, beside tensors: CUDA's context, libraries' workspaces, CUDA graphs. Assumed, not measured."""
USUAL_SHARE = 0.9
"""Of a GPU that an engine has alone."""
ITERATION_TOKENS = 8192
"""Most that vLLM computes at once on a GPU, where nothing else is said."""
_USUAL_KV_BYTES = 1_000_000_000
_BLOCK = 128
"""Tokens of the largest block that vLLM's cache is made of."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters, as vLLM makes room for them."""
CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Channels of a head that vLLM 0.32's attention computes on CPU: those that its kernels are compiled for. Its own list,
`CPUAttentionBackend.get_supported_head_sizes`, is never asked, and leaves out 48."""
_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""With it vLLM takes more than a model's positions."""


def kv_bytes(size: ModelSize, tokens: int, *, item: int = 2, tp: int = 1) -> int:
    """Bytes of cache that hold `tokens` on one of `tp` ranks, whole blocks and the spare one that vLLM keeps."""
    blocks = math.ceil(tokens / _BLOCK) + 2
    return blocks * _BLOCK * size.kv_per_token(tp) * item


def usual_kv_bytes(size: ModelSize, *, context: int, sequences: int, item: int = 2, tp: int = 1) -> int:
    """Cache of an engine whose memory is the host's: a conversation as long as can be, and room for more up to 1 GB."""
    most = kv_bytes(size, context * sequences, item=item, tp=tp)
    return max(kv_bytes(size, context, item=item, tp=tp), min(_USUAL_KV_BYTES, most))


def fixed_bytes(size: ModelSize, *, sequences: int, item: int = 2, tp: int = 1) -> Mapping[str, int]:
    """What one of `tp` ranks of an engine takes beside its cache, by part.

    Args:
        sequences: Decoded at once: their logits are there whole, in float32, and twice more while they are sampled.
        tp: Ranks of the engine. Norms, which all of them hold, do not count.
    """
    return {
        "weights": size.weights * item // tp,
        "activations": pass_bytes(size, ITERATION_TOKENS, item=item, tp=tp) + 3 * sequences * size.vocab * 4,
        "overhead": OVERHEAD_BYTES,
    }


def pass_bytes(size: ModelSize, tokens: int, *, item: int = 2, tp: int = 1) -> int:
    """What one forward pass over so many tokens holds beside weights, cache and logits."""
    between = size.hidden * 4 + (size.heads + 2 * size.kv_heads) * size.head_dim // tp + 3 * size.feed_forward // tp
    return tokens * between * item


def adapter_weights(size: ModelSize, lora: LoRA) -> int:
    """Weights of an adapter. Experts have none."""
    attention, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    between = size.plain_channels if size.num_experts else size.feed_forward
    ends = {
        "q_proj": size.hidden + attention,
        "k_proj": size.hidden + kv,
        "v_proj": size.hidden + kv,
        "o_proj": size.hidden + attention,
    }
    of_layers = (
        size.layers * ends[name] if name in ends else size.plain_layers * (size.hidden + between)
        for name in lora.targets
    )
    return lora.rank * sum(of_layers)


def adapter_rank(loras: Iterable[LoRA]) -> int:
    """Of the room that an engine has for each of its adapters: the largest one's, as vLLM rounds it."""
    largest = max(lora.rank for lora in loras)
    return next(rank for rank in _RANKS if rank >= largest)


def served_adapter_weights(size: ModelSize, loras: Sequence[LoRA]) -> int:
    """Weights that an engine has room for beside its model: for each adapter as if it had what any of them has."""
    if not loras:
        return 0
    targets = tuple(sorted({target for lora in loras for target in lora.targets}))
    return len(loras) * adapter_weights(size, LoRA(rank=adapter_rank(loras), targets=targets))


def item_bytes(dtype: str, config: EngineConfig) -> int:
    """Bytes of a number in an engine whose model is stored in `dtype`."""
    return 4 if (dtype if config.dtype == "auto" else config.dtype) == "float32" else 2


def engine_bytes(
    size: ModelSize, config: EngineConfig, *, dtype: str, tp: int, adapters: Sequence[LoRA]
) -> dict[str, int]:
    """Bytes of one of `tp` ranks of an engine without its cache, by part.

    Args:
        size: Of its model.
        config: Its settings.
        dtype: What the model is stored in.
        tp: Ranks.
        adapters: That it serves beside.
    """
    item = item_bytes(dtype, config)
    found = fixed_bytes(size, sequences=config.max_num_seqs, item=item, tp=tp)
    beside = served_adapter_weights(size, adapters) * item // tp
    return {**found, **({"adapters": beside} if beside else {})}


def check_tp(size: ModelSize, tp: int, model: str) -> None:
    """See that `tp` ranks of an engine can share the heads of `model`.

    Raises:
        ValueError: They cannot; the message says how many can.
    """
    if not size.divides(tp):
        could = [str(ranks) for ranks in range(1, size.heads + 1) if size.divides(ranks)]
        raise ValueError(
            f"engine.tp={tp} does not divide the {size.heads} query and {size.kv_heads} key heads of {model}; "
            f"choose {' or '.join(could)}"
        )


def check_context(size: ModelSize, max_model_len: int | None, model: str) -> None:
    """See that `model` can read so many tokens.

    Raises:
        ValueError: Its positions end before.
    """
    if max_model_len is not None and max_model_len > size.context and not os.environ.get(_LONGER):
        raise ValueError(
            f"engine.max_model_len={max_model_len} is more than the {size.context} tokens that {model} has positions "
            "for; lower it, or leave it out"
        )


def check_cache(size: ModelSize, config: EngineConfig, model: str, *, dtype: str, tp: int = 1) -> None:
    """See that the cache that settings ask for holds a conversation; vLLM rounds up to blocks besides.

    Args:
        dtype: That `model` is stored in.

    Raises:
        ValueError: It does not.
    """
    if config.kv_cache_gb is None:
        return
    context, each = config.max_model_len or size.context, size.kv_per_token(tp) * item_bytes(dtype, config)
    if (needed := context * each) > config.kv_cache_gb * 1e9:
        raise ValueError(
            f"engine.kv_cache_gb={config.kv_cache_gb:g} holds {int(config.kv_cache_gb * 1e9 // each)} tokens of "
            f"{model}, and a conversation may have {context}, which take {needed / 1e9:.2g} GB; raise it, leave it "
            "out, or lower engine.max_model_len"
        )


def check_head_size(folder: Path, model: str) -> None:
    """See that vLLM's attention on CPU computes heads as large as those of `model`; on GPUs it has other attention.

    A model that says its sizes otherwise, or whose keys have a size of their own (MLA), is left to vLLM.

    Args:
        folder: With its config.json.

    Raises:
        ValueError: It does not; the message says for which sizes.
    """
    try:
        head_dim = ModelSize.of(folder).head_dim
    except ModelNotFoundError:
        return
    if head_dim not in CPU_HEAD_SIZES and not read_json(folder / "config.json").get("kv_lora_rank"):
        raise ValueError(
            f"{model} has heads of {head_dim} channels, and on CPU vLLM computes attention for "
            f"{', '.join(map(str, CPU_HEAD_SIZES))} only; take a model with another head_dim, or serve it on a GPU"
        )
