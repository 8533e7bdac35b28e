"""The weight store: one TorchStore volume in its own process, and the reference through which actors reach it."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge_agents.runtime import mesh, startup

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import torch

    from forge_agents.runtime._monarch import ProcMesh
    from forge_agents.runtime.heartbeat import Heartbeat
    from forge_agents.weights.publisher import Publisher
    from forge_agents.weights.subscriber import Subscriber

_counter = itertools.count()
_PROBE_KEY = "heartbeat"
"""Key that exists in every store, to test whether it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStoreRef:
    """Reference to a store, picklable. Learners and engines use only `publisher` and `subscriber`.

    Another transport has two classes. In place of this one: a picklable class with `name`, `publisher` and
    `subscriber`, whose results have `Publisher.publish` and `Subscriber.load`, and of which two objects are equal only
    if they lead to the same weights. In place of `WeightStore`: a class with `start` (the same arguments), `ref`,
    `heartbeat` (its property `error` and its method `lost`) and `stop`, which ``_start_store`` in
    `forge_trainers.run.processes` starts. Errors of a broken transport are `ActorDiedError` or `StallError` with `name`
    as ``who``. The run then starts another, and learners publish again.
    """

    name: str
    """Name in error messages."""
    store_name: str
    """TorchStore's name, unique in the run."""
    place: str
    """Host whose processes share memory with the volume."""
    heartbeat_timeout_s: float = 60.0
    """Seconds after which a store that does not answer counts as dead."""
    volume: Any = field(default=None, compare=False, repr=False)
    """Actor of TorchStore's volume."""

    def publisher(
        self, weights_name: str, *, dtype: torch.dtype | None = None, thread: Executor | None = None
    ) -> Publisher:
        """A publisher of the weights called `weights_name`. See `Publisher`."""
        from forge_agents.weights.publisher import Publisher

        return Publisher(self, weights_name, dtype=dtype, thread=thread)

    def subscriber(self, weights_name: str) -> Subscriber:
        """A subscriber to the weights called `weights_name`. See `Subscriber`."""
        from forge_agents.weights.subscriber import Subscriber

        return Subscriber(self, weights_name)

    def client(self) -> Any:
        """The store's client of this process, created once."""
        from forge_agents.weights import _torchstore

        return _torchstore.client(self.store_name, self.volume, self.place)


class WeightStore:
    """The controller's side of the store. Create it with `start`."""

    def __init__(self, ref: WeightStoreRef, volume_mesh: ProcMesh, heartbeat: Heartbeat) -> None:
        self.ref = ref
        self.heartbeat = heartbeat
        self._volume_mesh = volume_mesh
        self._stopped = False

    @classmethod
    async def start(
        cls, *, name: str = "weights", heartbeat_timeout_s: float = 60.0, timeout_s: float = 60.0
    ) -> WeightStore:
        """Start the volume's process on the store's host.

        Args:
            name: Name in error messages.
            heartbeat_timeout_s: Seconds after which a store that does not answer counts as dead.
            timeout_s: Timeout of the start, in seconds.
        """
        from forge_agents.runtime.heartbeat import Heartbeat
        from forge_agents.weights import _torchstore

        volume_mesh = mesh.spawn_procs(name, role="store", threads=1)
        heartbeat = Heartbeat(volume_mesh, 1, name=name, heartbeat_timeout_s=heartbeat_timeout_s)
        store_name = f"{name}-{os.getpid()}-{next(_counter)}"

        async def within(work: Any, what: str) -> Any:
            return await heartbeat.guard(mesh.with_deadline(work, timeout_s, who=name, what=what))

        try:
            details = f"TorchStore, weights go {_torchstore.transport(mesh.has_remote_hosts())}"
            with startup.track("store", name, details, on=mesh.hardware_of(volume_mesh)):
                volume = await within(_torchstore.start_volume(volume_mesh), "start of the store")
            heartbeat.start_timeout()
            ref = WeightStoreRef(
                name=name,
                store_name=store_name,
                place=mesh.memory_domain_of(volume_mesh),
                heartbeat_timeout_s=heartbeat_timeout_s,
                volume=volume,
            )
            client = ref.client()
            await within(client.put(_PROBE_KEY, 0), "first answer of the store")
        except BaseException:
            heartbeat.end()
            await mesh.stop(volume_mesh, at_once=True)
            raise
        heartbeat.add_probe(lambda: client.get(_PROBE_KEY), "answer of the store")
        return cls(ref, volume_mesh, heartbeat)

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Free all weights and end the volume's process. Calling it twice is safe."""
        if self._stopped:
            return
        self._stopped = True
        self.heartbeat.end()
        await mesh.stop(self._volume_mesh, timeout_s=timeout_s)
