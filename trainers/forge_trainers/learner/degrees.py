"""Whether the ranks of a learner can share a model, and compute it where they are.

In: the learner's settings, the number of ranks, sizes of the model. Out: an error, or nothing. Waits for nothing.
"""

from __future__ import annotations

from forge_agents.models.sizes import ModelSize
from forge_trainers.learner.config import LearnerConfig


def shards_of(config: LearnerConfig, ranks: int) -> int:
    """Ranks that each weight is sharded over.

    Args:
        config: `dp_shard=-1` takes the ranks that the other degrees leave.
        ranks: All of the learner's.

    Raises:
        ValueError: The degrees do not make so many ranks.
    """
    shard = config.dp_shard if config.dp_shard > 0 else max(1, ranks // (config.dp_replicate * config.tp))
    if shard * config.dp_replicate * config.tp != ranks:
        raise ValueError(
            f"dp_replicate={config.dp_replicate} x dp_shard={config.dp_shard} x tp={config.tp} of the learner does not "
            f"make learner_procs={ranks}; their product must"
        )
    if shard * config.tp % config.ep:
        raise ValueError(
            f"ep={config.ep} does not divide dp_shard x tp = {shard} x {config.tp}; experts are spread over those ranks"
        )
    return shard


def check_degrees(config: LearnerConfig, size: ModelSize) -> None:
    """Raise ValueError where a parallel degree does not divide what it splits."""
    split = {
        "num_attention_heads": (size.heads, "tp", config.tp),
        "num_key_value_heads": (size.kv_heads, "tp", config.tp),
        "vocab_size": (size.vocab, "tp", config.tp),
        "num_experts": (size.num_experts, "ep", config.ep),
    }
    for name, (whole, degree, ranks) in split.items():
        if whole % ranks:
            raise ValueError(
                f"learner.{degree}={ranks} does not divide the model's {name}={whole}; choose a divisor"
            )
    if config.ep > 1 and not size.num_experts:
        raise ValueError(f"learner.ep={config.ep} spreads experts, and the model has none; leave it 1")
    if size.num_experts and config.tp > 1 and config.ep == 1 and config.sequence_parallel:
        raise ValueError(
            f"learner.tp={config.tp} with sequence_parallel and without ep: TorchTitan 0.3.0 then computes wrong "
            "gradients of what goes into experts; set ep, or sequence_parallel=False"
        )


def check_without_gpu(config: LearnerConfig) -> None:
    """Raise ValueError for what cannot run, or helps nobody, without an accelerator."""
    if config.compile:
        raise ValueError("compile=True is for GPUs: on CPU each new row would be compiled anew; leave it False")
    if config.cpu_offload:
        raise ValueError("cpu_offload=True is for GPUs: on CPU the weights are in the host's memory; leave it False")
