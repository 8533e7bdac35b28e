"""Qwen3.5 for text: layers with a recurrent state (Gated DeltaNet), and layers with gated attention between them.

Mixtures have experts whose gate and up projection are one weight, and an expert for all tokens.

TorchTitan's layers need the package fla, so a GPU, and split weights that an adapter must have as one.

Axes: L positions of the row, D hidden size, N query heads, V value heads, H and J sizes of a key and a value; R tokens
routed to the experts of this rank, E experts, F hidden size of an expert, G = 2 F, gates before values.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from forge_trainers.learner import titan
from forge_trainers.learner.delta import DeltaPlan, mix
from forge_trainers.learner.lean import FeedForward, gated_up

_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj")
WEIGHTS = (*(f"{part}.weight" for part in _PARTS), "A_log", "dt_bias")
"""Weights of a recurrent layer's attention."""
EXPERT_WEIGHTS = ("w13_EGD", "w2_EDF")
"""Weights of the experts."""
STACKS = dict(
    zip((f"routed_experts.inner_experts.{name}" for name in EXPERT_WEIGHTS),
        ("experts.gate_up_proj", "experts.down_proj"), strict=True)
)  # fmt: skip
"""Names of these weights in a mixture, and in that of a checkpoint."""
SHARED = {
    "gate.weight": "router.gate.weight",
    "shared_expert.gate_proj.weight": "shared_experts.w1.weight",
    "shared_expert.up_proj.weight": "shared_experts.w3.weight",
    "shared_expert.down_proj.weight": "shared_experts.w2.weight",
    "shared_expert_gate.weight": "shared_experts.gate.weight",
}
"""Names of the other weights of a mixture in a checkpoint, and in the model."""


class Masks(NamedTuple):
    """Plans of a row for the two kinds of layers."""

    attention: Any
    delta: DeltaPlan


@titan.with_own_config
class GatedAttention(titan.GQAttention):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's attention with outputs times the sigmoid of a gate, which the query projection computes as well.

    `qkv_linear` has two query heads for each, the second for the gate.
    """

    @classmethod
    def of(cls, config: Any) -> Any:
        """Configuration of this class from one of ``GQAttention``."""
        return cls.Config(**{field.name: getattr(config, field.name) for field in fields(titan.GQAttention.Config)})

    def forward(self, x_1LD: torch.Tensor, masks: Masks, positions: torch.Tensor) -> torch.Tensor:
        """The layer's output, of the shape and dtype of `x_1LD`."""
        query, key, value = self.qkv_linear(x_1LD)
        query_1LNH, gate_1LNH = query[:, :, 0::2], query[:, :, 1::2]
        query_1LNH, key = self.rope(self.q_norm(query_1LNH), self.k_norm(key), positions)
        out_1LNH = self.inner_attention(
            query_1LNH, key, value, attention_masks=masks.attention, scale=self.scaling, enable_gqa=self.enable_gqa
        )
        output: torch.Tensor = self.wo((out_1LNH * torch.sigmoid(gate_1LNH)).flatten(2))
        return output


