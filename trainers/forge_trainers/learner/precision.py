"""float32 weights of a model that computes in bfloat16: compute copies, dithering and stochastic rounding."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from forge_trainers.learner import titan

_ROWS_AT_ONCE = 1024
"""Number of rows of a gradient that are converted to float32 at a time."""


class ComputeCopies:
    """Copies of a single rank's weights in the compute dtype, with float32 sums of their gradients.

    FSDP would do the same, but casts and copies each weight twice per microbatch and each gradient three times, which
    takes 7 % of a step on CPU.

    A gradient is added to its float32 sum and freed as soon as the backward pass has computed it. Copies and sums keep
    their memory between steps, because allocating them among activations fragments the memory. Weights that have the
    dtype already are used as they are.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._places = [
            (module, name, weight)
            for module in model.modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.dtype != dtype
        ]
        self._dtype = dtype
        self._copies: dict[torch.nn.Parameter, torch.nn.Parameter] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Context in which copies of the current weights replace the weights."""
        for _, _, weight in self._places:
            if weight not in self._copies:  # tied weights have two places
                self._copies[weight] = self._copy(weight)
        self.refresh()
        for module, name, weight in self._places:
            setattr(module, name, self._copies[weight])
        try:
            yield
        finally:
            for module, name, weight in self._places:
                setattr(module, name, weight)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the current weights. Needed if weights change inside the context of `inside`."""
        for weight, copy in self._copies.items():
            copy.copy_(weight)

    def _copy(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        copy = torch.nn.Parameter(torch.empty_like(weight, dtype=self._dtype), requires_grad=weight.requires_grad)
        if weight.requires_grad:
            take = partial(_take_gradient, weight, torch.empty_like(weight))
            copy.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        return copy


def _take_gradient(weight: torch.nn.Parameter, total: torch.Tensor, copy: torch.Tensor) -> None:
    """Add the gradient of a weight's copy to the weight's gradient, whose memory is `total`."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if weight.grad is None:
        weight.grad = total.copy_(gradient)
        return
    for start in range(0, len(total), _ROWS_AT_ONCE):  # in blocks, because PyTorch makes a float32 copy first
        rows = slice(start, start + _ROWS_AT_ONCE)
        total[rows].add_(gradient[rows])


@torch.no_grad()
def dither_weights(model: torch.nn.Module, seed: int) -> None:
    """Move each float32 weight that is a bfloat16 number randomly, by less than half the distance to its neighbors.

    Rounded to bfloat16, all weights stay the same. Without dithering, every weight of a model stored in bfloat16 starts
    in the middle of its rounding interval, and the computed model does not change until updates have grown to half the
    interval: dozens of steps for weights of 0.1 at a learning rate of 1e-5 (rounding to nearest cancels small updates,
    arXiv 2010.06192). With dithering, a weight that has moved by a tenth of the interval is rounded to the next number
    with a probability of a tenth. Zeros and other weights are not changed. All ranks compute the same values.
    """
    for name, weight in model.named_parameters():
        if not weight.requires_grad or weight.dtype != torch.float32:
            continue
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        moves = _random_moves(name, weight, seed, 1 - 2**15, 2**15)  # 2^15 is the middle between two bfloat16 numbers
        bits = local.view(torch.int32)
        bits.add_(moves.masked_fill_((bits & 0xFFFF != 0) | (local == 0), 0))


def randomly_rounded(name: str, weight: Any, seed: int) -> Any:
    """Return float32 weights rounded to bfloat16 numbers, up or down with probabilities that keep their mean.

    Weights of a learner that computes in float32 are not dithered. Rounding to nearest would undo all updates of less
    than half an interval, see `dither_weights`. All ranks compute the same values.
    """
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    bits = local.contiguous().view(torch.int32) + _random_moves(name, weight, seed, 0, 2**16)
    rounded = bits.bitwise_and_(-(2**16)).view(torch.float32)
    if isinstance(weight, DTensor):
        return DTensor.from_local(
            rounded, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    return rounded


def _random_moves(name: str, weight: Any, seed: int, low: int, high: int) -> torch.Tensor:
    """Random integers for the bits of a rank's part of a float32 weight. bfloat16 drops the lower 16 bits."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    random = torch.Generator(local.device).manual_seed(zlib.crc32(titan.canonical_fqn(name).encode()) + seed)
    moves = torch.randint(low, high, weight.shape, generator=random, dtype=torch.int32, device=local.device)
    if isinstance(weight, DTensor):
        moves = distribute_tensor(moves, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
    return moves.to(local.device)  # with `cpu_offload` the weight is on the CPU, but the mesh is of GPUs
