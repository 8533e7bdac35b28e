"""DeepSeek V3: keys and values that are computed from one latent vector per position (MLA, arXiv 2405.04434).

TorchTitan computes keys and values of all heads, as in training. Engines cache the latent vectors.

Axes: L positions of the row, N heads, H size of a query and a key, V size of a value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from forge_agents.models import families
from forge_trainers.learner import titan
from forge_trainers.learner.lora import is_adapter

_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors, whatever `rms_norm_eps` is, as in transformers. vLLM takes `rms_norm_eps`."""


class Attention(titan.LatentAttention):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's attention with a given factor on the scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.LatentAttention.Config):  # type: ignore[misc]  # torchtitan is untyped
        """As TorchTitan's. `mscale` is not used."""

        scale: float

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.softmax_scale = config.scale


@titan.with_own_config
class VarlenAttention(titan.VarlenAttention):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's inner attention on GPU. FlashAttention 2 needs values of the size of keys, so zeros fill them up."""

    def forward(self, q_1LNH: torch.Tensor, k_1LNH: torch.Tensor, v_1LNV: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attention of a row, [1, L, N, V]."""
        size = v_1LNV.shape[-1]
        v_1LNH = F.pad(v_1LNV, (0, q_1LNH.shape[-1] - size))
        out_1LNH: torch.Tensor = super().forward(q_1LNH, k_1LNH, v_1LNH, **options)
        return out_1LNH[..., :size]


def attention(config: Mapping[str, Any], inner: Any, *, rope: Any, norm: Any, linear: Any) -> Any:
    """Configuration of a layer's attention. `norm` and `linear` return those of modules of a given size."""
    dim, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rotated, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries, query_rank = heads * (nope + rotated), families.query_rank(config) or 0
    return Attention.Config(
        n_heads=heads, dim=dim, q_lora_rank=query_rank, kv_lora_rank=rank, qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated, v_head_dim=value, rope=rope, scale=_scale(config),
        inner_attention=VarlenAttention.Config() if type(inner) is titan.VarlenAttention.Config else inner,
        wq=None if query_rank else linear(dim, queries),
        wq_a=linear(dim, query_rank) if query_rank else None,
        wq_b=linear(query_rank, queries) if query_rank else None,
        wkv_a=linear(dim, rank + rotated),
        wkv_b=linear(rank, heads * (nope + value)),
        wo=linear(heads * value, dim),
        q_norm=replace(norm(query_rank or 1), eps=_EPSILON),  # not built if there is no latent vector of queries
        kv_norm=replace(norm(rank), eps=_EPSILON),
    )  # fmt: skip


def _scale(config: Mapping[str, Any]) -> float:
    """Factor on the scores of attention. YaRN makes it larger, in addition to what it does to cosines and sines."""
    rope = families.rope_of(config)
    scale = float(families.head_dim_of(config) ** -0.5)
    if rope["rope_type"] != "yarn" or rope["factor"] <= 1:
        return scale
    return scale * (0.1 * (rope.get("mscale_all_dim") or 0) * math.log(rope["factor"]) + 1.0) ** 2


class StateDictAdapter(titan.DeepSeekV3StateDictAdapter):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's state-dict adapter without LoRA adapters."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors by the names of the checkpoint."""
        tensors = {name: value for name, value in state_dict.items() if not is_adapter(name)}
        result: dict[str, Any] = super().to_hf(tensors)
        return result
