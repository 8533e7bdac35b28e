"""The parts that `forge_agents.cli.doctor` tries, each small and real.

In: nothing. Out: a line that says what was seen; an exception is the finding. Waits for actors, with deadlines.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents.runtime import mesh
from forge_agents.testing._tiny_model import tiny_model

if TYPE_CHECKING:
    import torch


def actor() -> str:
    """A message to an actor in a process of its own, and back."""
    return asyncio.run(_actor())


async def _actor() -> str:
    from forge_agents.testing._echo import Echo

    async with mesh.session():
        echo = mesh.spawn_procs("doctor").spawn("echo", Echo)
        pid = await mesh.with_deadline(echo.pid.call_one(), 45, who="doctor", what="its first answer")
        started = time.perf_counter()
        await mesh.with_deadline(echo.pid.call_one(), 10, who="doctor", what="its second answer")
        return f"process {pid} answers in {1e3 * (time.perf_counter() - started):.1f} ms"


def tensor() -> str:
    """A tensor into the weight store and back."""
    return asyncio.run(_tensor())


async def _tensor() -> str:
    import torch

    from forge_agents.weights import Publisher, Subscriber, WeightStore

    sent = {"weight": torch.arange(4_000_000, dtype=torch.float32)}
    got: dict[str, torch.Tensor] = {}

    def keep(tensors: Mapping[str, torch.Tensor], version: int) -> None:
        got.update({name: tensor.clone() for name, tensor in tensors.items()})

    async with mesh.session():
        store = await WeightStore.start(timeout_s=60)
        started = time.perf_counter()
        await Publisher(store.ref, "doctor", dtype=torch.float32).publish(sent, 1)
        published = time.perf_counter()
        await Subscriber(store.ref, "doctor").fetch(keep)
        fetched = time.perf_counter()
        await store.stop()
    if not torch.equal(got["weight"], sent["weight"]):
        raise RuntimeError("what came out of the store is not what went in")
    return f"16 MB put in {1e3 * (published - started):.0f} ms, got in {1e3 * (fetched - published):.0f} ms"


def engine_step() -> str:
    """Eight tokens from vLLM, in an actor, with a tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_engine_step(tiny_model(Path(folder))))


async def _engine_step(model: Path) -> str:
    from forge_agents.policy import Sampling
    from forge_agents.serving import Engine, EngineConfig

    config = EngineConfig(
        model=str(model), max_model_len=256, max_num_seqs=2, kv_cache_gb=0.1, enforce_eager=True, threads=1
    )
    async with mesh.session():
        started = time.perf_counter()
        engine = await Engine.start(config, name="doctor", timeout_s=150)
        ready = time.perf_counter()
        completion = await engine.generate(list(b"hello"), Sampling(max_tokens=8), timeout_s=60)
        done = time.perf_counter()
        await engine.stop()
    return f"{len(completion.token_ids)} tokens in {1e3 * (done - ready):.0f} ms, ready after {ready - started:.0f} s"
