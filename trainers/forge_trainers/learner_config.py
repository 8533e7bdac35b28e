"""How the learner learns: its settings.

In: the user's choices. Out: frozen, checked dataclasses. Waits for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """One learner."""

    model: str = ""
    """Folder of a Hugging Face model: config.json and safetensors. The trainer fills it in."""
    lr: float = 1e-6
    """AdamW's learning rate after warm-up; 0 computes everything and changes nothing."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to `lr`; constant afterwards."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decay rates."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this L2 norm over all parameters."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of activations and matrix products. Weights, gradients' sum and optimiser state are float32."""
    max_tokens_per_microbatch: int = 2048
    """Most positions in one forward pass of one rank, and so the longest sample."""
    clip_low: float = 0.2
    """Lower clip range of the probability ratio (arXiv 2402.03300), in [0, 1]."""
    clip_high: float = 0.28
    """Upper clip range (DAPO's clip-higher, arXiv 2503.14476), >= 0."""
    kl_coef: float = 0.0
    """Weight of the k3 divergence from the frozen start model; above 0 a second copy of the model is held."""
    temperature: float = 1.0
    """The sampler's temperature; learner logprobs are taken at the same one. Above 0. The trainer fills it in."""
    share_prefixes: bool | None = None
    """Compute the common prompt of siblings once. None: yes on CPU, no on GPU. On GPU it is refused: attention there is
    TorchTitan's variable-length kernel, which takes no shared keys, and what a sharing one gains is not measured."""
    loss_chunk_tokens: int = 256
    """Loss tokens whose logits are held at a time."""
    seed: int = 0
    """Seed of the process's random numbers."""
    threads: int | None = None
    """CPU threads of each rank; None: all cores over the ranks."""
    dp_replicate: int = 1
    """Data-parallel replicas that hold the same shards."""
    dp_shard: int = -1
    """Data-parallel ranks over which weights are sharded; -1: all that the other degrees leave."""
    tp: int = 1
    """Tensor-parallel ranks; must divide the model's query and key heads."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes instead of remembering."""
    dump_folder: str = ""
    """Where TorchTitan writes debugging output; empty: a temporary folder."""
    collective_timeout_s: float = 300.0
    """Seconds after which ranks give up on each other."""

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "clip_high", "kl_coef"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value} must be finite and >= 0")
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low={self.clip_low} is outside [0, 1]; 0.2 is usual")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature={self.temperature} must be above 0; greedy samples cannot be learned from")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm} must be above 0; inf switches clipping off")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must lie in [0, 1)")
        minima = {"warmup_steps": 0, "max_tokens_per_microbatch": 2, "loss_chunk_tokens": 1, "tp": 1, "dp_replicate": 1}
        for name, least in minima.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.dp_shard != -1 and self.dp_shard < 1:
            raise ValueError(f"dp_shard={self.dp_shard} must be at least 1, or -1 for all remaining ranks")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1, or None")
        if not self.collective_timeout_s > 0:
            raise ValueError(f"collective_timeout_s={self.collective_timeout_s} must be above 0")
        if self.compute_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"compute_dtype={self.compute_dtype!r}; choose 'bfloat16' or 'float32'")
        if self.activation_checkpointing not in ("none", "selective", "full"):
            raise ValueError(
                f"activation_checkpointing={self.activation_checkpointing!r}; choose 'none', 'selective' or 'full'"
            )
