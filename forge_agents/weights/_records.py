"""The store's values under the name of one set of weights, and notes of those who read them.

In: a store's client. Out: values. Waits for the store, in which one part of the bytes travels at most, and for readers,
always with its `heartbeat_timeout_s` as a deadline.
"""

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
from forge_agents.weights._index import Process
from forge_agents.weights.store import WeightStoreRef

RETRY_S, MOST_RETRY_S = 0.005, 0.1


class Records:
    """What writers and readers have."""

    def __init__(self, ref: WeightStoreRef, weights_name: str) -> None:
        self.weights_name = weights_name
        self._ref = ref
        self._timeout_s = ref.heartbeat_timeout_s
        self._me = Process(place=memory_domain(), pid=os.getpid())

    async def _put(self, client: Any, key: str, value: object) -> None:
        await self._wait(client.put(f"{self.weights_name}.{key}", value), f"put of {self.weights_name}.{key}")

    async def _get(self, client: Any, key: str) -> Any:
        return await self._wait(client.get(f"{self.weights_name}.{key}"), f"get of {self.weights_name}.{key}")

    async def _has(self, client: Any, key: str) -> bool:
        found: bool = await self._wait(client.exists(f"{self.weights_name}.{key}"), f"look-up of the {key}")
        return found

    async def _delete(self, client: Any, key: str) -> None:
        """A key that may have vanished already."""
        with contextlib.suppress(KeyError):
            await self._wait(client.delete(f"{self.weights_name}.{key}"), f"end of {self.weights_name}.{key}")

    async def _keys(self, client: Any, what: str) -> list[str]:
        """Keys that lie under `what`, without the name of these weights."""
        name = f"{self.weights_name}."
        found = await self._wait(client.keys(f"{name}{what}"), f"list of keys {name}{what}")
        return [key.removeprefix(name) for key in found if key.startswith(f"{name}{what}.")]

    async def _wait(self, call: Any, what: str) -> Any:
        return await mesh.with_deadline(call, self._timeout_s, who=self._ref.name, what=what)

    async def _let_read(
        self, client: Any, what: str, all_parts: int, got_on: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until there are no notes under `what`, at most as long as all parts may take.

        Notes of who has ended, or gets no further, are taken away. `got_on` is called where one of them does.
        """
        begun, seen = time.monotonic(), dict[str, tuple[Note, float]]()
        while waiting := await self._keys(client, what):
            now = time.monotonic()
            for key in waiting:
                try:
                    note: Note = await self._get(client, key)
                except KeyError:
                    continue
                if key not in seen or seen[key][0] != note:
                    seen[key] = note, now
                    got_on()
                stalls = now - seen[key][1] > self._timeout_s or now - begun > self._timeout_s * all_parts
                if stalls or note.who.has_ended():
                    await self._delete(client, key)
            await asyncio.sleep(RETRY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Says that somebody reads, or writes, and gets on."""

    who: Process
    beats: int
    """Rises while it does."""


class Hold(Records):
    """A reader's note, which whoever writes next waits for as long as the reader gets on.

    Args:
        what: Under which keys it lies.
    """

    def __init__(self, ref: WeightStoreRef, weights_name: str, what: str) -> None:
        super().__init__(ref, weights_name)
        self._what, self._name = what, uuid.uuid4().hex
        self._key = f"{what}.{self._name}"
        self._beats = 0
        self.held = False

    async def begin(self, client: Any, where: str) -> None:
        """Leave the note under `where` among its keys."""
        self._key = f"{self._what}.{where}.{self._name}"
        await self.renew(client)

    async def renew(self, client: Any) -> None:
        """Leave the note, or say that the reader got on."""
        self._beats += 1
        self.held = True
        await self._put(client, self._key, Note(who=self._me, beats=self._beats))

    async def end(self, client: Any) -> None:
        """Take the note away, if there is one."""
        if self.held:
            self.held = False
            await self._delete(client, self._key)

    @contextlib.asynccontextmanager
    async def beating(self, client: Any) -> AsyncIterator[None]:
        """Renew the note, if there is one, as long as this process answers."""

        async def beat() -> None:
            while self.held:
                await asyncio.sleep(self._timeout_s / 4)
                await self.renew(client)

        async with alongside(beat()):
            yield


@contextlib.asynccontextmanager
async def alongside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Let `work` go on until the end of the block; what it raises is left to who does the same there."""
    going = asyncio.ensure_future(work)
    try:
        yield
    finally:
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
