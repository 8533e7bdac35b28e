"""One copy of remote weights per host: one process pulls a version from the store, and all others read its pages.

``W.at.P`` records the copy on host P. The process that pulls holds a lock that ends with the process: the address of an
abstract Unix socket. The next process that pulls reuses the same pages.
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
from forge_agents.weights._records import MAX_RETRY_S, RETRY_S, Lease, Records, StoreRef

if TYPE_CHECKING:
    from forge_agents.weights._layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopyRecord:
    """State of a host's copy, as the store holds it."""

    puller: Process
    pages: Mapping[int, _segments.SegmentHandle]
    """By rank."""
    entry: Entry | None = None
    """Version that may be read; None while one is being pulled."""
    retiring: Entry | None = None
    """As in `Index`."""
    parts: int = 0
    """Parts pulled so far."""


@dataclass(slots=True)
class PullRequest:
    """A version to pull."""

    entry: Entry
    layout: Layout
    ranks: tuple[int, ...]
    """Ranks whose buffers are needed."""
    get_part: Callable[[int, int], Awaitable[torch.Tensor]]
    """Reads a part of a rank's buffer from the store."""
    in_store: Callable[[], Awaitable[bool]]
    """Whether the store's bytes are still those of the entry."""
    on_progress: Callable[[], Awaitable[None]] = field(repr=False)
    """Called after each part."""


class HostCopy(Records):
    """The copy of one set of weights on this process's host."""

    def __init__(self, ref: StoreRef, weights_name: str) -> None:
        super().__init__(ref, weights_name)
        identity = f"{ref.store_name}/{weights_name}/{self._process.place}"
        self._lock_name = f"forge-weights-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
        self._key = f"at.{hashlib.sha256(self._process.place.encode()).hexdigest()[:16]}"
        self._pages: dict[int, torch.Tensor] = {}
        """Mapped in this process, so that the pages outlive the process that created them."""
        self._shared = True
        self.lease = Lease(ref, weights_name, f"{self._key}.lease")

    async def tensors(self, client: Any, request: PullRequest) -> Mapping[int, torch.Tensor] | None:
        """Buffers by rank, unchanged while `lease` is held; None if the version was overwritten in the meantime.

        Raises:
            StallError: The process of this host that pulls the version makes no progress.
        """
        last, since, pause_s = None, time.monotonic(), RETRY_S
        while True:
            record = await self._record(client)
            if record != last:
                last, since = record, time.monotonic()
            if record is not None and record.entry == request.entry:
                # Lease first, then look again: the next puller replaces the record before it lists the leases.
                await self.lease.renew(client)
                if await self._record(client) == record and self._open(record, request):
                    self._shared = True
                    return self._pages
                await self.lease.release(client)
            lock = _lock(self._lock_name)
            if lock is not None:
                with lock:
                    return await self._pull(client, request)
            if time.monotonic() - since > self._timeout_s:
                puller = "another process" if record is None else f"process {record.puller.pid}"
                raise StallError(
                    f"weights {self.weights_name!r} did not reach this host: {puller}, which pulls them for all "
                    f"processes here, has made no progress for {self._timeout_s:g} s",
                    f"reader of {self.weights_name}",
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def is_intact(self, client: Any, entry: Entry) -> bool:
        """Whether the pages still hold the entry."""
        if not self._shared:
            return True
        record = await self._record(client)
        return record is not None and entry in (record.entry, record.retiring)

    async def _record(self, client: Any) -> HostCopyRecord | None:
        if not await self._has(client, self._key):
            return None
        record: HostCopyRecord = await self._get(client, self._key)
        return record

    def _open(self, record: HostCopyRecord, request: PullRequest) -> bool:
        """Map the pages of all requested ranks; False if some are gone."""
        for rank in request.ranks:
            handle = record.pages.get(rank)
            if handle is None or handle.num_bytes != request.layout.rank_bytes[rank]:
                return False
            mapped = _segments.segment_of(self._pages[rank]) if rank in self._pages else None
            if mapped is None or mapped.inode != handle.inode:
                self._pages.pop(rank, None)
                try:
                    self._pages[rank] = _segments.open_segment(handle)
                except _segments.SegmentGoneError:
                    return False
        return True

    async def _pull(self, client: Any, request: PullRequest) -> Mapping[int, torch.Tensor] | None:
        """Copy all parts into the host's pages. The caller holds the lock."""
        old = await self._record(client)
        if old is not None and old.entry == request.entry and self._open(old, request):  # pulled in the meantime
            await self.lease.renew(client)
            self._shared = True
            return self._pages
        retiring = None if old is None else old.entry or old.retiring
        record = HostCopyRecord(puller=self._process, pages={} if old is None else old.pages, retiring=retiring)
        await self._put(client, self._key, record)
        num_parts = sum(len(request.layout.parts(rank)) for rank in request.ranks)
        await self._await_leases(client, f"{self._key}.lease", num_parts)
        # from here on bytes change
        await self._put(client, self._key, HostCopyRecord(puller=self._process, pages=record.pages))
        if not self._open(record, request):
            self._create_pages(request)
        segments = {rank: _segments.segment_of(self._pages[rank]) for rank in request.ranks}
        handles = {rank: segment.handle for rank, segment in segments.items() if segment is not None}
        self._shared = len(handles) == len(request.ranks)
        parts = 0
        for rank in request.ranks:
            for number, (start, end) in enumerate(request.layout.parts(rank)):
                source_B = await request.get_part(rank, number)
                if source_B.numel() != end - start:
                    return None
                # in a thread, because the actor answers other calls in the meantime
                await asyncio.to_thread(self._pages[rank][start:end].copy_, source_B)
                parts += 1
                await self._put(client, self._key, HostCopyRecord(puller=self._process, pages={}, parts=parts))
                await request.on_progress()
        if not await request.in_store():
            return None
        if self._shared:
            await self.lease.renew(client)
            record = HostCopyRecord(puller=self._process, pages=handles, entry=request.entry)
            await self._put(client, self._key, record)
        return self._pages

    def _create_pages(self, request: PullRequest) -> None:
        """Allocate shared pages, or private ones if there are none; then every process pulls for itself."""
        for rank in request.ranks:
            self._pages.pop(rank, None)
            num_bytes = request.layout.rank_bytes[rank]
            segment = _segments.try_create(num_bytes)
            self._pages[rank] = torch.empty(num_bytes, dtype=torch.uint8) if segment is None else segment.tensor()


def _lock(name: str) -> socket.socket | None:
    """A lock that all processes of the host share by name; None if it is taken. It ends with its process."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0{name}")
    except OSError:
        lock.close()
        return None
    return lock
