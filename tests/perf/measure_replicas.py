"""Two replicas against one on the same cores, and where the turns of a conversation should go."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from perf_common import Options, in_child

CORES = 2
TURNS = 4
TURN_TOKENS = 160
"""Characters of an observation. vLLM caches whole blocks, which on CPU have 128 tokens."""


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``replicas``."""
    one = in_child(run, options, timeout_s=1200, replicas=1)
    two = in_child(run, options, timeout_s=1200, replicas=2)
    ratios = {
        "two_over_one": round(two["tokens_per_s"] / one["tokens_per_s"], 3),
        "prefix_over_random": round(two["random"]["seconds"] / two["prefix"]["seconds"], 3),
    }
    peer = "one engine with all cores, and random routing"
    return [{"measure": "replicas", "one": one, "two": two, "peer": peer, "ratio": ratios, "goals": {}}]


class RandomRouter:
    """The peer of prefix-affine routing."""

    def __init__(self) -> None:
        self._draws = random.Random(0)

    def pick(self, prompt_ids: Sequence[int], loads: Mapping[int, int]) -> int:
        return self._draws.choice(sorted(loads))

    def answered(self, prompt_ids: Sequence[int], response_ids: Sequence[int], replica: int) -> None:
        pass


async def run(options: Options, replicas: int) -> dict[str, Any]:
    """So many replicas, which share the cores evenly."""
    from forge_agents.policy import Sampling
    from forge_agents.runtime import mesh
    from forge_agents.serving import EngineClient, EnginePlan
    from forge_agents.serving.routing import PrefixAffine

    config = EnginePlan(
        model=options.model,
        enforce_eager=options.quick,
        max_model_len=2048,
        kv_cache_gb=0.5,
        threads=CORES // replicas,
        replicas=replicas,
    )
    conversations = 8 if options.quick else 32
    async with mesh.session():
        engines = await EngineClient(config, name="perf", timeout_s=600).start()
        sampling = Sampling(max_tokens=options.rollout_tokens)
        requests = [[7 + i, *range(20, 60)] for i in range(conversations)]
        await asyncio.gather(*(engines.generate(prompt, Sampling(max_tokens=4)) for prompt in requests))  # warm
        started = time.perf_counter()
        answers = await asyncio.gather(*(engines.generate(p, sampling, seed=i) for i, p in enumerate(requests)))
        seconds = time.perf_counter() - started
        result: dict[str, Any] = {
            "tokens_per_s": round(sum(len(answer.token_ids) for answer in answers) / seconds, 1),
            "threads_each": CORES // replicas,
        }
        if replicas > 1:
            for number, (name, router) in enumerate(
                {"random": RandomRouter(), "prefix": PrefixAffine(config.max_num_seqs)}.items()
            ):
                engines._router = router
                result[name] = await _talk(engines, conversations, first=1000 * (number + 1))
        await engines.stop()
    return result


async def _talk(engines: Any, conversations: int, *, first: int) -> dict[str, float]:
    """Conversations of four turns, all at once, with different beginnings."""
    from forge_agents.policy import Sampling

    async def converse(number: int) -> None:
        draws = random.Random(first + number)
        prompt: list[int] = []
        for _ in range(TURNS):
            prompt += [draws.randrange(3, 200) for _ in range(TURN_TOKENS)]
            answer = await engines.generate(tuple(prompt), Sampling(max_tokens=8), seed=number)
            prompt += answer.token_ids

    before = (await engines.infos()).values()
    started = time.perf_counter()
    await asyncio.gather(*(converse(number) for number in range(conversations)))
    seconds = time.perf_counter() - started
    after = (await engines.infos()).values()
    prompts = sum(info.prompt_tokens for info in after) - sum(info.prompt_tokens for info in before)
    cached = sum(info.cached_tokens for info in after) - sum(info.cached_tokens for info in before)
    return {"seconds": round(seconds, 3), "cached_share": round(cached / prompts, 4), "prompt_tokens": float(prompts)}
