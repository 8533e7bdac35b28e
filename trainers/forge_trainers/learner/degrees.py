"""Checks of a learner's parallel degrees against the number of ranks, the model and the device."""

from __future__ import annotations

import math

from forge_agents.models.sizes import ModelSize
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.plan import LearnerPlan


def shards_of(config: LearnerConfig, ranks: int) -> int:
    """Return the number of ranks over which each weight is sharded.

    Raises:
        ValueError: A parallel degree does not divide the number of ranks.
    """
    degrees = {"dp_replicate": config.dp_replicate, "tp": config.tp}
    if ranks % math.prod(degrees.values()):
        product = " * ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)
        raise ValueError(
            f"{product} of the learner does not divide learner_procs={ranks}. Choose a divisor, or change learner_procs"
        )
    per_replica = ranks // config.dp_replicate
    if per_replica % config.ep:
        share = f" / dp_replicate={config.dp_replicate}" if config.dp_replicate > 1 else ""
        raise ValueError(
            f"ep={config.ep} of the learner does not divide learner_procs={ranks}{share}. Choose a divisor, or change "
            "learner_procs"
        )
    return per_replica // config.tp


def check_degrees(config: LearnerPlan, size: ModelSize) -> None:
    """Raise ValueError if a parallel degree does not divide the dimension that it splits, or does not fit the model."""
    dimensions = {
        "num_attention_heads": (size.heads, "tp", config.tp),
        "num_key_value_heads": (size.kv_heads, "tp", config.tp),
        "vocab_size": (size.vocab, "tp", config.tp),
        "num_experts": (size.num_experts, "ep", config.ep),
    }
    for name, (whole, degree, ranks) in dimensions.items():
        if whole % ranks:
            raise ValueError(f"learner.{degree}={ranks} does not divide the model's {name}={whole}. Choose a divisor")
    unsupported = {
        "Phi: a part of a fused weight is no part of each of its layers": size.fused,
        "gpt-oss: attention on a part of the heads was not tested": size.sinks,
        "LoRA on latent attention: TorchTitan has no adapters of layers that every rank holds": (
            size.latent is not None and config.lora is not None
        ),
        "Qwen3.5: a part of a recurrent layer's weight is no part of each of its queries, keys and values": (
            size.recurrence is not None
        ),
    }
    if reason := next((reason for reason, holds in unsupported.items() if holds and config.tp > 1), ""):
        raise ValueError(
            f"learner.tp={config.tp} is not supported for {reason}. Leave it at 1; weights are sharded over "
            "learner_procs"
        )
    if config.compile and size.recurrence is not None:
        raise ValueError(
            "learner.compile=True is not supported for Qwen3.5: torch.compile does not trace its recurrence. Leave it "
            "at False"
        )
    if config.ep > 1 and not size.num_experts:
        raise ValueError(f"learner.ep={config.ep} spreads experts, and the model has none. Leave it at 1")
    if size.num_experts and config.tp > 1 and config.ep == 1:
        raise ValueError(
            f"learner.tp={config.tp} without ep is not supported for a mixture of experts: "
            "TorchTitan 0.3.0 computes wrong gradients of the experts' inputs. Set learner.ep"
        )


def check_without_gpu(config: LearnerConfig) -> None:
    """Raise ValueError for settings that do not work, or have no effect, without an accelerator."""
    if config.compile:
        raise ValueError("compile=True is for GPUs: on CPU every new row would be compiled. Leave it at False")
    if config.cpu_offload:
        raise ValueError("cpu_offload=True is for GPUs: on CPU, weights are in host memory anyway. Leave it at False")
