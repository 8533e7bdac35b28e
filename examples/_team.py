"""Shared parts of the examples that train a team of another library: its tasks, tool and reward, and a training run.

A planner says in one line what has to be worked out, and a solver with a calculator answers.
"""

import argparse
import re
from pathlib import Path

import forge_agents as fa

AGENTS = ("planner", "solver")
PLANNER, SOLVER = "Say in one line what has to be worked out.", "Use your tool, then answer with the number."


def multiply_and_add(a: int, b: int, c: int) -> int:
    """Work out a * b + c."""
    return a * b + c


def tasks(rng):
    a, b, c = (int(n) for n in rng.integers(2, 30, 3))
    return {"question": f"Anna has {a} boxes of {b} eggs and {c} more. How many eggs?", "answer": a * b + c}


def right(task, result):
    """Return whether the last number of the answer is right. The answer may be empty or None."""
    return float(re.findall(r"\d+", result or "")[-1:] == [str(task["answer"])])


def main(env, description, out):
    """Train an adapter for each agent of ``env``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path(out))
    args = parser.parse_args()
    team = {agent: fa.Policy(args.model, name=agent, lora=fa.LoRA()) for agent in AGENTS}
    with fa.GRPOTrainer(team, out_dir=args.out) as trainer:
        print(trainer.fit(env, steps=args.steps).curve)
