"""Two agents, one reward, two frameworks: ours beside CoMLRL's MAGRPO on the same prompts and model.

Each of two agents, with weights of its own, answers its own sum. Both get the share of right answers. Four tasks of
eight siblings a step, temperature 1, no divergence from a reference. Loss and optimiser are each framework's own.
CoMLRL lives in a venv of its own, which sees this one's packages:

    python -m venv runs/comlrl && echo $PWD/.venv/lib/python3.11/site-packages > \
        runs/comlrl/lib/python3.11/site-packages/ours.pth && runs/comlrl/bin/pip install --no-deps comlrl==1.4.3 wandb
    python tests/perf/team_peer.py ours [--seed 0] [--steps 15] [--out runs/team_peer]
    runs/comlrl/bin/python tests/perf/team_peer.py comlrl [--seed 0] [--steps 15] [--out runs/team_peer]
    python tests/perf/team_peer.py table [--out runs/team_peer]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

AGENTS = ("left", "right")
GROUPS, SIBLINGS, TOKENS, HELD_OUT = 4, 8, 12, 128
INSTRUCTIONS = "You are good at sums. Answer with a number."


def task(seed: int) -> dict[str, tuple[int, int]]:
    """Each agent's numbers."""
    rng = random.Random(seed)
    return {agent: (rng.randint(1, 9), rng.randint(1, 9)) for agent in AGENTS}


def question(numbers: tuple[int, int]) -> str:
    return f"What is {numbers[0]} + {numbers[1]}? Answer with the number alone."


def right(numbers: tuple[int, int], answer: str) -> bool:
    """Return whether the last number of the answer is the sum."""
    result = re.findall(r"\d+", answer)
    return bool(result) and result[-1] == str(sum(numbers))


def messages(numbers: tuple[int, int]) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question(numbers)}]


def ours(asked: argparse.Namespace, model: str) -> dict[str, Any]:
    import forge_agents as fa

    @fa.register("perf/Sums-v0", max_turns=2)
    class Sums(fa.ParallelTurnEnv):
        possible_agents = list(AGENTS)

        def setup(self, rng: Any) -> None:
            self.task = task(int(rng.integers(2**31)))

        def instructions(self, agent: str) -> str:
            return INSTRUCTIONS

        def observe_text(self, agent: str) -> str:
            return question(self.task[agent])

        def act_all(self, actions: Any) -> Any:
            reward = sum(right(self.task[agent], text) for agent, text in actions.items()) / len(AGENTS)
            return fa.Outcome(rewards=dict.fromkeys(actions, reward), done=True)

    sampling = fa.Sampling(temperature=1.0, max_tokens=TOKENS)
    config = fa.GRPOConfig(
        seed=asked.seed, groups_per_step=GROUPS, group_size=SIBLINGS, max_resamples=0,
        learner=fa.LearnerConfig(lr=asked.lr), engine=fa.EngineConfig(max_model_len=256),
    )  # fmt: skip
    team = {agent: fa.Policy(model, name=agent, sampling=sampling) for agent in AGENTS}
    with fa.GRPOTrainer(team, config=config, out_dir=asked.out / f"ours-{asked.seed}") as trainer:
        before = trainer.evaluate("perf/Sums-v0", episodes=HELD_OUT)
        rows = trainer.fit("perf/Sums-v0", steps=asked.steps).metrics
        after = trainer.evaluate("perf/Sums-v0", episodes=HELD_OUT)
    return {
        "before": before.reward, "after": after.reward,
        "rewards": [row["reward/mean"] for row in rows], "step_s": sum(row["time/step_s"] for row in rows) / len(rows),
    }  # fmt: skip


def comlrl(asked: argparse.Namespace, model: str) -> dict[str, Any]:
    import torch
    from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(asked.seed)
    # CoMLRL takes the first padding token for a prompt's end, and SmolLM2's own also ends each of its messages
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", pad_token="<|endoftext|>")
    agents = [AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in AGENTS]
    for agent in agents:
        agent.generation_config.pad_token_id = tokenizer.pad_token_id
    earned: list[float] = []

    def prompt(numbers: tuple[int, int]) -> str:
        return tokenizer.apply_chat_template(messages(numbers), tokenize=False, add_generation_prompt=True)

    def reward(*answers: list[str], batch_items: list[dict[str, Any]]) -> list[float]:
        tasks = [batch_items[0][agent] for agent in AGENTS]
        earned.append(sum(right(tuple(each), answer[0]) for each, answer in zip(tasks, answers, strict=True)) / 2)
        return earned[-1:]

    def evaluate() -> float:
        share = 0.0
        for at, agent in enumerate(AGENTS):
            tasks = [task(10**9 + seed)[agent] for seed in range(HELD_OUT)]
            batch = tokenizer([prompt(each) for each in tasks], padding=True, return_tensors="pt")
            with torch.no_grad():
                out = agents[at].generate(
                    **batch, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=TOKENS
                )
            texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            share += sum(map(right, tasks, texts)) / HELD_OUT / len(AGENTS)
        return share

    trainer = MAGRPOTrainer(
        agents=agents, num_agents=2, tokenizer=tokenizer, reward_func=reward,
        formatters=[lambda item, name=name: prompt(item[name]) for name in AGENTS],
        train_dataset=Dataset.from_list([task(asked.seed * 100_000 + n) for n in range(asked.steps * GROUPS)]),
        args=MAGRPOConfig(
            num_train_epochs=1, agent_learning_rate=asked.lr, num_agents=2, num_turns=1, num_generations=SIBLINGS,
            max_new_tokens=TOKENS, temperature=1.0, top_p=1.0, top_k=0, rollout_buffer_size=GROUPS,
            train_batch_size=GROUPS, eval_interval=0,
        ),
    )  # fmt: skip
    before = evaluate()
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    size = GROUPS * SIBLINGS
    means = [sum(earned[at : at + size]) / size for at in range(0, len(earned), size)]
    return {"before": before, "after": evaluate(), "rewards": means, "step_s": seconds / asked.steps}


def table(out: Path) -> str:
    """Markdown of what was saved."""
    names = ("framework", "seed", "before", "after", "training, by fifths", "seconds a step", "CPU-s in all a step")
    rows = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for file in sorted(out.glob("*.json")):
        one = json.loads(file.read_text())
        means = one["rewards"]
        fifths = [means[len(means) * n // 5 : len(means) * (n + 1) // 5] for n in range(5)]
        curve = ", ".join(f"{sum(each) / len(each):.2f}" for each in fifths if each)
        rows.append(
            f"| {one['arm']} | {one['seed']} | {one['before']:.3f} | {one['after']:.3f} | {curve} | "
            f"{one['step_s']:.1f} | {one['cpu_s'] / len(means):.1f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=["ours", "comlrl", "table"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--out", type=Path, default=Path("runs/team_peer"))
    asked = parser.parse_args()
    if asked.arm == "table":
        sys.stdout.write(table(asked.out) + "\n")
        return
    from forge_agents.models.resolve import resolve

    asked.out.mkdir(parents=True, exist_ok=True)
    start = cpu_s()
    result = {"ours": ours, "comlrl": comlrl}[asked.arm](asked, str(resolve("smollm2-135m-instruct")))
    result |= {"arm": asked.arm, "seed": asked.seed, "cpu_s": cpu_s() - start}
    (asked.out / f"{asked.arm}-{asked.seed}.json").write_text(json.dumps(result))
    sys.stdout.write(json.dumps(result) + "\n")


def cpu_s() -> float:
    """CPU-seconds of this process and of its ended children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    main()
