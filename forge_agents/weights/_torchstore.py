"""TorchStore on our version of Monarch, with shared memory as its transport within a host.

TorchStore 0.1.2 mixes sync and async endpoints in its actors, which Monarch >= 0.2 refuses, and moves tensors through
messages (0.1 GB/s). Its actors are replaced by subclasses of this module. The subclasses are pickled by reference, so
every process that receives one imports this module and gets the transport as well.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from contextvars import ContextVar
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
        import torchstore.controller
        import torchstore.storage_volume
        import torchstore.transport.buffers
        import torchstore.transport.pipe
        from torchstore.client import LocalClient

        from forge_agents.weights._segments import SegmentHandle, open_segment, segment_of
except ModuleNotFoundError as cause:
    if (cause.name or "").partition(".")[0] != "torchstore":
        raise
    raise MissingExtraError(
        "weights travel through torchstore. Run `forge-agents doctor --fix`, which installs it"
    ) from cause

_clients: dict[str, Any] = {}
"""Clients of this process, by the store's name."""
_near: ContextVar[bool] = ContextVar("near", default=True)
"""Whether the store of the current call shares memory with this process."""


async def initialize(store_name: str, mesh: Any) -> Any:
    """Start TorchStore in the one process of `mesh`. Returns its controller actor.

    TorchStore puts that actor into the calling process, where it cannot be restarted after a failure. Here it lives
    next to the volume and ends with it.
    """
    strategy = torchstore.SingletonStrategy()
    volumes = await StorageVolume.spawn(num_volumes=1, mesh=mesh, id_func=strategy.get_volume_id)
    index = mesh.spawn("index", Controller)
    await index.init.call(strategy=strategy, num_storage_volumes=1, storage_volumes=volumes)
    return index


async def client(store_name: str, index: Any, volume_place: str) -> Any:
    """TorchStore's client of this process, created once. `volume_place`: where the store's volume is."""
    if store_name not in _clients:
        single_index = _SingleActor(index)
        strategy = await single_index.get_controller_strategy.call_one()
        strategy.storage_volumes = _SingleActor(strategy.storage_volumes)
        _clients[store_name] = Client(controller=single_index, strategy=strategy)
        _clients[store_name].near = volume_place == memory_domain()
    return _clients[store_name]


class _SingleActor:
    """A mesh of one actor, whose endpoints TorchStore calls by ``choose``: see `forge_agents.runtime.mesh.call_all`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def slice(self, **coordinates: int) -> _SingleActor:
        return self

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


def _with_async_endpoints(base: Any) -> Any:
    """A subclass of the actor `base` whose sync endpoints are async."""

    def as_async(method: Any) -> Any:
        @functools.wraps(method)
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs)

        return endpoint(call)

    methods = {name: getattr(member, "_method", None) for name, member in vars(base).items()}
    changed = {
        name: as_async(method)
        for name, method in methods.items()
        if inspect.isfunction(method) and not inspect.iscoroutinefunction(method)
    }
    return type(base.__name__, (base,), {"__module__": __name__, **changed})


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


Controller = _with_async_endpoints(torchstore.controller.Controller)
StorageVolume = _with_async_endpoints(torchstore.storage_volume.StorageVolume)
with warnings.catch_warnings():  # `transport` reports the result
    warnings.simplefilter("ignore", DeprecationWarning)  # of the Monarch name that TorchStore uses
    _rdma: bool = torchstore.transport.buffers.rdma_available()
_buffer_between: Callable[[Any], Any] = torchstore.transport.pipe.Pipe.create_transport_buffer


def _buffer(pipe: Any) -> Any:
    return _buffer_between(pipe) if _rdma and not _near.get() else SharedBuffer()


torchstore.transport.pipe.Pipe.create_transport_buffer = _buffer


class Client(LocalClient):  # type: ignore[misc,unused-ignore]
    """Uses shared memory if the store's volume is near, whatever the network is."""

    near = True

    async def put(self, *args: Any, **options: Any) -> Any:
        return await self._with_near(super().put(*args, **options))

    async def get(self, *args: Any, **options: Any) -> Any:
        return await self._with_near(super().get(*args, **options))

    async def _with_near(self, call: Any) -> Any:
        before = _near.set(self.near)
        try:
            return await call
        finally:
            _near.reset(before)
