"""Credit by role or for all agents together: does it matter if agents are rewarded for different things?

Two agents each answer a sum and are rewarded for their own answer. The clerk's numbers go up to 4 and the accountant's
up to 30, so the clerk is often right at first and the accountant hardly ever. One model plays both. In the first arm
the reward of an agent is compared with rewards of the same agent, `fa.Credit(by=("seed", "role"))` (the default). In
the second arm it is compared with rewards of both agents, `by=("seed",)`, which destabilizes the training of teams
according to Dr. MAS (arXiv 2602.08847).

    python examples/role_credit.py [--seeds 0 1 2] [--steps 15] [--out runs/role_credit]

A run takes three minutes on two CPU cores. The script writes ``role_credit.png``. Finished runs are not repeated.
"""

import re
import shutil
from pathlib import Path

import _study
from rich.console import Console
from rich.table import Table

import forge_agents as fa

ENV_ID = "example/OwnSums-v0"
LARGEST = {"clerk": 4, "accountant": 30}
ARMS = {"by role": ("seed", "role"), "all agents": ("seed",)}


@fa.register(ENV_ID, max_turns=2, tags=("2p",))
class OwnSums(fa.ParallelTurnEnv):
    """One round. An agent earns 1 if the last number of its answer is its sum."""

    possible_agents = list(LARGEST)

    def setup(self, rng):
        self.numbers = {agent: rng.integers(1, LARGEST[agent] + 1, size=2).tolist() for agent in LARGEST}

    def instructions(self, agent):
        return "You are good at sums. Answer with a number."

    def observe_text(self, agent):
        first, second = self.numbers[agent]
        return f"What is {first} + {second}? Answer with the number alone."

    def act_all(self, actions):
        last_numbers = {agent: re.findall(r"\d+", text)[-1:] for agent, text in actions.items()}
        rewards = {agent: float(last_numbers[agent] == [str(sum(self.numbers[agent]))]) for agent in actions}
        return fa.Outcome(rewards=rewards, done=True)


def run(arm, seed, args):
    """Train one arm with one seed. Its curve has rows of step, mean reward and rewards by agent."""
    folder = args.out / f"{arm.replace(' ', '-')}-{seed}"
    if result := _study.saved(folder):
        return result
    shutil.rmtree(folder, ignore_errors=True)
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=0,  # all arms play the same number of episodes
        credit=fa.Credit(by=ARMS[arm]),
        learner=fa.LearnerConfig(lr=args.lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=256),
        checkpoint_every=args.steps,
        keep_checkpoints=1,
    )
    team = fa.Policy(args.model, name="team", sampling=fa.Sampling(max_tokens=12))
    rows, curve = [], []
    with fa.GRPOTrainer(team, config=config, out_dir=folder) as trainer:
        for done in range(0, args.steps + 1, args.eval_every):
            if done:
                rows = trainer.fit(ENV_ID, steps=done).metrics
            evaluation = trainer.evaluate(ENV_ID, episodes=args.episodes)
            curve.append([done, evaluation.reward, evaluation.by_agent])
    largest = max((row["learner/grad_norm"] for row in rows), default=0.0)
    return _study.save(folder, {"arm": arm, "seed": seed, "curve": curve, "grad_norm": largest})


def main(words=None):
    defaults = {"seeds": [0, 1, 2], "steps": 15, "lr": 2e-5, "eval_every": 5, "episodes": 128}
    args = _study.parser(__doc__, **defaults, out=Path("runs/role_credit")).parse_args(words)
    results = [run(arm, seed, args) for arm in ARMS for seed in args.seeds]
    table = Table("credit", "seed", *LARGEST, "both", "gradient", title="held-out reward; largest gradient norm")
    for result in results:
        (_, before, first), (_, after, last) = result["curve"][0], result["curve"][-1]
        cells = [f"{first[agent]:.2f} to {last[agent]:.2f}" for agent in LARGEST] + [f"{before:.2f} to {after:.2f}"]
        table.add_row(result["arm"], str(result["seed"]), *cells, f"{result['grad_norm']:.2f}")
        result["curve"] = [row[:2] for row in result["curve"]]
    Console().print(table)
    labels = {arm: f"credit {arm}" for arm in ARMS}
    picture, title = args.out / "role_credit.png", f"{ENV_ID}, rewards that are compared with each other"
    _study.draw(results, labels, picture, title=title, value="reward")


if __name__ == "__main__":
    main()
