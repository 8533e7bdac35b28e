"""A volume of TorchStore on our version of Monarch, with shared memory as its transport within a host.

TorchStore 0.1.2 moves tensors through messages (0.1 GB/s), and its controller mixes sync and async endpoints, which
Monarch >= 0.2 refuses. There is one volume, so the controller, which finds the volume of each key, is left out. The
volume and its buffers are subclasses in this module. Subclasses are pickled by reference, so every process that
receives one imports this module.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

from forge_agents.errors import MissingExtraError
from forge_agents.imports import without_garbage_collection
from forge_agents.runtime._monarch import endpoint
from forge_agents.runtime.machine import memory_domain

try:  # after Monarch's settings
    with without_garbage_collection():
        import torch
        import torchstore  # type: ignore[import-untyped,unused-ignore]
        import torchstore.storage_volume
        import torchstore.transport.buffers
        import torchstore.transport.pipe
        from torchstore.transport.pipe import Request

        from forge_agents.weights._segments import SegmentHandle, open_segment, segment_of
except ModuleNotFoundError as cause:
    if (cause.name or "").partition(".")[0] != "torchstore":
        raise
    raise MissingExtraError(
        "weights travel through torchstore. Run `forge-agents doctor --fix`, which installs it"
    ) from cause

_clients: dict[str, Client] = {}
"""Clients of this process, by the store's name."""


async def start_volume(mesh: Any) -> Any:
    """Start a volume in the one process of `mesh`. Returns its actor."""
    volume = mesh.spawn("volume", StorageVolume, torchstore.SingletonStrategy.get_volume_id)
    await volume.get_id.choose()
    return volume


class Client:
    """Access to a store's volume. Each operation is one call, because Monarch keeps memory of each: see `ReplyPort`.

    TorchStore's own client calls its controller, too, and takes two calls for a ``put`` and three for a ``get``.

    Args:
        volume: Actor of the volume.
        near: Whether the volume shares memory with this process.
    """

    def __init__(self, volume: Any, *, near: bool) -> None:
        self._volume = _SingleActor(volume)
        self._pipe = _Pipe(self._volume, near)

    async def put(self, key: str, value: Any) -> None:
        """Store a tensor or a picklable object."""
        await self._pipe.put_to_storage_volume(key, Request.from_any(value))

    async def get(self, key: str) -> Any:
        """Read the value of a key. If the key does not exist, this raises KeyError in Monarch's ActorError."""
        return await self._pipe.get_from_storage_volume(key, Request.from_any(None))

    async def delete(self, key: str) -> None:
        """Remove a key, or raise as `get` does."""
        await self._volume.delete.call(key)

    async def keys(self, prefix: str = "") -> list[str]:
        """Keys that begin with `prefix`."""
        keys: list[str] = await self._volume.keys.call(prefix)
        return keys


def client(store_name: str, volume: Any, volume_place: str) -> Client:
    """The client of this process, created once. `volume_place`: where the store's volume is."""
    if store_name not in _clients:
        _clients[store_name] = Client(volume, near=volume_place == memory_domain())
    return _clients[store_name]


class _SingleActor:
    """A mesh of one actor, whose endpoints TorchStore calls by ``choose``: see `forge_agents.runtime.mesh.call_all`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        choose = getattr(self._actor, name).choose
        return SimpleNamespace(call=choose, call_one=choose)


def transport(several_hosts: bool) -> str:
    """Description of how weights travel.

    Args:
        several_hosts: Whether a sender or reader may be on another host than the store.
    """
    between = "by RDMA (not run by us)" if _rdma else "in messages"
    return "through shared memory" + f", to other hosts {between}" * several_hosts


class SharedBuffer(torchstore.transport.buffers.TransportBuffer):  # type: ignore[misc,unused-ignore]
    """Carries a segment's handle if both ends share memory, otherwise the tensor."""

    def __init__(self) -> None:
        self.handle: SegmentHandle | None = None
        self.part = (0, 0)
        self.value: torch.Tensor | None = None
        self.reader_place = memory_domain()

    def allocate(self, tensor_like: Any) -> None:
        """Nothing to prepare."""

    async def write_from(self, tensor: torch.Tensor | None) -> None:
        """Runs where the tensor is: in the client on put, in the volume on get."""
        if tensor is None:
            return
        segment = segment_of(tensor)
        if segment is not None and self.reader_place == memory_domain():
            self.handle, start = segment.handle, int(tensor.storage_offset())
            self.part = (start, start + tensor.numel())
        else:  # a copy, without the segment, which must not travel, and without the memory around a part
            self.value = tensor.detach().clone()

    async def read_into(self, tensor: torch.Tensor | None = None) -> torch.Tensor | None:
        """Runs where the tensor goes: in the volume on put, in the client on get."""
        source = open_segment(self.handle, *self.part) if self.handle is not None else self.value
        if tensor is None or source is None:
            return source
        return tensor.copy_(source)

    def update(self, other_buffer: SharedBuffer) -> None:
        """Take the contents that the volume filled in."""
        super().update(other_buffer)
        self.handle, self.part, self.value = other_buffer.handle, other_buffer.part, other_buffer.value


class StorageVolume(torchstore.storage_volume.StorageVolume):  # type: ignore[misc,unused-ignore]
    """Lists its keys as well."""

    @endpoint
    async def keys(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`."""
        return [key for key in self.store.kv if key.startswith(prefix)]


with warnings.catch_warnings():  # `transport` reports the result
    warnings.simplefilter("ignore", DeprecationWarning)  # of the Monarch name that TorchStore uses
    _rdma: bool = torchstore.transport.buffers.rdma_available()


class _Pipe(torchstore.transport.pipe.Pipe):  # type: ignore[misc,unused-ignore]
    """Uses shared memory if the store's volume is near, whatever the network is."""

    def __init__(self, volume: Any, near: bool) -> None:
        super().__init__(volume)
        self._near = near

    def create_transport_buffer(self) -> Any:
        """The buffer of one put or get."""
        return super().create_transport_buffer() if _rdma and not self._near else SharedBuffer()
