"""The learner's optimiser: TorchTitan's AdamW, with moments in the type that was asked for.

In: a model whose parameters have their places. Out: TorchTitan's container of optimisers. Waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from forge_trainers.learner import titan
from forge_trainers.learner.config import LearnerConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizers(config: LearnerConfig, model: Any) -> Any:
    """AdamW over all parameters of `model` that learn."""
    assert config.lr is not None, "the learner resolves its rate first"
    adamw_config = titan.default_adamw(lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    rounded = config.optimizer_state_dtype == "bfloat16"
    adamw_config.implementation = "fused_opt_states_bf16" if rounded else "fused"
    found = adamw_config.build(model_parts=[model])
    if not rounded:
        return found
    if all(_local(p).device.type == "cpu" for p in model.parameters() if p.requires_grad):
        found.optimizers = [_RoundedAdamW(optimizer.param_groups) for optimizer in found]
    for optimizer in found:
        optimizer.register_load_state_dict_post_hook(_round)  # PyTorch gives what it loads the type of the weights
    return found


class _RoundedAdamW(torch.optim.AdamW):
    """AdamW whose moments are bfloat16 between steps, for weights in the host's memory.

    PyTorch's fused kernel computes in float32 with such moments on CUDA, and refuses them on CPU. This does what it
    does there, one weight after the other, so that only one weight's moments are float32 at a time.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; no closure is called."""
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
