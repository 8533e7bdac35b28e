"""Memory estimate of a learner rank, and microbatch and chunk sizes that fit the device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from forge_agents.models import resolve as models
from forge_agents.models.sizes import ModelSize
from forge_agents.runtime.machine import visible_gpus
from forge_agents.serving.memory import OVERHEAD_BYTES, adapter_weights
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.degrees import shards_of
from forge_trainers.learner.plan import LEAST_CHUNK, LEAST_MICROBATCH, LearnerPlan

KEPT_SCORES, MAX_PADDING = 512, 1.35
"""Limits of `forge_trainers.learner.attention` for rows on CPU: number of attention scores per head and position that
are kept for the backward pass, and the factor by which padding may increase them."""
_BYTES = {"bfloat16": 2, "float32": 4}
_LOSS_COPIES = 4
"""Number of float32 copies of a chunk's logits: logits, scaled logits, softmax and gradient. A CPU processes them row
by row and keeps only logits and gradient in bfloat16, a quarter of that."""
DELTA_HEADS = 2
"""Maximum number of key heads of a recurrent layer that are computed together. More take longer, for page faults."""
_DELTA_BYTES = 48
"""Memory of their backward pass, in bytes per position and channel. 35 to 44 measured."""
RECOMPUTED: Sequence[Literal["none", "selective", "full"]] = ("none", "selective", "full")
"""Activation checkpointing modes in order of decreasing memory."""
_MICROBATCHES, _CPU_MICROBATCHES, _CHUNKS = (8192, 4096), (4096,), (1024, 512)
_CPU_OVERHEAD_BYTES = 1_000_000_000
"""Memory of libraries, allocator and matrix-product buffers on a CPU. `OVERHEAD_BYTES` is that of a GPU."""
_FRACTION, _LOGITS_FRACTION = 0.75, 1 / 32
"""Fractions of the device that a learner may use to choose larger microbatches, and its logits for larger chunks."""


def learner_bytes(
    size: ModelSize, config: LearnerPlan, *, ranks: int = 1, sharing: int = 1, on_cpu: bool = False
) -> Mapping[str, int]:
    """Upper estimate of the memory of one rank, in bytes by part.

    Args:
        size: Size of the model.
        config: Settings of the learner.
        ranks: Number of ranks.
        sharing: Number of policies whose adapters share the model. Each has a copy of its adapter and its own moments.
        on_cpu: Whether the learner computes on a CPU.

    Raises:
        ValueError: A parallel degree does not divide the number of ranks.
    """
    config = config.with_memory()
    assert config.max_tokens_per_microbatch is not None and config.loss_chunk_tokens is not None
    item, tp = _BYTES[config.dtype_on(cpu=on_cpu and size.recurrence is None)], config.tp
    shard = shards_of(config, ranks)
    parts = shard * tp
    adapter = 0 if config.lora is None else adapter_weights(size, config.lora)
    persistent = persistent_bytes(size, config, ranks=ranks, sharing=sharing, on_cpu=on_cpu)
    positions = max(config.max_tokens_per_microbatch, min(config.max_sample_tokens or 0, size.context))
    experts, apart = size.experts * size.sparse_layers, config.ep if config.ep > 1 else tp
    if (on_cpu and ranks == 1) or (shard == 1 and config.activation_checkpointing != "full"):
        copied, copied_experts = size.weights - experts, experts
    else:  # two layers at a time, and all weights outside of layers
        copied, copied_experts = 2 * size.dense + size.embedding, 2 * size.experts
    teachers = [ModelSize.of(models.config_folder(name)) for name in dict.fromkeys(config.teachers.values())]
    if shard > 1:  # of a teacher that computes, two layers and the head
        copied += max((2 * teacher.layer + teacher.embedding for teacher in teachers), default=0)
    parts_bytes = {
        **({} if config.cpu_offload else persistent),
        # weights that are gathered for a pass; of distributed experts only those of the rank. With an adapter and
        # without sharding, the base weights are used as they are.
        "compute copy": 0 if adapter and shard == 1 else item * (copied // tp + copied_experts // apart),
        "activations": positions * _activations(size, config, item, on_cpu=on_cpu) // tp,
        # the largest tensors of a layer's backward pass, while all activations are in memory: gradients of the
        # feed-forward products, or what a recurrent layer computes again
        "backward": positions * max(3 * item * size.feed_forward, _DELTA_BYTES * _channels_at_once(size)) // tp,
        "logits": _logits(size, config, config.loss_chunk_tokens, on_cpu=on_cpu),
        "reference": item * size.weights // parts if config.kl_coef > 0 and not (adapter or config.teachers) else 0,
        "teachers": sum(item * teacher.weights // parts for teacher in teachers),
        "overhead": _CPU_OVERHEAD_BYTES if on_cpu else OVERHEAD_BYTES,
    }
    return {name: count for name, count in parts_bytes.items() if count}


def by_memory(
    size: ModelSize, config: LearnerPlan, device_bytes: int, *, ranks: int = 1, sharing: int = 1, on_cpu: bool = False
) -> LearnerPlan:
    """`config` with microbatch and chunk sizes chosen by memory, where `config` does not set them.

    A chunk has 1,024 or 512 tokens if its logits take at most 1/32 of the device. A microbatch has 8,192 or 4,096
    positions, on CPU at most 4,096. Larger ones were not tested. Both require that the learner takes at most 3/4 of the
    device, or no more than for a single sample. Otherwise, and for compiled blocks, the sizes are 256 and 2,048. The
    choice does not depend on the memory that is free at the moment, so a resumed run computes the same bit for bit.

    `device_bytes` is the memory of each rank's device, if no other process uses it, or 0 if it is shared or unknown.
    Other arguments are those of `learner_bytes`.
    """

    def memory(candidate: LearnerPlan) -> int:
        return sum(learner_bytes(size, candidate, ranks=ranks, sharing=sharing, on_cpu=on_cpu).values())

    def logits(chunk: int) -> int:
        return _logits(size, config, chunk, on_cpu=on_cpu)

    limit = max(_FRACTION * device_bytes, memory(config.with_memory()))
    chunk = next((n for n in _CHUNKS if logits(n) <= _LOGITS_FRACTION * device_bytes), LEAST_CHUNK)
    microbatches = () if config.compile else _CPU_MICROBATCHES if on_cpu else _MICROBATCHES
    sizes = itertools.product((*microbatches, LEAST_MICROBATCH), (chunk, LEAST_CHUNK))
    candidates = (config.with_memory(max_tokens_per_microbatch=size, loss_chunk_tokens=n) for size, n in sizes)
    return next(candidate for candidate in candidates if memory(candidate) <= limit)


def _logits(size: ModelSize, config: LearnerPlan, chunk: int, *, on_cpu: bool) -> int:
    copies = _LOSS_COPIES * (2 if config.kl_coef and config.loss_settings.kl == "exact" else 1)
    return copies * chunk * size.vocab * 4 // config.tp // (4 if on_cpu else 1)


def checkpoint_bytes(config: LearnerConfig) -> int:
    """Bytes of one weight in a checkpoint without an adapter: itself, its moments, and a reference that moves."""
    moves = bool(config.kl_coef) and isinstance(config.reference, int)
    return 4 + moment_bytes(config) + moves * _BYTES[config.dtype_on(cpu=not visible_gpus())]


def moment_bytes(config: LearnerConfig) -> int:
    """Bytes of AdamW's two moments of one weight, on the device and in checkpoints."""
    return 2 * _BYTES[config.optimizer_state_dtype]


