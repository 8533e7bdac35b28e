"""Two agents, two policies: each agent trains an adapter or a model of its own, or both share one.

A 135M model plays both agents of forge/Relay-v0 without the tool: the asker calculates, and the answerer repeats the
number. ``--share role`` trains a policy per agent, ``--share all`` one policy for both. ``--kind lora`` trains adapters
on one frozen model, shared by one engine and one learner. ``--kind full`` trains all weights. The control has learning
rate 0. All arms are evaluated on the same held-out seeds. ``--env`` selects another environment of two agents.
``--games`` imitates games of its oracle first, in all arms, for games that an untrained policy cannot play, and
``--family`` takes a tiny random model.

    python examples/two_policies.py [--kind lora full] [--share role all] [--seeds 0 1 2] [--out runs/two_policies]
    python examples/two_policies.py --env forge/Codewords-v0@1 --games 96 --lr 8e-5 --kind full [...]

The script writes ``two_policies.png``. Finished runs are not repeated, and interrupted ones continue.
"""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import _study

import forge_agents as fa
from forge_agents.models.tiny import Family, tiny_model

RELAY = "forge/Relay-v0"
RATES = {"lora": 3e-4, "full": 2e-5}
FAMILIES = get_args(Family)
KINDS, SHARES = {"lora": "LoRA", "full": "all weights"}, {"role": "a policy per agent", "all": "one policy"}
ARMS = {
    f"{kind}-{share}{suffix}": f"{what}, {policies}{', learning rate 0' * bool(suffix)}"
    for kind, what in KINDS.items()
    for share, policies in SHARES.items()
    for suffix in ("", "-control")
}


def run(kind, share, seed, args, *, control=False):
    """Train one arm with one seed."""
    arm = f"{kind}-{share}" + "-control" * control
    folder = args.out / (f"{kind}-{share}-{seed}" + "-control" * control)
    if result := _study.saved(folder):
        return result
    model = args.model
    if args.family:
        # engines compute some families on CPU in bfloat16 only
        model = str(tiny_model(args.out / f"model-{seed}", family=args.family, seed=seed, dtype="bfloat16"))
    env_args = {"max_number": args.max_number, "tool": False} if args.env == RELAY else {}
    start = fa.Policy(model, name="team", sampling=fa.Sampling(max_tokens=args.max_tokens))
    if args.games:
        imitation = {"games": args.games, "epochs": args.epochs, "seed": seed}
        imitation |= {"lr": args.imitation_lr, "env_args": env_args}
        start = _study.imitated(start, args.env, args.out / f"imitated-{seed}", **imitation)
    lora = fa.LoRA(rank=args.rank, alpha=2 * args.rank) if kind == "lora" else None
    agents = fa.make(args.env).possible_agents
    team = {agent: replace(start, name=agent if share == "role" else "team", lora=lora) for agent in agents}
    lr = 0.0 if control else RATES[kind] if args.lr is None else args.lr
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=0,  # all arms play the same number of episodes
        learner=fa.LearnerConfig(lr=lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=args.max_model_len, enforce_eager=True),
        groups_per_step=args.groups,
        eval_every=args.eval_every,
        checkpoint_every=args.eval_every,
    )
    sizes = {"steps": args.control_steps if control else args.steps, "episodes": args.episodes}
    return _study.train(team, args.env, config, folder, env_args=env_args, arm=arm, seed=seed, **sizes)


def main(words=None):
    defaults = {"seeds": [0, 1, 2], "games": 0, "epochs": 4, "imitation_lr": 2e-5, "steps": 25, "control_steps": 5}
    defaults |= {"eval_every": 5, "episodes": 128, "max_tokens": 16, "max_model_len": 256}
    parser = _study.parser(__doc__, **defaults, out=Path("runs/two_policies"))
    parser.add_argument("--env", default=RELAY, help="an environment of two agents, with its level")
    parser.add_argument("--max-number", type=int, default=9, help="largest operand of forge/Relay-v0")
    parser.add_argument("--family", choices=FAMILIES, help="a tiny random model of this family in place of --model")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--share", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--lr", type=float, help="default: 3e-4 for adapters, 2e-5 for all weights")
    parser.add_argument("--rank", type=int, default=16, help="rank of adapters")
    parser.add_argument("--groups", type=int, default=8, help="seeds per step, eight episodes each")
    args = parser.parse_args(words)
    results = [
        run(kind, share, seed, args, control=control)
        for kind in args.kind
        for share in args.share
        for control in ((False, True) if args.control_steps else (False,))
        for seed in args.seeds
    ]
    pace = {"seconds a step": lambda result: f"{result['seconds'] / max(1, result['curve'][-1][0]):.1f}"}
    _study.show(results, ARMS, args.out / "two_policies.png", title=f"{args.env}, two agents", columns=pace)


if __name__ == "__main__":
    main()
