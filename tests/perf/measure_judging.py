"""Judgments per second of an LLM judge, compared with the same engine fed directly with the same prompts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from perf_common import OPENMP, PROMPTS, THREADS, DirectEngine, Options, goal, in_child, median

from forge_agents.serving.config import EnginePlan
from forge_agents.types import Trajectory, Turn

if TYPE_CHECKING:
    from forge_agents.serving._wire import Request

DEADLINE_S = 1800
GROUP = 8
RUBRIC = "The text is a story, it is about what was asked for, and its sentences are grammatical English."
SEED = 0
"""Seed of the judge's fences, so that both runs send the same prompts."""
WORDS = ("the keeper", "a storm", "climbed", "the stairs", "and saw", "a light", "far away", "at night")


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``judging``."""
    from forge_agents.serving import _vllm

    both = in_child(run, options, timeout_s=DEADLINE_S, env={**_vllm.environment(_config(options)), **OPENMP})
    peer = "the same engine fed directly with the same prompts, as tokens, in alternating rounds"
    goals = {"judge_over_direct": goal(both["ratio"]["judge_over_direct"], 0.9, at_most=False)}
    return [{"measure": "judging", **both, "peer": peer, "goals": goals}]


def _trajectories(options: Options, seed: int) -> list[Trajectory]:
    """Trajectories in groups, every answer different."""
    rng, num = np.random.default_rng(seed), 16 if options.quick else 128

    def trajectory(number: int) -> Trajectory:
        text = " ".join(WORDS[k] for k in rng.integers(len(WORDS), size=60))
        asked, story = PROMPTS[number // GROUP % len(PROMPTS)], f"Story {seed}.{number}: {text}."
        turn = Turn(agent="writer", index=0, observation=asked, action=story, reward=0.0)
        group_seed = seed * num + number // GROUP
        return Trajectory(agent="writer", policy="p", turns=(turn,), env_id="perf/Story", seed=group_seed, info={})

    return [trajectory(number) for number in range(num)]


def _config(options: Options) -> EnginePlan:
    return EnginePlan(
        model=options.model, max_model_len=4096 if options.quick else 1024, max_num_seqs=64, kv_cache_gb=1.0,
        threads=THREADS, enforce_eager=options.quick,
    )  # fmt: skip


def run(options: Options) -> dict[str, dict[str, float]]:
    """Score trajectories, and send the same prompts to an engine's thread in this process, in turns."""
    from forge_verifiers import Judge

    rows = []
    with (
        DirectEngine(_config(options)) as direct,
        Judge(options.model, RUBRIC, engine=_config(options), timeout_s=600, start_timeout_s=600, seed=SEED) as judge,
    ):
        for seed in range(1 + options.rounds):
            trajectories = _trajectories(options, seed)
            requests = _requests(options, trajectories, first=seed * len(trajectories))
            started = time.perf_counter()
            judge.score(trajectories)
            judge_s = time.perf_counter() - started
            started = time.perf_counter()
            direct.answer(requests)
            direct_s = time.perf_counter() - started
            rates = {"judge": len(requests) / judge_s, "direct": len(requests) / direct_s}
            rows.append({**rates, "judge_over_direct": direct_s / judge_s})
        used = judge.usage
    middle = median(rows[1:])
    return {
        "judgments_per_s": {name: middle[name] for name in ("judge", "direct")},
        "ratio": {"judge_over_direct": middle["judge_over_direct"]},
        "tokens": {
            "prompt": used.prompt_tokens / used.questions,
            "completion": used.completion_tokens / used.questions,
            "abstained": float(used.nonsense + used.failed),
        },
    }


def _requests(options: Options, trajectories: list[Trajectory], *, first: int) -> list[Request]:
    """The judge's requests for the same trajectories."""
    from forge_agents.policy import Sampling
    from forge_agents.rollout.rendering import Renderer
    from forge_agents.serving._wire import Request
    from forge_verifiers import YesNo
    from forge_verifiers.judge.prompts import documents, fence_key, instructions_for, question_of

    renderer, form = Renderer.of(Path(options.model)), YesNo()
    texts = [
        question_of(documents(trajectory, "answer", 8000)[0][0], form.ask, key=fence_key(SEED))
        for trajectory in trajectories
    ]
    return [
        Request(
            request_id=first + number,
            prompt_ids=renderer.start(instructions_for(RUBRIC), text),
            sampling=Sampling(temperature=0.0, max_tokens=form.max_tokens),
            choices=form.choices,
            top_logprobs=20,
        )
        for number, text in enumerate(texts)
    ]
