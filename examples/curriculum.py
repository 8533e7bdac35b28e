"""Choosing the level to practice: always the same, all levels equally, or the level with medium success.

A team of one 135M model plays forge/Relay-v0 without the tool, so it must add: level 1 has sums of numbers up to 9,
level 2 up to 20, level 3 up to 99. All arms train for the same number of steps and episodes, which cost the same at
every level. Arms are evaluated on held-out seeds of all levels. The control has learning rate 0.

    python examples/curriculum.py [--levels 1 2 3] [--seeds 0 1 2] [--steps 40] [--out runs/curriculum]

An arm takes five minutes on two CPU cores. The script writes ``curriculum.png``. Finished runs are not repeated.
"""

import shutil
from pathlib import Path

import _study
import numpy as np
from rich.console import Console
from rich.table import Table

import forge_agents as fa

GAME = "forge/Relay-v0"
ENV_ARGS = {"tool": False}


def run(arm, env, seed, args):
    """Train one arm with one seed. Its curve has rows of step and reward at each level."""
    folder = args.out / f"{arm.replace(' ', '-')}-{seed}"
    if result := _study.saved(folder):
        return result
    shutil.rmtree(folder, ignore_errors=True)
    lr, steps = (0.0, args.control_steps) if arm == "control" else (args.lr, args.steps)
    team = fa.Policy(args.model, name="team", sampling=fa.Sampling(max_tokens=16))
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=0,  # all arms play the same number of episodes
        learner=fa.LearnerConfig(lr=lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=256),
        checkpoint_every=steps,
        keep_checkpoints=1,
    )
    rows, curve = [], []
    with fa.GRPOTrainer(team, config=config, out_dir=folder) as trainer:
        for done in range(0, steps + 1, args.eval_every):
            if done:
                rows = trainer.fit(env, steps=done, env_args=ENV_ARGS).metrics
            levels = [f"{GAME}@{n}" for n in args.levels]
            rewards = [trainer.evaluate(level, episodes=args.episodes, env_args=ENV_ARGS).reward for level in levels]
            curve.append([done, *rewards])
    result = {"arm": arm, "seed": seed, "curve": curve, "seconds": sum(row["time/step_s"] for row in rows)}
    return _study.save(folder, result | {"levels": [row.get("curriculum/level") for row in rows]})


def main(words=None):
    defaults = {"seeds": [0, 1, 2], "steps": 40, "control_steps": 10, "lr": 2e-5, "eval_every": 10, "episodes": 64}
    parser = _study.parser(__doc__, **defaults, out=Path("runs/curriculum"))
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3], help="the easiest first")
    args = parser.parse_args(words)
    ids = [f"{GAME}@{n}" for n in args.levels]
    arms = {"curriculum": fa.Curriculum(ids), "all levels": dict.fromkeys(ids, 1.0)}
    arms |= {f"level {n}": env_id for n, env_id in zip(args.levels, ids, strict=True)}
    results = [run(arm, env, seed, args) for arm, env in arms.items() for seed in args.seeds]
    if args.control_steps:
        results.append(run("control", arms["all levels"], args.seeds[0], args))
    levels = [f"level {n}" for n in args.levels]
    table = Table("trained on", "seed", *levels, "mean", "seconds", title="reward on held-out seeds")
    for result in results:
        first, last = result["curve"][0][1:], result["curve"][-1][1:]
        cells = [f"{before:.3f} to {after:.3f}" for before, after in zip(first, last, strict=True)]
        mean = f"{np.mean(first):.3f} to {np.mean(last):.3f}"
        table.add_row(result["arm"], str(result["seed"]), *cells, mean, f"{result['seconds']:.0f}")
        result["curve"] = [[step, float(np.mean(rewards))] for step, *rewards in result["curve"]]
    Console().print(table)
    labels = {result["arm"]: result["arm"] for result in results}
    picture, title = args.out / "curriculum.png", f"{GAME}, levels of training"
    _study.draw(results, labels, picture, title=title, value="reward, all levels")


if __name__ == "__main__":
    main()
