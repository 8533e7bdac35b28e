"""A team learns an environment that it cannot play at first: imitation of the oracle, then GRPO.

One policy plays all agents of a team environment (`forge-agents list` shows which environments have an oracle).
Untrained models earn almost nothing in most of them. After imitating games of the oracle the model earns a little, and
GRPO continues from there. The control has learning rate 0. All arms are evaluated on the same held-out seeds.

    python examples/worlds.py [forge/Codewords-v0@1] [--seeds 0 1 2] [--games 96] [--steps 20] [--out runs/worlds]

The script writes ``curves.png`` into the environment's folder, and 6 GB of models and checkpoints per seed. Finished
runs are not repeated, and interrupted ones continue.
"""

from dataclasses import replace
from pathlib import Path

import _study

import forge_agents as fa

ARMS = {"trained": "imitation, then GRPO", "control": "control, learning rate 0"}


def run(seed, args, out):
    """Train one seed and its control. Returns the results."""
    folder = out / f"seed-{seed}"
    arms = list(ARMS) if args.control_steps else ["trained"]
    results = [_study.saved(folder / arm) for arm in arms]
    if all(results):
        return results
    team = fa.Policy(args.model, name="team", sampling=fa.Sampling(max_tokens=args.max_tokens))
    if args.games:
        imitation = {"games": args.games, "epochs": args.epochs, "seed": seed}
        team = _study.imitated(team, args.env, out / f"imitated-{seed}", **imitation)
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
    common = {"episodes": args.episodes, "after": args.episodes, "seed": seed}
    with fa.GRPOTrainer(team, config=config, out_dir=folder / "trained") as trainer:
        steps = {"steps": args.steps, **common}
        results = [_study.measure(trainer, args.env, folder / "trained", arm="trained", **steps)]
        if args.control_steps:
            steps = {"steps": args.control_steps, **common}
            with trainer.fork(folder / "control", config=still) as control:
                results.append(_study.measure(control, args.env, folder / "control", arm="control", **steps))
    return results


def main(words=None):
    defaults = {"seeds": [0, 1, 2], "games": 96, "epochs": 2, "steps": 20, "control_steps": 2, "lr": 2e-5}
    defaults |= {"max_tokens": 24, "max_model_len": 1024, "eval_every": 5, "episodes": 64}
    parser = _study.parser(__doc__, **defaults, out=Path("runs/worlds"))
    parser.add_argument("env", nargs="?", default="forge/Codewords-v0@1", help="environment, with its level")
    args = parser.parse_args(words)
    out = args.out / args.env.rpartition("/")[2].replace("@", "-")
    results = [result for seed in args.seeds for result in run(seed, args, out)]
    _study.show(results, ARMS, out / "curves.png", title=f"{args.env}, {Path(args.model).name}")


if __name__ == "__main__":
    main()
