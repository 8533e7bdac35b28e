"""What the learner measures of itself: ratios of probabilities, work done, memory.

In: log-ratios, a model, a device. Out: numbers for the metrics. Waits for nothing.

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
"""Rows of the matrices that a CPU's peak is measured with: large enough to reach it, 20 ms at 100 GFLOPS."""


def ratio_quantiles(log_ratio_T: torch.Tensor, loss_mask_T: torch.Tensor) -> dict[str, float]:
    """Quantiles over loss tokens of learner's over sampler's probability: ``ratio_p1``, ``ratio_p50``, ``ratio_p99``.

    Each is the value of one token: the smallest that at least this share of the tokens does not exceed.

    Args:
        log_ratio_T: Natural logarithms.
        loss_mask_T: Which tokens count, at least one.
    """
    ordered = log_ratio_T[loss_mask_T].double().sort().values
    at = {name: math.ceil(percent * ordered.numel() / 100) - 1 for name, percent in _PERCENT.items()}
    return {name: float(ordered[place].exp()) for name, place in at.items()}


def averaged(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a batch from those of its optimizer steps, at least one.

    Returns:
        Means over the steps, sums of seconds, and of the first step the differences of sampler and learner, which
        later steps add their learning to.
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
    """Floating-point operations that one forward and backward pass needs, as TorchTitan counts them.

    Six per parameter and position, embeddings without a head left out, plus attention as if it were not causal.
    Nothing that is computed twice counts twice. Departures: a sample's attention reaches over its own length, and the
    head counts for every position, though it is computed for those in the loss only.

    Args:
        model_config: TorchTitan's.
        model: Built from it.
        lengths: int64 [n], tokens of each sample.
        positions: Computed, by all ranks together.
    """
    _, at_zero = model_config.get_nparams_and_flops(model, 0)
    _, at_one = model_config.get_nparams_and_flops(model, 1)
    reach = float((lengths.double() ** 2).sum() / lengths.sum())
    return positions * (float(at_zero) + float(at_one - at_zero) * reach)


@functools.cache
def peak_flops(dtype: torch.dtype) -> float:
    """Floating-point operations per second that one rank's device can do at best.

    A GPU's are TorchTitan's figures for its name. A CPU's are measured once: the best of five matrix products, by as
    many threads as the learner has, so that whatever else runs at that moment lowers them.
    """
    if titan.DEVICE_TYPE != "cpu":
        return float(titan.device_utils.get_peak_flops(titan.device_utils.device_module.get_device_name()))
    a, b = (torch.randn(_MATRIX, _MATRIX, generator=torch.Generator().manual_seed(0)).to(dtype) for _ in range(2))
    out, best_s = torch.empty_like(a), float("inf")
    for _ in range(5):
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        best_s = min(best_s, time.perf_counter() - started)
    return 2.0 * _MATRIX**3 / best_s


def memory() -> dict[str, float]:
    """``peak_rss_bytes`` of this process, on an accelerator also ``peak_device_bytes`` that torch has allocated."""
    found = {"peak_rss_bytes": float(resident_bytes()[1])}
    if titan.DEVICE_TYPE != "cpu":
        found["peak_device_bytes"] = float(titan.device_utils.device_module.max_memory_allocated())
    return found
