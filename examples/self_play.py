"""Self-play in Kuhn poker: does a policy that plays only against itself become hard to exploit?

A 135M model first imitates all legal answers with equal probability. Then it plays both agents, and the loss holds it
near a reference, its own weights of every 40th step. Exploitability, the amount that the best response wins, is
computed over the whole game from the model's answers at every information set: 0.458 chips per game for uniform play, 0
at an equilibrium. The control has learning rate 0 and must stay as exploitable as it is.

    python examples/self_play.py [--seeds 0 1 2] [--steps 80] [--out runs/self_play]

A run takes a quarter of an hour on two CPU cores. The script writes ``self_play.png``. Finished runs are not repeated,
and interrupted ones continue.
"""

from pathlib import Path

import _study
from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_agents.bench import GameTree, exploitability, uniform
from forge_envs.games.poker import KuhnPoker

GAME = "example/KuhnPoker-v0"
ARMS = {"divergence": "self-play with a divergence", "control": "learning rate 0"}


@fa.register(GAME, max_turns=3, tags=("2p", "zero-sum", "hidden-information"))
class Poker(KuhnPoker):
    """Kuhn poker with one more sentence in its instructions.

    With it SmolLM2's prompts end just behind a block of the engine's prefix cache (32 tokens on CPU), which halves the
    time of a rollout.
    """

    def instructions(self, agent):
        return f"{super().instructions(agent)} A fold loses 1 chip."


def answers():
    """Return, for every legal action at every information set, a conversation that ends in this action."""
    tree = GameTree(GAME)
    rows = []
    for place in tree.info_sets:
        prompt = [{"role": "system", "content": tree.instructions[place.agent]}]
        for observation, action in place.past:
            prompt += [{"role": "user", "content": observation}, {"role": "assistant", "content": action}]
        prompt.append({"role": "user", "content": place.observation})
        rows += [{"prompt": prompt, "completion": action} for action in place.legal]
    return rows


def train(policy, seed, args, *, before=None, control=False):
    """Train one run. Its curve has rows of step, exploitability, illegal answers and entropy of a token.

    ``before`` is the exploitability before training. The control does not learn, so the first point of its curve is.
    """
    arm = "control" if control else "divergence"
    folder = args.out / (arm if control else f"{arm}-{seed}")
    if result := _study.saved(folder):
        return result
    config = fa.GRPOConfig(
        seed=seed,
        groups_per_step=32,
        max_resamples=0,
        loss_normalization="sampled",  # zero-variance groups have a divergence, too
        credit=fa.Credit(by=("seed", "role"), scale="none"),
        learner=fa.LearnerConfig(
            lr=0.0 if control else args.lr,
            warmup_steps=2,
            lr_decay="sqrt",
            kl="exact",
            kl_coef=1.0,
            reference=40,
            compute_dtype="float32",  # bfloat16 rounds the logits, which are near 38, to multiples of 1/4
        ),
        engine=fa.EngineConfig(max_model_len=512, dtype="float32"),
        eval_every=args.eval_every,
        eval_episodes=args.episodes,
        exploitability_samples=args.samples,
        checkpoint_every=args.eval_every,
    )
    with fa.GRPOTrainer(policy, config=config, out_dir=folder) as trainer:
        rows = trainer.fit(GAME, steps=args.control_steps if control else args.steps).metrics
    names = ("eval/exploitability", "eval/illegal", "learner/entropy")
    curve = [[row["step"], *(row.get(name) for name in names)] for row in rows if names[0] in row]
    result = {"arm": arm, "seed": seed, "curve": curve}
    result |= {"before": [curve[0][1] if control else before, None], "after": [curve[-1][1], None]}
    return _study.save(folder, result)


def main(words=None):
    defaults = {"seeds": [0, 1, 2], "steps": 80, "lr": 2e-5, "control_steps": 10, "eval_every": 10, "episodes": 16}
    parser = _study.parser(__doc__, **defaults, out=Path("runs/self_play"))
    parser.add_argument("--samples", type=int, default=200, help="number of answers at each of 12 information sets")
    args = parser.parse_args(words)
    player = fa.Policy(args.model, name="player", sampling=fa.Sampling(temperature=1.0, max_tokens=8))
    config = fa.SFTConfig(batch_size=24, learner=fa.LearnerConfig(lr=5e-5, warmup_steps=3))
    player = _study.after_sft(player, args.out / "taught", config, answers, steps=20)
    controls = [train(player, args.seeds[0], args, control=True)] if args.control_steps else []
    before = controls[0]["before"][0] if controls else None
    results = [train(player, seed, args, before=before) for seed in args.seeds] + controls
    table = Table("run", "seed", "step", "exploitability", "illegal answers", "entropy")
    for result in results:
        for step, *measures in result["curve"]:
            label = ARMS[result["arm"]], str(result["seed"])
            table.add_row(*label, str(step), *("" if value is None else f"{value:.3f}" for value in measures))
        result["curve"] = [row[:2] for row in result["curve"]]
    Console().print(table)
    labels = {"title": "Self-play in Kuhn poker", "value": "exploitability, chips per game"}
    level = ("uniform play", exploitability(GAME, uniform))
    _study.draw(results, ARMS, args.out / "self_play.png", level=level, **labels)


if __name__ == "__main__":
    main()
