"""RMSNorm, SwiGLU and embeddings for CPU, with less memory traffic than autograd's versions.

Autograd saves the input of every operation: two float32 copies for a norm, and for SwiGLU an activation that is cheap
to recompute. On CPU both passes are bound by memory bandwidth.

Axes: D channels, the last axis; any axes before it. Embeddings: V rows, T tokens, U distinct tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from forge_trainers.learner import titan


@titan.with_own_config
class RMSNorm(titan.RMSNorm):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's norm, ``x / sqrt(mean(x^2) + eps) * w`` (arXiv 1910.07467, eq. 4), in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalized `x`, of the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


@titan.with_own_config
class FeedForward(titan.FeedForward):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's feed-forward layer, ``W2 (silu(W1 x) * W3 x)`` (SwiGLU, arXiv 2002.05202, eq. 6)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, of the shape and dtype of `x`."""
        output: torch.Tensor = self.w2(gated_up(self.w1(x), self.w3(x)))
        return output


@titan.with_own_config
class Embedding(titan.Embedding):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's embedding with gradients that are summed in float32.

    On CPU, PyTorch sums the gradients of a repeated token in the weight's dtype. In bfloat16 the sum of 512 equal
    numbers stops at 256 of them.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight for int64 `ids`: the shape of `ids`, then D."""
        output: torch.Tensor = _Embedding.apply(ids, self.weight)  # type: ignore[no-untyped-call]
        return output


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(weight_VD)
        return F.embedding(ids, weight_VD)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        if not ctx.needs_input_grad[1]:
            return None, None
        (ids,), size = ctx.saved_tensors, grad.shape[-1]
        unique_U, index_T = ids.flatten().unique(return_inverse=True)
        sums_UD = grad.new_zeros(len(unique_U), size, dtype=torch.float32)
        sums_UD.index_add_(0, index_T, grad.reshape(-1, size).float())
        return None, grad.new_zeros(ctx.rows, size).index_copy_(0, unique_U, sums_UD.to(grad.dtype))


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * w`` in float32, of the shape and dtype of `x`."""
    output: torch.Tensor = _RMSNorm.apply(x, weight_D, eps)  # type: ignore[no-untyped-call]
    return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.float32, copy=True)
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        return wide.mul_(scale).mul_(weight_D.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight_D, scale = ctx.saved_tensors
        size = x.shape[-1]
        weight_32, scale_T = weight_D.float(), scale.flatten()
        wide, gradient = (y.reshape(-1, size).to(torch.float32, copy=True) for y in (x, grad))
        product = wide * gradient
        weight_grad_D = product.T.mv(scale_T)
        # y = x s w and s = (mean(x^2) + eps)^-1/2, so dx = s w dy - x s^3 mean(x w dy)
        shared_T = product.mv(weight_32).mul_(scale_T**3).div_(size)
        gradient.mul_(weight_32).mul_(scale_T[:, None]).addcmul_(wide, shared_T[:, None], value=-1)
        return gradient.to(x.dtype).view(x.shape), weight_grad_D.to(weight_D.dtype), None


def gated_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, without keeping the activation for the backward pass."""
    output: torch.Tensor = _GatedUp.apply(gate, up)  # type: ignore[no-untyped-call]
    return output


class _GatedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
