"""(j) Tokens per second of `fa.benchmark` while it plays, over the same engine fed directly with the same requests.

In: `Options`. Out: tokens per second of each. Waits for one child with a deadline, in which engines start one by one.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from perf_common import PROMPTS, THREADS, Options, Story, goal, in_child, median

if TYPE_CHECKING:
    from forge_agents.policy import Policy
    from forge_agents.rollout.players import Generator, PolicyEngine
    from forge_agents.serving import EnginePlan
    from forge_agents.serving._wire import Answer, Request

DEADLINE_S = 1800
ENV_ID = "perf/Chapter-v0"
PLAYER = "model"


class Chapter(Story):
    """A story to write, drawn by the episode's seed."""

    def __init__(self) -> None:
        super().__init__("")

    def setup(self, rng: np.random.Generator) -> None:
        self._prompt = f"{PROMPTS[int(rng.integers(len(PROMPTS)))]} Begin with chapter {int(rng.integers(1, 100))}."


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``benchmark``."""
    from forge_agents.serving import _vllm

    threads = {name: str(THREADS) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    env = {**_vllm.environment(_config(options)), **threads}
    found = in_child(run, options, timeout_s=DEADLINE_S, env=env)
    rate = {name: found[name]["tokens_per_s"] for name in ("benchmark", "direct", "direct_without_seeds")}
    ratios = {f"over_{name}": round(rate["benchmark"] / rate[name], 4) for name in rate if name != "benchmark"}
    return [
        {
            "measure": "benchmark",
            "episodes": _episodes(options),
            "max_new_tokens": options.rollout_tokens,
            **found,
            "peer": "the same engine fed directly with the same requests, all at once; and without their seeds",
            "ratio": ratios,
            "goals": {"over_direct": goal(ratios["over_direct"], 0.9, at_most=False)},
        }
    ]


def _episodes(options: Options) -> int:
    return 8 if options.quick else 256


def _config(options: Options) -> EnginePlan:
    from forge_agents.serving import EnginePlan

    return EnginePlan(
        model=options.model, max_model_len=512, threads=THREADS, enforce_eager=options.quick, kv_cache_gb=1.0
    )


def run(options: Options) -> dict[str, dict[str, float]]:
    """Benchmarks, each with an engine of its own; then what they asked, asked directly of one more engine."""
    asked: list[Request] = []
    benchmarks = []
    for round_ in range(options.rounds):
        asked.clear()
        benchmarks.append(_benchmark(options, seed=round_, asked=asked))
    replay = _Replay(options, len(asked))
    without = [replace(request, seed=None) for request in asked]
    replay(asked)  # warm
    found = {"direct": [], "direct_without_seeds": []}  # type: dict[str, list[dict[str, float]]]
    for _ in range(options.rounds):
        found["direct"].append(replay(asked))
        found["direct_without_seeds"].append(replay(without))
    replay.close()
    return {"benchmark": median(benchmarks), **{name: median(rows) for name, rows in found.items()}}


def _benchmark(options: Options, *, seed: int, asked: list[Request]) -> dict[str, float]:
    """One benchmark; its requests are left in `asked`."""
    import forge_agents as fa
    from forge_agents.bench import play as playing

    if ENV_ID not in fa.list_envs():
        fa.register(ENV_ID, max_turns=1)(Chapter)
    plain = playing._fleet

    @contextlib.asynccontextmanager
    async def heard(models: Mapping[str, Policy], config: EnginePlan) -> AsyncIterator[Mapping[str, PolicyEngine]]:
        async with plain(models, config) as served:
            yield {name: replace(one, engine=_Heard(one.engine, asked)) for name, one in served.items()}

    player = fa.Policy(options.model, sampling=fa.Sampling(max_tokens=options.rollout_tokens))
    playing._fleet = heard  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = fa.benchmark(
                {PLAYER: player},
                ENV_ID,
                episodes=_episodes(options),
                seed=seed,
                engine=replace(_config(options), model=""),
                out_dir=folder,
                progress=False,
            )
    finally:
        playing._fleet = plain
    assert report.complete, report.stopped
    tokens = sum(seat.tokens for record in report.records for seat in record.seats.values())
    return {
        **_rate(tokens, report.timing["play_seconds"]),
        "seconds_with_start": report.timing["seconds"],
    }


def _rate(tokens: int, seconds: float) -> dict[str, float]:
    return {"tokens_per_s": tokens / seconds, "tokens": float(tokens), "seconds": seconds}


class _Heard:
    """An engine whose requests are noted."""

    def __init__(self, engine: Generator, asked: list[Request]) -> None:
        self._engine, self._asked = engine, asked
        self.max_model_len = engine.max_model_len

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Any, **options: Any) -> Any:
        from forge_agents.serving._wire import Request

        request = Request(
            request_id=len(self._asked),
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            seed=options.get("seed"),
        )
        self._asked.append(request)
        return await self._engine.generate(prompt_ids, sampling, **options)


class _Replay:
    """The engine's thread in this process: requests all at once, until the last is answered."""

    def __init__(self, options: Options, number: int) -> None:
        from forge_agents.serving._loop import EngineThread

        self._number, self._news = number, threading.Event()
        self._answers: list[Answer] = []
        self._failures: list[BaseException] = []
        self._thread = EngineThread(_config(options), deliver=self._deliver, on_death=self._died)
        self._thread.ready.result(600)

    def __call__(self, requests: Sequence[Request]) -> dict[str, float]:
        self._answers.clear()
        self._news.clear()
        started = time.perf_counter()
        self._thread.add(list(requests))
        if not self._news.wait(600) or self._failures:
            raise RuntimeError(f"{len(self._answers)} of {self._number} requests answered; failures: {self._failures}")
        seconds = time.perf_counter() - started
        done = [answer.completion for answer in self._answers if answer.completion is not None]
        return _rate(sum(len(completion.token_ids) for completion in done), seconds)

    def close(self) -> None:
        self._thread.close(10)

    def _deliver(self, arrived: list[Answer]) -> None:
        self._answers.extend(arrived)
        if len(self._answers) == self._number:
            self._news.set()

    def _died(self, error: BaseException) -> None:
        self._failures.append(error)
        self._news.set()
