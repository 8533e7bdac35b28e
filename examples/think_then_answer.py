"""Reason, then answer: a model imitates a script that reasons, and continues with RL on its answers.

The task is a sum of five numbers from 1 to 3, and only the answer is rewarded. The script adds one number at a time in
<think> tags. With --plain it gives the answer alone. A model imitates the script until some of its answers are right,
and then trains with GRPO. The reasoning is not graded: the environment does not see it, and the learner trains its
tokens like all others.

    python examples/think_then_answer.py [--plain] [--seed 0] [--steps 25] [--lr 3e-5] [--out runs/think]

--lr 0 is the control. Every call shows all finished runs of the folder in a table and in ``think_then_answer.png``.
Finished runs are not repeated, and interrupted ones continue.
"""

import asyncio
import re
from pathlib import Path

import _study

import forge_agents as fa
from forge_agents.rollout import Rollout

ENV_ID = "example/Sums-v0"
ARMS = {"think": "reasons, then answers", "plain": "answers", "control": "reasons, learning rate 0"}


@fa.register(ENV_ID, max_turns=1)
class Sums(fa.TurnEnv):
    """Five numbers from 1 to 3. The reward is 1 for their sum."""

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
    """Return the sum, after one addition for each number unless `plain`."""
    first, *others = map(int, re.findall(r"\d+", observation))
    total, additions = first, []
    for number in others:
        additions.append(f"{total}+{number}={total + number}")
        total += number
    reasoning = "" if plain else "<think>" + "\n".join(additions) + "</think>"
    return f"{reasoning}{total}"


def demonstrations(seed, count, plain=False):
    """Return the teacher's trajectories: the same questions with and without reasoning, and none of the training."""
    script = fa.Scripted(lambda observation: teacher(observation, plain), name="teacher")
    rollout = Rollout(make_env=lambda: fa.make(ENV_ID), env_id=ENV_ID, policies=script)
    groups = [asyncio.run(rollout.group(2**30 + count * seed + number, 1)) for number in range(count)]
    return [group.episodes[0].trajectories["adder"] for group in groups]


def run(arm, args):
    """Imitate, then train with GRPO."""
    kind = "plain" if args.plain else "think"  # the control starts from the same model as the arm that learns
    adder = fa.Policy(args.model, name="adder", sampling=fa.Sampling(max_tokens=48))
    config = fa.SFTConfig(seed=args.seed, batch_size=16, learner=fa.LearnerConfig(lr=1e-4, warmup_steps=3))
    folder = args.out / f"imitated-{kind}-{args.seed}"
    examples = lambda: demonstrations(args.seed, args.shown, args.plain)  # noqa: E731
    adder = _study.after_sft(adder, folder, config, examples, epochs=args.epochs)
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
    folder, sizes = args.out / f"{arm}-{args.seed}", {"steps": args.steps, "episodes": 2 * args.episodes}
    facts = {"after": 2 * args.episodes, "columns": ("reasoning_tokens", "tokens"), "arm": arm, "seed": args.seed}
    return _study.train(adder, ENV_ID, config, folder, **sizes, **facts)


def main(words=None):
    defaults = {"seed": 0, "epochs": 1, "steps": 25, "lr": 3e-5, "eval_every": 5, "episodes": 128}
    parser = _study.parser(__doc__, **defaults, out=Path("runs/think"))
    parser.add_argument("--plain", action="store_true", help="demonstrations have no reasoning")
    parser.add_argument("--shown", type=int, default=112, help="number of demonstrations")
    args = parser.parse_args(words)
    run("plain" if args.plain else "think" if args.lr else "control", args)
    results = [_study.saved(file.parent) for file in sorted(args.out.glob("*/result.json"))]
    columns = {
        "reasoning tokens, first and last step": lambda result: " ".join(
            f"{result['reasoning_tokens'][index]:.1f}" for index in (0, -1)
        ),
        "tokens sampled": lambda result: f"{sum(result['tokens']):,.0f}",
        "seconds": lambda result: f"{result['seconds']:,.0f}",
    }
    title = "Sums of five numbers, imitation and then GRPO"
    picture = args.out / "think_then_answer.png"
    _study.show(results, ARMS, picture, title=title, value="right answers, held out", columns=columns)


if __name__ == "__main__":
    main()
