"""The samples of one optimizer step, as a rank of a learner computes them.

Axes: n samples and T tokens of a minibatch.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from forge_agents.types import EpisodeBatch
from forge_trainers.batch.layout import Microbatch


@dataclass(slots=True, kw_only=True)
class Minibatch:
    """Samples of one optimizer step, laid out for this rank, with values that are computed once per batch."""

    batch: EpisodeBatch
    computed_n: torch.Tensor
    """bool [n], samples that the loss depends on. Only these are computed."""
    computed_T: torch.Tensor
    """bool [T], loss tokens of these samples."""
    num_loss_tokens: float
    """Number of loss tokens, by which the loss is divided."""
    num_computed: float
    """Number of those that are computed."""
    microbatches: Sequence[Microbatch]
    """Rows of this rank."""
    facts: dict[str, float]
    """``positions``, ``group_positions``, ``microbatches`` and ``waste`` of a pass (`LearnerCore.train_step`)."""
    kl_sums: dict[str, float] = field(default_factory=dict)
    """Sum of the divergence over the computed tokens in the latest optimizer step, by agent with a teacher."""
    log_ratio_T: torch.Tensor | None = None
    """float32 [T], learner's minus sampler's log-probabilities in the latest optimizer step, each token on one rank."""
    old_T: torch.Tensor | None = None
    """float32 [T], the learner's log-probabilities at the start of the batch. None if the loss does not need them."""
    reference_T: torch.Tensor | None = None
    """float32 [T], log-probabilities of the reference model, computed in the first optimizer step."""


def divergences(parts: Sequence[Minibatch], agents: Iterable[str]) -> dict[str, float]:
    """``kl/AGENT`` in the last pass over the minibatches, for agents with a teacher that have tokens."""
    metrics = {}
    for agent in agents:
        number, tokens = zlib.crc32(agent.encode()), 0.0
        for part in parts:
            samples = part.batch["samples"]
            is_agents_T = (samples["agent"] == number).repeat_interleave(samples["length"])
            tokens += float((is_agents_T & part.computed_T).sum())
        if agent and tokens:
            metrics[f"kl/{agent}"] = math.fsum(part.kl_sums.get(agent, 0.0) for part in parts) / tokens
    return metrics
