"""Choosing the level to practice: always the same, all levels equally, or the level with medium success.

A team of one 135M model plays forge/Relay-v0 without the tool, so it must add: level 1 has sums of numbers up to 9,
level 2 up to 20, level 3 up to 99. All arms train for the same number of steps and episodes, which cost the same at
every level. They are evaluated on held-out seeds of all levels. The control has learning rate 0.

    python examples/curriculum.py [--levels 1 2 3] [--seeds 0 1 2] [--steps 40] [--out runs/curriculum]

An arm takes five minutes on two CPU cores. The script writes ``curriculum.png``. Finished runs are not repeated.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_trainers.records.plots import draw_arms

GAME = "forge/Relay-v0"
ENV_ARGS = {"tool": False}


def run(arm, practised, seed, args):
    """One arm and seed: rewards by level at the start, along the way and at the end; saved when finished."""
    folder = args.out / f"{arm.replace(' ', '-')}-{seed}"
    saved = folder / "result.json"
    if saved.exists():
        return json.loads(saved.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    lr, steps = (0.0, args.control_steps) if arm == "control" else (args.lr, args.steps)
    team = fa.Policy(args.model, name="team", sampling=fa.Sampling(max_tokens=16))
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=0,  # every arm plays as much
        learner=fa.LearnerConfig(lr=lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=256),
        checkpoint_every=steps,
        keep_checkpoints=1,
    )
    rows, curve = [], []
    with fa.GRPOTrainer(team, config=config, out_dir=folder) as trainer:
        for done in range(0, steps + 1, args.eval_every):
            if done:
                rows = trainer.fit(practised, steps=done, env_args=ENV_ARGS).metrics
            curve.append([done, *levels_of(trainer, args)])
    result = {"arm": arm, "seed": seed, "curve": curve, "seconds": sum(row["time/step_s"] for row in rows)}
    result["practised"] = [row.get("curriculum/level") for row in rows]
    saved.write_text(json.dumps(result))
    return result


def levels_of(trainer, args):
    """Reward on held-out seeds of each level."""
    each = (trainer.evaluate(f"{GAME}@{n}", episodes=args.episodes, env_args=ENV_ARGS) for n in args.levels)
    return [result.reward for result in each]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3], help="the easiest first")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps of each run")
    parser.add_argument("--control-steps", type=int, default=10, help="of the control on the first seed; 0: none")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--eval-every", type=int, default=10, help="steps between points of the curve")
    parser.add_argument("--episodes", type=int, default=64, help="held-out seeds of each level")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/curriculum"))
    args = parser.parse_args(words)
    ids = [f"{GAME}@{n}" for n in args.levels]
    arms = {"curriculum": fa.Curriculum(ids), "all alike": dict.fromkeys(ids, 1.0)}
    arms |= {f"level {n}": env_id for n, env_id in zip(args.levels, ids, strict=True)}
    results = [run(arm, practised, seed, args) for seed in args.seeds for arm, practised in arms.items()]
    if args.control_steps:
        results.append(run("control", arms["all alike"], args.seeds[0], args))
    levels = [f"level {n}" for n in args.levels]
    table = Table("practised", "seed", *levels, "mean", "seconds", title="reward on held-out seeds")
    for result in sorted(results, key=lambda result: (result["arm"], result["seed"])):
        first, last = result["curve"][0][1:], result["curve"][-1][1:]
        cells = [f"{before:.3f} to {after:.3f}" for before, after in zip(first, last, strict=True)]
        mean = f"{np.mean(first):.3f} to {np.mean(last):.3f}"
        table.add_row(result["arm"], str(result["seed"]), *cells, mean, f"{result['seconds']:.0f}")
    Console().print(table)
    curves = {}
    for result in results:
        curves.setdefault(result["arm"], []).append([[step, float(np.mean(each))] for step, *each in result["curve"]])
    draw_arms(curves, args.out / "curriculum.png", title=f"{GAME}, what is practised", value="reward, all levels")


if __name__ == "__main__":
    main()
