"""The learner in processes of its own: agreement, failure, publishing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from forge_agents.errors import ActorDiedError, ModelNotFoundError
from forge_agents.runtime import mesh
from forge_agents.types import EpisodeBatch
from forge_trainers.learner.client import Learner
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.core import LearnerCore

Batches = Callable[..., EpisodeBatch]


def config(model: Path, **changes: object) -> LearnerConfig:
    return LearnerConfig(model=str(model), compute_dtype="float32", threads=1, lr=1e-3, **changes)  # type: ignore[arg-type]


def near(found: dict[str, float], expected: dict[str, float]) -> bool:
    return (
        found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        and found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        and found["entropy"] == pytest.approx(expected["entropy"], rel=1e-5)
    )


@pytest.mark.timeout(120)
def test_two_sharded_processes_compute_what_one_does(tiny_llama: Path, random_batch: Batches, tmp_path: Path):
    batches = [random_batch(seed=seed) for seed in range(3)]

    async def run() -> tuple[list[dict[str, float]], float]:
        async with mesh.session():
            learner = await Learner.start(config(tiny_llama), world_size=2, timeout_s=90)
            steps = [await learner.train_step(batch, timeout_s=60) for batch in batches[:2]]
            await learner.save(tmp_path / "step-2", timeout_s=60)
            steps.append(await learner.train_step(batches[2], timeout_s=60))
            assert learner.version == 3
            await learner.export(tmp_path / "export", timeout_s=60)
            return steps, float((await learner.logprobs(batches[0])).sum())

    two, two_logprobs = asyncio.run(run())
    one = LearnerCore(config(tiny_llama))
    for batch, found in zip(batches, two, strict=True):
        assert near(found, one.train_step(batch))
    assert two_logprobs == pytest.approx(float(one.logprobs(batches[0]).sum()), rel=1e-5)
    exported = LearnerCore(config(tmp_path / "export"))  # stored in bfloat16
    assert two_logprobs == pytest.approx(float(exported.logprobs(batches[0]).sum()), rel=1e-2)
    assert one.load(tmp_path / "step-2") == 2  # what two ranks saved, one continues
    assert near(one.train_step(batches[2]), two[2])


@pytest.mark.timeout(120)
def test_published_versions_reach_a_subscriber(tiny_llama: Path, random_batch: Batches):
    from safetensors.torch import load_file

    from forge_agents.weights import Subscriber, WeightStore

    async def run() -> None:
        async with mesh.session():
            store = await WeightStore.start(timeout_s=60)
            learner = await Learner.start(config(tiny_llama), name="hero", store=store.ref, timeout_s=60)
            assert await learner.publish() == 0
            stored = load_file(tiny_llama / "model.safetensors")
            subscriber = Subscriber(store.ref, "hero")
            fetched = []

            def compare(tensors: Mapping[str, torch.Tensor], version: int) -> None:
                same = tensors.keys() == stored.keys() and all(
                    tensors[name].equal(value) for name, value in stored.items()
                )
                fetched.append((version, same))

            await subscriber.fetch(compare)
            await learner.train_step(random_batch())
            assert await learner.publish() == 1
            await subscriber.fetch(compare)
            assert fetched == [(0, True), (1, False)]
            await store.stop()

    asyncio.run(run())


@pytest.mark.timeout(120)
def test_failures_come_back_at_once_and_by_name(tiny_llama: Path, random_batch: Batches, tmp_path: Path):
    async def run() -> None:
        async with mesh.session():
            with pytest.raises(ModelNotFoundError, match="no config.json"):
                await Learner.start(config(tmp_path), timeout_s=60)
            learner = await Learner.start(config(tiny_llama), name="hero", world_size=2, timeout_s=90)
            bad = random_batch()
            bad["tokens"]["logprobs"][25] = float("nan")
            with pytest.raises(ValueError, match="logprobs of token 25 is nan"):
                await learner.train_step(bad)
            assert (await learner.train_step(random_batch()))["version"] == 1
            with pytest.raises(RuntimeError, match="without a store"):
                await learner.publish()
            logs = mesh.log_folder("hero")
            assert logs is not None
            os.kill(int((logs / "1.pid").read_text()), signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises((ActorDiedError, RuntimeError)):
                await learner.train_step(random_batch(), timeout_s=60)
            assert time.monotonic() - started < 30
            await learner.stop()

    asyncio.run(run())
