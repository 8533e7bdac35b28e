"""Two seats, two policies: each seat learns its own adapter or its own model, or both seats share one.

A 135M model plays both seats of forge/Relay-v0 without the tool: the asker calculates and tells, the answerer writes
down. ``--share role`` trains a policy for each seat, ``--share all`` one for both; ``--kind lora`` trains adapters on
one frozen model, which one engine and one learner hold once, ``--kind full`` all weights. The control has learning rate
0 and must not move. All are measured on the same held-out seeds. ``--world`` takes another game of two seats; where a
policy can do nothing there at first, ``--games`` of the world's oracle are imitated before, the same for all arms.

    python examples/two_policies.py [--kind lora full] [--share role all] [--seeds 0 1 2] [--out runs/two_policies]
    python examples/two_policies.py --world forge/Codewords-v0@1 --games 96 --lr 8e-5 --kind full [...]

writes ``two_policies.json`` and ``two_policies.png``. Finished runs are not repeated, broken ones continue.
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


def seats(kind, share, start, asked):
    """Who plays: a policy per seat, or one for both."""
    lora = fa.LoRA(rank=asked.rank, alpha=2 * asked.rank) if kind == "lora" else None
    agents = fa.make(asked.world).possible_agents
    return {agent: replace(start, name=agent if share == "role" else "team", lora=lora) for agent in agents}


def run(kind, share, seed, asked, *, control=False):
    """One training run; returns and saves what was measured."""
    lr = 0.0 if control else RATES[kind] if asked.lr is None else asked.lr
    steps = asked.control_steps if control else asked.steps
    folder = asked.out / (f"{kind}-{share}-{seed}" + ("-control" if control else ""))
    saved = folder / "result.json"
    if saved.exists():
        return json.loads(saved.read_text())
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=0,  # every arm plays as much
        learner=fa.LearnerConfig(lr=lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=asked.max_model_len, enforce_eager=True),
        groups_per_step=asked.groups,
        eval_every=asked.eval_every,
        checkpoint_every=asked.eval_every,
    )
    start = fa.Policy(asked.model, name="team", sampling=fa.Sampling(max_tokens=asked.max_tokens))
    if asked.games:
        start = replace(start, model=str(imitated(start, seed, asked, asked.out / f"imitated-{seed}").absolute()))
    env_args = RELAY_ARGS if asked.world == RELAY else {}
    team = seats(kind, share, start, asked)
    with fa.GRPOTrainer(team, config=config, out_dir=folder) as trainer:
        first = folder / "before.json"  # a run that is continued was measured when it began
        if not first.exists():
            before = trainer.evaluate(asked.world, episodes=asked.episodes, env_args=env_args)
            folder.mkdir(parents=True, exist_ok=True)
            first.write_text(json.dumps([before.reward, before.ci]))
        rows = trainer.fit(asked.world, steps=steps, env_args=env_args).metrics
        after = trainer.evaluate(asked.world, episodes=2 * asked.episodes, env_args=env_args)
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
    asked = parser.parse_args(words)
    results = []
    for seed in asked.seeds:
        for kind in asked.kind:
            for share in asked.share:
                results.append(run(kind, share, seed, asked))
                if asked.control_steps:
                    results.append(run(kind, share, seed, asked, control=True))
    table = Table("arm", "seed", "before", "after", "steps", "seconds a step", title="reward on held-out seeds, 95 %")
    for result in sorted(results, key=label):
        each = [f"{mean:.3f} ± {ci:.3f}" for mean, ci in (result["before"], result["after"])]
        pace = result["seconds"] / result["steps"]
        table.add_row(label(result), str(result["seed"]), *each, str(result["steps"]), f"{pace:.1f}")
    Console().print(table)
    (asked.out / "two_policies.json").write_text(json.dumps(results, indent=1))
    arms = {arm: [r["curve"] for r in results if label(r) == arm] for arm in map(label, results)}
    draw_arms(arms, asked.out / "two_policies.png", title=f"{asked.world}, two seats", value="reward on held-out seeds")


if __name__ == "__main__":
    main()
