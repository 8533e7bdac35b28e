"""Memory of the engines of a league with LoRA that has played against every snapshot of a full pool."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import psutil
from perf_common import Options, goal, in_child

POOL = 8


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``league``."""
    result = in_child(run, options, timeout_s=1500)
    goals = {"engines": goal(len(result["engine_bytes"]), 1, at_most=True)}
    return [{"measure": "league", "pool": POOL, **result, "peer": "one more engine for snapshots", "goals": goals}]


def run(options: Options) -> dict[str, Any]:
    import torch
    from safetensors.torch import save_file

    import forge_agents as fa
    from forge_agents.serving._shapes import adapter_shapes

    policy = fa.Policy(options.model, name="hero", lora=fa.LoRA(), sampling=fa.Sampling(max_tokens=4))
    engine = fa.EngineConfig(max_model_len=256, kv_cache_gb=0.2, enforce_eager=True)
    config = fa.GRPOConfig(preflight=False, engine=engine)
    with tempfile.TemporaryDirectory(prefix="forge-perf-") as folder:
        trainer = fa.GRPOTrainer(fa.League(policy, pool=POOL), config=config, out_dir=folder)
        with trainer:
            trainer.evaluate("forge/KuhnPoker-v0", episodes=2)
            for version in range(1, POOL):
                adapter = Path(folder, "league", f"hero-{version:06d}", "adapter")
                adapter.mkdir(parents=True)
                shapes = adapter_shapes(options.model, fa.LoRA())
                weights = {name: 0.01 * torch.randn(shape) for name, shape in shapes.items()}
                save_file(weights, adapter / "adapter_model.safetensors")
            trainer._loop.run(play(trainer))
            pids = {n: pid for each in trainer._lifecycle.running.engines.values() for n, pid in each.pids.items()}
            memory = {name: psutil.Process(pid).memory_full_info().pss for name, pid in pids.items()}
        snapshot = sum(file.stat().st_size for file in Path(folder, "league", "hero-000001").rglob("*.*"))
    return {"engine_bytes": memory, "total_bytes": sum(memory.values()), "snapshot_bytes": snapshot}


async def play(trainer: Any) -> None:
    """Sample from each snapshot of the pool."""
    import forge_agents as fa

    processes, engine = trainer._lifecycle.running, trainer._policies._engine
    names = {f"hero-{version:06d}": version for version in range(1, POOL)}
    for batch in engine.batches(list(names)):
        served = await engine.serve({name: names[name] for name in batch}, processes)
        for each in served.values():
            await each.generate((1, 2, 3), fa.Sampling(max_tokens=4))
