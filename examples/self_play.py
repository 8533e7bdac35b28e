"""Self-play in Kuhn poker: does a policy that plays only against itself and its past become hard to exploit?

A 135M model first imitates all legal answers with equal probability. Then it plays against itself and its snapshots,
chosen by prioritized fictitious self-play. Exploitability, the amount that the best response wins, is computed over the
whole game from the model's answers at every information set: 0.458 chips per game for uniform play, 0 at an
equilibrium. The control has learning rate 0 and must stay as exploitable as it is.

    python examples/self_play.py [--seeds 0 1 2] [--steps 40] [--out runs/self_play]

A run takes ten minutes on two CPU cores. The script writes ``self_play.png``. Finished runs are not repeated, and
interrupted ones continue. `examples/self_play_table.py` uses a table of numbers instead of a model.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_agents.bench import GameTree, exploitability, uniform
from forge_trainers.records.plots import draw_arms

GAME = "forge/KuhnPoker-v0"
CREDIT = fa.Credit(by=("seed", "role"), scale="none")


def league_of(policy):
    """The league of both experiments."""
    return fa.League(policy, snapshot_every=5, opponents="pfsp", pool=8, self_play=0.35)


def answers():
    """Conversations that end in a legal action: every action at every information set once."""
    tree = GameTree(GAME)
    rows = []
    for place in tree.info_sets:
        prompt = [{"role": "system", "content": tree.instructions[place.agent]}]
        for seen, action in place.past:
            prompt += [{"role": "user", "content": seen}, {"role": "assistant", "content": action}]
        prompt.append({"role": "user", "content": place.observation})
        rows += [{"prompt": prompt, "completion": action} for action in place.legal]
    return rows


def taught(model, folder):
    """The folder of a model that has learned to answer so."""
    export = folder / "export"
    if not export.exists():
        config = fa.SFTConfig(batch_size=24, learner=fa.LearnerConfig(lr=5e-5, warmup_steps=3))
        with fa.SFTTrainer(fa.Policy(model, name="player"), config, out_dir=folder) as trainer:
            trainer.fit(answers(), steps=20)
    return export


def train(model, seed, args, *, control=False):
    """One run with a model. Returns rows of step, exploitability, illegal answers and reward against the start."""
    folder = args.out / ("control" if control else f"league-{seed}")
    saved = folder / "result.json"
    if saved.exists():
        return json.loads(saved.read_text())["curve"]
    steps, lr = (args.control_steps, 0.0) if control else (args.steps, args.lr)
    player = fa.Policy(str(model), name="player", sampling=fa.Sampling(temperature=1.0, max_tokens=8))
    config = fa.GRPOConfig(
        seed=seed,
        credit=CREDIT,
        learner=fa.LearnerConfig(lr=lr, warmup_steps=2, lr_decay="linear", entropy_coef=0.05),
        engine=fa.EngineConfig(max_model_len=512),
        eval_every=args.eval_every,
        eval_episodes=args.episodes,
        exploitability_samples=args.samples,
        checkpoint_every=args.eval_every,
    )
    with fa.GRPOTrainer(league_of(player), config=config, out_dir=folder) as trainer:
        rows = trainer.fit(GAME, steps=steps).metrics
    names = ("eval/exploitability", "eval/illegal", "eval/reward")
    curve = [[row["step"], *(row[name] for name in names)] for row in rows if names[0] in row]
    result = {"arm": "control" if control else "league", "seed": seed, "curve": curve}
    result |= {"before": [None, None], "after": [curve[-1][1], None]}  # exploitability; not measured before training
    saved.write_text(json.dumps(result))
    return curve


def draw(curves, target, title):
    """Exploitability by step of each arm, beside that of even play."""
    level = ("even play", exploitability(GAME, uniform))
    draw_arms(curves, target, title=title, value="exploitability, chips a game", level=level)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps of each run")
    parser.add_argument("--lr", type=float, default=5e-6, help="learning rate")
    parser.add_argument("--control-steps", type=int, default=20, help="with learning rate 0 on the first seed; 0: none")
    parser.add_argument("--eval-every", type=int, default=10, help="steps between points of the curve")
    parser.add_argument("--episodes", type=int, default=64, help="held-out games against the start")
    parser.add_argument("--samples", type=int, default=200, help="answers at each of the 12 information sets")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/self_play"), help="folder of the runs")
    args = parser.parse_args(words)
    model = taught(args.model, args.out / "taught")
    arms = {"league": [train(model, seed, args) for seed in args.seeds]}
    if args.control_steps:
        arms["learning rate 0"] = [train(model, args.seeds[0], args, control=True)]
    table = Table("run", "seed", "step", "exploitability", "illegal answers", "reward against the start")
    for label, curves in arms.items():
        for seed, curve in zip(args.seeds, curves, strict=False):
            for step, *measures in curve:
                table.add_row(label, str(seed), str(step), *(f"{value:.3f}" for value in measures))
    Console().print(table)
    curves = {label: [[row[:2] for row in curve] for curve in curves] for label, curves in arms.items()}
    draw(curves, args.out / "self_play.png", "Self-play with a league in Kuhn poker")


if __name__ == "__main__":
    main()
