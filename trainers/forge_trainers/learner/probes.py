"""The learner's check in `forge-agents doctor`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from forge_agents.models.tiny import tiny_model


def learner_step() -> str:
    """Run one GRPO step of a tiny model in this process. Returns a line that describes the result."""
    from forge_trainers.batch.packing import Sample, pack
    from forge_trainers.learner.core import LearnerCore
    from forge_trainers.learner.plan import LearnerPlan

    sampled = np.arange(10) >= 5
    samples = [
        Sample(
            token_ids=np.frombuffer(text, np.uint8),
            loss_mask=sampled,
            logprobs=np.where(sampled, -5.0, 0.0),
            advantage=advantage,
            versions=np.where(sampled, 0, -1),
            group=0,
        )
        for text, advantage in ((b"helloworld", 1.0), (b"hellothere", -1.0))
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model")
        started = time.perf_counter()
        learner = LearnerCore(LearnerPlan(model=str(model), lr=1e-3, threads=1, dump_folder=folder))
        ready = time.perf_counter()
        metrics = learner.train_step(pack(samples))
        done = time.perf_counter()
    if learner.version != 1:
        raise RuntimeError(f"the learner's weights are at version {learner.version} after one step, expected 1")
    step_ms, start_s = 1e3 * (done - ready), ready - started
    return f"gradient norm {metrics['grad_norm']:.3g} in {step_ms:.0f} ms, ready after {start_s:.0f} s"
