"""One GRPO step on the fixed work W, stage by stage."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import measure_trl
from perf_common import POLICY, THREADS, Options, StageClock, goal, in_child, median, play_all, policy

STAGES = ("generate", "score", "train", "sync")
GOAL_CPU_S = 16.0


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``step``."""
    result = in_child(run_steps, options, timeout_s=1500)
    numbers, facts = result["numbers"], result["facts"]
    cpu_s = numbers["cpu_s"]
    peers: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    if "trl" in options.peers:
        trl = peers["trl"] = in_child(measure_trl.run_trl, options, timeout_s=3600)
        ratios = {
            "peer": f"TRL {trl['version']}, {trl['fastest']} (the fastest of {', '.join(trl['by_setting'])})",
            "ratio": round(cpu_s / trl["cpu_s"], 4),
            "wall_ratio": round(numbers["wall_s"] / trl["wall_s"], 4),
        }
    goals = {"cpu_s": goal(cpu_s, GOAL_CPU_S, at_most=True)}
    return [{"measure": "step", **facts, **numbers, **peers, **ratios, "goals": goals}]


async def run_steps(options: Options) -> dict[str, Any]:
    from forge_agents.runtime import mesh
    from forge_agents.serving import EngineConfig
    from forge_trainers.rl.config import GRPOConfig
    from forge_trainers.run.processes import Processes

    config = GRPOConfig(
        group_size=options.siblings,
        groups_per_step=len(options.prompts),
        engine=EngineConfig(
            max_model_len=512, kv_cache_gb=0.5 * options.scale, threads=THREADS, enforce_eager=options.quick
        ),
    )
    async with mesh.session():
        with tempfile.TemporaryDirectory() as folder:
            policies = {POLICY: policy(options, options.step_tokens)}
            processes = await Processes.start(policies, config, folder=Path(folder))
            await processes.start_learners()
            pids = {who: _pid(mesh.log_folder(name)) for who, name in _NAMES.items()} | {"controller": os.getpid()}
            rows: list[dict[str, float]] = []
            for number in range(options.warm_ups + options.rounds):
                row = await _step(options, processes, pids)
                if number >= options.warm_ups:
                    rows.append(row)
            await processes.stop()
    facts = {
        "prompts": len(options.prompts),
        "siblings": options.siblings,
        "max_new_tokens": options.step_tokens,
        "warm_ups": options.warm_ups,
        "rounds": options.rounds,
        "cpu_s_of_rounds": [round(row["cpu_s"], 2) for row in rows],
    }
    return {"numbers": median(rows), "facts": facts}


_NAMES = {"engine": POLICY, "learner": f"{POLICY}-learner", "store": "weights"}
"""Names of a run's processes."""


async def _step(options: Options, processes: Any, pids: dict[str, int]) -> dict[str, float]:
    from forge_trainers.batch.packing import pack
    from forge_trainers.rl.credit import Credit
    from forge_trainers.rl.rewards import env_reward
    from forge_trainers.rl.samples import credit_groups
    from forge_trainers.rl.scoring import score

    clock = StageClock(pids)
    with clock.stage("generate"):
        groups = await play_all(options, processes.policy_engines, options.step_tokens)
    with clock.stage("score"):
        judged = await score(groups, env_reward, timeout_s=60)
        samples = credit_groups(judged, Credit(), [POLICY]).samples[POLICY]
        batch = pack(samples)
    with clock.stage("train"):
        learned = await processes.learners[POLICY].train_step(batch)
    with clock.stage("sync"):
        await processes.sync()
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    if len(samples) != len(turns):
        raise AssertionError(f"{len(turns)} responses gave {len(samples)} samples; W must be learned whole")
    row = clock.row
    return row | {
        "wall_s": sum(row[f"{stage}_s"] for stage in STAGES),
        "cpu_s": sum(row[f"{stage}_cpu_s"] for stage in STAGES),
        "prompt_tokens_mean": sum(len(turn.prompt_ids) for turn in turns) / len(turns),
        "new_tokens": float(sum(len(turn.response_ids) for turn in turns)),
        "learner_tokens": learned["tokens"],
        "logprob_gap_mean": learned["logprob_gap_mean"],
    }


def _pid(folder: Path | None) -> int:
    if folder is None:
        raise RuntimeError("a process of the run has no log folder; has the run renamed its processes?")
    return int((folder / "0.pid").read_text())
