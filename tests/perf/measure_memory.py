"""Peak memory of a learner by activation checkpointing, at 4,096 tokens in a microbatch."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
from collections.abc import Callable
from typing import Any, Literal

from measure_learner import Work, batch_of
from perf_common import STATE_BYTES, Options, goal, in_child, num_parameters, peak_rss

ROOM = 4096
WORK = Work(groups=4, siblings=8, seats=1, prompt=224, turns=1, question=0, answer=32)
"""8,192 tokens, two microbatches."""


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``learner_memory``."""
    state = num_parameters(options.model) * STATE_BYTES
    modes = ("none", "selective", "full")
    result = {mode: in_child(run, options, timeout_s=600, mode=mode) for mode in modes}
    ratios = {mode: round(row["peak_tensor_bytes"] / state, 4) for mode, row in result.items()}
    resident = {f"{mode}_resident": round(row["peak_rss_bytes"] / state, 4) for mode, row in result.items()}
    record = {
        "measure": "learner_memory",
        "tokens_per_microbatch": ROOM,
        "by_activation_checkpointing": result,
        "peer": "weights, gradients and optimiser state, float32",
        "peer_bytes": state,
        "ratio": ratios | resident,
        "goals": {"full_over_state": goal(ratios["full"], 1.5, at_most=True)},
    }
    return [record]


def run(options: Options, mode: Literal["none", "selective", "full"]) -> dict[str, float]:
    from forge_agents.runtime.machine import keep_freed_memory, limit_matmul_cache

    keep_freed_memory()  # as the learner's actor does
    limit_matmul_cache()
    from forge_trainers.learner.core import LearnerCore
    from forge_trainers.learner.plan import LearnerPlan

    room = ROOM // 8 if options.quick else ROOM
    work = dataclasses.replace(WORK, siblings=1) if options.quick else WORK
    core = LearnerCore(
        LearnerPlan(
            model=options.model, max_tokens_per_microbatch=room, activation_checkpointing=mode, share_prefixes=False
        )
    )
    batch = batch_of(work, core, share=False)
    before = peak_rss(os.getpid())
    steps = [core.train_step(batch)["step_s"] for _ in range(2)]
    resident = peak_rss(os.getpid())
    return {
        "before_step_bytes": before,
        "peak_rss_bytes": resident,
        "peak_tensor_bytes": tensor_peak(lambda: core.train_step(batch)),
        "step_s": round(min(steps), 3),
    }


def tensor_peak(work: Callable[[], object]) -> int:
    """Most bytes that tensors hold at a time during `work`: what ``torch.cuda.max_memory_allocated`` is on a GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor):
            storage = getattr(one, "_local_tensor", one).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return sum(storages.values()) + max(itertools.accumulate(change for _, change in changes))
