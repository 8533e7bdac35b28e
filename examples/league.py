"""Mirror self-play or a league: which policy holds against a perfect player of tic-tac-toe?

A transformer with a million weights imitates minimax against random moves until it loses two thirds of its games
against minimax. Then it plays 200 steps of 128 games. In the first arm it plays only against itself (mirror self-play).
In the second arm it plays a third of the games against itself and the others against its snapshots, chosen by
prioritized fictitious self-play. Both arms are evaluated against minimax, which they do not meet in training: 0 is the
best possible score, and -1 loses always. The control has learning rate 0.

    python examples/league.py [--seeds 0 1 2] [--steps 200] [--out runs/league]

A run takes ten minutes on two CPU cores. The script writes ``league.png``. Finished runs are not repeated. Interrupted
ones start again.
"""

import argparse
import asyncio
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_agents.models.tiny import tiny_model
from forge_agents.rollout.rollout import Rollout
from forge_trainers.records.plots import draw_arms

GAME = "forge/TicTacToe-v0"
SIGNS = (  # of what a seat is shown only the nine signs reach the model, and nothing of the rules
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{{ message['content'].split('\nFree')[0].replace(' ', '').replace('\n', '') + '<|im_start|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
)
ARMS = {"league": {"self_play": 0.35}, "mirror": {"self_play": 1.0}}


def untaught(folder):
    """A random model of a million weights that reads a board as nine letters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny_model(folder)
    torch.manual_seed(0)
    settings = json.loads((folder / "config.json").read_text())
    sizes = {"intermediate_size": 512, "num_hidden_layers": 4}
    LlamaForCausalLM(LlamaConfig(**settings | sizes)).save_pretrained(folder)
    tokenizer_config = folder / "tokenizer_config.json"
    tokenizer_config.write_text(json.dumps(json.loads(tokenizer_config.read_text()) | {"chat_template": SIGNS}))
    return folder


def taught(args):
    """The folder of such a model after it has imitated minimax."""
    folder = args.out / "taught"
    if not (folder / "export").exists():
        chance, oracle = fa.Random(), fa.Oracle(name="player")
        pairs = [{"player_1": first, "player_2": second} for first, second in ((chance, oracle), (oracle, chance))]
        rollouts = [Rollout(make_env=partial(fa.make, GAME), env_id=GAME, policies=seats) for seats in pairs]

        async def play():
            return [(await rollouts[seed % 2].group(seed, 1)).episodes[0] for seed in range(args.games)]

        learner = fa.LearnerConfig(lr=1e-3, warmup_steps=5, lr_decay="linear", compute_dtype="float32", threads=1)
        config = fa.SFTConfig(batch_size=64, learner=learner)
        player = fa.Policy(str(untaught(folder / "start")), name="player")
        with fa.SFTTrainer(player, config, out_dir=folder) as trainer:
            trainer.fit(asyncio.run(play()), epochs=args.epochs)
    return folder / "export"


def train(arm, model, seed, args, *, control=False):
    """One run: its curve, rows of step, reward against minimax and entropy of a token, and the seconds of its steps."""
    folder = args.out / ("control" if control else f"{arm}-{seed}")
    saved = folder / "result.json"
    if saved.exists():
        return json.loads(saved.read_text())
    shutil.rmtree(folder, ignore_errors=True)  # begun and not finished: what it was before is measured at the start
    player = fa.Policy(str(model.absolute()), name="player", sampling=fa.Sampling(max_tokens=4))
    learner = fa.LearnerConfig(
        lr=0.0 if control else args.lr,
        warmup_steps=2,
        compute_dtype="float32",
        threads=1,  # two would wait for each other at products as small as these
    )
    config = fa.GRPOConfig(
        seed=seed,
        group_size=16,
        max_resamples=0,  # both arms play as many games
        credit=fa.Credit(by=("seed", "role"), scale="none"),
        learner=learner,
        engine=fa.EngineConfig(max_model_len=128, threads=1),
        eval_every=args.eval_every,
        eval_episodes=args.episodes,
        checkpoint_every=args.eval_every,
        max_empty_steps=args.steps,  # a policy that has collapsed is a result
    )
    league = fa.League(player, snapshot_every=5, opponents="pfsp", pool=8, held_out=(fa.Oracle(),), **ARMS[arm])
    with fa.GRPOTrainer(league, config=config, out_dir=folder) as trainer:
        before = trainer.evaluate(GAME, episodes=args.episodes)
        rows = trainer.fit(GAME, steps=args.control_steps if control else args.steps).metrics
    names = ("eval/reward", "learner/entropy")
    curve = [[0, before.reward, None]]
    curve += [[row["step"], *(row.get(name) for name in names)] for row in rows if names[0] in row]
    result = {"curve": curve, "seconds": sum(row["time/step_s"] for row in rows)}
    saved.write_text(json.dumps(result))
    return result


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200, help="optimiser steps of each run")
    parser.add_argument("--control-steps", type=int, default=40, help="with learning rate 0 on the first seed; 0: none")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--games", type=int, default=12000, help="of minimax against random moves")
    parser.add_argument("--epochs", type=int, default=4, help="how often minimax's part in them is imitated")
    parser.add_argument("--eval-every", type=int, default=20, help="steps between points of the curve")
    parser.add_argument("--episodes", type=int, default=128, help="held-out games against minimax")
    parser.add_argument("--out", type=Path, default=Path("runs/league"), help="folder of the runs")
    args = parser.parse_args(words)
    model = taught(args)
    results = {arm: [train(arm, model, seed, args) for seed in args.seeds] for arm in args.arms}
    if args.control_steps:
        results["learning rate 0"] = [train(args.arms[0], model, args.seeds[0], args, control=True)]
    table = Table("arm", "seed", *("start", "best", "at step", "last", "entropy", "seconds"), title="against minimax")
    for label, runs in results.items():
        for seed, run in zip(args.seeds, runs, strict=False):
            rewards = [row[1] for row in run["curve"]]
            best = int(np.argmax(rewards))
            entropy = run["curve"][-1][2]
            row = [f"{rewards[0]:.3f}", f"{rewards[best]:.3f}", str(run["curve"][best][0]), f"{rewards[-1]:.3f}"]
            table.add_row(label, str(seed), *row, "" if entropy is None else f"{entropy:.2f}", f"{run['seconds']:.0f}")
    Console().print(table)
    curves = {label: [[row[:2] for row in run["curve"]] for run in runs] for label, runs in results.items()}
    draw_arms(
        curves, args.out / "league.png", title=f"{GAME}, self-play of two kinds", value="reward against minimax"
    )


if __name__ == "__main__":
    main()
