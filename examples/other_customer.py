"""Does an agent that trained with a fixed user simulator serve other users as well as one whose user trained with it?

In forge/ServiceDesk-v0@1 a customer describes a request to an agent. Customer and agent are 135M models that have
imitated games of the oracle. In the first arm only the agent trains, and the customer is a fixed user simulator. In the
second arm both train, with separate weights. Then each agent serves three customers on held-out seeds: the fixed
one, the customer that trained with the other arm's agent, and the oracle.

    python examples/other_customer.py [--seeds 0] [--steps 8] [--out runs/other_customer]

A seed takes half an hour on two CPU cores and 8 GB of disk. Finished arms are not repeated, and interrupted ones
continue.
"""

import json
from dataclasses import replace
from pathlib import Path

import _study
from rich.console import Console
from rich.table import Table

import forge_agents as fa

ENV_ID = "forge/ServiceDesk-v0@1"
ENGINE = fa.EngineConfig(max_model_len=1024)


def players(agent, customer):
    """Return the policy of each agent. At level 1 the supervisor never acts."""
    return {"customer": customer, "agent": agent, "supervisor": fa.Oracle()}


def trained(arm, start, seed, args):
    """Return agent and customer after the arm's training, with frozen weights."""
    agent, customer = (replace(start, name=name) for name in ("agent", "customer"))
    if arm == "fixed":
        customer = replace(customer, trainable=False)
    folder = args.out / f"{arm}-{seed}"
    export = folder / "export"
    if not export.exists():
        config = fa.GRPOConfig(
            seed=seed,
            max_resamples=0,  # all arms play the same number of episodes
            groups_per_step=args.groups,
            learner=fa.LearnerConfig(lr=args.lr, warmup_steps=2),
            engine=ENGINE,
            checkpoint_every=args.steps,
            keep_checkpoints=1,
        )
        with fa.GRPOTrainer(players(agent, customer), config=config, out_dir=folder) as trainer:
            trainer.fit(ENV_ID, steps=args.steps)
    if arm == "fixed":
        return replace(agent, model=str(export), trainable=False), customer
    return tuple(replace(policy, model=str(export / policy.name), trainable=False) for policy in (agent, customer))


def evaluate(seed, args):
    """Train both arms. Returns the reward of each agent with each customer."""
    start = fa.Policy(args.model, name="team", sampling=fa.Sampling(max_tokens=32))
    imitation = {"games": args.games, "epochs": args.epochs, "seed": seed}
    start = _study.imitated(start, ENV_ID, args.out / f"imitated-{seed}", **imitation)
    pairs = {arm: trained(arm, start, seed, args) for arm in ("fixed", "trained")}
    agents = {"imitation alone": replace(start, name="agent", trainable=False)}
    agents |= {f"trained with a {arm} customer": agent for arm, (agent, _) in pairs.items()}
    customers = {arm: customer for arm, (_, customer) in pairs.items()} | {"oracle": fa.Oracle()}
    rewards = {}
    for what, agent in agents.items():
        for whom, customer in customers.items():
            folder = args.out / "evaluations" / f"{seed}-{what}-{whom}".replace(" ", "-")
            config = fa.GRPOConfig(seed=seed, engine=ENGINE)
            with fa.GRPOTrainer(players(agent, customer), config=config, out_dir=folder) as trainer:
                evaluation = trainer.evaluate(ENV_ID, episodes=args.episodes)
            rewards.setdefault(what, {})[whom] = [evaluation.reward, evaluation.ci]
    return rewards


def main(words=None):
    defaults = {"seeds": [0, 1, 2], "games": 60, "epochs": 1, "steps": 8, "lr": 2e-5, "episodes": 64}
    parser = _study.parser(__doc__, **defaults, out=Path("runs/other_customer"))
    parser.add_argument("--groups", type=int, default=4, help="seeds per step, eight episodes each")
    args = parser.parse_args(words)
    table = Table("seed", "agent", "fixed customer", "trained customer", "oracle", title=f"{ENV_ID}, held-out; 95 %")
    for seed in args.seeds:
        file = args.out / f"seed-{seed}.json"
        if not file.exists():
            file.write_text(json.dumps(evaluate(seed, args)))
        for what, row in json.loads(file.read_text()).items():
            table.add_row(str(seed), what, *(f"{mean:.3f} ± {ci:.3f}" for mean, ci in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
