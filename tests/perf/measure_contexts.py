"""A long game in a small context: what each `Policy.context` earns, reads, writes and takes.

python tests/perf/measure_contexts.py [--episodes 8] [--turns 40] [--context 1024] [--model smollm2-135m-instruct]
python tests/perf/measure_contexts.py --reader   # no engine: answers from what the prompt holds, and nothing else
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from transformers import AutoTokenizer

import forge_agents as fa
from forge_agents.bench.records import tokens_of
from forge_agents.models.resolve import resolve
from forge_agents.rollout.conversation import ASK_FOR_NOTES
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_agents.rollout.rollout import Rollout
from forge_agents.types import Completion, EpisodeGroup, VersionSpan
from forge_trainers import samples_from

COLOURS = ("red", "blue", "green", "white", "black", "brown", "pink", "grey")
WORDS = ("apple", "bread", "chair", "dance", "eagle", "flute", "grape", "house", "juice", "knife", "lemon", "mouse")


class Doors(fa.TurnEnv):
    """Each turn tells the new password of one of eight doors, and asks for that of a door told then or earlier.

    A right answer earns 1 / turns. Most questions are about the last twenty turns; every fourth is about the gate,
    whose password is told once, on the first.
    """

    possible_agents = ("guard",)

    def __init__(self, turns: int = 40) -> None:
        super().__init__()
        self.turns = turns

    def setup(self, rng: np.random.Generator) -> None:
        self.at, self.words = 0, {"gate": str(rng.choice(WORDS))}
        self._tell()

    def _tell(self) -> None:
        self.told = str(self.rng.choice(COLOURS))
        self.words.pop(self.told, None)
        self.words[self.told] = str(self.rng.choice(WORDS))
        expected = [door for door in self.words if door != "gate"]
        self.asked = "gate" if self.at % 4 == 3 else str(self.rng.choice(expected))

    def instructions(self, agent: str) -> str:
        return "You keep the passwords of doors. Passwords change. Answer each question with the password, one word."

    def observe_text(self, agent: str) -> str:
        gate = f"The password of the gate is {self.words['gate']}. It never changes. " if self.at == 0 else ""
        news = f"The password of the {self.told} door is now {self.words[self.told]}."
        return f"{gate}{news} What is the password of the {self.asked}{'' if self.asked == 'gate' else ' door'}?"

    def act(self, agent: str, action: str) -> fa.Outcome:
        right = self.words[self.asked] in action.casefold()
        self.at += 1
        if self.at < self.turns:
            self._tell()
        return fa.Outcome(rewards={agent: right / self.turns}, done=self.at == self.turns)


class Reader:
    """Replaces an engine. It knows exactly what its prompt says, and writes all of that into its notes."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._tokenizer, self.max_model_len = tokenizer, max_model_len

    async def generate(self, prompt_ids: tuple[int, ...], sampling: fa.Sampling, **asked: Any) -> Completion:
        prompt = self._tokenizer.decode(prompt_ids)
        expected = dict(re.findall(r"password of the (\w+)(?: door)? is (?:now )?(\w+)", prompt))
        text = " ".join(f"The password of the {door} is {word}." for door, word in expected.items())
        if ASK_FOR_NOTES not in prompt[-len(ASK_FOR_NOTES) - 100 :]:
            text = expected.get(re.findall(r"What is the password of the (\w+)", prompt)[-1], "unknown")
        ids = (*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id)
        ids = ids[: sampling.max_tokens]
        span = VersionSpan(version=0, start=0, end=len(ids))
        logprobs = (-0.1,) * len(ids)
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason="stop", versions=(span,))


def measured(groups: Sequence[EpisodeGroup], seconds: float) -> dict[str, Any]:
    """Means per episode of one policy."""
    played = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in played for turn in trajectory.turns]
    samples = [samples_from(trajectory, [1.0] * len(trajectory.turns), 0) for trajectory in played]
    read, written = zip(*map(tokens_of, played), strict=True)
    return {
        "reward": np.mean([trajectory.reward for trajectory in played]),
        "turns": len(turns) / len(played),
        "times compacted": sum(turn.compaction is not None for turn in turns) / len(played),
        "tokens read": np.mean(read),
        "tokens written": np.mean(written),
        "of them notes": sum(len(turn.notes.response_ids) for turn in turns if turn.notes) / len(played),
        "samples": np.mean([len(own) for own in samples]),
        "tokens to learn from": np.mean([sum(len(sample.token_ids) for sample in own) for own in samples]),
        "seconds for all": seconds,
    }


async def play(
    policy: fa.Policy, served: Mapping[str, PolicyEngine], arguments: argparse.Namespace
) -> list[EpisodeGroup]:
    """One episode of each seed, all at once."""
    room = Rollout(make_env=lambda: Doors(arguments.turns), env_id="Doors", policies=policy, engines=served)
    return await asyncio.gather(*(room.group(seed, 1, rng_key=f"doors/{seed}") for seed in range(arguments.episodes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--reader", action="store_true", help="no engine; see Reader")
    arguments = parser.parse_args()
    sampling = fa.Sampling(temperature=0.7, max_tokens=24)
    policies = [fa.Policy(arguments.model, sampling=sampling, context=c) for c in ("end", "window", "summarize")]
    config = fa.EngineConfig(enforce_eager=True, max_model_len=arguments.context)
    rows = {}
    with contextlib.nullcontext() if arguments.reader else fa.Engines(policies[0], config=config) as engines:
        for policy in policies:
            started = time.perf_counter()
            if engines is None:
                tokenizer = AutoTokenizer.from_pretrained(resolve(arguments.model))
                served = {policy.name: PolicyEngine(Reader(tokenizer, arguments.context), Renderer(tokenizer))}
                groups = asyncio.run(play(policy, served, arguments))
            else:
                groups = engines.run([policy], lambda served, policy=policy: play(policy, served, arguments))
            rows[policy.context] = measured(groups, time.perf_counter() - started)
    show = Console(width=200, markup=False).print
    show(f"| mean of {arguments.episodes} games | {' | '.join(rows)} |\n|---|{'---|' * len(rows)}")
    for name in rows["end"]:
        values = " | ".join(f"{row[name]:.3f}" if name == "reward" else f"{row[name]:,.0f}" for row in rows.values())
        show(f"| {name} | {values} |")


if __name__ == "__main__":
    main()
