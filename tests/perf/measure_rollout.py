"""Tokens per second of episodes through the engine's actor, over the same engine without actor, and vLLM's LLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf_common import OPENMP, POLICY, THREADS, DirectEngine, Options, goal, in_child, median, play_all

if TYPE_CHECKING:
    from forge_agents.serving import EnginePlan

DEADLINE_S = 900


def measure(options: Options) -> list[dict[str, Any]]:
    """The records ``rollout``, one for each length of answers."""
    from forge_agents.serving import _vllm

    result = {
        "actor": in_child(run_actor, options, timeout_s=DEADLINE_S),
        "direct": in_child(
            run_direct, options, timeout_s=DEADLINE_S, env={**_vllm.environment(_config(options)), **OPENMP}
        ),
        "vllm_llm": in_child(run_llm, options, timeout_s=DEADLINE_S, env=llm_variables(options)),
    }
    records = []
    for most in _lengths(options):
        own = {name: of_length[str(most)] for name, of_length in result.items()}
        rate = {name: numbers["tokens_per_s"] for name, numbers in own.items()}
        ratios = {f"over_{name}": round(rate["actor"] / rate[name], 4) for name in rate if name != "actor"}
        peer = "the same engine fed directly, and vLLM's LLM class with its own child processes"
        facts = {"live_episodes": len(options.prompts) * options.siblings, "max_new_tokens": most}
        least = {"over_direct": 0.98, "over_vllm_llm": 1.8}
        goals = {name: goal(ratios[name], value, at_most=False) for name, value in least.items()}
        records.append({"measure": "rollout", **facts, **own, "peer": peer, "ratio": ratios, "goals": goals})
    return records


def llm_variables(options: Options) -> dict[str, str]:
    """Environment of `run_llm`."""
    from forge_agents.serving import _vllm

    eager = {"TORCHDYNAMO_DISABLE": "1"} if options.quick else {}
    quiet = ("VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE")
    return {name: _vllm.ENVIRONMENT[name] for name in quiet} | eager


def _lengths(options: Options) -> tuple[int, ...]:
    """Most new tokens of an answer, each measured on the engine that the one before has left."""
    return options.rollout_tokens // 4, options.rollout_tokens


def _medians(options: Options, run: Callable[[int], dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median of the rounds by length. The first round is a warm-up."""
    return {str(most): median([run(most) for _ in range(1 + options.rounds)][1:]) for most in _lengths(options)}


def _config(options: Options) -> EnginePlan:
    from forge_agents.serving import EnginePlan

    return EnginePlan(
        model=options.model,
        max_model_len=512,
        max_num_seqs=64 * options.scale,
        kv_cache_gb=1.0 * options.scale,
        threads=THREADS,
        enforce_eager=options.quick,
    )


def _prompts(options: Options) -> list[tuple[int, ...]]:
    """Tokens of what the episodes ask, siblings one after another."""
    from forge_agents.rollout.rendering import Renderer

    renderer = Renderer.of(Path(options.model))
    return [renderer.start("", prompt) for prompt in options.prompts for _ in range(options.siblings)]


def _rate(lengths: list[int], seconds: float, most: int) -> dict[str, float]:
    return {
        "tokens_per_s": sum(lengths) / seconds,
        "tokens": float(sum(lengths)),
        "seconds": seconds,
        "stopped_early": sum(length < most for length in lengths) / len(lengths),
    }


async def run_actor(options: Options) -> dict[str, dict[str, float]]:
    """Episodes, through the actor."""
    from forge_agents.rollout.policy_engine import PolicyEngine
    from forge_agents.rollout.rendering import Renderer
    from forge_agents.runtime import mesh
    from forge_agents.serving import EngineProcess

    async with mesh.session():
        engine = await EngineProcess.start(_config(options), name="engine", timeout_s=600)
        served = {POLICY: PolicyEngine(engine, Renderer.of(Path(options.model)))}
        result = {}
        for most in _lengths(options):
            rows = []
            for _ in range(1 + options.rounds):
                started = time.perf_counter()
                groups = await play_all(options, served, most)
                seconds = time.perf_counter() - started
                turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
                rows.append(_rate([len(turn.response_ids) for turn in turns], seconds, most))
            result[str(most)] = median(rows[1:])
        await engine.stop()
    return result


def run_direct(options: Options) -> dict[str, dict[str, float]]:
    """The engine's thread in this process, fed at once."""
    from forge_agents.policy import Sampling
    from forge_agents.serving._wire import Request

    prompts = _prompts(options)
    with DirectEngine(_config(options)) as engine:

        def run(most: int) -> dict[str, float]:
            sampling = Sampling(max_tokens=most)
            requests = [Request(request_id=i, prompt_ids=ids, sampling=sampling) for i, ids in enumerate(prompts)]
            started = time.perf_counter()
            completions = engine.answer(requests)
            seconds = time.perf_counter() - started
            return _rate([len(completion.token_ids) for completion in completions], seconds, most)

        return _medians(options, run)


def run_llm(options: Options) -> dict[str, dict[str, float]]:
    """vLLM's own batch interface with its own child processes."""
    from vllm import LLM, SamplingParams

    config = _config(options)
    llm = LLM(
        model=config.model,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=int(config.kv_cache_gb * 1e9),
        enforce_eager=config.enforce_eager,
        enable_prefix_caching=True,
        seed=config.seed,
    )
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in _prompts(options)]

    def run(most: int) -> dict[str, float]:
        params = SamplingParams(temperature=1.0, max_tokens=most, logprobs=0)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return _rate([len(out.outputs[0].token_ids) for out in outputs], seconds, most)

    return _medians(options, run)
