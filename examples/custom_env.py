"""A custom environment: define it, check it, play it with random policies, train on it.

Two agents must meet. Each names a place without seeing what the other names at the same time, and both are rewarded if
the places are equal. Agents only see the places of the previous round, so they have to find a convention.

    python examples/custom_env.py [--steps 20] [--model smollm2-135m-instruct] [--out runs/meeting]
"""

import argparse
import asyncio

import forge_agents as fa
from forge_agents.rollout import Rollout

PLACES = ("bridge", "station", "market")


@fa.register("example/Meeting-v0", max_turns=6, tags=("2p", "cooperative"))
class Meeting(fa.ParallelTurnEnv):
    """Three rounds; a meeting ends the game. Meeting early pays more: 1, 0.7, 0.4."""

    possible_agents = ["left", "right"]

    def setup(self, rng):
        self.round, self.seen = 0, dict.fromkeys(self.agents, "You have not been anywhere yet.")

    def instructions(self, agent):
        return f"Meet the other one. Answer with one of: {', '.join(PLACES)}."

    def observe_text(self, agent):
        return f"{self.seen[agent]} Where do you go?"

    def legal_actions(self, agent):
        return list(PLACES)

    def act_all(self, actions):
        went = {agent: next((p for p in PLACES if p in text.lower()), "nowhere") for agent, text in actions.items()}
        met = went["left"] == went["right"] != "nowhere"
        reward = round(1 - 0.3 * self.round, 1) if met else 0.0
        self.round += 1
        for agent, other in (("left", "right"), ("right", "left")):
            self.seen[agent] = f"You went to the {went[agent]}, the other one to the {went[other]}."
        return fa.Outcome(rewards=dict.fromkeys(actions, reward), done=met)


def play_at_random(episodes):
    """Mean reward of random play."""
    env_id = "example/Meeting-v0"
    rollout = Rollout(make_env=lambda: fa.make(env_id), env_id=env_id, policies=fa.Random(seed=0))
    groups = [asyncio.run(rollout.group(seed, 1)) for seed in range(episodes)]
    return sum(group.episodes[0].rewards["left"] for group in groups) / episodes


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="0 only checks and plays")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", default="runs/meeting")
    args = parser.parse_args(words)
    print(fa.check_env("example/Meeting-v0"))
    print(f"random play earns {play_at_random(200):.3f}")
    if not args.steps:
        return
    team = fa.Policy(args.model, name="team", sampling=fa.Sampling(max_tokens=8))
    config = fa.GRPOConfig(learner=fa.LearnerConfig(lr=2e-5), engine=fa.EngineConfig(max_model_len=512))
    with fa.GRPOTrainer(team, config=config, out_dir=args.out) as trainer:
        print(f"before training {trainer.evaluate('example/Meeting-v0').reward:.3f}")
        result = trainer.fit("example/Meeting-v0", steps=args.steps)
        print(f"after {result.steps} steps {trainer.evaluate('example/Meeting-v0').reward:.3f}, see {result.curve}")


if __name__ == "__main__":
    main()
