"""Versions of weights in the store: written by a learner's ranks, read by engines, all or nothing.

In: a state dict, whole or sharded over the learner's ranks. Out: the same tensors in another process, all of one
version. Waits for the store and, on writing, for the other ranks, with deadlines.

Keys of weights ``W``: ``W.index`` says which versions exist and which is being written, ``W.slotK.head`` how the bytes
of the version in slot K are laid out, ``W.slotK.rankR.partP`` is part P of what rank R packed, ``W.hold.slotK.X`` is
there while reader X reads it, ``W.wish.X`` while it would like to and has met a write, and ``W.beat`` changes while a
write gets on. The index changes before the first byte and after the last, so a version exists as a whole or not, and
what is read between two looks at an entry of the index is of one version. ``docs/decisions/weights.md`` says
what happens to slow readers and to writers that die while they write. `_landing` copies missing pages to a host.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forge_agents.errors import ForgeError, StallError, UnknownIdError, did_you_mean
from forge_agents.runtime.machine import memory_domain
from forge_agents.weights import _segments
from forge_agents.weights._index import Entry, Index, Write
from forge_agents.weights._landing import Landing, Pull
from forge_agents.weights._layout import Layout, Piece
from forge_agents.weights._records import MOST_RETRY_S, RETRY_S, Hold, Note, Records, alongside
from forge_agents.weights._staging import for_device
from forge_agents.weights.store import WeightStoreRef

T = TypeVar("T")
Tensors = Iterable[tuple[str, torch.Tensor]]
"""With their names."""
_ATTEMPTS = 3
"""At least, however long each takes."""
ALIGN_BYTES = 64
"""Tensors begin on cache lines."""
PART_BYTES = 1 << 27
"""What travels at once. The store answers between two parts, however large the model is, so that a busy one is told
from a dead one: at the slowest transport, messages at 0.1 GB/s, a part takes 1.3 s."""


def lay_out(tensors: Sequence[tuple[str, tuple[int, ...], str, int]], num_ranks: int) -> Layout:
    """Spread tensors over the ranks' buffers, each to the one with the fewest bytes so far.

    Args:
        tensors: (name, shape, dtype, bytes an element) in an order that all ranks share.
    """
    ends = [0] * num_ranks
    pieces = {}
    for name, shape, dtype, item_bytes in tensors:
        rank = ends.index(min(ends))
        num_bytes = math.prod(shape) * item_bytes
        pieces[name] = Piece(rank=rank, offset=ends[rank], shape=shape, dtype=dtype, num_bytes=num_bytes)
        ends[rank] += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return Layout(pieces=pieces, rank_bytes=tuple(max(end, 1) for end in ends), part_bytes=PART_BYTES)


def view_of(buffer_B: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The tensor that lies at `piece` of a rank's buffer, without a copy."""
    dtype = getattr(torch, piece.dtype)
    return buffer_B[piece.offset : piece.offset + piece.num_bytes].view(dtype).view(piece.shape)


# ---- writing


