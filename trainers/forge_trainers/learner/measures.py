"""Measurements of a training step: probability ratios, floating-point operations and memory.

Axes: T tokens of a batch.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forge_agents.runtime.machine import resident_bytes
from forge_trainers.learner import titan

_PERCENT = {"ratio_p1": 1, "ratio_p50": 50, "ratio_p99": 99}
_MATRIX = 1024
"""Rows of the matrices with which a CPU's peak is measured. A product takes 20 ms at 100 GFLOPS."""
_MEASURED_S = 1.0
"""Time after which no further product is measured."""


def ratio_quantiles(log_ratio_T: torch.Tensor, loss_mask_T: torch.Tensor) -> dict[str, float]:
    """Quantiles of the learner/sampler probability ratio: ``ratio_p1``, ``ratio_p50``, ``ratio_p99``.

    A quantile is the smallest ratio of a token that at least this fraction of the loss tokens (at least one) does not
    exceed.
    """
    ordered = log_ratio_T[loss_mask_T].double().sort().values
    at = {name: math.ceil(percent * ordered.numel() / 100) - 1 for name, percent in _PERCENT.items()}
    return {name: float(ordered[place].exp()) for name, place in at.items()}


def averaged(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a batch's optimizer steps (at least one): means, and sums of seconds.

    ``logprob_gap`` metrics are those of the first step, because later steps compare the sampler with a changed learner.
    """
    if len(steps) == 1:
        return dict(steps[0])
    return {
        name: steps[0][name]
        if name.startswith("logprob_gap")
        else math.fsum(step[name] for step in steps) / (1 if name.endswith("_s") else len(steps))
        for name in steps[0]
    }


def flops_per_step(model_config: Any, model: torch.nn.Module, lengths: torch.Tensor, positions: float) -> float:
    """Floating-point operations of a forward and backward pass over `positions`, as TorchTitan counts them.

    Six per parameter and position, without embeddings that are not tied to the head, plus non-causal attention.
    Recomputation does not count. Unlike TorchTitan, attention is counted over the length of each sample. The head
    counts at every position, although only positions in the loss are computed.
    """
    _, at_zero = model_config.get_nparams_and_flops(model, 0)
    _, at_one = model_config.get_nparams_and_flops(model, 1)
    reach = float((lengths.double() ** 2).sum() / lengths.sum())
    return positions * (float(at_zero) + float(at_one - at_zero) * reach)


@functools.cache
def peak_flops(dtype: torch.dtype) -> float:
    """Peak floating-point operations per second of one rank's device.

    For a GPU, TorchTitan's figure for its name. For a CPU, the best of five matrix products with the learner's threads,
    measured once, so other programs that run at that time lower it. A processor without instructions for `dtype` needs
    seconds for one product, which is then the only one.
    """
    if titan.DEVICE_TYPE != "cpu":
        return float(titan.device_utils.get_peak_flops(titan.device_utils.device_module.get_device_name()))
    a, b = (torch.randn(_MATRIX, _MATRIX, generator=torch.Generator().manual_seed(0)).to(dtype) for _ in range(2))
    out, best_s, began = torch.empty_like(a), float("inf"), time.perf_counter()
    for _ in range(5):
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        best_s = min(best_s, time.perf_counter() - started)
        if time.perf_counter() - began > _MEASURED_S:
            break
    return 2.0 * _MATRIX**3 / best_s


def memory() -> dict[str, float]:
    """``peak_rss_bytes`` of this process, and on an accelerator torch's ``peak_device_bytes``."""
    peaks = {"peak_rss_bytes": float(resident_bytes()[1])}
    if titan.DEVICE_TYPE != "cpu":
        peaks["peak_device_bytes"] = float(titan.device_utils.device_module.max_memory_allocated())
    return peaks
