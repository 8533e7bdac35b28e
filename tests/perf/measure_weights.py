"""Publishing and fetching all weights, compared with a warm plain copy of the same bytes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from perf_common import THREADS, Options, goal, in_child, median

from forge_agents.runtime._monarch import Actor, concurrent_endpoint

ROUNDS = 5
WARM_UPS = 4
"""Fresh pages cost more than the copies."""
CALL_S = 120


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``weights``."""
    moves = in_child(run_moves, options, timeout_s=600)
    ratios = {
        "publisher_memory_over_weights": round(moves["publisher_shared"] + moves["publisher_transient"], 3),
        "subscriber_memory_over_weights": round(moves["subscriber_private"] + moves["subscriber_transient"], 3),
        "publish_over_memcpy": round(moves["publish_s"] / moves["publisher_memcpy_s"], 3),
        "fetch_apply_over_memcpy": round(moves["fetch_apply_s"] / moves["subscriber_memcpy_s"], 3),
    }
    most = {
        "publish_over_memcpy": 3,
        "fetch_apply_over_memcpy": 7,
        "publisher_memory_over_weights": 1.2,
        "subscriber_memory_over_weights": 1.2,
    }
    goals = {
        name.removesuffix("_over_weights"): goal(ratios[name], value, at_most=True) for name, value in most.items()
    }
    peer = "warm plain copy of the same bytes in the same process"
    return [{"measure": "weights", **moves, "peer": peer, "ratio": ratios, "goals": goals}]


class Mover(Actor):
    """Holds a model's tensors in bfloat16, and publishes or fetches them."""

    def __init__(self, model: str, store: Any) -> None:
        import torch
        from safetensors.torch import load_file

        from forge_agents.weights import Publisher, Subscriber

        files = sorted(Path(model).glob("*.safetensors"))
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        # cloned: these are warm pages of this process, not of the file
        self._live = {name: tensor.to(torch.bfloat16).clone() for name, tensor in tensors.items()}
        self._num_bytes: int = sum(tensor.nbytes for tensor in self._live.values())
        self._flat = [torch.ones(self._num_bytes, dtype=torch.uint8) for _ in range(2)]
        self._publisher = Publisher(store, "weights")
        self._subscriber = Subscriber(store, "weights")

    @concurrent_endpoint
    async def publish(self, version: int) -> float:
        started = time.perf_counter()
        await self._publisher.publish(version, self._live)
        return time.perf_counter() - started

    @concurrent_endpoint
    async def fetch(self) -> float:
        import torch

        start = time.perf_counter()
        async with self._subscriber.load() as weights:

            def load() -> None:  # as an engine's thread does
                with torch.no_grad():
                    for name, tensor in weights.tensors.items():
                        self._live[name].copy_(tensor)
                weights.check()

            await asyncio.to_thread(load)
        return time.perf_counter() - start

    @concurrent_endpoint
    async def memcpy(self) -> float:
        started = time.perf_counter()
        self._flat[0].copy_(self._flat[1])
        return time.perf_counter() - started

    @concurrent_endpoint
    async def memory(self) -> dict[str, int]:
        """Bytes of private and shared memory now, and of both at their most since the last call."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        result = {name: int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem", "VmRSS", "VmHWM")}
        return {**result, "transient": result["VmHWM"] - result["VmRSS"]}

    @concurrent_endpoint
    async def num_bytes(self) -> int:
        return self._num_bytes


async def run_moves(options: Options) -> dict[str, float]:
    from forge_agents.runtime import mesh
    from forge_agents.weights import WeightStore

    async def ask(who: Any, endpoint: str, *args: Any) -> Any:
        call = getattr(who, endpoint).call_one(*args)
        return await mesh.with_deadline(call, CALL_S, who="mover", what=endpoint)

    async with mesh.session():
        store = await WeightStore.start()
        writer, reader = (
            mesh.spawn_procs(name, threads=THREADS).spawn("mover", Mover, options.model, store.ref)
            for name in ("writer", "reader")
        )
        rows = []
        before = await ask(reader, "memory")
        for version in range(_warm_ups(options) + (1 if options.quick else ROUNDS)):
            if version == _warm_ups(options):
                await ask(writer, "memory"), await ask(reader, "memory")
            row = {"publish_s": await ask(writer, "publish", version), "fetch_apply_s": await ask(reader, "fetch")}
            row["publisher_memcpy_s"] = await ask(writer, "memcpy")
            row["subscriber_memcpy_s"] = await ask(reader, "memcpy")
            rows.append(row)
        size = float(await ask(writer, "num_bytes"))
        wrote, read = await ask(writer, "memory"), await ask(reader, "memory")
        await store.stop()
    memory = {
        "publisher_shared": wrote["RssShmem"] / size,
        "publisher_transient": wrote["transient"] / size,
        "subscriber_private": (read["RssAnon"] - before["RssAnon"]) / size,
        "subscriber_transient": read["transient"] / size,
    }
    return median(rows[_warm_ups(options) :]) | memory | {"bytes": size, "first_publish_s": rows[0]["publish_s"]}


def _warm_ups(options: Options) -> int:
    return 1 if options.quick else WARM_UPS
