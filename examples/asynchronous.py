"""Asynchronous rollouts: the cost in learning and the gain in time of a policy lag of 1 and 2.

Two agents of forge/Relay-v0 share a 135M model, or one agent sorts names in two turns (``--task sort``). Without an
accelerator, the synchronous arm gives all cores to engine and learner in turn. The other arms give half of the cores to
each all the time. All arms are evaluated on the same held-out seeds, over seconds of training (including all
evaluations but the last). The control has learning rate 0.

    python examples/asynchronous.py [--task relay] [--staleness 0 1 2] [--seeds 0 1 2] [--out runs/asynchronous]

A run takes minutes on two CPU cores. The script writes ``asynchronous.png``. Finished runs are not repeated.
"""

import argparse
import json
import shutil
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_trainers.records.plots import draw_arms


@dataclass(frozen=True)
class Task:
    """A task and its training settings."""

    env_id: str
    env_args: dict
    sampling: fa.Sampling
    groups: int
    lr: float
    reward: float
    """Held-out reward that the time is taken to."""


TASKS = {
    "relay": Task("forge/Relay-v0", {"max_number": 9, "tool": False}, fa.Sampling(temperature=1.0, max_tokens=16),
                  groups=8, lr=2e-5, reward=0.7),
    "sort": Task("forge/AlphabetSort-v0", {"num_names": 3, "num_added": 1, "turns": 2},
                 fa.Sampling(temperature=0.7, max_tokens=20), groups=4, lr=3e-5, reward=0.8),
}  # fmt: skip
MEANS = ("time/step_s", "idle/engines", "idle/learner")
WARM_FROM = 3
"""Steps before do not count for idle shares and times if there are others: memory is new, caches are cold, nothing is
collected ahead."""


def run(staleness, seed, args, *, learns=True):
    """Train one arm. Saves and returns the measurements."""
    task = TASKS[args.task]
    lr = task.lr if learns else 0.0
    arm = [args.task, f"staleness-{staleness}", args.correction, str(seed), None if learns else "control"]
    folder = args.out / "-".join(filter(None, arm))
    saved = folder / "result.json"
    if saved.exists():
        return json.loads(saved.read_text())
    shutil.rmtree(folder, ignore_errors=True)  # begun and not finished: what it was before is measured at the start
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=0,  # every arm plays as much
        groups_per_step=task.groups,
        max_staleness=staleness,
        learner=fa.LearnerConfig(lr=lr, warmup_steps=2, correction=args.correction),
        engine=fa.EngineConfig(max_model_len=256, enforce_eager=True),
        eval_every=args.eval_every,
        eval_episodes=args.episodes,
        checkpoint_every=args.steps,
    )
    team = fa.Policy(args.model, name="team", sampling=task.sampling)
    with fa.GRPOTrainer(team, config=config, out_dir=folder) as trainer:
        before = trainer.evaluate(task.env_id, episodes=args.episodes, env_args=task.env_args)
        rows = trainer.fit(task.env_id, steps=args.steps, env_args=task.env_args).metrics
        after = trainer.evaluate(task.env_id, episodes=2 * args.episodes, env_args=task.env_args)
    spent = np.cumsum([row["time/step_s"] for row in rows])
    curve = [[0.0, before.reward]]
    curve += [[float(s), row["eval/reward"]] for s, row in zip(spent, rows, strict=True) if "eval/reward" in row]
    warm = rows[WARM_FROM:] or rows
    result = {
        "staleness": staleness, "seed": seed, "lr": lr, "curve": curve,
        "before": [before.reward, before.ci], "after": [after.reward, after.ci],
        **{name: float(np.mean([row[name] for row in warm])) for name in MEANS},
        "staleness_max": max(row["staleness/max"] for row in rows),
    }  # fmt: skip
    saved.write_text(json.dumps(result))
    return result


def seconds_to(curve, reward):
    """Seconds of training until the held-out reward is first reached, between points on a line; None: never."""
    for (s0, r0), (s1, r1) in pairwise(curve):
        if r1 >= reward:
            return s1 if r1 == r0 else s0 + (s1 - s0) * max(0.0, reward - r0) / (r1 - r0)
    return None


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="relay")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=18, help="optimiser steps of each run")
    parser.add_argument("--control", type=int, default=0, metavar="N", help="control runs, of the most stale arm")
    parser.add_argument("--episodes", type=int, default=128, help="held-out seeds; twice as many at the end")
    parser.add_argument("--eval-every", type=int, default=3, help="steps between points of the curve")
    parser.add_argument("--reward", type=float, help="that the time is taken to, not the task's own")
    parser.add_argument("--correction", choices=["ratio", "truncate", "mask", "none"],
                        help="for samples of another version, not the default's")  # fmt: skip
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/asynchronous"))
    args = parser.parse_args(words)
    task = TASKS[args.task]
    reward = task.reward if args.reward is None else args.reward
    results = [run(staleness, seed, args) for seed in args.seeds for staleness in args.staleness]
    results += [run(max(args.staleness), seed, args, learns=False) for seed in args.seeds[: args.control]]
    columns = (f"seconds to {reward}", "seconds a step", "engines idle", "learner idle", "most stale")
    table = Table("staleness", "seed", "before", "after", *columns, title=f"{task.env_id}, held-out reward, 95 %")
    for result in sorted(results, key=lambda result: (result["lr"] == 0, result["staleness"])):
        each = [f"{mean:.3f} ± {ci:.3f}" for mean, ci in (result["before"], result["after"])]
        idle = [f"{result[name]:.0%}" for name in ("idle/engines", "idle/learner")]
        reached_s = seconds_to(result["curve"], reward)
        when = ["never" if reached_s is None else f"{reached_s:.0f}", f"{result['time/step_s']:.1f}"]
        name = f"{result['staleness']}" + ("" if result["lr"] else ", learning rate 0")
        table.add_row(name, str(result["seed"]), *each, *when, *idle, f"{result['staleness_max']:.0f}")
    Console().print(table)
    arms = {
        f"staleness {staleness}": [r["curve"] for r in results if r["staleness"] == staleness and r["lr"]]
        for staleness in args.staleness
    }
    picture = args.out / "asynchronous.png"
    title, over = f"{task.env_id}, SmolLM2-135M-Instruct", "seconds of training"
    draw_arms(arms, picture, title=title, value="reward on held-out seeds", over=over)


if __name__ == "__main__":
    main()
