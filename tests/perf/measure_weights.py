"""Publishing and fetching all weights, over a warm plain copy of the same bytes; and the whole way to the engine."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from perf_common import POLICY, THREADS, Options, goal, in_child, median, policy

from forge_agents.runtime._monarch import Actor, concurrent_endpoint

ROUNDS = 5
WARM_UPS = 4
"""Fresh pages cost more than the copies."""
CALL_S = 120


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``weights``."""
    moves = in_child(run_moves, options, timeout_s=600)
    way = in_child(run_whole_way, options, timeout_s=900)
    ratios = {
        "publisher_memory_over_weights": round(moves["publisher_shared"] + moves["publisher_transient"], 3),
        "subscriber_memory_over_weights": round(moves["subscriber_private"] + moves["subscriber_transient"], 3),
        "publish_over_memcpy": round(moves["publish_s"] / moves["publisher_memcpy_s"], 3),
        "fetch_apply_over_memcpy": round(moves["fetch_apply_s"] / moves["subscriber_memcpy_s"], 3),
    }
    return [
        {
            "measure": "weights",
            **moves,
            "whole_way": way,
            "peer": "warm plain copy of the same bytes in the same process",
            "ratio": ratios,
            "goals": {
                "publish_over_memcpy": goal(ratios["publish_over_memcpy"], 3, at_most=True),
                "fetch_apply_over_memcpy": goal(ratios["fetch_apply_over_memcpy"], 7, at_most=True),
                "publisher_memory": goal(ratios["publisher_memory_over_weights"], 1.2, at_most=True),
                "subscriber_memory": goal(ratios["subscriber_memory_over_weights"], 1.2, at_most=True),
                "whole_way_s": goal(way["whole_way_s"], 0.8, at_most=True),
            },
        }
    ]


class Mover(Actor):
    """Holds a model's tensors in bfloat16; publishes them or fetches into them."""

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
        found = {name: int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem", "VmRSS", "VmHWM")}
        return {**found, "transient": found["VmHWM"] - found["VmRSS"]}

    @concurrent_endpoint
    async def num_bytes(self) -> int:
        return self._num_bytes


def run_moves(options: Options) -> dict[str, float]:
    return asyncio.run(_run_moves(options))


async def _run_moves(options: Options) -> dict[str, float]:
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


def run_whole_way(options: Options) -> dict[str, float]:
    return asyncio.run(_run_whole_way(options))


async def _run_whole_way(options: Options) -> dict[str, float]:
    from forge_agents.runtime import mesh
    from forge_agents.serving import EngineConfig
    from forge_trainers.rl.config import GRPOConfig
    from forge_trainers.run.processes import Processes

    engine = EngineConfig(max_model_len=512, kv_cache_gb=0.5, threads=THREADS, enforce_eager=options.quick)
    async with mesh.session():
        with tempfile.TemporaryDirectory() as folder:
            policies, config = {POLICY: policy(options, 8)}, GRPOConfig(engine=engine)
            processes = await Processes.start(policies, config, folder=Path(folder))
            await processes.start_learners()
            learner = processes.learners[POLICY]
            rows = []
            for _ in range(_warm_ups(options) + (1 if options.quick else ROUNDS)):
                await learner.train_step(_small_batch(), timeout_s=CALL_S)
                started = time.perf_counter()
                await processes.sync()
                whole_way_s = time.perf_counter() - started
                loaded = (await processes.engines[POLICY].infos())[POLICY].last_update
                if loaded["version"] != learner.version:
                    raise AssertionError(f"the engine has version {loaded['version']}, the learner {learner.version}")
                put = learner.last_publish
                rows.append(
                    {
                        "whole_way_s": whole_way_s,
                        "cast_s": whole_way_s - put["pack_s"] - put["put_s"] - loaded["seconds"],
                        "pack_s": put["pack_s"],
                        "put_s": put["put_s"],
                        "fetch_s": loaded["fetch_s"],
                        "load_s": loaded["load_s"],
                    }
                )
            await processes.stop()
    return median(rows[_warm_ups(options) :]) | {"first_whole_way_s": round(rows[0]["whole_way_s"], 4)}


def _warm_ups(options: Options) -> int:
    return 1 if options.quick else WARM_UPS


def _small_batch() -> Any:
    """Just enough to learn from, so that the version rises."""
    from forge_trainers.batch.packing import Sample, pack

    def sample(advantage: float) -> Sample:
        return Sample(
            token_ids=(1, 2, 3, 4),
            loss_mask=(False, False, True, True),
            logprobs=(0.0, 0.0, -5.0, -5.0),
            advantage=advantage,
            versions=(-1, -1, 0, 0),
            group=0,
        )

    return pack([sample(1.0), sample(-1.0)])
