"""Gemma 3: norms before and after each sublayer, scaled embeddings, and GELU in the feed-forward. D: hidden size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from forge_trainers.learner import lean, titan


@titan.with_own_config
class RMSNorm(titan.RMSNorm):  # type: ignore[misc]  # torchtitan is untyped
    """RMSNorm with the factor ``1 + weight``, not rounded to the weights' dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalized `x`, of the same shape and dtype."""
        weight_D = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight_D, self.eps).to(x.dtype)


@titan.with_own_config
class LeanRMSNorm(lean.RMSNorm):
    """The same for CPU, with less memory traffic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalized `x`, of the same shape and dtype."""
        return lean.rms_norm(x, 1.0 + self.weight.float(), self.eps)


@titan.with_own_config
class FeedForward(titan.FeedForward):  # type: ignore[misc]  # torchtitan is untyped
    """``W2 (gelu(W1 x) * W3 x)``, with the tanh approximation of GELU (GEGLU, arXiv 2002.05202, eq. 6)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, of the shape and dtype of `x`."""
        output: torch.Tensor = self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))
        return output


class TransformerBlock(titan.Qwen3TransformerBlock):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's block with norms of the outputs of attention and feed-forward, and another scale of the scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Qwen3TransformerBlock.Config):  # type: ignore[misc]  # torchtitan is untyped
        """As ``Qwen3TransformerBlock.Config``."""

        attention_post_norm: Any
        ffn_post_norm: Any
        scale: float
        """Factor on the scores of attention."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.attention_post_norm = config.attention_post_norm.build()
        self.ffn_post_norm = config.ffn_post_norm.build()
        self.attention.scaling = config.scale

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The block's output, of the shape and dtype of `x`."""
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), attention_masks, positions))
        output: torch.Tensor = x + self.ffn_post_norm(self.feed_forward(self.ffn_norm(x)))
        return output


class Model(titan.Qwen3Model):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's decoder with embeddings times the square root of D."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Qwen3Model.Config):  # type: ignore[misc]  # torchtitan is untyped
        """As ``Qwen3Model.Config``."""

        def update_from_config(self, *, config: Any, **options: Any) -> None:
            """Shard the norms of outputs as those of inputs."""
            titan.Qwen3Model.Config.update_from_config(self, config=config, **options)
            for layer in self.layers:
                for norm in (layer.attention_post_norm, layer.ffn_post_norm):
                    norm.sharding_config = layer.attention_norm.sharding_config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tok_embeddings.register_forward_hook(_scaled)


def _scaled(_module: object, _inputs: object, rows: torch.Tensor) -> torch.Tensor:
    """Embeddings times the square root of D. The factor is rounded to their dtype, as in transformers and vLLM."""
    return rows * float(torch.tensor(rows.shape[-1] ** 0.5, dtype=rows.dtype))
