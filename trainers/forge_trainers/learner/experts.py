"""The expert layers of mixture-of-experts models, on TorchTitan's router and token exchange.

In: a Hugging Face ``config.json``. Out: TorchTitan configs. Waits for nothing.

Axes: R tokens sent to these experts, D hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from forge_trainers.learner import titan


class Experts(titan.GroupedExperts):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's grouped experts in the type of their input; its own compute in bfloat16 whatever they are given."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.GroupedExperts.Config):  # type: ignore[misc]  # torchtitan is untyped
        """As ``GroupedExperts.Config``."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Apply each expert to its tokens.

        Args:
            x_RD: Tokens, sorted by expert.
            num_tokens_per_expert_E: How many belong to each.

        Returns:
            [R, D], the type of `x_RD`.
        """
        gate, up, down = (_local(weight).transpose(-2, -1) for weight in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        hidden = F.silu(F.grouped_mm(x_RD, gate, offs=ends_E)) * F.grouped_mm(x_RD, up, offs=ends_E)
        return F.grouped_mm(hidden, down, offs=ends_E)


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of each mixture layer; 0 of a dense model."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a Qwen3 mixture is one; the others are dense."""
    every = config.get("decoder_sparse_step") or 1
    return num_experts(config) > 0 and layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % every == 0


def moe_config(config: Mapping[str, Any], *, param_init: Any) -> Any:
    """The mixture of a Qwen3 layer: softmax over all experts, the best few weighted by it.

    There is no load balancing: neither TorchTitan's bias, which the model does not have, nor the auxiliary loss of
    pre-training.

    Args:
        config: The content of config.json.
        param_init: Initialises a weight in place.
    """
    dim, count, top_k = config["hidden_size"], num_experts(config), config["num_experts_per_tok"]
    return titan.make_moe_config(
        num_experts=count,
        load_balance_coeff=None,
        router=titan.make_router_config(
            dim=dim,
            num_experts=count,
            gate_param_init={"weight": param_init},
            top_k=top_k,
            score_func="softmax",
            route_norm=bool(config.get("norm_topk_prob", False)),
        ),
        routed_experts=titan.RoutedExperts.Config(
            inner_experts=Experts.Config(
                dim=dim,
                hidden_dim=config["moe_intermediate_size"],
                num_experts=count,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), param_init),
            ),
            token_dispatcher=titan.make_token_dispatcher_config(
                num_experts=count, top_k=top_k, comm_backend="standard"
            ),
        ),
    )
