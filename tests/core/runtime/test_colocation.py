"""Two sides that share devices, with fakes that count bytes: never both at the same time, in order of requests."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from forge_agents.errors import StallError
from forge_agents.runtime.colocation import Colocation

pytestmark = pytest.mark.anyio

CAPACITY = 80
NEEDS = {"engines": 70, "learner": 60}
"""Bytes of each side when it computes. An offloaded side keeps 5."""
KEEPS = 5


class Gpu:
    """Counts who holds how much, and what happens."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self.held = {"engines": NEEDS["engines"], "learner": KEEPS}
        self.events: list[str] = []
        self.breaks = ""
        self.turns = Colocation("engines", timeout_s)
        self.side = {
            name: self.turns.register(name, offload=lambda n=name: self.leave(n), onload=lambda n=name: self.come(n))
            for name in NEEDS
        }

    async def leave(self, name: str) -> None:
        self.events.append(f"{name} leave")
        await asyncio.sleep(0)
        if self.breaks == name:
            self.breaks = ""
            raise RuntimeError(f"{name} cannot leave")
        self.held[name] = KEEPS

    async def come(self, name: str) -> None:
        self.held[name] = NEEDS[name]
        assert sum(self.held.values()) <= CAPACITY, self.held
        self.events.append(f"{name} come")
        await asyncio.sleep(0)

    async def work(self, name: str, what: str, moments: int = 2) -> None:
        async with self.side[name]():
            for _ in range(moments):
                assert self.held[name] == NEEDS[name]
                await asyncio.sleep(0)
            self.events.append(what)


async def test_each_step_moves_each_side_once() -> None:
    gpu = Gpu()
    for _ in range(2):
        await asyncio.gather(*(gpu.work("engines", "play") for _ in range(3)))
        await gpu.work("learner", "train")
        await gpu.work("learner", "publish")
        await gpu.work("engines", "load")
    step = ["play"] * 3 + ["engines leave", "learner come", "train", "publish", "learner leave", "engines come", "load"]
    assert gpu.events == step * 2


def test_sides_are_never_loaded_at_the_same_time() -> None:
    for seed in range(30):
        rng, gpu = random.Random(seed), Gpu()

        async def crowd(rng: Any = rng, gpu: Gpu = gpu) -> None:
            async def one(number: int) -> None:
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(0)
                await gpu.work(rng.choice(["engines", "learner"]), str(number), rng.randrange(5))

            await asyncio.gather(*(one(number) for number in range(20)))

        asyncio.run(crowd())
        assert sorted(event for event in gpu.events if event.isdigit()) == sorted(map(str, range(20)))


@pytest.mark.parametrize("side", ["engines", "learner"])
async def test_failed_move_leaves_no_active_side(side: str) -> None:
    gpu = Gpu()
    other = "learner" if side == "engines" else "engines"
    await gpu.work(side, "first")
    gpu.breaks = side
    with pytest.raises(RuntimeError, match=f"{side} cannot leave"):
        await gpu.work(other, "second")
    assert gpu.held[other] == KEEPS
    await gpu.work(other, "third")
    await gpu.work(side, "fourth")
    assert gpu.held[other] == KEEPS and gpu.events[-1] == "fourth"


async def test_endless_work_is_named_in_the_timeout() -> None:
    gpu = Gpu(timeout_s=0.05)
    forever = asyncio.ensure_future(gpu.work("engines", "play", 10**9))
    await asyncio.sleep(0)
    with pytest.raises(StallError, match="engines did not finish the work that keeps learner waiting within"):
        await gpu.work("learner", "train")
    forever.cancel()
    await asyncio.gather(forever, return_exceptions=True)
    await gpu.work("learner", "train")  # who is cancelled holds nobody up
    assert gpu.events[-1] == "train"
