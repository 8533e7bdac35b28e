"""The learner's optimizer: TorchTitan's AdamW with float32 or bfloat16 moments."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from forge_trainers.learner import titan
from forge_trainers.learner.plan import LearnerPlan

_MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizers(config: LearnerPlan, model: Any) -> Any:
    """AdamW over all trainable parameters of `model`, as TorchTitan's container of optimizers."""
    assert config.lr is not None, "the learning rate must be resolved"
    adamw_config = titan.default_adamw(lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    rounded = config.optimizer_state_dtype == "bfloat16"
    adamw_config.implementation = "fused_opt_states_bf16" if rounded else "fused"
    optimizers = adamw_config.build(model_parts=[model])
    if not rounded:
        return optimizers
    if all(_local(p).device.type == "cpu" for p in model.parameters() if p.requires_grad):
        optimizers.optimizers = [_RoundedAdamW(optimizer.param_groups) for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.register_load_state_dict_post_hook(_round)  # PyTorch casts loaded moments to the weights' dtype
    return optimizers


class _RoundedAdamW(torch.optim.AdamW):
    """AdamW with bfloat16 moments for weights on the CPU.

    PyTorch's fused kernel accepts bfloat16 moments on CUDA, where it computes in float32, but not on CPU. This class
    does the same for one weight at a time, so that only one weight has float32 moments at any time.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """An optimizer step. A closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state |= {name: torch.zeros_like(weight, dtype=torch.bfloat16) for name in _MOMENTS}
                moments = [state[name].float() for name in _MOMENTS]
                adamw(
                    [weight],
                    [weight.grad],
                    [moments[0]],
                    [moments[1]],
                    [],
                    [state["step"]],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                for name, moment in zip(_MOMENTS, moments, strict=True):
                    state[name].copy_(moment)


def _round(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state.update({name: state[name].to(torch.bfloat16) for name in _MOMENTS if name in state})


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