def persistent_bytes(
    size: ModelSize, config: LearnerPlan, *, ranks: int = 1, sharing: int = 1, on_cpu: bool = False
) -> dict[str, int]:
    """Bytes of one rank between passes, by part. With `cpu_offload` in host memory. Arguments as in `learner_bytes`."""
    adapter = 0 if config.lora is None else adapter_weights(size, config.lora)
    trained, base = adapter or size.weights, 0
    if adapter:  # each policy has a copy of its adapter
        base = _BYTES[config.dtype_on(cpu=on_cpu and size.recurrence is None)] * size.weights + 4 * sharing * adapter
    counts = {
        "weights": base + 4 * trained,
        "gradients": 4 * trained,
        "optimizer": moment_bytes(config) * trained * sharing,
    }
    return {name: count // (shards_of(config, ranks) * config.tp) for name, count in counts.items()}


def published_bytes(size: ModelSize, config: LearnerPlan) -> int:
    """Bytes of all weights that are published to engines, in the learner's compute dtype."""
    return _BYTES[config.dtype_on(cpu=False)] * size.weights


def _channels_at_once(size: ModelSize) -> int:
    """Channels of a recurrent layer that are computed together. 0 without such layers."""
    if (recurrence := size.recurrence) is None:
        return 0
    return recurrence.mixed * min(DELTA_HEADS, recurrence.heads) // recurrence.heads


def _activations(size: ModelSize, config: LearnerPlan, item: int, *, on_cpu: bool) -> int:
    """Bytes per position that are kept for the backward pass, counted from the saved tensors of each model family.

    A norm keeps its input and the normalized input in float32. In the compute dtype: inputs of the query, gate and
    output projections, queries, attention outputs, keys, values, gate, its activation, up projection and their product.
    On CPU also attention probabilities, up to the limit of a row.
    """
    attention, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    norms = 8 * (size.norms * size.hidden + (attention + kv if size.qk_norm else 0))
    # inputs of the experts, their outputs in float32 for the weighted sum, and the shared expert's output for its gate
    routed = (item + 4) * size.experts_per_token * size.hidden if size.experts else 0
    routed += item * size.hidden if size.shared else 0
    products = item * (2 * size.hidden + 3 * attention + 2 * kv + 4 * size.feed_forward) + routed
    longest = min(KEPT_SCORES, config.max_sample_tokens or size.context)
    scores = int(item * size.heads * longest * MAX_PADDING) if on_cpu else 0
    if on_cpu and size.sinks:  # queries, keys and values of long samples with a channel for the sink
        scores += item * (attention + 2 * kv)
    if (latent := size.latent) is not None:  # keys of all heads, values filled up to their size, and latent vectors
        norms += 8 * (latent.query_rank + latent.rank)
        products += item * (latent.query_rank + latent.rank + size.heads * latent.value - attention)
    layer = norms + products + scores + 4 * size.head_dim
    recurrent = 0
    if (recurrence := size.recurrence) is not None:
        layer += 2 * item * attention  # the gate and its sigmoid
        # queries, keys and values, the state's outputs, and in float32 the gate, its activation and the outputs
        outputs = item * (recurrence.mixed + 2 * recurrence.values) + 16 * recurrence.values
        others = norms - 8 * (attention + kv) + item * (2 * size.hidden + 4 * size.feed_forward) + routed
        recurrent = recurrence.layers * (others + outputs - layer)
    layer_input = item * size.hidden
    how = config.activation_checkpointing or "none"
    kept_bytes = {
        "none": layer + recurrent // size.layers,
        "selective": _kept_selectively(size, item, adapter=config.lora is not None),
        "full": layer_input,
    }
    recomputed = layer if how != "none" else 0  # one layer at a time
    return size.layers * kept_bytes[how] + recomputed + 8 * size.hidden


def _kept_selectively(size: ModelSize, item: int, *, adapter: bool) -> int:
    """Bytes per position of a layer under TorchTitan's `SelectiveAC`, which keeps every second matrix product.

    Kept are the layer's input, the attention output, and the first, third and fifth product: fused queries, keys and
    values, gate, and the feed-forward output. With an adapter, two products of the adapter follow each product, so
    nearly all products of the layer are kept. `SelectiveAC` does not count products of experts.
    """
    attention, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    if size.fused:  # of four products, the first and the third
        return item * (size.hidden + attention + (2 if adapter else 1) * (attention + 2 * kv + 2 * size.feed_forward))
    if (latent := size.latent) is not None:  # in the order of computation, without those of routed experts
        wide = (size.plain_layers * size.plain_channels + size.sparse_layers * size.shared) // size.layers
        expanded = size.heads * (size.head_dim - latent.rotated + latent.value)
        others = latent.query_rank + latent.compressed if latent.query_rank else attention + expanded
        return item * (size.hidden + attention + (2 if adapter else 1) * (others + wide + size.hidden))
    wide = size.feed_forward + size.hidden if size.plain_layers else 0
    if (recurrence := size.recurrence) is not None:  # of eight products, those of output and up projection; measured
        # of a shared expert, those of gate and output, after attention that of the up projection
        after, wide = (size.shared + 2 * size.hidden, size.shared) if size.shared else (wide, wide)
        others = recurrence.layers * (size.hidden + recurrence.values + (2 if adapter else 1) * after)
        gated = attention + (2 if adapter else 1) * (2 * attention + wide)  # of queries and gates
        gated = size.attention_layers * (size.hidden + 2 * kv + gated)
        return item * (others + gated) // size.layers
    others = size.hidden if size.sinks else 0  # of the output projection, whose bias makes it another operation
    return item * (size.hidden + attention + 2 * kv + others + (2 if adapter else 1) * (attention + wide))
