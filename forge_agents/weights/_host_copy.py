"""A copy of remote weights per host: one process pulls a version from the store, and all others read its pages.

``W.at.P`` records the copy on host P. The process that pulls holds a lock that ends with the process. The next process
that pulls reuses the same pages.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

import torch

from forge_agents.errors import StallError
from forge_agents.files import lock_file
from forge_agents.private_folder import private_folder
from forge_agents.weights import _segments
from forge_agents.weights._index import Entry, Process
from forge_agents.weights._records import MAX_RETRY_S, RETRY_S, Lease, Records, Silence

if TYPE_CHECKING:
    from forge_agents.weights._layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopyRecord:
    """State of a host's copy, as the store holds it."""

    puller: Process
    pages: Mapping[int, _segments.SegmentHandle]
    """By rank."""
    entry: Entry | None = None
    """Version that may be read. None while one is being pulled."""
    retiring: Entry | None = None
    """As in `Index`."""
    parts: int = 0
    """Parts pulled so far."""


class HostCopy(Records):
    """The copy of one set of weights on this process's host."""

    def __init__(self, ref: Any, weights_name: str) -> None:
        super().__init__(ref, weights_name)
        identity = f"{ref.store_name}/{weights_name}/{self._process.place}"
        self._lock_name = f"forge-weights-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
        self._key = f"at.{hashlib.sha256(self._process.place.encode()).hexdigest()[:16]}"
        self._pages: dict[int, torch.Tensor] = {}
        """Mapped in this process, so that the pages outlive the process that created them."""
        self._shared = True
        """Whether `_pages` are memory that other processes of the host map as well."""
        self.lease = Lease(ref, weights_name, f"{self._key}.lease")

    async def tensors(
        self, client: Any, entry: Entry, layout: Layout, ranks: Sequence[int], store_lease: Lease
    ) -> Mapping[int, torch.Tensor] | None:
        """Buffers of `ranks`, flat uint8 by rank, or None if the version was overwritten in the meantime.

        They do not change while `lease` is held. `store_lease` keeps the version in the store while it is pulled.

        Raises:
            StallError: The process of this host that pulls the version makes no progress.
        """
        last, silence, pause_s = None, Silence(self._timeout_s), RETRY_S
        while True:
            record = await self._record(client)
            if record != last:
                last, silence = record, Silence(self._timeout_s)
            if record is not None and record.entry == entry:
                # Lease first, then look again: the next puller replaces the record before it lists the leases.
                await self.lease.renew(client)
                if await self._record(client) == record and self._open(record, layout, ranks):
                    self._shared = True
                    return self._pages
                await self.lease.release(client)
            lock = _lock(self._lock_name)
            if lock is not None:
                with lock:
                    return await self._pull(client, entry, layout, ranks, store_lease)
            if silence.is_too_long():
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
        record: HostCopyRecord | None = await self._get_or_none(client, self._key)
        return record

    def _open(self, record: HostCopyRecord, layout: Layout, ranks: Sequence[int]) -> bool:
        """Map the pages of all ranks, or False if some are gone."""
        for rank in ranks:
            handle = record.pages.get(rank)
            if handle is None or handle.num_bytes != layout.rank_bytes[rank]:
                return False
            mapped = _segments.segment_of(self._pages[rank]) if rank in self._pages else None
            if mapped is None or mapped.inode != handle.inode:
                self._pages.pop(rank, None)
                try:
                    self._pages[rank] = _segments.open_segment(handle)
                except _segments.SegmentGoneError:
                    return False
        return True

    async def _pull(
        self, client: Any, entry: Entry, layout: Layout, ranks: Sequence[int], store_lease: Lease
    ) -> Mapping[int, torch.Tensor] | None:
        """Copy all parts into the host's pages. The caller holds the lock."""
        old = await self._record(client)
        if old is not None and old.entry == entry and self._open(old, layout, ranks):  # pulled in the meantime
            await self.lease.renew(client)
            self._shared = True
            return self._pages
        record = HostCopyRecord(puller=self._process, pages={})
        if old is not None:
            record = replace(record, pages=old.pages, retiring=old.entry or old.retiring)
        await self._put(client, self._key, record)
        await self._await_leases(client, f"{self._key}.lease", sum(len(layout.parts(rank)) for rank in ranks))
        record = replace(record, retiring=None)
        await self._put(client, self._key, record)  # from here on bytes change
        if not self._open(record, layout, ranks):
            for rank in ranks:
                self._pages.pop(rank, None)
                self._pages[rank] = _segments.create(layout.rank_bytes[rank])
        segments = {rank: _segments.segment_of(self._pages[rank]) for rank in ranks}
        pages = {rank: segment.handle for rank, segment in segments.items() if segment is not None}
        self._shared = len(pages) == len(ranks)  # otherwise memory is short, and every process pulls for itself
        record = replace(record, pages={})
        for rank in ranks:
            for number, (start, end) in enumerate(layout.parts(rank)):
                source_B: torch.Tensor = await self._get_part(client, entry, rank, number)
                if source_B.numel() != end - start:
                    return None
                # in a thread, because the actor answers other calls in the meantime
                await asyncio.to_thread(self._pages[rank][start:end].copy_, source_B)
                record = replace(record, parts=record.parts + 1)
                await self._put(client, self._key, record)
                await store_lease.renew(client)
        if not await self._in_store(client, entry):
            return None
        if self._shared:
            await self.lease.renew(client)
            await self._put(client, self._key, HostCopyRecord(puller=self._process, pages=pages, entry=entry))
        return self._pages


def _lock(name: str) -> IO[str] | None:
    """Return a lock that all processes of the host share by name, or None if it is taken.

    The lock ends with its process. The lock file is in the private folder of the host's run. Another user could take
    the name of an abstract socket.
    """
    try:
        return lock_file(private_folder() / f"{name}.lock")
    except BlockingIOError:
        return None
