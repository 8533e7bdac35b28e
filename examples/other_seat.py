"""Does an agent that trained with a fixed user simulator serve other users as well as one whose user trained with it?

In forge/ServiceDesk-v0@1 a customer describes a request to an agent. Both are 135M models that have imitated games of
the oracle. In the first arm only the agent trains, and the customer is a fixed user simulator. In the second arm both
train, each with its own weights. Then each agent serves three customers on held-out seeds: the fixed one, the customer
that trained with the other arm's agent, and the oracle.

    python examples/other_seat.py [--seeds 0] [--steps 8] [--out runs/other_seat]

A seed takes half an hour on two CPU cores and 8 GB of disk. Finished arms are not repeated. Interrupted ones start
again.
"""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from worlds import imitated

import forge_agents as fa

WORLD = "forge/ServiceDesk-v0@1"
ENGINE = fa.EngineConfig(max_model_len=1024)


def seated(agent, customer):
    """The policy of each agent. At level 1 the supervisor has no part."""
    return {"customer": customer, "agent": agent, "supervisor": fa.Oracle()}


def trained(arm, start, seed, args, folder):
    """The agent and the customer after the arm's training, as they play from then on."""
    agent, customer = (replace(start, name=seat) for seat in ("agent", "customer"))
    if arm == "fixed":
        customer = replace(customer, trainable=False)
    export = folder / "export"
    if not export.exists():
        shutil.rmtree(folder, ignore_errors=True)
        learner = fa.LearnerConfig(lr=args.lr, warmup_steps=2)
        config = fa.GRPOConfig(
            seed=seed,
            max_resamples=0,  # both arms play as much
            groups_per_step=args.groups,
            learner=learner,
            engine=ENGINE,
            checkpoint_every=args.steps,
            keep_checkpoints=1,
        )
        with fa.GRPOTrainer(seated(agent, customer), config=config, out_dir=folder) as trainer:
            trainer.fit(WORLD, steps=args.steps)
    learned = {policy.name: policy for policy in (agent, customer) if policy.trainable}
    places = {name: export / name if len(learned) > 1 else export for name in learned}
    return {
        policy.name: replace(policy, model=str(places.get(policy.name, policy.model)), trainable=False)
        for policy in (agent, customer)
    }


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--games", type=int, default=60, help="of the oracle, which are imitated")
    parser.add_argument("--epochs", type=int, default=1, help="how often each is")
    parser.add_argument("--steps", type=int, default=8, help="optimiser steps of each arm")
    parser.add_argument("--groups", type=int, default=4, help="seeds a step, eight games each")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--episodes", type=int, default=64, help="held-out seeds of each meeting")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/other_seat"))
    args = parser.parse_args(words, argparse.Namespace(world=WORLD))
    table = Table("seed", "agent", "fixed customer", "trained customer", "script", title=f"{WORLD}, held-out; 95 %")
    for seed in args.seeds:
        saved = args.out / f"seed-{seed}.json"
        if not saved.exists():
            base = fa.Policy(args.model, name="team", sampling=fa.Sampling(max_tokens=32))
            start = replace(base, model=str(imitated(base, seed, args, args.out / f"imitated-{seed}").absolute()))
            pairs = {arm: trained(arm, start, seed, args, args.out / f"{arm}-{seed}") for arm in ("fixed", "trained")}
            still = replace(start, name="agent", trainable=False)
            agents = {"imitation alone": still}
            agents |= {f"beside a {arm} customer": pair["agent"] for arm, pair in pairs.items()}
            customers = {arm: pair["customer"] for arm, pair in pairs.items()} | {"script": fa.Oracle()}
            rewards = {}
            for what, agent in agents.items():
                for whom, customer in customers.items():
                    folder = args.out / "meetings" / f"{seed}-{what}-{whom}".replace(" ", "-")
                    config = fa.GRPOConfig(seed=seed, engine=ENGINE)
                    with fa.GRPOTrainer(seated(agent, customer), config=config, out_dir=folder) as meeting:
                        met = meeting.evaluate(WORLD, episodes=args.episodes)
                    rewards.setdefault(what, {})[whom] = [met.reward, met.ci]
            saved.write_text(json.dumps(rewards))
        for what, row in json.loads(saved.read_text()).items():
            table.add_row(str(seed), what, *(f"{mean:.3f} ± {ci:.3f}" for mean, ci in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
