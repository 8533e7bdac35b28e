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
            _require(math.isfinite(getattr(self, name)) and getattr(self, name) >= 0, self, name, "finite and >= 0")
        for name in ("warmup_steps", "max_tokens_per_microbatch", "loss_chunk_tokens", "dp_replicate", "tp"):
            least = {"warmup_steps": 0, "max_tokens_per_microbatch": 2}.get(name, 1)
            _require(getattr(self, name) >= least, self, name, f"at least {least}")
        _require(all(0 <= beta < 1 for beta in self.betas), self, "betas", "in [0, 1)")
        _require(self.max_grad_norm > 0, self, "max_grad_norm", "above 0; inf switches clipping off")
        _require(0 <= self.clip_low <= 1, self, "clip_low", "in [0, 1]; 0.2 is usual")
        _require(0 < self.temperature < math.inf, self, "temperature", "above 0; greedy samples teach nothing")
        _require(self.dp_shard == -1 or self.dp_shard >= 1, self, "dp_shard", "at least 1, or -1 for all ranks left")
        _require(self.threads is None or self.threads >= 1, self, "threads", "at least 1, or None")
        _require(self.collective_timeout_s > 0, self, "collective_timeout_s", "above 0")
        _require(self.compute_dtype in ("bfloat16", "float32"), self, "compute_dtype", "'bfloat16' or 'float32'")
        kinds = ("none", "selective", "full")
        _require(self.activation_checkpointing in kinds, self, "activation_checkpointing", f"one of {kinds}")


def _require(holds: bool, config: LearnerConfig, name: str, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name}={getattr(config, name)!r} of the learner must be {wanted}")
