"""Credit by role or for all seats alike: does it matter where seats are paid for different things?

Two seats each answer a sum of their own and are paid for their own answer: the clerk's numbers go up to 4, the
accountant's up to 30, so one of them is often right at first and the other hardly ever. One model sits in both. In one
arm a seat's reward is compared with its siblings' in the same seat, `fa.Credit(by=("seed", "role"))`, which is the
default; in the other with those of both seats, `by=("seed",)`. Dr. MAS (arXiv 2602.08847) says that the latter upsets
the training of teams.

    python examples/role_credit.py [--seeds 0 1 2] [--steps 15] [--out runs/role_credit]

takes three minutes a run on two CPU cores and writes ``role_credit.png``. Finished runs are not repeated.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_trainers.records.plots import draw_arms

ENV_ID = "example/OwnSums-v0"
LARGEST = {"clerk": 4, "accountant": 30}
ARMS = {"by role": ("seed", "role"), "seats alike": ("seed",)}


@fa.register(ENV_ID, max_turns=2, tags=("2p",))
class OwnSums(fa.ParallelTurnEnv):
    """One round; each seat gets 1 where the last number that it says is its own sum."""

    possible_agents = list(LARGEST)

    def setup(self, rng):
        self.numbers = {agent: rng.integers(1, LARGEST[agent] + 1, size=2).tolist() for agent in LARGEST}

    def instructions(self, agent):
        return "You are good at sums. Answer with a number."

    def observe_text(self, agent):
        first, second = self.numbers[agent]
        return f"What is {first} + {second}? Answer with the number alone."

    def act_all(self, actions):
        said = {agent: re.findall(r"\d+", text)[-1:] for agent, text in actions.items()}
        rewards = {agent: float(said[agent] == [str(sum(self.numbers[agent]))]) for agent in actions}
        return fa.Outcome(rewards=rewards, done=True)


def run(arm, seed, asked):
    """One run: each seat's reward on held-out seeds along the way, and the largest gradient; saved when finished."""
    folder = asked.out / f"{arm.replace(' ', '-')}-{seed}"
    saved = folder / "result.json"
    if saved.exists():
        return json.loads(saved.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=0,  # every arm plays as much
        credit=fa.Credit(by=ARMS[arm]),
        learner=fa.LearnerConfig(lr=asked.lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=256),
        checkpoint_every=asked.steps,
        keep_checkpoints=1,
    )
    team = fa.Policy(asked.model, name="team", sampling=fa.Sampling(max_tokens=12))
    rows, curve = [], []
    with fa.GRPOTrainer(team, config=config, out_dir=folder) as trainer:
        for done in range(0, asked.steps + 1, asked.eval_every):
            if done:
                rows = trainer.fit(ENV_ID, steps=done).metrics
            found = trainer.evaluate(ENV_ID, episodes=asked.episodes)
            curve.append([done, found.reward, found.by_agent])
    largest = max((row["learner/grad_norm"] for row in rows), default=0.0)
    result = {"arm": arm, "seed": seed, "curve": curve, "grad_norm": largest}
    saved.write_text(json.dumps(result))
    return result


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=15, help="optimiser steps of each run")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--eval-every", type=int, default=5, help="steps between points of the curve")
    parser.add_argument("--episodes", type=int, default=128, help="held-out seeds")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/role_credit"))
    asked = parser.parse_args(words)
    results = [run(arm, seed, asked) for seed in asked.seeds for arm in ARMS]
    table = Table("credit", "seed", *LARGEST, "both", "gradient", title="held-out reward; largest gradient norm")
    for result in sorted(results, key=lambda one: (one["arm"], one["seed"])):
        (_, before, first), (_, after, last) = result["curve"][0], result["curve"][-1]
        cells = [f"{first[agent]:.2f} to {last[agent]:.2f}" for agent in LARGEST] + [f"{before:.2f} to {after:.2f}"]
        table.add_row(result["arm"], str(result["seed"]), *cells, f"{result['grad_norm']:.2f}")
    Console().print(table)
    curves = {}
    for result in results:
        curves.setdefault(f"credit {result['arm']}", []).append([point[:2] for point in result["curve"]])
    draw_arms(curves, asked.out / "role_credit.png", title=f"{ENV_ID}, whom a seat is compared with", value="reward")


if __name__ == "__main__":
    main()
