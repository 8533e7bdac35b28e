"""The same training on one process a role, and on a node's: a learner of two ranks, two engines of two ranks.

    python tests/perf/node_table.py [--seeds 0 1 2] [--steps 30] [--out FOLDER]

A random two-layer model in float32 plays Relay for partial credit: it learns to say numbers of about the right size.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENV, ENV_ARGS = "forge/Relay-v0", {"tool": False, "partial_credit": 1.0}
EPISODES = 256
"""Held-out, before and after."""
LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "one process each": {},
    "learner of 2 (FSDP), 2 engines of 2 ranks": {"learner_procs": 2, "replicas": 2, "tp": 2},
}


def main() -> int:
    """Run what has no result yet, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30, help="Optimiser steps of each run.")
    parser.add_argument("--out", type=Path, default=Path("runs/node"), help="Folder of the runs and their results.")
    arguments = parser.parse_args()
    results = []
    for seed in arguments.seeds:
        for number, layout in enumerate(LAYOUTS):
            folder = arguments.out / f"seed-{seed}-layout-{number}-steps-{arguments.steps}"
            result = folder / "result.json"
            if not result.exists():
                result.write_text(json.dumps(train(folder, LAYOUTS[layout], seed, arguments.steps)) + "\n")
            results.append({"seed": seed, "layout": layout, **json.loads(result.read_text())})
    sys.stdout.write(table(results))
    return 0


def train(folder: Path, layout: Mapping[str, int], seed: int, steps: int) -> dict[str, Any]:
    """One run: held-out rewards, the reward of each step, seconds."""
    import forge_agents as fa

    procs, replicas, tp = (layout.get(name, 1) for name in ("learner_procs", "replicas", "tp"))
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=0,
        checkpoint_every=steps,
        learner_procs=procs,
        learner=fa.LearnerConfig(lr=3e-3, threads=1, compute_dtype="float32"),
        engine=fa.EngineConfig(
            dtype="float32", max_model_len=512, kv_cache_gb=0.05, threads=1, replicas=replicas, tp=tp
        ),
    )
    team = fa.Policy("tiny-random", name="team", sampling=fa.Sampling(max_tokens=16))
    with fa.GRPOTrainer(team, config=config, out_dir=folder) as trainer:
        before = trainer.evaluate(ENV, episodes=EPISODES, env_args=ENV_ARGS)
        started = time.perf_counter()
        rows = trainer.fit(ENV, steps=steps, env_args=ENV_ARGS).metrics
        seconds = time.perf_counter() - started
        after = trainer.evaluate(ENV, episodes=EPISODES, env_args=ENV_ARGS)
    gaps = [row["learner/logprob_gap_mean"] for row in rows if row["groups/used"]]
    return {
        "before": (before.reward, before.ci),
        "after": (after.reward, after.ci),
        "rewards": [row["reward/mean"] for row in rows],
        "gap": max(gaps),
        "seconds": seconds,
    }


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each run; then, for each seed, how far the two are apart."""
    titles = ("seed", "processes", "before", "after", "sampler and learner, at most", "seconds")
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in found:
        held_out = ("{:.3f} ± {:.3f}".format(*row[name]) for name in ("before", "after"))
        cells = (str(row["seed"]), row["layout"], *held_out, f"{row['gap']:.1e}", f"{row['seconds']:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| seed | steps whose mean reward is equal | difference after | its 95 % |", "|---|---|---|---|"]
    for one, node in zip(found[::2], found[1::2], strict=True):
        equal = sum(a == b for a, b in zip(one["rewards"], node["rewards"], strict=True))
        apart, ci = node["after"][0] - one["after"][0], math.hypot(node["after"][1], one["after"][1])
        lines.append(f"| {one['seed']} | {equal} of {len(one['rewards'])} | {apart:+.3f} | ± {ci:.3f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
