"""What one rank of a learner takes of its device's memory, and what it may take where nobody said so.

In: sizes of a model, the learner's settings, bytes of a device. Out: bytes by part, settings. Waits for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from forge_agents.models.sizes import ModelSize
from forge_agents.serving.memory import OVERHEAD_BYTES, adapter_weights
from forge_trainers.learner.config import LEAST_CHUNK, LEAST_MICROBATCH, LearnerConfig
from forge_trainers.learner.degrees import shards_of

KEPT_SCORES, MAX_PADDING = 512, 1.35
"""Scores of attention a head that a row on CPU keeps for the backward pass, for each of its positions, and by how much
they may be padded: `forge_trainers.learner.attention` holds to both."""
_BYTES = {"bfloat16": 2, "float32": 4}
_LOSS_COPIES = 4
"""Of a chunk's logits of the rank's part of the vocabulary, in float32: as computed, scaled, their softmax, their
gradient. On a CPU, which goes through them row by row, logits and gradient in bfloat16: a quarter of that."""
RECOMPUTED: Sequence[Literal["none", "selective", "full"]] = ("none", "selective", "full")
"""What the backward pass makes again where memory decides: more, one after the other."""
_MICROBATCHES, _CPU_MICROBATCHES, _CHUNKS = (8192, 4096), (4096,), (1024, 512)
_CPU_OVERHEAD_BYTES = 1_000_000_000
"""Libraries, and what allocator and products keep; `OVERHEAD_BYTES` is a GPU's."""
_SHARE, _LOGITS_SHARE = 0.75, 1 / 32
"""Of a device that a learner may take for larger passes, and its logits for larger chunks."""


