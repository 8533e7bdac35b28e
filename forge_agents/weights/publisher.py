"""Publishes weights: writes one version of a state dict, whole or sharded over ranks, into the store."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from forge_agents.errors import ForgeError
from forge_agents.models.families import is_exact
from forge_agents.runtime.machine import memory_domain
from forge_agents.weights import _segments
from forge_agents.weights._index import Index, Write
from forge_agents.weights._layout import Layout, lay_out, view_of
from forge_agents.weights._records import LeaseRecord, Records, in_background

T = TypeVar("T")
Tensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]
StateDict: TypeAlias = Mapping[str, torch.Tensor] | Callable[[], Tensors]


class Publisher(Records):
    """Writes versions of one set of weights. Every rank has one. All call `publish` together.

    The store keeps one version. Its memory is reused, because touching fresh pages costs more than the copy. Readers
    wait while a version is written, and a writer waits for readers as long as they make progress. If a writer dies, its
    version never becomes visible. Keys of weights W:

    - ``W.index``: the version that exists, and the one being written (`_index.Index`)
    - ``W.data.head.ID`` and ``W.data.rankR.partP.ID``: layout and bytes, written by publisher ID
    - ``W.lease.X``: lease of reader X
    - ``W.request.X``: reader X met a write in progress and asks the next one to wait for it
    - ``W.progress``: changes while a write makes progress

    Args:
        weights_name: Name that subscribers use as well.
        dtype: Type that floating-point tensors are cast to. None means bfloat16. Other tensors, and those that
            `is_exact` names, keep their type.
        thread: Executor for packing and for collectives: the thread that computes the tensors, because its current
            device is theirs. None uses the caller's.
    """

    def __init__(
        self,
        ref: Any,
        weights_name: str,
        *,
        dtype: torch.dtype | None = None,
        thread: Executor | None = None,
    ) -> None:
        super().__init__(ref, weights_name)
        if not weights_name:
            raise ValueError("weights_name is empty. Give the policy's name")
        self._dtype = dtype or torch.bfloat16
        self._buffer_B = torch.empty(0, dtype=torch.uint8)
        self._id = uuid.uuid4().hex
        self._thread = thread
        self._specs: list[tuple[str, tuple[int, ...], str, int]] | None = None
        self._progress = 0
        self._group: dist.ProcessGroup | None = None
        """Group of the ranks for messages on CPU, whatever device the learner uses."""

    async def publish(self, version: int, state_dict: StateDict) -> dict[str, float]:
        """Write one version and make it the latest.

        Args:
            version: Not negative. An existing version is replaced.
            state_dict: Tensors by Hugging Face name, on any device. DTensors are gathered, in which all ranks take
                part. Plain tensors are taken to be equal on all ranks. Alternatively, a function that yields names and
                tensors, perhaps created one at a time. The function must yield the same names and shapes on every call
                and rank, and is called twice for the first version.

        Returns:
            ``pack_s`` and ``put_s`` in seconds, and ``bytes`` of all tensors.

        Raises:
            ValueError: There are no tensors, the version is negative, or the names or shapes have changed.
            StallError: The store or another rank did not answer.
            ActorDiedError: The store's process ended.
            ForgeError: Another publisher began to write these weights in the meantime.
        """
        if version < 0:
            raise ValueError(f"version={version} of weights {self.weights_name!r}. Versions count from 0")
        start = time.perf_counter()
        distributed = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        if world > 1 and self._group is None:
            self._group = await self._blocking(lambda: dist.new_group(backend="gloo"))
        tensors = state_dict.items if isinstance(state_dict, Mapping) else state_dict
        if self._specs is None or isinstance(state_dict, Mapping):
            self._specs = await self._blocking(lambda: [*itertools.starmap(self._spec_of, tensors())])
        if not self._specs:
            raise ValueError(f"no tensors for weights {self.weights_name!r} version {version}")
        layout = lay_out(self._specs, world)
        client = self._ref.client()
        async with in_background(self._report_progress(client)):
            index = await self._claim(client, version, layout, rank, world)
            # in the thread as well: fresh pages take 0.3 s per GB
            buffer_B = await self._blocking(lambda: self._buffer(layout.rank_bytes[rank]))
            await self._blocking(lambda: self._pack(tensors(), layout, rank, buffer_B))
            packed = time.perf_counter()
            max_parts = max(len(layout.parts(each)) for each in range(world))
            await self._on_all_ranks(self._put_parts(client, layout, rank, buffer_B, index), world, max_parts)
            committing = self._commit(client, layout, index) if rank == 0 else _no_work()
            await self._on_all_ranks(committing, world)  # on return the version exists for every rank
        return {"pack_s": packed - start, "put_s": time.perf_counter() - packed, "bytes": float(layout.num_bytes)}

    async def _report_progress(self, client: Any) -> None:
        """From every rank, tell waiting readers that the write makes progress."""
        reported = self._progress
        while True:
            await asyncio.sleep(self._timeout_s / 4)
            if self._progress > reported:
                reported = self._progress
                await self._put(client, "progress", LeaseRecord(owner=self._process, renewals=reported))

    def _spec_of(self, name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str, int]:
        if tensor.is_meta:
            raise ValueError(f"tensor {name!r} of weights {self.weights_name!r} has no values (meta device)")
        dtype = self._dtype if tensor.is_floating_point() and not is_exact(name) else tensor.dtype
        return name, tuple(tensor.shape), str(dtype).removeprefix("torch."), dtype.itemsize

    async def _claim(self, client: Any, version: int, layout: Layout, rank: int, world: int) -> Index:
        """Remove the last version from the index before the first of its bytes changes.

        Reader and writer each announce themselves before they look at the other's announcement: a reader takes its
        lease and then reads the index. A writer replaces the index and then lists the leases. So at least one of them
        sees the other, and no reader begins on bytes that change.
        """
        num_parts = sum(len(layout.parts(each)) for each in range(world))

        async def claim() -> Index:
            await self._await_leases(client, "request", num_parts)
            old: Index = await self._get_or_none(client, "index") or Index()
            write = Write(version=version, writer=self._process, publisher=self._id)
            await self._put(client, "index", index := old.announce(write))
            await self._await_leases(client, "lease", num_parts, self._count_progress)
            await self._put(client, "index", index := index.begin_write())
            if self._buffer_B.numel() != layout.rank_bytes[rank]:  # free another publisher's bytes before allocating
                for key in await self._keys(client, "data"):
                    await self._delete(client, key)
            return index

        claiming = claim() if rank == 0 else _no_work()
        # twice: for requests, and for leases
        claimed: list[Any] = [await self._on_all_ranks(claiming, world, 1 + 2 * num_parts)]
        if world > 1:
            await self._blocking(lambda: dist.broadcast_object_list(claimed, src=0, group=self._group))
        index: Index = claimed[0]
        return index

    async def _commit(self, client: Any, layout: Layout, index: Index) -> None:
        await self._put(client, f"data.head.{self._id}", layout)
        now: Index = await self._get(client, "index")
        if now != index:
            assert index.write is not None
            other = "another publisher" if now.write is None else f"process {now.write.writer.pid}"
            raise ForgeError(
                f"weights {self.weights_name!r} have two publishers: {other} began to write before process "
                f"{self._process.pid} had finished version {index.write.version}, which does not exist. Give each "
                "publisher its own weights_name"
            )
        await self._put(client, "index", index.commit())

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """This rank's memory: shared with the store's volume if both are on one host, otherwise private."""
        if self._buffer_B.numel() != num_bytes:
            self._buffer_B = torch.empty(0, dtype=torch.uint8)  # freed before the new one is allocated
            shared = self._ref.place == memory_domain()
            self._buffer_B = _segments.create(num_bytes) if shared else torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer_B

    def _pack(self, tensors: Tensors, layout: Layout, rank: int, buffer_B: torch.Tensor) -> None:
        from torch.distributed.tensor import DTensor  # slow to import, and only a learner's ranks need it

        missing = dict(layout.pieces)
        with torch.no_grad():
            for name, tensor in tensors:
                piece = missing.pop(name, None)
                if piece is None or piece.shape != tuple(tensor.shape):
                    before = "did not exist" if piece is None else f"had the shape {list(piece.shape)}"
                    raise ValueError(
                        f"tensor {name!r} of weights {self.weights_name!r} has the shape {list(tensor.shape)}, but "
                        f"{before} in the previous version. Publish the same tensors each time"
                    )
                whole: torch.Tensor = tensor
                if isinstance(tensor, DTensor):  # cast the shard first: half the bytes to gather
                    whole = tensor.to(getattr(torch, piece.dtype)).full_tensor()  # type: ignore[attr-defined]
                if piece.rank == rank:
                    view_of(buffer_B, piece).copy_(whole)
                self._count_progress()
                del tensor, whole  # before the next one is created
        if missing:
            names = ", ".join(list(missing)[:3])
            raise ValueError(
                f"weights {self.weights_name!r} lack {names}, which the previous version had. Publish the same tensors "
                "each time"
            )

    async def _put_parts(self, client: Any, layout: Layout, rank: int, buffer_B: torch.Tensor, index: Index) -> None:
        assert index.write is not None  # by the first rank
        for number, (start, end) in enumerate(layout.parts(rank)):
            part_B = _segments.part_of(buffer_B, start, end)
            await self._put(client, f"data.rank{rank}.part{number}.{index.write.publisher}", part_B)
            self._count_progress()

    def _count_progress(self) -> None:
        self._progress += 1

    async def _on_all_ranks(self, work: Awaitable[T], world: int, num_waits: int = 1) -> T:
        """Do this rank's `work`. If it fails on any rank, raise on all, so that none waits in a later collective.

        The work of one rank may wait for the store `num_waits` times.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = await work
        except ForgeError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001  # sent to all ranks, which may not know its type, and raised there
            error = RuntimeError(f"{type(failure).__name__}: {failure}")
        errors: list[Exception | None] = [error] * world
        if world > 1:

            def gather() -> None:  # the barrier names the ranks that stall
                timeout = timedelta(seconds=self._timeout_s * (1 + num_waits))
                dist.monitored_barrier(self._group, timeout=timeout)
                dist.all_gather_object(errors, error, group=self._group)

            await self._blocking(gather)
        for failed in filter(None, errors):
            raise failed
        done: T = result
        return done

    async def _blocking(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def _no_work() -> None:
    """The work of a rank that only takes part in the collective."""
