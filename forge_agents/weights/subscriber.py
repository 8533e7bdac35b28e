"""Loads published weights: reads one whole version from memory that the processes of a host share."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from forge_agents.errors import StallError, UnknownIdError, did_you_mean
from forge_agents.weights import _segments
from forge_agents.weights._host_copy import HostCopy
from forge_agents.weights._index import Entry, Index, Write
from forge_agents.weights._layout import Layout, view_of
from forge_agents.weights._records import MAX_RETRY_S, RETRY_S, Lease, Records, Silence

_MIN_ATTEMPTS = 3
"""Attempts to read a version before giving up, however long each of them takes."""


@dataclass(slots=True, kw_only=True)
class LoadedWeights:
    """A version, readable inside the ``async with`` block of `Subscriber.load`.

    Another transport, whose tensors are private copies, sets the first three fields.
    """

    version: int
    tensors: Mapping[str, torch.Tensor]
    """Views of shared pages, by name: read-only, and invalid after the block. Empty if the caller has the version."""
    fetch_s: float
    """Seconds until the tensors were readable."""
    _weights_name: str = ""
    _timeout_s: float = 0.0
    _intact: Callable[[], Coroutine[Any, Any, bool]] | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _context: contextvars.Context = field(default_factory=contextvars.copy_context)
    _checked: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, or 0 if the caller has the version."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def check(self) -> None:
        """Check that the tensors read so far are of this version, from a thread that is not the event loop's.

        A reader that is slower than the writer's patience may see pages change. Call this before using what was read.
        Otherwise the end of the block checks it.

        Raises:
            StallError: The pages were overwritten while they were read.
        """
        # in the context of the actor, because Monarch's calls need it and a thread of its own lacks it
        self._context.copy().run(asyncio.run_coroutine_threadsafe, self.verify(), self._loop).result()

    async def verify(self) -> None:
        """As `check`, on the event loop."""
        if self._intact is not None and not await self._intact():
            raise StallError(
                f"weights {self._weights_name!r} version {self.version} were overwritten while they were read, which "
                f"took longer than {self._timeout_s:g} s",
                f"reader of {self._weights_name}",
            )
        self._checked = True


class Subscriber(Records):
    """Reads versions of one set of weights, one per process and set of weights.

    Tensors lie in memory that the processes of this host share: the writer's pages if the writer is here, otherwise
    those of the process that pulled the version for the whole host. A lease keeps the next write away from them. If
    the writer loses patience with a slow reader, the reader notices, so two versions are never mixed.
    """

    def __init__(self, ref: Any, weights_name: str) -> None:
        super().__init__(ref, weights_name)
        self._mapped: dict[int, torch.Tensor] = {}
        self._lock = asyncio.Lock()
        self._request, self._lease = Lease(ref, weights_name, "request"), Lease(ref, weights_name, "lease")
        self._host_copy = HostCopy(ref, weights_name)

    @contextlib.asynccontextmanager
    async def load(
        self, version: int | None = None, *, current: Callable[[], int | None] = lambda: None
    ) -> AsyncIterator[LoadedWeights]:
        """Read one version inside the block, without a copy, one block at a time.

        Args:
            version: Version to read, or None for the latest.
            current: Returns the version that the caller has when its turn comes. The caller's version is not read
                again.

        Raises:
            UnknownIdError: There are no such weights or no such version. The message lists those that exist.
            StallError: No version stayed unchanged long enough to be read, or the store, the writer, or the process
                that pulls the version for this host makes no progress.
            ActorDiedError: The store's process ended.
        """
        async with self._lock:
            start = time.perf_counter()
            client = self._ref.client()
            leases = (self._lease, self._host_copy.lease, self._request)
            try:
                weights = await self._open(client, version, current, start)
                async with contextlib.AsyncExitStack() as renewals:
                    for lease in leases:
                        await renewals.enter_async_context(lease.renewing(client))
                    yield weights
                    if not weights._checked:
                        await weights.verify()
            finally:
                for lease in leases:
                    await lease.release(client)

    async def _open(
        self, client: Any, version: int | None, current: Callable[[], int | None], start: float
    ) -> LoadedWeights:
        """Find a version and take a lease on it before its tensors are read."""
        deadline, attempts = time.monotonic() + self._timeout_s, 0
        while True:
            attempts += 1
            entry = await self._find(client, version)
            if entry.version == current():
                return LoadedWeights(version=entry.version, tensors={}, fetch_s=time.perf_counter() - start)
            # The lease comes before the look at the index: see `Publisher._claim`.
            await self._lease.renew(client)
            if entry == (await self._index(client)).entry:
                opened = await self._map(client, entry)
                if opened is not None:
                    tensors, intact = opened
                    return LoadedWeights(
                        version=entry.version,
                        tensors=tensors,
                        fetch_s=time.perf_counter() - start,
                        _weights_name=self.weights_name,
                        _timeout_s=self._timeout_s,
                        _intact=intact,
                    )
            await self._lease.release(client)
            if time.monotonic() > deadline and attempts >= _MIN_ATTEMPTS:
                raise StallError(
                    f"weights {self.weights_name!r} change faster than they can be read: no stable version in "
                    f"{attempts} attempts and {self._timeout_s:g} s. Publish less often"
                )
            await self._request.renew(client)

    async def _find(self, client: Any, version: int | None) -> Entry:
        """The entry of a version or the latest. Waits for a write in progress as long as it makes progress."""
        stamp, progress, silence, pause_s = -1, None, Silence(self._timeout_s), RETRY_S
        while True:
            index = await self._index(client)
            if index.entry is not None and version in (None, index.entry.version):
                return index.entry
            write = index.write
            if write is None or version not in (None, write.version):
                exists = "none" if index.entry is None else index.entry.version
                raise UnknownIdError(
                    f"weights {self.weights_name!r} have no version {'yet' if version is None else version}. Existing "
                    f"versions: {exists}{f', and {write.version} is being written' if write else ''}. Older ones are "
                    "freed. Publish first, or ask for the latest with None"
                )
            latest_progress = await self._get_or_none(client, "progress")
            if index.stamp != stamp:
                if stamp >= 0:  # a version came and went between two looks: ask the next write to wait
                    await self._request.renew(client)
                stamp, silence = index.stamp, Silence(self._timeout_s)
            if latest_progress != progress:
                progress, silence = latest_progress, Silence(self._timeout_s)
            self._check_writer(write, silence)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    def _check_writer(self, write: Write, silence: Silence) -> None:
        """Raise StallError if the writer of a version has ended or has made no progress for too long."""
        ended = write.writer.has_ended()
        if silence.is_too_long() or ended:
            reason = "ended before it finished" if ended else f"has made no progress for {silence.seconds:.0f} s"
            raise StallError(
                f"weights {self.weights_name!r} have no complete version: process {write.writer.pid}, which was "
                f"writing version {write.version}, {reason}. They exist again once it or its successor has published",
                f"writer of {self.weights_name}",
            )

    async def _index(self, client: Any) -> Index:
        index: Index
        try:
            index = await self._get(client, "index")
        except KeyError:
            keys = await self._wait(client.keys(), "list of keys")
            names = sorted(key.removesuffix(".index") for key in keys if key.endswith(".index"))
            if self.weights_name not in names:
                raise UnknownIdError(
                    f"no weights {self.weights_name!r} have been published. Published: {', '.join(names) or 'none'}."
                    f"{did_you_mean(self.weights_name, names)}"
                ) from None
            index = await self._get(client, "index")  # written in the meantime
        return index

    async def _map(
        self, client: Any, entry: Entry
    ) -> tuple[Mapping[str, torch.Tensor], Callable[[], Coroutine[Any, Any, bool]]] | None:
        """Map the pages of an entry. Returns tensors over them and a check that they are intact, None if they vanished.

        Pages that this process cannot share with the writer are pulled by one process of the host for all.
        """
        try:
            layout: Layout = await self._get(client, f"data.head.{entry.publisher}")
            ranks = range(len(layout.rank_bytes))
            pages = {}
            for rank in ranks if self._ref.place == self._process.place else ():
                segment = _segments.segment_of(await self._get_part(client, entry, rank, 0))
                if segment is not None and segment.num_bytes == layout.rank_bytes[rank]:
                    pages[rank] = self._mapped[rank] = segment.tensor()  # stays mapped for the next version
            remote = tuple(rank for rank in ranks if rank not in pages)
            if remote:
                copied = await self._host_copy.tensors(client, entry, layout, remote, self._lease)
                if copied is None:
                    return None
                pages |= {rank: copied[rank] for rank in remote}
                if len(remote) == len(ranks):  # the writer's pages are not read, so it may continue
                    await self._lease.release(client)
        except (KeyError, _segments.SegmentGoneError):
            return None

        async def intact() -> bool:
            local = len(remote) == len(ranks) or await self._in_store(client, entry)
            return local and (not remote or await self._host_copy.is_intact(client, entry))

        return {name: view_of(pages[piece.rank], piece) for name, piece in layout.pieces.items()}, intact
