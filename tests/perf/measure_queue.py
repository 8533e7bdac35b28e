"""The controller's time per episode, and memory while 10,000 episodes are queued."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from pathlib import Path
from typing import Any

import psutil
from perf_common import Options, Story, cpu_seconds, goal, in_child, policy

DEADLINE_S = 1800
GROUP_SIZE = 8
NEW_TOKENS = 4
LIVE = 512
"""As `GRPOConfig.max_concurrent_episodes` has it by default."""
EVERY_S = 0.25
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``queue``."""
    result = in_child(run, options, timeout_s=DEADLINE_S)
    share = result["controller_cpu_s"] / result["engine_cpu_s"]
    growth = {
        f"{who}_end_over_warm": round(result[f"{who}_rss_end_mb"] / result[f"{who}_rss_warm_mb"], 4)
        for who in ("controller", "engine")
    }
    peer = "the engine's CPU time for the same episodes, and memory when a tenth of them had been played"
    ratio = {"controller_over_engine": round(share, 4), **growth}
    goals = {name: goal(ratio, 1.05, at_most=True) for name, ratio in growth.items()}
    return [{"measure": "queue", **result, "peer": peer, "ratio": ratio, "goals": goals}]


async def run(options: Options) -> dict[str, float]:
    """A tenth of the episodes, then all, queued at once. Results are dropped as they arrive."""
    from forge_agents.rollout.policy_engine import PolicyEngine
    from forge_agents.rollout.rendering import Renderer
    from forge_agents.runtime import mesh
    from forge_agents.serving import EnginePlan, EngineProcess

    episodes = 400 if options.quick else 10_000
    config = EnginePlan(model=options.model, max_model_len=512, kv_cache_gb=1.0, enforce_eager=options.quick)
    async with mesh.session():
        engine = await EngineProcess.start(config, name="engine", timeout_s=600)
        served = {"perf": PolicyEngine(engine, Renderer.of(Path(options.model)))}
        folder = mesh.log_folder("engine")
        assert folder is not None
        pids = {"controller": os.getpid(), "engine": int((folder / "0.pid").read_text())}
        await _play(options, served, episodes // 10)
        gc.collect()
        warm, before = _rss_mb(pids), {who: cpu_seconds(pid) for who, pid in pids.items()}
        most = dict(warm)
        watching = asyncio.create_task(_watch(pids, most))
        started = time.perf_counter()
        await _play(options, served, episodes)
        seconds = time.perf_counter() - started
        watching.cancel()
        gc.collect()
        end, spent = _rss_mb(pids), {who: cpu_seconds(pid) - before[who] for who, pid in pids.items()}
        await engine.stop()
    return {
        "episodes": episodes,
        "seconds": seconds,
        "controller_cpu_ms_per_episode": 1000 * spent["controller"] / episodes,
        **{f"{who}_cpu_s": value for who, value in spent.items()},
        **{f"{who}_rss_warm_mb": value for who, value in warm.items()},
        **{f"{who}_rss_most_mb": value for who, value in most.items()},
        **{f"{who}_rss_end_mb": value for who, value in end.items()},
    }


async def _play(options: Options, served: Any, episodes: int) -> None:
    """All groups exist at once, and `LIVE` episodes run at the same time."""
    from forge_agents.rollout.rollout import Rollout
    from forge_agents.runtime.threads import all_or_first_error

    seats, limit = policy(options, NEW_TOKENS), asyncio.Semaphore(LIVE)

    async def group(number: int) -> None:
        prompt = f"{options.prompts[number % len(options.prompts)]} Chapter {number}."
        rollout = Rollout(make_env=lambda: Story(prompt), env_id="perf/Story", policies=seats, engines=served)
        played = await rollout.group(number, GROUP_SIZE, limit=limit)
        if played.failed:
            raise RuntimeError(f"an episode failed: {played.failed[0].error}")

    await all_or_first_error(group(number) for number in range(episodes // GROUP_SIZE))


async def _watch(pids: dict[str, int], most: dict[str, float]) -> None:
    """Keep the most that was seen."""
    while True:
        for who, value in _rss_mb(pids).items():
            most[who] = max(most[who], value)
        await asyncio.sleep(EVERY_S)


def _rss_mb(pids: dict[str, int]) -> dict[str, float]:
    return {who: psutil.Process(pid).memory_info().rss / 1e6 for who, pid in pids.items()}
