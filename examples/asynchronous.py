"""Asynchronous rollouts: the cost in learning and the gain in time of a policy lag of 1 and 2.

Two agents of forge/Relay-v0 share a 135M model, or one agent sorts names in two turns (``--task sort``). Without an
accelerator, the synchronous arm gives all cores to engine and learner in turn. The other arms give half of the cores to
each all the time. All arms are evaluated on the same held-out seeds, over seconds of training (including all
evaluations but the last). The control has learning rate 0.

    python examples/asynchronous.py [--task relay] [--staleness 0 1 2] [--seeds 0 1 2] [--out runs/asynchronous]

A run takes minutes on two CPU cores. The script writes ``asynchronous.png``. Finished runs are not repeated.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import _study
import numpy as np

import forge_agents as fa


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
COLUMNS = ("time/step_s", "idle/engines", "idle/learner", "staleness/max", "eval/reward")
WARM_FROM = 3
"""Earlier steps do not count for idle shares and times if there are later ones: memory is new, caches are cold, and
nothing is collected ahead."""


def run(staleness, seed, args, *, control=False):
    """Train one arm with one seed."""
    task = TASKS[args.task]
    lr = 0.0 if control else task.lr
    parts = [args.task, f"staleness-{staleness}", args.correction, str(seed), "control" if control else None]
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=0,  # all arms play the same number of episodes
        groups_per_step=task.groups,
        max_staleness=staleness,
        learner=fa.LearnerConfig(lr=lr, warmup_steps=2, correction=args.correction),
        engine=fa.EngineConfig(max_model_len=256, enforce_eager=True),
        eval_every=args.eval_every,
        eval_episodes=args.episodes,
        checkpoint_every=args.steps,
    )
    team = fa.Policy(args.model, name="team", sampling=task.sampling)
    return _study.train(
        team, task.env_id, config, args.out / "-".join(filter(None, parts)), steps=args.steps, episodes=args.episodes,
        env_args=task.env_args, columns=COLUMNS, arm=label(staleness, lr), seed=seed,
    )  # fmt: skip


def label(staleness, lr):
    """Describe an arm."""
    return f"staleness {staleness}" + ("" if lr else ", learning rate 0")


def by_seconds(result):
    """Return points of seconds of training and held-out reward."""
    seconds = np.cumsum(result["time/step_s"]).tolist()
    rewards = result["eval/reward"]
    return [[0.0, result["before"][0]], *([s, r] for s, r in zip(seconds, rewards, strict=True) if r is not None)]


def seconds_to(curve, reward):
    """Return the seconds until the reward is first reached, between points on a line; None: never."""
    for (s0, r0), (s1, r1) in pairwise(curve):
        if r1 >= reward:
            return s1 if r1 == r0 else s0 + (s1 - s0) * max(0.0, reward - r0) / (r1 - r0)
    return None


def main(words=None):
    defaults = {"seeds": [0, 1, 2], "steps": 18, "eval_every": 3, "episodes": 128}
    parser = _study.parser(__doc__, **defaults, out=Path("runs/asynchronous"))
    parser.add_argument("--task", choices=list(TASKS), default="relay")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--control", type=int, default=0, metavar="N", help="number of control runs, of the last arm")
    parser.add_argument("--reward", type=float, help="held-out reward that the time is taken to; default: the task's")
    parser.add_argument("--correction", choices=["ratio", "truncate", "mask", "none"], help="for stale samples")
    args = parser.parse_args(words)
    task = TASKS[args.task]
    reward = task.reward if args.reward is None else args.reward
    results = [run(staleness, seed, args) for staleness in args.staleness for seed in args.seeds]
    results += [run(max(args.staleness), seed, args, control=True) for seed in args.seeds[: args.control]]
    for result in results:
        result["curve"] = by_seconds(result)
    _study.show(
        results,
        {result["arm"]: result["arm"] for result in results},
        args.out / "asynchronous.png",
        title=f"{task.env_id}, SmolLM2-135M-Instruct",
        columns={
            f"seconds to {reward}": lambda result: time_cell(result["curve"], reward),
            "seconds a step": lambda result: f"{warm_mean(result, 'time/step_s'):.1f}",
            "engines idle": lambda result: f"{warm_mean(result, 'idle/engines'):.0%}",
            "learner idle": lambda result: f"{warm_mean(result, 'idle/learner'):.0%}",
            "most stale": lambda result: f"{max(result['staleness/max']):.0f}",
        },
        over="seconds of training",
    )


def time_cell(curve, reward):
    """Return the seconds to a reward as text."""
    seconds = seconds_to(curve, reward)
    return "never" if seconds is None else f"{seconds:.0f}"


def warm_mean(result, column):
    """Return the mean of a metric without the first steps."""
    return float(np.mean(result[column][WARM_FROM:] or result[column]))


if __name__ == "__main__":
    main()
