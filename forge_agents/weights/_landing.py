"""Weights that reach a host once: one process pulls them from the store, the others there read its pages.

In: what lies where in the store. Out: tensors over pages that all processes of the host share. Waits for the process
that pulls, and before it pulls for those that still read the version before, with deadlines.

``W.at.P`` says what lies on host P, and where. Who pulls holds a lock that ends with its process: a socket's address
that has no name in the file system. The pages go from one that pulls to the next.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from forge_agents.errors import StallError
from forge_agents.weights import _segments
from forge_agents.weights._index import Entry, Process
from forge_agents.weights._records import MOST_RETRY_S, RETRY_S, Hold, Records

if TYPE_CHECKING:
    from forge_agents.weights._layout import Layout
    from forge_agents.weights.store import WeightStoreRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """What lies on a host."""

    puller: Process
    pages: Mapping[int, _segments.SegmentHandle]
    """Of each rank."""
    entry: Entry | None = None
    """What may be read there; None while it is pulled."""
    leaving: Entry | None = None
    """As in `Index`."""
    parts: int = 0
    """So far, of what is being pulled."""


@dataclass(slots=True)
class Pull:
    """What a landing asks of its reader."""

    entry: Entry
    layout: Layout
    ranks: tuple[int, ...]
    """Whose bytes are wanted."""
    part: Callable[[int, int], Awaitable[torch.Tensor]]
    """Gets a part of a rank's bytes from the store."""
    still: Callable[[], Awaitable[bool]]
    """Whether the store's bytes are those of the entry."""
    got_on: Callable[[], Awaitable[None]] = field(repr=False)
    """Called after each part."""


class Landing(Records):
    """One set of weights on this process's host."""

    def __init__(self, ref: WeightStoreRef, weights_name: str) -> None:
        super().__init__(ref, weights_name)
        whose = f"{ref.store_name}/{weights_name}/{self._me.place}"
        self._name = f"forge-weights-{hashlib.sha256(whose.encode()).hexdigest()[:32]}"
        self._key = f"at.{hashlib.sha256(self._me.place.encode()).hexdigest()[:16]}"
        self._pages: dict[int, torch.Tensor] = {}
        """Mapped here, so that they stay whoever ends."""
        self._shared = True
        self.hold = Hold(ref, weights_name, f"{self._key}.hold")

    async def tensors(self, client: Any, pull: Pull) -> Mapping[int, torch.Tensor] | None:
        """The bytes of ranks, which stay as they are while `hold` is held; None where the version went meanwhile.

        Raises:
            StallError: Another process of this host pulls them and does not get on.
        """
        seen, since, pause_s = None, time.monotonic(), RETRY_S
        while True:
            landed = await self._landed(client)
            if landed != seen:
                seen, since = landed, time.monotonic()
            if landed is not None and landed.entry == pull.entry:
                await self.hold.renew(client)
                if await self._landed(client) == landed and self._open(landed, pull):
                    self._shared = True
                    return self._pages
                await self.hold.end(client)
            lock = _lock(self._name)
            if lock is not None:
                with lock:
                    return await self._pull(client, pull)
            if time.monotonic() - since > self._timeout_s:
                who = "another process" if landed is None else f"process {landed.puller.pid}"
                raise StallError(
                    f"weights {self.weights_name!r} did not reach this host: {who}, which pulls them for all here, "
                    f"did not get on within {self._timeout_s:g} s",
                    f"reader of {self.weights_name}",
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_RETRY_S)

    async def holds(self, client: Any, entry: Entry) -> bool:
        """Whether the pages hold what was taken from there."""
        if not self._shared:
            return True
        landed = await self._landed(client)
        return landed is not None and entry in (landed.entry, landed.leaving)

    async def _landed(self, client: Any) -> Landed | None:
        if not await self._has(client, self._key):
            return None
        landed: Landed = await self._get(client, self._key)
        return landed

    def _open(self, landed: Landed, pull: Pull) -> bool:
        """Map the pages of all ranks that are asked for; False where they are gone."""
        for rank in pull.ranks:
            handle = landed.pages.get(rank)
            if handle is None or handle.num_bytes != pull.layout.rank_bytes[rank]:
                return False
            mapped = _segments.segment_of(self._pages[rank]) if rank in self._pages else None
            if mapped is None or mapped.inode != handle.inode:
                self._pages.pop(rank, None)
                try:
                    self._pages[rank] = _segments.open_segment(handle)
                except _segments.SegmentGoneError:
                    return False
        return True

    async def _pull(self, client: Any, pull: Pull) -> Mapping[int, torch.Tensor] | None:
        """Copy all parts into the host's pages. Holds the lock."""
        old = await self._landed(client)
        if old is not None and old.entry == pull.entry and self._open(old, pull):  # by who had the lock before
            await self.hold.renew(client)
            self._shared = True
            return self._pages
        leaving = None if old is None else old.entry or old.leaving
        said = Landed(puller=self._me, pages={} if old is None else old.pages, leaving=leaving)
        await self._put(client, self._key, said)
        num_parts = sum(len(pull.layout.parts(rank)) for rank in pull.ranks)
        await self._let_read(client, f"{self._key}.hold", num_parts)
        await self._put(client, self._key, Landed(puller=self._me, pages=said.pages))  # from here on bytes change
        if not self._open(said, pull):
            self._renew(pull)
        segments = {rank: _segments.segment_of(self._pages[rank]) for rank in pull.ranks}
        offered = {rank: segment.handle for rank, segment in segments.items() if segment is not None}
        self._shared = len(offered) == len(pull.ranks)
        parts = 0
        for rank in pull.ranks:
            for number, (start, end) in enumerate(pull.layout.parts(rank)):
                source_B = await pull.part(rank, number)
                if source_B.numel() != end - start:
                    return None
                # in a thread, because the actor answers others meanwhile
                await asyncio.to_thread(self._pages[rank][start:end].copy_, source_B)
                parts += 1
                await self._put(client, self._key, Landed(puller=self._me, pages={}, parts=parts))
                await pull.got_on()
        if not await pull.still():
            return None
        if self._shared:
            await self.hold.renew(client)
            await self._put(client, self._key, Landed(puller=self._me, pages=offered, entry=pull.entry))
        return self._pages

    def _renew(self, pull: Pull) -> None:
        """Pages of this process's own; private ones where none can be shared, and then others pull for themselves."""
        for rank in pull.ranks:
            self._pages.pop(rank, None)
            num_bytes = pull.layout.rank_bytes[rank]
            segment = _segments.try_create(num_bytes)
            self._pages[rank] = torch.empty(num_bytes, dtype=torch.uint8) if segment is None else segment.tensor()


def _lock(name: str) -> socket.socket | None:
    """A lock that all processes of a host know by its name; None where another one has it. It ends with its process."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0{name}")
    except OSError:
        lock.close()
        return None
    return lock
