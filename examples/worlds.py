"""A team learns an environment that it cannot play at first: imitation of the oracle, then GRPO.

One policy plays all agents of a team environment (`forge-agents list` shows which environments have an oracle).
Untrained models earn almost nothing in most of them. After imitating games of the oracle the model earns a little, and
GRPO continues from there. The control has learning rate 0. All arms are evaluated on the same held-out seeds.

    python examples/worlds.py [forge/Codewords-v0@1] [--seeds 0 1 2] [--games 96] [--steps 20] [--out runs/worlds]

The script writes ``curves.png`` into the environment's folder, and 6 GB of models and checkpoints per seed. Finished
runs are not repeated. Interrupted ones start again.
"""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_trainers.records.plots import draw_arms

ARMS = {"trained": "imitation, then GRPO", "control": "control, learning rate 0"}


def run(seed, args, out):
    """Train one seed and its control. Returns the result of each arm; finished seeds are read from their files."""
    folder = out / f"seed-{seed}"
    files = {arm: folder / arm / "result.json" for arm in ("trained", *(["control"] if args.control_steps else []))}
    if all(file.exists() for file in files.values()):
        return {arm: json.loads(file.read_text()) for arm, file in files.items()}
    shutil.rmtree(folder, ignore_errors=True)  # an unfinished seed starts again: its first measurement is lost
    team = fa.Policy(args.model, name="team", sampling=fa.Sampling(max_tokens=args.max_tokens))
    if args.games:
        team = replace(team, model=str(imitated(team, seed, args, out / f"imitated-{seed}").absolute()))
    config = fa.GRPOConfig(
        seed=seed,
        learner=fa.LearnerConfig(lr=args.lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=args.max_model_len),
        eval_every=args.eval_every,
        eval_episodes=args.episodes,
        checkpoint_every=args.steps,
        keep_checkpoints=1,
    )
    still = replace(config, learner=replace(config.learner, lr=0.0))
    results = {}
    with fa.GRPOTrainer(team, config=config, out_dir=folder / "trained") as first:
        results["trained"] = measured(first, args.steps, args)
        if args.control_steps:
            with first.fork(folder / "control", config=still) as second:
                results["control"] = measured(second, args.control_steps, args)
    for arm, result in results.items():
        result |= {"arm": arm, "seed": seed}
        files[arm].write_text(json.dumps(result))
    return results


def imitated(team, seed, args, folder):
    """The model after the oracle's games."""
    if not (folder / "export").exists():
        config = fa.SFTConfig(seed=seed, batch_size=16, learner=fa.LearnerConfig(lr=2e-5))
        with fa.SFTTrainer(team, config, out_dir=folder) as trainer:
            trainer.fit(fa.demonstrations(args.world, args.games, seed=seed), epochs=args.epochs)
    return folder / "export"


def measured(trainer, steps, args):
    """Rewards on held-out seeds before, along and after training, with half the width of their 95 % intervals."""
    before = trainer.evaluate(args.world, episodes=args.episodes)
    rows = trainer.fit(args.world, steps=steps).metrics
    after = trainer.evaluate(args.world, episodes=args.episodes)
    curve = [[0, before.reward]] + [[row["step"], row["eval/reward"]] for row in rows if "eval/reward" in row]
    seconds = sum(row["time/step_s"] for row in rows)
    return {"before": [before.reward, before.ci], "after": [after.reward, after.ci], "curve": curve, "seconds": seconds}


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", nargs="?", default="forge/Codewords-v0@1", help="environment, with its level")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--games", type=int, default=96, help="number of the oracle's games to imitate; 0: none")
    parser.add_argument("--epochs", type=int, default=2, help="how often each is")
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps of each run")
    parser.add_argument("--control-steps", type=int, default=2, help="of the control; 0: none")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--max-tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--max-model-len", type=int, default=1024, help="of a seat's conversation, in tokens")
    parser.add_argument("--eval-every", type=int, default=5, help="steps between points of the curve")
    parser.add_argument("--episodes", type=int, default=64, help="held-out seeds")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/worlds"), help="folder of the worlds' folders")
    args = parser.parse_args(words)
    out = args.out / args.world.rpartition("/")[2].replace("@", "-")
    results = [run(seed, args, out) for seed in args.seeds]
    table = Table("seed", "arm", "before", "after", "seconds", title=f"{args.world}, held-out; 95 %")
    for result in results:
        for arm in (arm for arm in ARMS if arm in result):
            outcome = result[arm]
            cells = (f"{mean:.3f} ± {ci:.3f}" for mean, ci in (outcome["before"], outcome["after"]))
            table.add_row(str(outcome["seed"]), ARMS[arm], *cells, f"{outcome['seconds']:.0f}")
    console = Console()
    console.print(table)
    played = [arm for arm in ARMS if any(arm in result for result in results)]
    curves = {ARMS[arm]: [result[arm]["curve"] for result in results if arm in result] for arm in played}
    title = f"{args.world}, {Path(args.model).name}"
    draw_arms(curves, out / "curves.png", title=title, value="reward on held-out seeds")
    means = [np.mean([result["trained"][when][0] for result in results]) for when in ("before", "after")]
    console.print(f"mean of the seeds {means[0]:.3f} to {means[1]:.3f}; plot {out / 'curves.png'}")


if __name__ == "__main__":
    main()
