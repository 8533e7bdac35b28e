"""Who gets which share of a host's cores, where nobody said so.

In: settings, numbers of engines and learners. Out: settings with threads. Waits for nothing.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_trainers.rl.config import GRPOConfig


def share_cores(cores: int, *, engines: int, ranks: int, overlap: bool) -> tuple[int | None, int | None]:
    """Threads of each engine and of each rank of a learner, at least 1, so that no more compute than there are cores.

    None is for what has all cores for itself.

    Args:
        cores: Of the host.
        engines: All replicas of all engines; 0 where no model plays.
        ranks: All ranks of all learners; 0 where nothing learns.
        overlap: Engines compute while learners do.
    """
    half = cores // 2
    for_engines, for_learners = (half, cores - half) if overlap and ranks else (cores, cores)
    shares = max(1, for_engines // max(1, engines)), max(1, for_learners // max(1, ranks))
    return shares[0] if shares[0] < cores else None, shares[1] if shares[1] < cores else None


def with_threads(config: GRPOConfig, *, engines: int, learners: int) -> GRPOConfig:
    """`config` with threads where nobody chose them.

    Without an accelerator all that compute at the same time divide the cores. What has them for itself is left to its
    library.
    """
    import torch

    if torch.accelerator.is_available():
        return config
    engine, learner = share_cores(
        len(os.sched_getaffinity(0)),
        engines=engines * config.engine.replicas,
        ranks=learners * config.learner_procs,
        overlap=config.max_staleness > 0,
    )
    return replace(
        config,
        engine=replace(config.engine, threads=config.engine.threads or engine),
        learner=replace(config.learner, threads=config.learner.threads or learner),
    )
