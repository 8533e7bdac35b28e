"""Reason, then answer: a model imitates a script that reasons, and continues with RL on its answers.

The task is a sum of five numbers from 1 to 3, and only the answer is rewarded. The script adds one number at a time in
<think> tags. With --plain it gives the answer alone. A model imitates the script until some of its answers are right,
and then trains with GRPO. The reasoning is not graded: the environment does not see it, and the learner trains its
tokens like all others.

    python examples/think_then_answer.py [--plain] [--seed 0] [--steps 25] [--lr 3e-5] [--out runs/think]

--lr 0 is the control. Every call shows all finished runs of the folder in a table and in ``think_then_answer.png``.
Finished runs are not repeated, and interrupted ones continue.
"""

import argparse
import asyncio
import json
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_agents.rollout import Rollout
from forge_trainers.records.plots import draw_arms

ENV_ID = "example/Sums-v0"
ARMS = {"think": "thinks, then answers", "plain": "answers", "control": "thinks, learning rate 0"}


@fa.register(ENV_ID, max_turns=1)
class Sums(fa.TurnEnv):
    """Five numbers from 1 to 3; their sum pays 1."""

    possible_agents = ["adder"]

    def setup(self, rng):
        self.numbers = rng.integers(1, 4, size=5).tolist()

    def instructions(self, agent):
        return "Add the numbers."

    def observe_text(self, agent):
        return " + ".join(map(str, self.numbers))

    def act(self, agent, action):
        return fa.Outcome(rewards={agent: float(action.strip() == str(sum(self.numbers)))}, done=True)


def teacher(observation, plain=False):
    """The sum, and before it one addition after another."""
    first, *others = map(int, re.findall(r"\d+", observation))
    total, additions = first, []
    for number in others:
        additions.append(f"{total}+{number}={total + number}")
        total += number
    thought = "" if plain else "<think>" + "\n".join(additions) + "</think>"
    return f"{thought}{total}"


def demonstrations(seed, count, plain=False):
    """The teacher's trajectories, of the same questions with and without thoughts; training and tests draw others."""
    script = fa.Scripted(lambda observation: teacher(observation, plain), name="teacher")
    rollout = Rollout(make_env=lambda: fa.make(ENV_ID), env_id=ENV_ID, policies=script)
    groups = [asyncio.run(rollout.group(2**30 + count * seed + number, 1)) for number in range(count)]
    return [group.episodes[0].trajectories["adder"] for group in groups]


def imitate(adder, folder, args):
    """The policy after it has imitated the teacher."""
    export = folder / "export"
    if not export.exists():
        config = fa.SFTConfig(seed=args.seed, batch_size=16, learner=fa.LearnerConfig(lr=1e-4, warmup_steps=3))
        with fa.SFTTrainer(adder, config, out_dir=folder) as trainer:
            trainer.fit(demonstrations(args.seed, args.shown, args.plain), epochs=args.epochs)
    return fa.Policy(str(export.absolute()), name=adder.name, sampling=adder.sampling)


def run(arm, args):
    """Imitation, then play. Returns held-out reward by step, and each step's tokens, seconds and length of thoughts."""
    kind = "plain" if args.plain else "think"  # the control begins where the arm that learns does
    adder = fa.Policy(args.model, name="adder", sampling=fa.Sampling(max_tokens=48))
    adder = imitate(adder, args.out / f"imitated-{kind}-{args.seed}", args)
    config = fa.GRPOConfig(
        seed=args.seed,
        groups_per_step=8,
        learner=fa.LearnerConfig(lr=args.lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=192, enforce_eager=True),
        eval_every=args.eval_every,
        eval_episodes=args.episodes,
        checkpoint_every=args.eval_every,
        keep_checkpoints=1,
    )
    folder = args.out / f"{arm}-{args.seed}"
    first = folder / "before.json"  # of a run that goes on, too
    with fa.GRPOTrainer(adder, config=config, out_dir=folder) as trainer:
        if not first.exists():
            evaluation = trainer.evaluate(ENV_ID, episodes=2 * args.episodes)
            first.parent.mkdir(parents=True, exist_ok=True)
            first.write_text(json.dumps([evaluation.reward, evaluation.ci]))
        rows = trainer.fit(ENV_ID, steps=args.steps).metrics
        after = trainer.evaluate(ENV_ID, episodes=2 * args.episodes)
    before = json.loads(first.read_text())
    curve = [[0, before[0]]] + [[row["step"], row["eval/reward"]] for row in rows if "eval/reward" in row]
    columns = {"thoughts": "reasoning_tokens", "tokens": "tokens", "seconds": "time/step_s"}
    return {"arm": arm, "seed": args.seed, "before": before, "after": [after.reward, after.ci], "curve": curve,
            **{name: [row[column] for row in rows] for name, column in columns.items()}}  # fmt: skip


def show(results, folder):
    """A table and a picture of all runs."""
    length = "tokens of a thought, first and last step"
    table = Table("run", "seed", "before", "after", length, "tokens sampled", "seconds")
    for result in results:
        rewards = (f"{mean:.3f} ± {half:.3f}" for mean, half in (result["before"], result["after"]))
        lengths = " ".join(f"{result['thoughts'][at]:.1f}" for at in (0, -1))
        spent = (f"{sum(result[name]):,.0f}" for name in ("tokens", "seconds"))
        table.add_row(ARMS[result["arm"]], str(result["seed"]), *rewards, lengths, *spent)
    Console().print(table)
    curves = {label: [result["curve"] for result in results if result["arm"] == arm] for arm, label in ARMS.items()}
    arms = {label: [c[: min(map(len, many))] for c in many] for label, many in curves.items() if many}
    title = "Sums of five numbers, imitation and then GRPO"
    draw_arms(arms, folder / "think_then_answer.png", title=title, value="right answers, held out")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="the model is shown answers without thoughts")
    parser.add_argument("--seed", type=int, default=0, help="of what is shown, and of training")
    parser.add_argument("--shown", type=int, default=112, help="demonstrations")
    parser.add_argument("--epochs", type=int, default=1, help="times that each is imitated")
    parser.add_argument("--steps", type=int, default=25, help="of GRPO")
    parser.add_argument("--lr", type=float, default=3e-5, help="learning rate of GRPO")
    parser.add_argument("--eval-every", type=int, default=5, help="steps between points of the curve")
    parser.add_argument("--episodes", type=int, default=128, help="held-out sums of a point; twice as many at the ends")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/think"), help="folder of the runs")
    args = parser.parse_args(words)
    arm = "plain" if args.plain else "think" if args.lr else "control"
    saved = args.out / f"{arm}-{args.seed}" / "result.json"
    if not saved.exists():
        result = run(arm, args)
        saved.write_text(json.dumps(result))
    show([json.loads(file.read_text()) for file in sorted(args.out.glob("*/result.json"))], args.out)


if __name__ == "__main__":
    main()
