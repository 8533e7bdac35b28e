"""First imitate, then play: a model that has seen the form of the answers begins where rewards differ.

A script plays forge/Relay-v0 and is imitated for an epoch. Then the export plays for itself and is trained by GRPO.

    python examples/sft_then_grpo.py [--episodes 64] [--steps 20] [--model smollm2-135m-instruct] [--out runs/sft_grpo]
"""

import argparse
import asyncio
import re
from pathlib import Path

import forge_agents as fa
from forge_agents.rollout import Rollout

ENV_ID = "forge/Relay-v0"
ENV_ARGS = {"max_number": 9, "tool": False}


def teacher(observation, agent):
    """The asker adds, the answerer repeats."""
    numbers = [int(number) for number in re.findall(r"\d+", observation)]
    return str(sum(numbers[:2]) if agent == "asker" else numbers[-1] if numbers else 0)


def demonstrations(episodes):
    """Trajectories of the script; seeds are its own, and training draws others."""
    rollout = Rollout(
        make_env=lambda: fa.make(ENV_ID, **ENV_ARGS), env_id=ENV_ID, policies=fa.Scripted(teacher, name="teacher")
    )
    played = [asyncio.run(rollout.group(seed, 1)).episodes[0] for seed in range(episodes)]
    return [trajectory for episode in played for trajectory in episode.trajectories.values()]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64, help="demonstrations")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8, help="groups of --siblings a step")
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/sft_grpo"))
    args = parser.parse_args(words)
    team = fa.Policy(args.model, name="team", sampling=fa.Sampling(max_tokens=16))
    config = fa.SFTConfig(batch_size=args.batch, min_reward=1.0, learner=fa.LearnerConfig(lr=2e-5))
    with fa.SFTTrainer(team, config, out_dir=args.out / "sft") as trainer:
        imitated = trainer.fit(demonstrations(args.episodes))
    print(f"imitated {imitated.steps} steps, loss {imitated.metrics[-1]['train/loss']:.3f}, model {imitated.export}")
    team = fa.Policy(str(imitated.export), name="team", sampling=team.sampling)
    config = fa.GRPOConfig(
        group_size=args.siblings,
        groups_per_step=args.groups,
        learner=fa.LearnerConfig(lr=1e-5),
        engine=fa.EngineConfig(max_model_len=512, enforce_eager=True),
    )
    with fa.GRPOTrainer(team, config=config, out_dir=args.out / "grpo") as trainer:
        played = trainer.fit(ENV_ID, steps=args.steps, env_args=ENV_ARGS)
    rewards = [row["reward/mean"] for row in played.metrics]
    print(f"played {played.steps} steps, reward {rewards[0]:.3f} to {rewards[-1]:.3f}, model {played.export}")


if __name__ == "__main__":
    main()
