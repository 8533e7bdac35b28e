"""On-policy distillation: a team of three policies becomes one model that plays all roles (arXiv 2602.05182).

Three agents have a task each and are rewarded for their own answer. First each agent trains a policy of its own with
GRPO. Then one policy plays all agents and learns from the three policies, its teachers: the loss is the divergence from
the teacher of the agent, on the samples of the student. The student is compared with one policy that learns with GRPO
from as many episodes as team and student together, and with a control of learning rate 0.

    python examples/distill_team.py [--seeds 0 1 2] [--steps 10] [--out runs/distill_team]
    python examples/distill_team.py --tiny --steps 8 --groups 4 --lr 0.003    # a random model with 0.3 million weights

With SmolLM2 the policies are adapters of rank 16, and the tasks are small questions. The tiny model trains all weights,
and its tasks are kinds of letters. The script writes ``distill_team.png``. Finished runs are not repeated.
"""

import contextlib
import re
from dataclasses import replace
from pathlib import Path

import _study

import forge_agents as fa
from forge_agents.models.tiny import tiny_model

AGENTS = ("adder", "comparer", "reader")
ARMS = {
    "team": "a policy for each agent, GRPO",
    "distilled": "one policy, learns from the team",
    "grpo": "one policy, GRPO",
    "control": "one policy, learns from the team, learning rate 0",
}


@fa.register("example/Questions-v0", max_turns=3, tags=("3p",))
class Questions(fa.ParallelTurnEnv):
    """One round. An agent earns 1 if the last number of its answer is right."""

    possible_agents = list(AGENTS)

    def setup(self, rng):
        self.pairs = {agent: rng.integers(1, 10, size=2).tolist() for agent in AGENTS}

    def instructions(self, agent):
        return "You only write numbers."

    def observe_text(self, agent):
        a, b = self.pairs[agent]
        form = {
            "adder": "Calculate {} + {}. Write the result as a number.",
            "comparer": "Which is larger, {} or {}?",
            "reader": "Write the second of these numbers: {}, {}.",
        }
        return form[agent].format(a, b)

    def act_all(self, actions):
        (a, b), (c, d), (_, second) = (self.pairs[agent] for agent in AGENTS)
        right = dict(zip(AGENTS, (a + b, max(c, d), second), strict=True))
        last = {agent: re.findall(r"\d+", text)[-1:] for agent, text in actions.items()}
        return fa.Outcome(rewards={agent: float(last[agent] == [str(right[agent])]) for agent in actions}, done=True)


@fa.register("example/Letters-v0", max_turns=3, tags=("3p",))
class Letters(Questions):
    """One round. An agent earns the share of its letters that are of its kind."""

    KINDS = {"adder": str.isdigit, "comparer": str.isupper, "reader": str.islower}

    def observe_text(self, agent):
        return {"adder": "1234", "comparer": "ABCD", "reader": "abcd"}[agent]

    def act_all(self, actions):
        shares = {agent: sum(map(self.KINDS[agent], text)) / max(1, len(text)) for agent, text in actions.items()}
        return fa.Outcome(rewards=shares, done=True)


def run(seed, args):
    """Train all arms with one seed. Returns their results."""
    env, lora, model = ("example/Questions-v0", fa.LoRA(), args.model)
    if args.tiny:
        env, lora = "example/Letters-v0", None
        model = str(tiny_model(args.out / f"model-{seed}", seed=seed, dtype="bfloat16"))
    start = fa.Policy(model, name="student", lora=lora, sampling=fa.Sampling(max_tokens=args.max_tokens))
    team_folder = args.out / f"team-{seed}"
    teachers = {agent: str((team_folder / "export" / agent).absolute()) for agent in AGENTS}
    grpo = fa.GRPOConfig(
        seed=seed,
        groups_per_step=args.groups,
        max_resamples=0,  # all arms play the same number of episodes
        learner=fa.LearnerConfig(lr=args.lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=256, enforce_eager=True, kv_cache_gb=0.1 if args.tiny else None),
        eval_every=args.eval_every,
        eval_episodes=args.episodes,
        checkpoint_every=args.steps,
        keep_checkpoints=1,
    )
    learner = replace(grpo.learner, loss="distill", reference=teachers, kl_coef=1.0)
    distill = replace(grpo, learner=learner, group_size=1, groups_per_step=grpo.group_size * grpo.groups_per_step)
    columns = ("reward/mean", *(f"learner/kl/{agent}" for agent in AGENTS))
    common = {"episodes": args.episodes, "columns": columns, "seed": seed}
    team = {agent: replace(start, name=agent) for agent in AGENTS}
    results = [_study.train(team, env, grpo, team_folder, arm="team", steps=args.steps, **common)]
    arms = {
        "distilled": (distill, 2 * args.steps),
        "grpo": (grpo, 3 * args.steps),
        "control": (replace(distill, learner=replace(learner, lr=0.0)), args.control_steps),
    }
    with contextlib.ExitStack() as trainers:
        trainer = None
        for arm, (config, steps) in arms.items():
            folder = args.out / f"{arm}-{seed}"
            if (result := _study.saved(folder)) is None and steps:
                new = {"config": config, "out_dir": folder}  # a fork takes the engine of the trainer before it
                trainer = trainers.enter_context(trainer.fork(**new) if trainer else fa.GRPOTrainer(start, **new))
                result = _study.measure(trainer, env, folder, arm=arm, steps=steps, **common)
            results += [result] * (result is not None)
    return results


def main(words=None):
    defaults = {"seeds": [0, 1, 2], "steps": 10, "control_steps": 2, "lr": 3e-4, "eval_every": 5, "episodes": 128}
    parser = _study.parser(__doc__, **defaults, max_tokens=12, out=Path("runs/distill_team"))
    parser.add_argument("--groups", type=int, default=8, help="groups of eight episodes for each step of GRPO")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and its tasks")
    args = parser.parse_args(words)
    results = [result for seed in args.seeds for result in run(seed, args)]
    pace = {"seconds a step": lambda result: f"{result['seconds'] / max(1, result['curve'][-1][0]):.1f}"}
    _study.show(results, ARMS, args.out / "distill_team.png", title="a team in one model", columns=pace)


if __name__ == "__main__":
    main()