class Publisher(Records):
    """Writes versions of one set of weights into a ring of slots. One a rank; all ranks call `publish` together.

    A slot's memory is used again and again, because fresh pages cost more than the copy. A writer that dies in the
    middle leaves no visible version: the slot it was writing is not in the index. Who reads the slot is waited for, as
    long as it gets on.

    Args:
        weights_name: What these weights are called; subscribers give the same name.
        slots: Versions kept, each as large as the weights. One: who wants weights while the next version is written
            waits for it. More are for readers of older versions.
        dtype: Floating tensors are cast to it; None means bfloat16. Others travel as they are.
        thread: Where tensors are packed and other ranks are waited for: the thread that computes them, whose current
            device is theirs. None: the caller's.
    """

    def __init__(
        self,
        ref: WeightStoreRef,
        weights_name: str,
        *,
        slots: int = 1,
        dtype: torch.dtype | None = None,
        thread: Executor | None = None,
    ) -> None:
        super().__init__(ref, weights_name)
        if slots < 1:
            raise ValueError(f"slots={slots}; at least 1, which holds the last version")
        if not weights_name:
            raise ValueError("weights_name is empty; give the policy's name")
        self._slots = slots
        self._dtype = dtype or torch.bfloat16
        self._buffers: dict[int, torch.Tensor] = {}
        self._pages = uuid.uuid4().hex
        """Names its bytes, those of all ranks by the first one's: another publisher of these weights has its own."""
        self._thread = thread
        self._staged, self._staging = "cpu", for_device("cpu")
        """What brings tensors here from a kind of device."""
        self._described: list[tuple[str, tuple[int, ...], str, int]] | None = None
        """Of tensors that come one at a time."""
        self._done = 0
        """Rises with all that it does in a write."""
        self._group: dist.ProcessGroup | None = None
        """Of several ranks: what they tell each other here needs no device, whatever the learner computes on."""

    async def publish(
        self, state_dict: Mapping[str, torch.Tensor] | Callable[[], Tensors], version: int
    ) -> dict[str, float]:
        """Write one version and make it the latest.

        Args:
            state_dict: Tensors by their Hugging Face names, any device; DTensors are gathered, with every rank taking
                part, and plain tensors count as equal on all ranks. Or what gives names and tensors, which may be made
                one at a time, since none is kept: the same names and shapes whenever it is called, on all ranks. The
                first time it is called twice.
            version: Not negative. A version that exists is replaced.

        Returns:
            ``pack_s`` and ``put_s``, seconds; ``bytes``, of all tensors.

        Raises:
            ValueError: Nothing to publish, a negative version, or other tensors than are given whenever called.
            StallError: The store or another rank did not answer.
            ActorDiedError: The store's process ended.
            ForgeError: Another publisher began to write these weights meanwhile.
        """
        if version < 0:
            raise ValueError(f"version={version} of weights {self.weights_name!r}; versions count from 0")
        started = time.perf_counter()
        several = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        if world > 1 and self._group is None:
            self._group = await self._blocking(lambda: dist.new_group(backend="gloo"))
        tensors = state_dict.items if isinstance(state_dict, Mapping) else state_dict
        if self._described is None or isinstance(state_dict, Mapping):
            self._described = await self._blocking(lambda: [*itertools.starmap(self._describe, tensors())])
        if not self._described:
            raise ValueError(f"no tensors for weights {self.weights_name!r} version {version}")
        layout = lay_out(self._described, world)
        client = await self._together(self._ref.client(), world)
        async with alongside(self._beat(client)):
            slot, index = await self._claim_slot(client, version, layout, rank, world)
            # fresh pages take 0.3 s of each GB, in which the process answers
            buffer_B = await self._blocking(lambda: self._buffer(slot, layout.rank_bytes[rank]))
            await self._blocking(lambda: self._pack(tensors(), layout, rank, buffer_B))
            packed = time.perf_counter()
            most_parts = max(len(layout.parts(each)) for each in range(world))
            await self._together(self._put_parts(client, slot, layout, rank, buffer_B, index), world, waits=most_parts)
            entry = self._enter(client, slot, layout, index) if rank == 0 else _nothing()
            await self._together(entry, world)  # on return the version exists for every rank
        return {"pack_s": packed - started, "put_s": time.perf_counter() - packed, "bytes": float(layout.num_bytes)}

    async def _beat(self, client: Any) -> None:
        """Tell who waits for the version, on each rank, that the write gets on, as long as it does."""
        told = self._done
        while True:
            await asyncio.sleep(self._timeout_s / 4)
            if self._done > told:
                told = self._done
                await self._put(client, "beat", Note(who=self._me, beats=told))

    def _describe(self, name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str, int]:
        if tensor.is_meta:
            raise ValueError(f"tensor {name!r} of weights {self.weights_name!r} has no values (meta device)")
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        return name, tuple(tensor.shape), str(dtype).removeprefix("torch."), dtype.itemsize

    async def _claim_slot(self, client: Any, version: int, layout: Layout, rank: int, world: int) -> tuple[int, Index]:
        """Take the oldest slot's version out of the index, before the first of its bytes changes."""
        all_parts = sum(len(layout.parts(each)) for each in range(world))

        async def claim() -> tuple[int, Index]:
            await self._let_read(client, "wish", all_parts)
            old: Index = await self._get(client, "index") if await self._has(client, "index") else Index()
            slot, index = old.announced(self._slots, Write(version=version, writer=self._me, pages=self._pages))
            await self._put(client, "index", index)  # nobody begins to read the slot from here on
            await self._let_read(client, f"hold.slot{slot}", all_parts, self._got_on)
            await self._put(client, "index", index := index.begun())
            if not self._fits(slot, layout.rank_bytes[rank]):  # free another's pages before there are new ones
                for key in await self._keys(client, f"slot{slot}"):
                    await self._delete(client, key)
            return slot, index

        claiming = claim() if rank == 0 else _nothing()
        # for those who wish to read, and for those who do
        claimed: list[Any] = [await self._together(claiming, world, waits=1 + 2 * all_parts)]
        if world > 1:
            await self._blocking(lambda: dist.broadcast_object_list(claimed, src=0, group=self._group))
        taken: tuple[int, Index] = claimed[0]
        return taken

    async def _enter(self, client: Any, slot: int, layout: Layout, index: Index) -> None:
        await self._put(client, f"slot{slot}.head.{self._pages}", layout)
        now: Index = await self._get(client, "index")
        if now != index:
            assert index.write is not None
            other = "another" if now.write is None else f"process {now.write.writer.pid}"
            raise ForgeError(
                f"weights {self.weights_name!r} are published by two: {other} began to write before process "
                f"{self._me.pid} had ended its version {index.write.version}, which does not exist; give each its own "
                "weights_name"
            )
        await self._put(client, "index", index.written(slot))

    def _buffer(self, slot: int, num_bytes: int) -> torch.Tensor:
        """The slot's memory: shared with the volume where it can be, else private and sent in messages."""
        if not self._fits(slot, num_bytes):
            self._buffers.pop(slot, None)
            segment = _segments.try_create(num_bytes) if self._ref.place == memory_domain() else None
            buffer_B = torch.empty(num_bytes, dtype=torch.uint8) if segment is None else segment.tensor()
            self._buffers[slot] = buffer_B
        return self._buffers[slot]

    def _fits(self, slot: int, num_bytes: int) -> bool:
        return slot in self._buffers and self._buffers[slot].numel() == num_bytes

    def _pack(self, tensors: Tensors, layout: Layout, rank: int, buffer_B: torch.Tensor) -> None:
        from torch.distributed.tensor import DTensor  # slow to load, and only ranks of a learner need it

        left = dict(layout.pieces)
        with torch.no_grad():
            for name, tensor in tensors:
                piece = left.pop(name, None)
                if piece is None or piece.shape != tuple(tensor.shape):
                    before = "it was not there" if piece is None else f"it had {list(piece.shape)}"
                    raise ValueError(
                        f"tensor {name!r} of weights {self.weights_name!r} has the shape {list(tensor.shape)}, and "
                        f"{before} in the version before; give the same tensors each time"
                    )
                whole: torch.Tensor = tensor
                if isinstance(tensor, DTensor):  # cast the shard first: half the bytes to gather
                    whole = tensor.to(getattr(torch, piece.dtype)).full_tensor()  # type: ignore[attr-defined]
                if piece.rank == rank:
                    self._bring(view_of(buffer_B, piece), whole)
                self._got_on()
                del tensor, whole  # before the next is made
            if self._staging is not None:
                self._staging.finish()
        if left:
            lack = ", ".join(list(left)[:3])
            raise ValueError(f"weights {self.weights_name!r} lack {lack}, which they had before; give them each time")

    def _bring(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._staged != source.device.type:
            self._staged, self._staging = source.device.type, for_device(source.device.type)
        if self._staging is None:
            target.copy_(source)
        else:
            self._staging.copy(target, source.to(target.dtype))

    async def _put_parts(  # noqa: PLR0917
        self, client: Any, slot: int, layout: Layout, rank: int, buffer_B: torch.Tensor, index: Index
    ) -> None:
        assert index.write is not None
        for number, (start, end) in enumerate(layout.parts(rank)):
            part_B = _segments.part_of(buffer_B, start, end)
            await self._put(client, f"slot{slot}.rank{rank}.part{number}.{index.write.pages}", part_B)
            self._got_on()

    def _got_on(self) -> None:
        self._done += 1

    async def _together(self, work: Awaitable[T], world: int, *, waits: int = 1) -> T:
        """What this rank's `work` gives; where one rank fails all raise, so that none waits for it in a collective.

        `waits`: how often a rank may wait for the store in it.
        """
        result: Any = None
        errors: list[Exception | None] = [None]
        try:
            result = await work
        except ForgeError as error:
            errors = [error]
        except Exception as error:  # noqa: BLE001  # told to all ranks, which may not know its type, and raised there
            errors = [RuntimeError(f"{type(error).__name__}: {error}")]
        if world > 1:
            own, errors = errors[0], [None] * world

            def tell() -> None:  # the barrier names the ranks that stall
                dist.monitored_barrier(self._group, timeout=timedelta(seconds=self._timeout_s * (1 + waits)))
                dist.all_gather_object(errors, own, group=self._group)

            await self._blocking(tell)
        for failure in errors:
            if failure is not None:
                raise failure
        found: T = result
        return found

    async def _blocking(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def _nothing() -> None:
    """The work of a rank that has none."""


# ---- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult:
    """One fetch that ended."""

    version: int
    """What `apply` was given, or what the caller has already."""
    seconds: float
    """The whole fetch, `apply_s` included."""
    apply_s: float
    """Seconds inside `apply`."""
    bytes: int
    """Bytes handed to `apply`; 0 where the caller has the version."""


@dataclass(slots=True, kw_only=True)
class _Loan:
    """Tensors of one version that others may use."""

    entry: Entry
    tensors: Mapping[str, torch.Tensor] | None
    """None where the caller has the version."""
    holds: Callable[[], Coroutine[Any, Any, bool]]
    """Whether they are as they were published; once True it is said of the time before."""


class Subscriber(Records):
    """Reads versions of one set of weights; one a process and weights name.

    What is read lies in memory that processes of this host share: the writer's pages where it is here, else those of
    the one that pulls for all. A note keeps whoever writes next from them meanwhile; should it lose patience, that is
    noticed, and `apply` never sees two versions mixed.
    """

    def __init__(self, ref: WeightStoreRef, weights_name: str) -> None:
        super().__init__(ref, weights_name)
        self._mapped: dict[int, torch.Tensor] = {}
        self._private: dict[str, torch.Tensor] = {}
        self._one_at_a_time = asyncio.Lock()
        self._wish, self._hold = Hold(ref, weights_name, "wish"), Hold(ref, weights_name, "hold")
        self._landing = Landing(ref, weights_name)

    async def fetch(
        self,
        apply: Callable[[Mapping[str, torch.Tensor], int], Awaitable[None] | None],
        *,
        version: int | None = None,
        have: Callable[[], int | None] = lambda: None,
    ) -> FetchResult:
        """Copy one version and call ``apply(tensors by name, version)`` once, or not at all.

        Args:
            apply: Plain or async. The tensors are its own until it returns; the next fetch writes over them.
            version: Which one; None for the latest.
            have: Tells the version the caller has when its turn comes; the same one is not fetched again.

        Raises:
            UnknownIdError: No such weights or version; the message says which exist.
            StallError: No stable version could be read in time, the store does not answer, or whoever writes the
                version, or brings it to this host, does not get on.
            ActorDiedError: The store's process ended.
        """
        async with self._one_at_a_time:
            started = time.perf_counter()
            client = await self._ref.client()
            attempt = 0
            while True:
                attempt += 1
                async with self._borrowed(client, version, have) as loan:
                    if loan.tensors is None:
                        return _result(loan, started, time.perf_counter())
                    # in a thread, because the actor answers others meanwhile
                    copied = await asyncio.to_thread(self._copy, loan.tensors)
                    if await loan.holds():
                        break
                if time.perf_counter() - started > self._timeout_s and attempt >= _ATTEMPTS:
                    raise self._too_fast(attempt)
            fetched = time.perf_counter()
            outcome = apply(copied, loan.entry.version)
            if inspect.isawaitable(outcome):
                await outcome
            return _result(loan, started, fetched)

    async def lend(
        self,
        apply: Callable[[Mapping[str, torch.Tensor], int, Callable[[], None]], Awaitable[None]],
        *,
        version: int | None = None,
        have: Callable[[], int | None] = lambda: None,
    ) -> FetchResult:
        """As `fetch`, without a copy: call ``apply(tensors by name, version, check)`` once, or not at all.

        Args:
            apply: Its tensors are pages that others read, and not its own: it may only read them, and none once it has
                returned. Before it counts on what it read it calls ``check()`` in a thread of its own, which raises
                StallError where the pages were written over meanwhile, because it took too long.
            version: As in `fetch`.
            have: As in `fetch`.

        Raises:
            UnknownIdError, StallError, ActorDiedError: As in `fetch`.
        """
        async with self._one_at_a_time:
            started, loop, here = time.perf_counter(), asyncio.get_running_loop(), contextvars.copy_context()
            client = await self._ref.client()
            async with self._borrowed(client, version, have) as loan:
                fetched = time.perf_counter()
                if loan.tensors is not None:

                    def check() -> None:
                        told: Future[bool] = Future()
                        # as this actor, which a thread of its own is not
                        loop.call_soon_threadsafe(_tell, loan.holds, told, context=here.copy())
                        if not told.result():
                            raise StallError(
                                f"weights {self.weights_name!r} version {loan.entry.version} were written over while "
                                f"they were read, for longer than {self._timeout_s:g} s; publish with more slots",
                                f"reader of {self.weights_name}",
                            )

                    await apply(loan.tensors, loan.entry.version, check)
                return _result(loan, started, fetched)

    async def versions(self) -> tuple[int, ...]:
        """Versions that exist now, in the order of publication."""
        client = await self._ref.client()
        return (await self._index(client)).versions

    @contextlib.asynccontextmanager
    async def _borrowed(
        self, client: Any, version: int | None, have: Callable[[], int | None]
    ) -> AsyncIterator[_Loan]:
        """A version that stays as it is until the end, as long as that does not take too long."""
        try:
            loan = await self._borrow(client, version, have)
            async with self._wish.beating(client), self._hold.beating(client), self._landing.hold.beating(client):
                yield loan
        finally:
            for note in (self._hold, self._landing.hold, self._wish):
                await note.end(client)

    async def _borrow(self, client: Any, version: int | None, have: Callable[[], int | None]) -> _Loan:
        deadline, attempt = time.monotonic() + self._timeout_s, 0
        while True:
            attempt += 1
            entry = await self._written(client, version)
            if entry.version == have():
                return _Loan(entry=entry, tensors=None, holds=self._always)
            await self._hold.begin(client, f"slot{entry.slot}")
            if entry in (await self._index(client)).entries and (loan := await self._read(client, entry)) is not None:
                return loan
            await self._hold.end(client)
            if time.monotonic() > deadline and attempt >= _ATTEMPTS:
                raise self._too_fast(attempt)
            await self._wish.renew(client)

    def _too_fast(self, attempts: int) -> StallError:
        return StallError(
            f"weights {self.weights_name!r} change faster than they can be read: no stable version in "
            f"{attempts} attempts and {self._timeout_s:g} s; publish less often or with more slots"
        )

    async def _written(self, client: Any, version: int | None) -> Entry:
        """Where a version, or the latest, lies; waits for one that is being written, as long as that gets on."""
        stamp, beat, since, pause_s = -1, None, 0.0, RETRY_S
        while True:
            index = await self._index(client)
            entry = index.latest() if version is None else index.of(version)
            if entry is not None:
                return entry
            write = index.write
            if write is None or version not in (None, write.version):
                exists = ", ".join(map(str, index.versions)) or "none"
                raise UnknownIdError(
                    f"weights {self.weights_name!r} have no version {'yet' if version is None else version}; existing "
                    f"versions: {exists}{f', and {write.version} is being written' if write else ''}. Older ones are "
                    "freed; publish first, or ask for the latest with None"
                )
            told = await self._get(client, "beat") if await self._has(client, "beat") else None
            if index.stamp != stamp:
                if stamp >= 0:  # that version came and went between two looks: the next write waits for this reader
                    await self._wish.renew(client)
                stamp, since = index.stamp, time.monotonic()
            if told != beat:
                beat, since = told, time.monotonic()
            _check_writer(write, self.weights_name, time.monotonic() - since, self._timeout_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_RETRY_S)

    async def _index(self, client: Any) -> Index:
        try:
            index: Index = await self._get(client, "index")
        except KeyError:
            if not await self._has(client, "index"):
                keys = await self._wait(client.keys(), "list of keys")
                names = sorted(key.removesuffix(".index") for key in keys if key.endswith(".index"))
                raise UnknownIdError(
                    f"no weights {self.weights_name!r} have been published; published: {', '.join(names) or 'none'}."
                    f"{did_you_mean(self.weights_name, names)}"
                ) from None
            index = await self._get(client, "index")  # it has come meanwhile
        return index

    async def _read(self, client: Any, entry: Entry) -> _Loan | None:
        """Tensors over the pages that hold an entry; None where they vanished meanwhile."""

        async def part(rank: int, number: int) -> torch.Tensor:
            found: torch.Tensor = await self._get(client, f"slot{entry.slot}.rank{rank}.part{number}.{entry.pages}")
            return found

        async def still() -> bool:
            return (await self._index(client)).holds(entry)

        try:
            layout: Layout = await self._get(client, f"slot{entry.slot}.head.{entry.pages}")
            pages = {}
            for rank, num_bytes in enumerate(layout.rank_bytes):
                if self._ref.place == self._me.place:
                    segment = _segments.segment_of(await part(rank, 0))
                    if segment is not None and segment.num_bytes == num_bytes:
                        pages[rank] = self._mapped[rank] = segment.tensor()  # stays mapped for the next time
            far = tuple(rank for rank in range(len(layout.rank_bytes)) if rank not in pages)
            if far:
                got_on = partial(self._hold.renew, client)
                pull = Pull(entry=entry, layout=layout, ranks=far, part=part, still=still, got_on=got_on)
                landed = await self._landing.tensors(client, pull)
                if landed is None:
                    return None
                pages |= {rank: landed[rank] for rank in far}
                if len(far) == len(layout.rank_bytes):  # the writer may go on
                    await self._hold.end(client)
        except (KeyError, _segments.SegmentGoneError):
            return None

        async def holds() -> bool:
            near = len(far) == len(layout.rank_bytes) or await still()
            return near and (not far or await self._landing.holds(client, entry))

        tensors = {name: view_of(pages[piece.rank], piece) for name, piece in layout.pieces.items()}
        return _Loan(entry=entry, tensors=tensors, holds=holds)

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        for name, tensor in tensors.items():
            private = self._private.get(name)
            if private is None or private.shape != tensor.shape or private.dtype != tensor.dtype:
                private = self._private[name] = torch.empty_like(tensor)
            private.copy_(tensor)
        return {name: self._private[name] for name in tensors}

    @staticmethod
    async def _always() -> bool:
        return True


def _result(loan: _Loan, started: float, fetched: float) -> FetchResult:
    ended = time.perf_counter()
    if loan.tensors is None:
        return FetchResult(version=loan.entry.version, seconds=ended - started, apply_s=0.0, bytes=0)
    num_bytes = sum(tensor.nbytes for tensor in loan.tensors.values())
    return FetchResult(version=loan.entry.version, seconds=ended - started, apply_s=ended - fetched, bytes=num_bytes)


def _tell(ask: Callable[[], Coroutine[Any, Any, T]], told: Future[T]) -> None:
    """Begin to ask, on the loop's thread; another waits for the answer."""

    def answer(asking: asyncio.Task[T]) -> None:
        if asking.cancelled():
            told.cancel()
        elif (error := asking.exception()) is not None:
            told.set_exception(error)
        else:
            told.set_result(asking.result())

    asyncio.ensure_future(ask()).add_done_callback(answer)


def _check_writer(write: Write, weights_name: str, seconds: float, timeout_s: float) -> None:
    """Raise StallError where the writer of a version has ended, or for `seconds`, too many, has not got on."""
    ended = write.writer.has_ended()
    if ended or seconds > timeout_s:
        told = "ended in the middle" if ended else f"has not got on for {seconds:.0f} s"
        raise StallError(
            f"weights {weights_name!r} have no whole version: process {write.writer.pid}, which was writing version "
            f"{write.version}, {told}; they exist again once it or its successor has published",
            f"writer of {weights_name}",
        )
