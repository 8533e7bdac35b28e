"""One task, one model, one budget: GRPO, RLOO, DAPO and SFT before GRPO, three seeds each.

A 135M model sorts names, and sorts them again with an additional name (forge/AlphabetSort-v0). Each arm changes one
thing. The control has learning rate 0. All arms are evaluated on the same held-out seeds.

    python examples/algorithms.py [--arms grpo rloo dapo sft control] [--seeds 0 1 2] [--out runs/algorithms]

A run takes about five minutes on two CPU cores. The script writes ``algorithms.png``. Finished runs are not repeated.
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

ENV_ID = "forge/AlphabetSort-v0"
ENV_ARGS = {"num_names": 3, "num_added": 1, "turns": 2}
ARMS = {"grpo": "GRPO", "rloo": "RLOO", "dapo": "DAPO with dynamic sampling", "sft": "SFT, then GRPO",
        "control": "control, learning rate 0"}  # fmt: skip
CONTROL_SHARE = 0.4
"""Of the steps: the control need not go all the way."""
NUM_CHATS = 48
"""Demonstrations of the SFT arm."""


def demonstration(seed):
    """One episode as a chat, played by a sorter that makes no mistake."""
    env = fa.make(ENV_ID, **ENV_ARGS)
    env.reset(seed=seed)
    names, messages = [], [{"role": "system", "content": env.unwrapped.instructions("sorter")}]
    while env.agents and not env.terminations["sorter"]:
        question = env.observe("sorter")
        names = sorted(names + question.rpartition(": ")[2].split(", "))
        answer = "\n".join(names)
        env.step(answer)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def imitate(sorter, seed, folder):
    """The policy after supervised fine-tuning on demonstrations."""
    config = fa.SFTConfig(seed=seed, batch_size=16, learner=fa.LearnerConfig(lr=3e-5))
    with fa.SFTTrainer(sorter, config, out_dir=folder) as trainer:
        chats = [demonstration(2**30 + 1000 * seed + number) for number in range(NUM_CHATS)]
        export = trainer.fit(chats, epochs=4).export
    return fa.Policy(str(export.absolute()), name=sorter.name, sampling=sorter.sampling)


def run(arm, seed, steps, folder, args):
    """Train one arm. Saves and returns the measurements."""
    saved = folder / "result.json"
    if saved.exists():
        return json.loads(saved.read_text())
    shutil.rmtree(folder, ignore_errors=True)  # begun and not finished: what it was before is measured at the start
    sorter = fa.Policy(args.model, name="sorter", sampling=fa.Sampling(temperature=0.7, max_tokens=20))
    if arm == "sft":
        sorter = imitate(sorter, seed, folder / "sft")
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=1 if arm == "dapo" else 0,
        learner=fa.LearnerConfig(
            loss=arm if arm in ("rloo", "dapo") else "grpo", lr=0.0 if arm == "control" else args.lr, warmup_steps=2
        ),
        engine=fa.EngineConfig(max_model_len=256, enforce_eager=True),
        groups_per_step=4,
        eval_every=args.eval_every,
        checkpoint_every=steps,
        keep_checkpoints=1,
    )
    with fa.GRPOTrainer(sorter, config=config, out_dir=folder) as trainer:
        before = trainer.evaluate(ENV_ID, episodes=args.episodes, env_args=ENV_ARGS)
        rows = trainer.fit(ENV_ID, steps=steps, env_args=ENV_ARGS).metrics
        after = trainer.evaluate(ENV_ID, episodes=2 * args.episodes, env_args=ENV_ARGS)
    curve = [[0, before.reward]] + [[row["step"], row["eval/reward"]] for row in rows if "eval/reward" in row]
    result = {"arm": arm, "seed": seed, "curve": curve, "seconds": sum(row["time/step_s"] for row in rows)}  # fmt: skip
    result |= {"before": [before.reward, before.ci], "after": [after.reward, after.ci]}
    saved.write_text(json.dumps(result))
    return result


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps of each run")
    parser.add_argument("--lr", type=float, default=3e-5, help="learning rate of all arms but the control")
    parser.add_argument("--eval-every", type=int, default=5, help="steps between points of the curve")
    parser.add_argument("--episodes", type=int, default=128, help="held-out seeds before; twice as many after")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"), help="folder of the runs")
    args = parser.parse_args(words)
    results = []
    for seed in args.seeds:
        for arm in args.arms:
            steps = max(1, round(args.steps * CONTROL_SHARE)) if arm == "control" else args.steps
            results.append(run(arm, seed, steps, args.out / f"{arm}-{seed}", args))
    seeds = [f"seed {seed}" for seed in args.seeds]
    table = Table("arm", "before", *seeds, "mean", title=f"{ENV_ID}: reward of held-out episodes, of 2; 95 %")
    for arm in args.arms:
        mine = [r for r in results if r["arm"] == arm]
        each = [f"{r['after'][0]:.3f} ± {r['after'][1]:.3f}" for r in mine]
        means = [np.mean([r[when][0] for r in mine]) for when in ("before", "after")]
        table.add_row(ARMS[arm], f"{means[0]:.3f}", *each, f"{means[1]:.3f}")
    console = Console()
    console.print(table)
    arms = {ARMS[arm]: [r["curve"] for r in results if r["arm"] == arm] for arm in args.arms}
    title = f"{ENV_ID}, SmolLM2-135M-Instruct"
    draw_arms(arms, args.out / "algorithms.png", title=title, value="reward of held-out episodes, of 2")
    console.print(f"plot {args.out / 'algorithms.png'}")


if __name__ == "__main__":
    main()
