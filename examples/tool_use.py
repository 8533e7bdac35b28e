"""Two agents learn to use a tool: one calls a calculator and passes on the result, the other repeats it.

A 135M model plays both agents of forge/ToolRelay-v0. A working call earns 0.2, the right answer 1. Measured on held-out
seeds before and after training, with 95 % intervals: the fraction of episodes with a working call, with a call that
computes the given question, and with the right answer. The control has learning rate 0.

    python examples/tool_use.py [--steps 30] [--control-steps 10] [--seed 0] [--out runs/tool_use]

The script took 27 minutes on two busy CPU cores. Episodes are in OUT/*/episodes.jsonl.
"""

import json
from pathlib import Path

import _study
import numpy as np
from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_agents.tools import calculator, parse_tool_calls, run_tool

ENV_ID = "forge/ToolRelay-v0"
MEASURES = ("a call works", "a call is the right one", "the answer is right")


def measure(trainer, episodes):
    """Return the shares of held-out episodes with a working call, with a right result and with the right answer."""
    rows = []
    for episode in trainer.evaluate(ENV_ID, episodes=episodes).episodes:
        asker = episode.trajectories["asker"]
        calls = [call for turn in asker.turns for call in parse_tool_calls(turn.action, tools=[calculator])]
        results = [run_tool([calculator], call) for call in calls]
        worked = asker.info.get("tool_calls", 0) > asker.info.get("tool_errors", 0)
        right = worked and any(result.ok and result.content == asker.info.get("answer") for result in results)
        rows.append((worked, right, bool(asker.info.get("correct"))))
    return [interval(column) for column in np.asarray(rows, dtype=float).T]


def interval(hits):
    """Return the share and its 95 % interval after Wilson."""
    n, p, z = len(hits), float(np.mean(hits)), 1.96
    middle, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return p, (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def reward(measures):
    """Return the share of right answers and half the width of its interval."""
    share, low, high = measures[-1]
    return share, (high - low) / 2


def run(folder, args, *, steps, lr):
    """Train, or continue training, in `folder`. Returns the measures before and after."""
    team = fa.Policy(args.model, name="team", sampling=fa.Sampling(temperature=0.7, max_tokens=24))
    config = fa.GRPOConfig(
        seed=args.seed,
        max_resamples=0,  # all arms play the same number of episodes
        learner=fa.LearnerConfig(lr=lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=512),
    )
    with fa.GRPOTrainer(team, config=config, out_dir=folder) as trainer:
        first = folder / "before.json"  # exists if an interrupted run continues
        if not first.exists():
            before = measure(trainer, args.episodes)
            folder.mkdir(parents=True, exist_ok=True)
            first.write_text(json.dumps(before))
        trainer.fit(ENV_ID, steps=steps)
        return json.loads(first.read_text()), measure(trainer, args.episodes)


def main(words=None):
    defaults = {"steps": 30, "control_steps": 10, "episodes": 128, "seed": 0}
    args = _study.parser(__doc__, **defaults, out=Path("runs/tool_use")).parse_args(words)
    runs = {"trained": run(args.out / "trained", args, steps=args.steps, lr=2e-5)}
    if args.control_steps:
        runs["control, lr 0"] = run(args.out / "control", args, steps=args.control_steps, lr=0.0)
    table = Table("run", "measure", "before", "after", title=f"{ENV_ID}: share of held-out episodes, 95 %")
    for name, (before, after) in runs.items():
        for what, *both in zip(MEASURES, before, after, strict=True):
            table.add_row(name, what, *(f"{p:.3f} [{low:.3f}, {high:.3f}]" for p, low, high in both))
    Console().print(table)
    for name, (before, after) in runs.items():
        shares = {"before": reward(before), "after": reward(after), "measures": {"before": before, "after": after}}
        arm = name.partition(",")[0]
        _study.save(args.out / arm, {"arm": arm, "seed": args.seed, **shares})


if __name__ == "__main__":
    main()
