"""Layers of Phi-3, whose checkpoints stack the weights of several layers.

The weights keep the names and the order of the checkpoint, so that an adapter fits the layers of vLLM and PEFT.

Axes: B and L batch and positions, D hidden size, N query heads, K key heads, H head size, F intermediate size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from forge_trainers.learner import titan
from forge_trainers.learner.lean import gated_up


@titan.with_own_config
class FusedQKV(titan.FusedQKVLinear):  # type: ignore[misc]  # torchtitan is untyped
    """Queries, keys and values as one product. The weight, [(N + 2 K) H, D], holds the three weights one by one.

    TorchTitan's class has the order of key heads instead, and state dicts with three weights.
    """

    @classmethod
    def of(cls, config: Any) -> Any:
        """Configuration of this class from one of ``FusedQKVLinear``."""
        return cls.Config(
            head_dim=config.head_dim, n_heads=config.n_heads, n_kv_heads=config.n_kv_heads, wqkv=config.wqkv
        )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._heads = [config.n_heads, config.n_kv_heads, config.n_kv_heads]

    def forward(self, x_BLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, L, N, H], keys and values [B, L, K, H]."""
        heads = self.wqkv(x_BLD).unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split(self._heads, dim=-2)
        return query, key, value

    @staticmethod
    def _split_qkv_on_save(*_: object) -> None:
        """Leave the weight as it is in state dicts."""

    @staticmethod
    def _merge_qkv_on_load(*_: object) -> None:
        """Leave the weight as it is in state dicts."""


@titan.with_own_config
class FusedFeedForward(titan.FeedForward):  # type: ignore[misc]  # torchtitan is untyped
    """SwiGLU with gate and up projection as one product. The weight, [2 F, D], holds the gate's first.

    It is `w1` of the configuration. `w3`, which TorchTitan's functions need, is not used.
    """

    @classmethod
    def of(cls, config: Any) -> Any:
        """Configuration of this class from one of ``FeedForward``."""
        fused = replace(config.w1, out_features=2 * config.w1.out_features)
        return cls.Config(w1=fused, w2=config.w2, w3=config.w3)

    def __init__(self, config: Any) -> None:
        titan.Module.__init__(self)
        self.w13, self.w2 = config.w1.build(), config.w2.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, of the shape and dtype of `x`."""
        gate, up = self.w13(x).chunk(2, dim=-1)
        output: torch.Tensor = self.w2(gated_up(gate, up))
        return output
