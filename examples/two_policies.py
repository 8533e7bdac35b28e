"""Two agents, two policies: each agent trains an adapter or a model of its own, or both share one.

A 135M model plays both agents of forge/Relay-v0 without the tool: the asker calculates, and the answerer repeats the
number. ``--share role`` trains a policy per agent, ``--share all`` one policy for both. ``--kind lora`` trains adapters
on one frozen model, shared by one engine and one learner. ``--kind full`` trains all weights. The control has learning
rate 0. All arms are evaluated on the same held-out seeds. ``--world`` selects another game of two agents. ``--games``
imitates games of its oracle first, in all arms, for games that an untrained policy cannot play.

    python examples/two_policies.py [--kind lora full] [--share role all] [--seeds 0 1 2] [--out runs/two_policies]
    python examples/two_policies.py --world forge/Codewords-v0@1 --games 96 --lr 8e-5 --kind full [...]

The script writes ``two_policies.json`` and ``two_policies.png``. Finished runs are not repeated, and interrupted ones
continue.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from worlds import imitated

import forge_agents as fa
from forge_trainers.records.plots import draw_arms

RELAY, RELAY_ARGS = "forge/Relay-v0", {"max_number": 9, "tool": False}
RATES = {"lora": 3e-4, "full": 2e-5}


def seats(kind, share, start, args):
    """The policies: one per agent, or one for both."""
    lora = fa.LoRA(rank=args.rank, alpha=2 * args.rank) if kind == "lora" else None
    agents = fa.make(args.world).possible_agents
    return {agent: replace(start, name=agent if share == "role" else "team", lora=lora) for agent in agents}


def run(kind, share, seed, args, *, control=False):
    """Train one arm. Saves and returns the measurements."""
    lr = 0.0 if control else RATES[kind] if args.lr is None else args.lr
    steps = args.control_steps if control else args.steps
    folder = args.out / (f"{kind}-{share}-{seed}" + ("-control" if control else ""))
    saved = folder / "result.json"
    if saved.exists():
        return json.loads(saved.read_text())
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=0,  # every arm plays as much
        learner=fa.LearnerConfig(lr=lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=args.max_model_len, enforce_eager=True),
        groups_per_step=args.groups,
        eval_every=args.eval_every,
        checkpoint_every=args.eval_every,
    )
    start = fa.Policy(args.model, name="team", sampling=fa.Sampling(max_tokens=args.max_tokens))
    if args.games:
        start = replace(start, model=str(imitated(start, seed, args, args.out / f"imitated-{seed}").absolute()))
    env_args = RELAY_ARGS if args.world == RELAY else {}
    team = seats(kind, share, start, args)
    with fa.GRPOTrainer(team, config=config, out_dir=folder) as trainer:
        first = folder / "before.json"  # a run that is continued was measured when it began
        if not first.exists():
            before = trainer.evaluate(args.world, episodes=args.episodes, env_args=env_args)
            folder.mkdir(parents=True, exist_ok=True)
            first.write_text(json.dumps([before.reward, before.ci]))
        rows = trainer.fit(args.world, steps=steps, env_args=env_args).metrics
        after = trainer.evaluate(args.world, episodes=2 * args.episodes, env_args=env_args)
    before = json.loads(first.read_text())
    curve = [[0, before[0]]] + [[row["step"], row["eval/reward"]] for row in rows if "eval/reward" in row]
    gaps = {n: [row[n] for row in rows if n in row] for n in rows[0] if n.endswith("logprob_gap_mean")}
    result = {
        "arm": folder.name.replace(f"-{seed}", ""),
        "kind": kind, "share": share, "seed": seed, "lr": lr, "before": before, "after": [after.reward, after.ci],
        "curve": curve, "seconds": sum(row["time/step_s"] for row in rows), "steps": steps, "logprob_gap_mean": gaps,
    }  # fmt: skip
    saved.write_text(json.dumps(result))
    return result


def label(result):
    """The arm of a run, in words."""
    kind = {"lora": "LoRA", "full": "all weights"}[result["kind"]]
    share = {"role": "a policy per seat", "all": "one policy"}[result["share"]]
    return f"{kind}, {share}" + (", learning rate 0" if result["lr"] == 0 else "")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default=RELAY, help="a game of two seats, with its level")
    parser.add_argument("--games", type=int, default=0, help="of the world's oracle, which are imitated; 0: none")
    parser.add_argument("--epochs", type=int, default=4, help="how often each is")
    parser.add_argument("--kind", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--share", nargs="+", choices=["role", "all"], default=["role", "all"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--control-steps", type=int, default=5, help="of the runs with learning rate 0; 0: no such run")
    parser.add_argument("--lr", type=float, help="default: 3e-4 for adapters, 2e-5 for all weights")
    parser.add_argument("--rank", type=int, default=16, help="of adapters")
    parser.add_argument("--groups", type=int, default=8, help="seeds per step, eight episodes each")
    parser.add_argument("--episodes", type=int, default=128, help="held-out seeds before; twice as many after")
    parser.add_argument("--eval-every", type=int, default=5, help="steps between points of the curve")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--max-model-len", type=int, default=256, help="of a seat's conversation, in tokens")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/two_policies"))
    args = parser.parse_args(words)
    results = []
    for seed in args.seeds:
        for kind in args.kind:
            for share in args.share:
                results.append(run(kind, share, seed, args))
                if args.control_steps:
                    results.append(run(kind, share, seed, args, control=True))
    table = Table("arm", "seed", "before", "after", "steps", "seconds a step", title="reward on held-out seeds, 95 %")
    for result in sorted(results, key=label):
        each = [f"{mean:.3f} ± {ci:.3f}" for mean, ci in (result["before"], result["after"])]
        pace = result["seconds"] / result["steps"]
        table.add_row(label(result), str(result["seed"]), *each, str(result["steps"]), f"{pace:.1f}")
    Console().print(table)
    (args.out / "two_policies.json").write_text(json.dumps(results, indent=1))
    arms = {arm: [r["curve"] for r in results if label(r) == arm] for arm in map(label, results)}
    draw_arms(arms, args.out / "two_policies.png", title=f"{args.world}, two seats", value="reward on held-out seeds")


if __name__ == "__main__":
    main()
