"""Comparison of GRPO, RLOO, DAPO and SFT before GRPO on one task, with the same model, budget and three seeds.

A 135M model sorts names, and sorts them again with an additional name (forge/AlphabetSort-v0). Each arm changes one
thing. The control has learning rate 0. All arms are evaluated on the same held-out seeds.

    python examples/algorithms.py [--arms grpo rloo dapo sft control] [--seeds 0 1 2] [--out runs/algorithms]

A run takes about five minutes on two CPU cores. The script writes ``algorithms.png``. Finished runs are not repeated,
and interrupted ones continue.
"""

from pathlib import Path

import _study

import forge_agents as fa

ENV_ID = "forge/AlphabetSort-v0"
ENV_ARGS = {"num_names": 3, "num_added": 1, "turns": 2}
ARMS = {"grpo": "GRPO", "rloo": "RLOO", "dapo": "DAPO with dynamic sampling", "sft": "SFT, then GRPO",
        "control": "control, learning rate 0"}  # fmt: skip
CONTROL_SHARE = 0.4
"""Steps of the control, as a fraction of the others'."""
NUM_CHATS = 48
"""Number of demonstrations of the SFT arm."""


def demonstration(seed):
    """Return one episode of a sorter without mistakes as a chat."""
    env = fa.make(ENV_ID, **ENV_ARGS)
    env.reset(seed=seed)
    names, messages = [], [{"role": "system", "content": env.unwrapped.instructions("sorter")}]
    while env.agents and not env.terminations["sorter"]:
        question = env.observe("sorter")
        names = sorted(names + question.rpartition(": ")[2].split(", "))
        answer = "\n".join(names)
        env.step(answer)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def run(arm, seed, args):
    """Train one arm with one seed."""
    folder = args.out / f"{arm}-{seed}"
    sorter = fa.Policy(args.model, name="sorter", sampling=fa.Sampling(temperature=0.7, max_tokens=20))
    if arm == "sft":
        config = fa.SFTConfig(seed=seed, batch_size=16, learner=fa.LearnerConfig(lr=3e-5))
        chats = [demonstration(2**30 + 1000 * seed + number) for number in range(NUM_CHATS)]
        sorter = _study.after_sft(sorter, folder / "sft", config, lambda: chats, epochs=4)
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=1 if arm == "dapo" else 0,
        learner=fa.LearnerConfig(
            loss=arm if arm in ("rloo", "dapo") else "grpo", lr=0.0 if arm == "control" else args.lr, warmup_steps=2
        ),
        engine=fa.EngineConfig(max_model_len=256, enforce_eager=True),
        groups_per_step=4,
        eval_every=args.eval_every,
        checkpoint_every=args.eval_every,
        keep_checkpoints=1,
    )
    steps = max(1, round(args.steps * CONTROL_SHARE)) if arm == "control" else args.steps
    facts = {"arm": arm, "seed": seed, "env_args": ENV_ARGS}
    return _study.train(sorter, ENV_ID, config, folder, steps=steps, episodes=args.episodes, **facts)


def main(words=None):
    defaults = {"seeds": [0, 1, 2], "steps": 20, "lr": 3e-5, "eval_every": 5, "episodes": 128}
    parser = _study.parser(__doc__, **defaults, out=Path("runs/algorithms"))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    args = parser.parse_args(words)
    results = [run(arm, seed, args) for seed in args.seeds for arm in args.arms]
    results.sort(key=lambda result: args.arms.index(result["arm"]))
    value = "reward of held-out episodes, of 2"
    _study.show(results, ARMS, args.out / "algorithms.png", title=f"{ENV_ID}, SmolLM2-135M-Instruct", value=value)


if __name__ == "__main__":
    main()
