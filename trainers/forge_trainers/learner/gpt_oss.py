"""gpt-oss: attention with sinks, and experts with biases and a clamped SwiGLU.

Axes: L positions of the row, D hidden size; R tokens routed to the experts of this rank, E experts, F hidden size of an
expert, G = 2 F, gate and value in turn.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from forge_trainers.learner import titan
from forge_trainers.learner.lora import is_adapter

EXPERT_WEIGHTS = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
"""Weights of the experts."""
_SWIGLU_ALPHA = 1.702
"""Factor in the sigmoid of a gate, with which it is close to GELU."""


@titan.with_own_config
class Attention(titan.GptOssAttention):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's attention with a sink per query head: a key without a value, whose score is a weight."""

    def forward(self, x_1LD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's output, of the shape and dtype of `x_1LD`.

        Attention on CPU reads the sinks. On GPU their share is taken off the result.
        """
        query, key, value = self.qkv_linear(x_1LD)
        query, key = self.rope(query, key, positions)
        out_1LNH = self.inner_attention(
            query, key, value, attention_masks=attention_masks, scale=self.softmax_scale, enable_gqa=self.enable_gqa,
            sinks_N=self.sinks, out_transform=self._apply_sinks,
        )  # fmt: skip
        output: torch.Tensor = self.wo(out_1LNH.flatten(2))
        return output


@titan.with_own_config
class Experts(titan.GptOssGroupedExperts):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's experts of gpt-oss in the dtype of their input. TorchTitan's version always computes in bfloat16."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Apply each expert to its tokens. `x_RD` is sorted by expert. Returns [R, D] of the same dtype."""
        weights = (getattr(self, name) for name in EXPERT_WEIGHTS)
        in_EGD, in_EG, out_EDF, out_ED = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        rows_R = torch.arange(len(x_RD), dtype=torch.int32, device=x_RD.device)
        expert_R = torch.searchsorted(ends_E, rows_R, right=True).clamp_(max=len(ends_E) - 1)  # rows at the end pad
        # biases are float32 here, so that their gradients are sums over many rows in float32
        in_RG = F.grouped_mm(x_RD, in_EGD.transpose(-2, -1), offs=ends_E) + in_EG.float()[expert_R].to(x_RD.dtype)
        hidden_RF = _Swiglu.apply(in_RG, self.swiglu_limit)  # type: ignore[no-untyped-call]
        out_RD = F.grouped_mm(hidden_RF, out_EDF.transpose(-2, -1), offs=ends_E)
        return out_RD + out_ED.float()[expert_R].to(x_RD.dtype)


class _Swiglu(torch.autograd.Function):
    """Gates and values in turn, ``gate * sigmoid(1.702 gate) * (value + 1)`` within a limit. Only the input is kept."""

    @staticmethod
    def forward(ctx: Any, in_RG: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(in_RG)
        ctx.limit = limit
        return _swiglu(in_RG, limit)

    @staticmethod
    def backward(ctx: Any, grad_RF: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            in_RG = ctx.saved_tensors[0].detach().requires_grad_()
            (gradient,) = torch.autograd.grad(_swiglu(in_RG, ctx.limit), in_RG, grad_RF)
        return gradient, None


def _swiglu(in_RG: torch.Tensor, limit: float) -> torch.Tensor:
    gate_RF, value_RF = in_RG[..., ::2].clamp(max=limit), in_RG[..., 1::2].clamp(min=-limit, max=limit)
    return gate_RF * torch.sigmoid(_SWIGLU_ALPHA * gate_RF) * (value_RF + 1)


_TOP = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight"}  # fmt: skip
_LAYER = {
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.sinks": "attention.sinks",
    "mlp.experts.gate_up_proj_bias": "moe.routed_experts.inner_experts.mlp1_bias_EG",
    "mlp.experts.down_proj_bias": "moe.routed_experts.inner_experts.mlp2_bias_ED",
} | {
    f"{hf_name}.{kind}": f"{name}.{kind}"
    for hf_name, name in {
        **{f"self_attn.{x}_proj": f"attention.qkv_linear.w{x}" for x in "qkv"},
        "self_attn.o_proj": "attention.wo",
        "mlp.router": "moe.router.gate",
    }.items()
    for kind in ("weight", "bias")
}
_TURNED = {
    "mlp.experts.gate_up_proj": "moe.routed_experts.inner_experts.mlp1_weight_EGD",
    "mlp.experts.down_proj": "moe.routed_experts.inner_experts.mlp2_weight_EDF",
}
"""Weights whose last two axes are in the other order in a checkpoint."""


class StateDictAdapter(titan.StateDictAdapter):  # type: ignore[misc]  # torchtitan is untyped
    """Converts between TorchTitan's names and those of a checkpoint whose experts are not quantized."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors by the names of the checkpoint, without adapters. Weights of experts are views."""
        names = {name: hf_name for hf_name, name in (_TOP | _LAYER | _TURNED).items()}
        state_dict = {name: value for name, value in state_dict.items() if not is_adapter(name)}
        return _renamed(state_dict, names, "layers.", "model.layers.")

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors by TorchTitan's names."""
        return _renamed(hf_state_dict, _TOP | _LAYER | _TURNED, "model.layers.", "layers.")


def _renamed(tensors: dict[str, Any], names: dict[str, str], prefix: str, new_prefix: str) -> dict[str, Any]:
    turned, result = {*_TURNED, *_TURNED.values()}, {}
    for name, value in tensors.items():
        layer = re.fullmatch(rf"{re.escape(prefix)}(\d+)\.(.*)", name)
        key = layer[2] if layer else name
        new_name = f"{new_prefix}{layer[1]}.{names[key]}" if layer else names[key]
        result[new_name] = value.transpose(-2, -1) if key in turned else value
    return result