def learner_bytes(
    size: ModelSize, config: LearnerConfig, *, ranks: int = 1, sharing: int = 1, on_cpu: bool = False
) -> Mapping[str, int]:
    """Bytes of one of `ranks`, at most, by part.

    Args:
        size: Of the model.
        config: The learner's; `dp_shard=-1` takes the ranks that the other degrees leave.
        ranks: All of them.
        sharing: Policies whose adapters take turns: each is kept beside the one that is in the model, with its moments.
        on_cpu: Of a host, not of a GPU.

    Raises:
        ValueError: The degrees do not make so many ranks.
    """
    config = config.with_memory()
    assert config.max_tokens_per_microbatch is not None and config.loss_chunk_tokens is not None
    item, tp = _BYTES[config.compute_dtype], config.tp
    shard = shards_of(config, ranks)
    parts = shard * tp
    adapter = 0 if config.lora is None else adapter_weights(size, config.lora)
    positions = max(config.max_tokens_per_microbatch, min(config.max_sample_tokens or 0, size.context))
    trained = adapter or size.weights
    host = config.cpu_offload
    held = {
        "weights": (4 * (1 + sharing) * adapter + item * size.weights if adapter else 4 * trained) // parts,
        "gradients": 4 * trained // parts,
        "optimizer": moment_bytes(config) * trained * sharing // parts,
    }
    experts, apart = size.experts * size.sparse_layers, config.ep if config.ep > 1 else tp
    if (on_cpu and ranks == 1) or (shard == 1 and config.activation_checkpointing != "full"):
        copied, copied_experts = size.weights - experts, experts
    else:  # two layers at a time, and what is no layer's
        copied, copied_experts = 2 * size.dense + size.embedding, 2 * size.experts
    found = {
        **(dict.fromkeys(held, 0) if host else held),
        # the weights that a pass computes with, whole over the ranks that shard them, of experts that are spread the
        # rank's own; an adapter's base is held as such
        "compute copy": 0 if adapter and shard == 1 else item * (copied // tp + copied_experts // apart),
        "activations": positions * _activations(size, config, item, on_cpu=on_cpu) // tp,
        "backward": positions * _gradients(size, config, item) // tp,
        "logits": _logits(size, config, config.loss_chunk_tokens, on_cpu=on_cpu),
        "reference": item * size.weights // parts if config.kl_coef > 0 and not adapter else 0,
        "overhead": _CPU_OVERHEAD_BYTES if on_cpu else OVERHEAD_BYTES,
    }
    return {name: count for name, count in found.items() if count}


def by_memory(
    size: ModelSize,
    config: LearnerConfig,
    device_bytes: int,
    *,
    ranks: int = 1,
    sharing: int = 1,
    on_cpu: bool = False,
) -> LearnerConfig:
    """`config` with passes and chunks of the head as large as memory allows, where it leaves them to that.

    Chunks are of 1,024 or 512 tokens where their logits take at most 1/32 of the device; passes of 8,192 or 4,096
    positions; both where the learner then takes at most 3/4 of the device, or no more than it must for one sample. Else
    they are of 256 and 2,048, as are passes of compiled blocks, whose rows are padded to a share of that. What is free
    at the moment does not count, so that a run that goes on later computes the same, bit for bit.

    Args:
        size: Of the model.
        config: The learner's.
        device_bytes: Of each rank's device, which it has alone; 0: it has not, or nobody knows.
        ranks: All of the learner's.
        sharing: As for `learner_bytes`.
        on_cpu: As for `learner_bytes`; passes are of 4,096 at most; longer ones were not tried there.
    """
    def taken(one: LearnerConfig) -> int:
        return sum(learner_bytes(size, one, ranks=ranks, sharing=sharing, on_cpu=on_cpu).values())

    def logits(chunk: int) -> int:
        return _logits(size, config, chunk, on_cpu=on_cpu)

    most = max(_SHARE * device_bytes, taken(config.with_memory()))
    chunk = next((n for n in _CHUNKS if logits(n) <= _LOGITS_SHARE * device_bytes), LEAST_CHUNK)
    rooms = () if config.compile else _CPU_MICROBATCHES if on_cpu else _MICROBATCHES
    sizes = itertools.product((*rooms, LEAST_MICROBATCH), (chunk, LEAST_CHUNK))
    tried = (config.with_memory(max_tokens_per_microbatch=room, loss_chunk_tokens=n) for room, n in sizes)
    return next(found for found in tried if taken(found) <= most)


def _logits(size: ModelSize, config: LearnerConfig, chunk: int, *, on_cpu: bool) -> int:
    return _LOSS_COPIES * chunk * size.vocab * 4 // config.tp // (4 if on_cpu else 1)


def moment_bytes(config: LearnerConfig) -> int:
    """Bytes of AdamW's two moments of one weight, on the device and in a checkpoint."""
    return 2 * _BYTES[config.optimizer_state_dtype]


def offloaded_bytes(size: ModelSize, config: LearnerConfig) -> int:
    """Bytes of weights, gradients and moments that all ranks of a learner with `cpu_offload` keep in their hosts."""
    if config.lora is not None:
        return _BYTES[config.compute_dtype] * size.weights
    return (4 + 4 + moment_bytes(config)) * size.weights


def published_bytes(size: ModelSize, config: LearnerConfig) -> int:
    """Bytes of all weights on their way to engines, in what the learner computes in."""
    return _BYTES[config.compute_dtype] * size.weights


def _gradients(size: ModelSize, config: LearnerConfig, item: int) -> int:
    """Bytes a position of the last layer's widest gradients, while all activations are there.

    Of its feed-forward products; or of attention, in the kernel's bfloat16, where prefixes are shared
    (`forge_trainers.learner.prefixes`): of its output and queries, and of samples' own positions both once more, with
    queries and outputs; of keys and values, and of prefixes' both once more, with keys and values.
    """
    products = 3 * item * size.feed_forward
    shared = 2 * (6 * size.heads + 6 * size.kv_heads) * size.head_dim if config.share_prefixes else 0
    return max(products, shared)


def _activations(size: ModelSize, config: LearnerConfig, item: int, *, on_cpu: bool) -> int:
    """Bytes that a position leaves for the backward pass; what is counted was seen in the saved tensors of each family.

    Each norm keeps what it was given and what it made of that in float32. In the type of the products: what goes into
    queries, gate and the attention's output; queries and what attention makes of them; keys and values; gate, its
    activation, up and their product. On CPU also probabilities of attention, as many as a row may keep.
    """
    attention, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    norms = 8 * (2 * size.hidden + (attention + kv if size.qk_norm else 0))
    routed = 2 * size.experts_per_token * size.hidden if size.experts else 0
    products = item * (2 * size.hidden + 3 * attention + 2 * kv + 4 * size.feed_forward + routed)
    longest = min(KEPT_SCORES, config.max_sample_tokens or size.context)
    scores = int(item * size.heads * longest * MAX_PADDING) if on_cpu else 0
    layer = norms + products + scores + 4 * size.head_dim
    least = item * size.hidden  # what a layer is given
    how = config.activation_checkpointing or "none"
    kept = {
        "none": layer,
        "selective": _kept_selectively(size, item, adapter=config.lora is not None),
        "full": least,
        "memory_budget": int(least + config.memory_budget * (layer - least)),
    }
    again = layer if how != "none" else 0  # of the layer that is recomputed
    return size.layers * kept[how] + again + 8 * size.hidden


def _kept_selectively(size: ModelSize, item: int, *, adapter: bool) -> int:
    """Bytes that a position leaves in a layer of which TorchTitan's `SelectiveAC` keeps every second product.

    They are what the layer is given, what attention makes, and the first, third and fifth product: queries, keys and
    values in one, gate, and what the layer adds. With an adapter two of its own follow each, so that nearly all of them
    are first or third. Products of experts are none of those that it knows.
    """
    attention, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    wide = size.feed_forward + size.hidden if size.plain_layers else 0
    return item * (size.hidden + attention + 2 * kv + (2 if adapter else 1) * (attention + wide))
