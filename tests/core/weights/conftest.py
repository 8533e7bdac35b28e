"""Stores that live in this process, with the client that publishers and subscribers use."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest

from forge_agents.runtime.machine import memory_domain


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class SlowStore:
    """A store on another host, and its client. Each part that it moves takes a while."""

    name, place, heartbeat_timeout_s = "weights", "elsewhere", 0.3

    def __init__(self, part_s: float = 0.0) -> None:
        self.store_name = f"{os.getpid()}-{id(self)}"
        self.values: dict[str, Any] = {}
        self.put_s = self.get_s = part_s

    def keys_with(self, *words: str) -> list[str]:
        return [key for key in self.values if any(word in key for word in words)]

    def client(self) -> SlowStore:
        return self

    async def keys(self, prefix: str = "") -> list[str]:
        return [key for key in self.values if key.startswith(prefix)]

    async def put(self, key: str, value: Any) -> None:
        await asyncio.sleep(self.put_s if "part" in key else 0)
        self.values[key] = value.clone() if "part" in key else value

    async def get(self, key: str) -> Any:
        await asyncio.sleep(self.get_s if "part" in key else 0)
        return self.values[key]

    async def delete(self, key: str) -> None:
        del self.values[key]


class SharedStore(SlowStore):
    """A store on this host, which keeps what it is given, and lets others do some steps before it answers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.place, self.heartbeat_timeout_s = memory_domain(), 20.0
        self._random = random.Random(seed)

    async def _rest(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)

    async def put(self, key: str, value: Any) -> None:
        await self._rest()
        self.values[key] = value
        await self._rest()

    async def get(self, key: str) -> Any:
        await self._rest()
        return self.values[key]


@pytest.fixture
def slow_store() -> Any:
    return SlowStore(part_s=0.1)


@pytest.fixture
def remote_store() -> Any:
    return SlowStore()


@pytest.fixture(params=range(3))
def shared_store(request: pytest.FixtureRequest) -> Any:
    return SharedStore(request.param)
