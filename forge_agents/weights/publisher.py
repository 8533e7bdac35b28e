"""Publish a learner's weights as a version.

In: a state dict, whole or sharded over the learner's ranks. Out: one version in the store.
Waits for the store and for the other ranks, with deadlines.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from forge_agents.errors import ForgeError
from forge_agents.runtime import mesh
from forge_agents.runtime.places import place
from forge_agents.weights._layout import Index, Layout, Piece, lay_out
from forge_agents.weights.store import WeightStoreRef

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Publisher:
    """Writes versions of one set of weights into a ring of slots. One a rank; all ranks call `publish` together.

    A slot's memory is used again and again, because fresh pages cost more than the copy. A writer that dies in the
    middle leaves no visible version: the slot it was writing is not in the index.

    Args:
        ref: The store.
        weights_name: What these weights are called; subscribers give the same name.
        slots: Versions kept, at least 2: readers of the last one are not disturbed while the next is written. More are
            for readers that take longer than the time between two versions.
        dtype: Floating tensors are cast to it; None means bfloat16. Others travel as they are.
        timeout_s: Deadline of each wait for the store, in which one part of the bytes travels at most, and for other
            ranks beside that; None: the store's `silence_s`.
    """

    def __init__(
        self,
        ref: WeightStoreRef,
        weights_name: str,
        *,
        slots: int = 2,
        dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> None:
        import torch

        if slots < 2:
            raise ValueError(f"slots={slots}; at least 2, or readers would find no version while one is written")
        if not weights_name:
            raise ValueError("weights_name is empty; give the policy's name")
        self.weights_name = weights_name
        self._ref = ref
        self._slots = slots
        self._dtype = dtype or torch.bfloat16
        self._timeout_s = ref.silence_s if timeout_s is None else timeout_s
        self._buffers: dict[int, torch.Tensor] = {}

    async def publish(self, state_dict: Mapping[str, torch.Tensor], version: int) -> dict[str, float]:
        """Write one version and make it the latest.

        Args:
            state_dict: Tensors by their Hugging Face names, any device; DTensors are gathered, with every rank taking
                part, and plain tensors count as equal on all ranks.
            version: Not negative. A version that exists is replaced.

        Returns:
            ``pack_s`` and ``put_s``, seconds; ``bytes``, of all tensors.

        Raises:
            ValueError: Nothing to publish, or a negative version.
            StallError: The store or another rank did not answer.
            ActorDiedError: The store's process ended.
        """
        if version < 0:
            raise ValueError(f"version={version} of weights {self.weights_name!r}; versions count from 0")
        if not state_dict:
            raise ValueError(f"no tensors for weights {self.weights_name!r} version {version}")
        started = time.perf_counter()
        rank, world = _rank_and_world()
        layout = lay_out([self._describe(name, tensor) for name, tensor in state_dict.items()], world)
        client = await self._together(self._ref.client(), world)
        slot, index = await self._claim_slot(client, rank, world)
        buffer_B = self._buffer(slot, layout.rank_bytes[rank])
        self._pack(state_dict, layout, rank, buffer_B)
        packed = time.perf_counter()
        await self._together(self._put_parts(client, slot, layout, rank, buffer_B), world, waits=layout.most_parts)
        entry = self._enter(client, slot, layout, index.with_version(version, slot)) if rank == 0 else _nothing()
        await self._together(entry, world)  # on return the version exists for every rank
        return {"pack_s": packed - started, "put_s": time.perf_counter() - packed, "bytes": float(layout.num_bytes)}

    def _describe(self, name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str, int]:
        if tensor.is_meta:
            raise ValueError(f"tensor {name!r} of weights {self.weights_name!r} has no values (meta device)")
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        return name, tuple(tensor.shape), str(dtype).removeprefix("torch."), dtype.itemsize

    async def _claim_slot(self, client: Any, rank: int, world: int) -> tuple[int, Index]:
        """Take the oldest slot's version out of the index, before the first of its bytes changes."""
        import torch.distributed as dist

        claim: list[Any] = [await self._together(self._room(client) if rank == 0 else _nothing(), world)]
        if world > 1:
            dist.broadcast_object_list(claim, src=0)
        taken: tuple[int, Index] = claim[0]
        return taken

    async def _room(self, client: Any) -> tuple[int, Index]:
        key = f"{self.weights_name}.index"
        known = await self._wait(client.exists(key), "look-up of the index")
        old: Index = await self._wait(client.get(key), "get of the index") if known else Index()
        slot, index = old.make_room(self._slots)
        await self._put(client, "index", index)
        return slot, index

    async def _enter(self, client: Any, slot: int, layout: Layout, index: Index) -> None:
        await self._put(client, f"slot{slot}.head", layout)
        await self._put(client, "index", index)

    def _buffer(self, slot: int, num_bytes: int) -> torch.Tensor:
        """The slot's memory: shared with the volume where it can be, else private and sent in messages."""
        import torch

        from forge_agents.weights import _segments

        buffer_B = self._buffers.get(slot)
        if buffer_B is None or buffer_B.numel() != num_bytes:
            segment = _segments.try_create(num_bytes) if self._ref.place == place() else None
            buffer_B = torch.empty(num_bytes, dtype=torch.uint8) if segment is None else segment.tensor()
            self._buffers[slot] = buffer_B
        return buffer_B

    def _pack(self, state_dict: Mapping[str, torch.Tensor], layout: Layout, rank: int, buffer_B: torch.Tensor) -> None:
        import torch
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            for name, tensor in state_dict.items():
                piece = layout.pieces[name]
                whole: torch.Tensor = tensor
                if isinstance(tensor, DTensor):  # cast the shard first: half the bytes to gather
                    whole = tensor.to(getattr(torch, piece.dtype)).full_tensor()  # type: ignore[attr-defined]
                if piece.rank == rank:
                    view_of(buffer_B, piece).copy_(whole)

    async def _put_parts(self, client: Any, slot: int, layout: Layout, rank: int, buffer_B: torch.Tensor) -> None:
        from forge_agents.weights import _segments

        for number, (start, end) in enumerate(layout.parts(rank)):
            part_B = _segments.part_of(buffer_B, start, end)
            await self._put(client, f"slot{slot}.rank{rank}.part{number}", part_B)

    async def _put(self, client: Any, key: str, value: object) -> None:
        await self._wait(client.put(f"{self.weights_name}.{key}", value), f"put of {self.weights_name}.{key}")

    async def _wait(self, call: Any, what: str) -> Any:
        return await mesh.with_deadline(call, self._timeout_s, who=self._ref.name, what=what)

    async def _together(self, work: Awaitable[T], world: int, *, waits: int = 1) -> T:
        """What this rank's `work` gives; where one rank fails all raise, so that none waits for it in a collective.

        `waits`: how often a rank may wait for the store in it.
        """
        import torch.distributed as dist

        result: Any = None
        errors: list[Exception | None] = [None]
        try:
            result = await work
        except ForgeError as error:
            errors = [error]
        except Exception as error:  # noqa: BLE001  # told to all ranks, which may not know its type, and raised there
            errors = [RuntimeError(f"{type(error).__name__}: {error}")]
        if world > 1:
            if dist.get_backend() == "gloo":  # names the ranks that stall
                dist.monitored_barrier(timeout=timedelta(seconds=self._timeout_s * (1 + waits)))
            own, errors = errors[0], [None] * world
            dist.all_gather_object(errors, own)
        for failure in errors:
            if failure is not None:
                raise failure
        found: T = result
        return found


async def _nothing() -> None:
    """The work of a rank that has none."""


def view_of(buffer_B: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The tensor that lies at `piece` of a rank's buffer, without a copy."""
    import torch

    dtype = getattr(torch, piece.dtype)
    return buffer_B[piece.offset : piece.offset + piece.num_bytes].view(dtype).view(piece.shape)


def _rank_and_world() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