class GatedDeltaNet(titan.Module):  # type: ignore[misc]  # torchtitan is untyped
    """Layer with a recurrent state, see `delta`. The weights have the names and the order of the checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Module.Config):  # type: ignore[misc]  # torchtitan is untyped
        """Parts of the layer."""

        heads: tuple[int, int]
        """Numbers of key and value heads."""
        sizes: tuple[int, int]
        """H and J."""
        in_proj_qkv: Any
        in_proj_z: Any
        in_proj_b: Any
        in_proj_a: Any
        conv1d: Any
        norm: Any
        out_proj: Any

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.sizes = config.heads, config.sizes
        for name in _PARTS:
            setattr(self, name, getattr(config, name).build())
        self.A_log = torch.nn.Parameter(torch.empty(config.heads[1]))
        self.dt_bias = torch.nn.Parameter(torch.empty(config.heads[1]))

    def forward(self, x_1LD: torch.Tensor, masks: Masks, _positions: torch.Tensor) -> torch.Tensor:
        """The layer's output, of the shape and dtype of `x_1LD`."""
        decay_LV = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x_1LD)[0].float() + self.dt_bias.float())
        out_LVJ = mix(
            self.in_proj_qkv(x_1LD)[0], self.conv1d.weight[:, 0], decay_LV,
            torch.sigmoid(self.in_proj_b(x_1LD)[0].float()), masks.delta, self.heads, self.sizes,
        )  # fmt: skip
        gate_LVJ = self.in_proj_z(x_1LD)[0].unflatten(-1, out_LVJ.shape[1:])
        out_LVJ = (self.norm(out_LVJ) * F.silu(gate_LVJ.float())).to(x_1LD.dtype)
        output: torch.Tensor = self.out_proj(out_LVJ.flatten(1))[None]
        return output


@titan.with_own_config
class Experts(titan.GroupedExperts):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's grouped experts in the dtype of their input, with the stacked weights of the checkpoint."""

    def __init__(self, config: Any) -> None:
        titan.Module.__init__(self)
        self.num_experts = config.num_experts
        self.w13_EGD = torch.nn.Parameter(torch.empty(config.num_experts, 2 * config.hidden_dim, config.dim))
        self.w2_EDF = torch.nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Apply each expert to its tokens. `x_RD` is sorted by expert. Returns [R, D] of the same dtype."""
        in_EGD, out_EDF = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w13_EGD, self.w2_EDF))
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        gate_RF, up_RF = F.grouped_mm(x_RD, in_EGD.transpose(-2, -1), offs=ends_E).chunk(2, dim=-1)
        return F.grouped_mm(gated_up(gate_RF, up_RF), out_EDF.transpose(-2, -1), offs=ends_E)


class SharedExpert(FeedForward):
    """A feed-forward for all tokens, times the sigmoid of a gate for each."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.FeedForward.Config):  # type: ignore[misc]  # torchtitan is untyped
        """As ``FeedForward.Config``, with the projection to the gate."""

        gate: Any

    @classmethod
    def of(cls, config: Any) -> Any:
        """Configuration of this class from one of ``FeedForward``."""
        return cls.Config(w1=config.w1, w2=config.w2, w3=config.w3, gate=replace(config.w1, out_features=1))

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate = config.gate.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The expert's output, of the shape and dtype of `x`."""
        return torch.sigmoid(self.gate(x)) * super().forward(x)


class Model(titan.Qwen3Model):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's decoder with both kinds of layers. The decoder takes `Masks` in place of attention masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Qwen3Model.Config):  # type: ignore[misc]  # torchtitan is untyped
        """As ``Qwen3Model.Config``."""

        def update_from_config(self, *, config: Any, **options: Any) -> None:
            """Spread experts over ranks. Other layers stay as they are: tensor parallelism is refused before."""
            if config.parallelism.expert_parallel_degree > 1:
                for layer in self.layers:
                    titan.set_moe_sharding_config(
                        layer.moe,
                        enable_ep=True,
                        enable_sp=config.parallelism.enable_sequence_parallel,
                        expert_param_layout=dict.fromkeys(EXPERT_WEIGHTS),  # for tensor parallelism
                    )

        def get_nparams_and_flops(self, model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
            """Number of parameters, and floating-point operations per token, without those of the recurrence."""
            full = [layer.attention for layer in self.layers if isinstance(layer.attention, GatedAttention.Config)]
            heads, width = (full[0].n_heads, 2 * full[0].head_dim) if full else (0, 0)
            count, at_zero = titan.get_moe_model_nparams_and_flops(self, model, heads, width, 0)
            _, in_all_layers = titan.get_moe_model_nparams_and_flops(self, model, heads, width, seq_len)
            return count, at_zero + (in_all_layers - at_zero) * len(full) // len(self.layers)
