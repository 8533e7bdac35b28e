"""Reads and writes the store's values of one set of weights, and the leases of readers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from forge_agents.runtime import mesh
from forge_agents.runtime.machine import memory_domain
from forge_agents.weights._index import Entry, Index, Process

RETRY_S, MAX_RETRY_S = 0.005, 0.1


class Records:
    """Access to the keys of one set of weights. Every call has the store's heartbeat timeout as its deadline.

    `ref` is a `WeightStoreRef`, whose module imports this one.
    """

    def __init__(self, ref: Any, weights_name: str) -> None:
        self.weights_name = weights_name
        self._ref = ref
        self._timeout_s = ref.heartbeat_timeout_s
        self._process = Process(place=memory_domain(), pid=os.getpid())

    async def _put(self, client: Any, key: str, value: object) -> None:
        await self._wait(client.put(f"{self.weights_name}.{key}", value), f"put of {self.weights_name}.{key}")

    async def _get(self, client: Any, key: str) -> Any:
        return await self._wait(client.get(f"{self.weights_name}.{key}"), f"get of {self.weights_name}.{key}")

    async def _get_or_none(self, client: Any, key: str) -> Any:
        with contextlib.suppress(KeyError):
            return await self._get(client, key)
        return None

    async def _delete(self, client: Any, key: str) -> None:
        with contextlib.suppress(KeyError):  # it may be gone already
            await self._wait(client.delete(f"{self.weights_name}.{key}"), f"deletion of {self.weights_name}.{key}")

    async def _in_store(self, client: Any, entry: Entry) -> bool:
        """Whether the store's bytes are still those of the entry."""
        index: Index = await self._get(client, "index")
        return index.is_intact(entry)

    async def _get_part(self, client: Any, entry: Entry, rank: int, number: int) -> Any:
        """A part of the buffer that a rank of the publisher wrote, as a flat uint8 tensor."""
        return await self._get(client, f"data.rank{rank}.part{number}.{entry.publisher}")

    async def _keys(self, client: Any, prefix: str) -> list[str]:
        """Keys under ``prefix.``, without the name of the weights."""
        name = f"{self.weights_name}."
        keys = await self._wait(client.keys(f"{name}{prefix}."), f"list of keys {name}{prefix}")
        return [key.removeprefix(name) for key in keys]

    async def _wait(self, call: Any, action: str) -> Any:
        return await mesh.with_deadline(call, self._timeout_s, who=self._ref.name, what=action)

    async def _await_leases(
        self, client: Any, prefix: str, num_parts: int, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until no lease is left under `prefix`.

        A lease whose owner died, or that was not renewed within the heartbeat timeout, is deleted. The whole wait lasts
        at most as long as `num_parts` parts may take.
        """
        whole, last_seen = Silence(self._timeout_s * num_parts), dict[str, tuple[LeaseRecord, Silence]]()
        while keys := await self._keys(client, prefix):
            is_over = whole.is_too_long()
            for key in keys:
                try:
                    record: LeaseRecord = await self._get(client, key)
                except KeyError:
                    continue
                if key not in last_seen or last_seen[key][0] != record:
                    last_seen[key] = record, Silence(self._timeout_s)
                    on_progress()
                if last_seen[key][1].is_too_long() or is_over or record.owner.has_ended():
                    await self._delete(client, key)
            await asyncio.sleep(RETRY_S)


class Silence:
    """Time without progress of another process.

    Between two looks, at most a quarter of the timeout counts. Otherwise, a reader and a writer that are suspended
    together, as by Ctrl-Z, would appear to each other as hung.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.seconds, self._looked = 0.0, time.monotonic()

    def is_too_long(self) -> bool:
        """Count the time since the last look, and return whether the silence exceeds the timeout."""
        now = time.monotonic()
        self.seconds += min(now - self._looked, self._timeout_s / 4)
        self._looked = now
        return self.seconds > self._timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A lease as the store holds it, also the progress report of a writer."""

    owner: Process
    renewals: int
    """Increases as long as the owner makes progress."""


class Lease(Records):
    """A reader's lease under ``prefix``. The next write waits for it as long as the reader renews it."""

    def __init__(self, ref: Any, weights_name: str, prefix: str) -> None:
        super().__init__(ref, weights_name)
        self._key = f"{prefix}.{uuid.uuid4().hex}"
        self._renewals = 0
        self.held = False

    async def renew(self, client: Any) -> None:
        """Take or renew the lease."""
        self._renewals += 1
        self.held = True
        await self._put(client, self._key, LeaseRecord(owner=self._process, renewals=self._renewals))

    async def release(self, client: Any) -> None:
        """Give the lease back, if it is held."""
        if self.held:
            self.held = False
            await self._delete(client, self._key)

    @contextlib.asynccontextmanager
    async def renewing(self, client: Any) -> AsyncIterator[None]:
        """Renew the lease, if it is held, until the block ends."""

        async def renew() -> None:
            while self.held:
                await asyncio.sleep(self._timeout_s / 4)
                await self.renew(client)

        async with in_background(renew()):
            yield


@contextlib.asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` until the block ends, and ignore its errors: the block meets the same ones."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
