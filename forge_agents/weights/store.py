"""The store of weights: one TorchStore volume in a process of its own, and how others reach it.

In: a name. Out: a picklable `WeightStoreRef`. Waits for the volume's process, with a deadline.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge_agents.runtime import mesh, startup

if TYPE_CHECKING:
    from forge_agents.runtime._monarch import ProcMesh
    from forge_agents.runtime.heartbeat import Heartbeat

_counter = itertools.count()
_SIGN = "sign-of-life"
"""What lies in every store beside weights, to be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStoreRef:
    """How an actor reaches the store; send it in a message or to an actor's constructor."""

    name: str
    """As errors call it."""
    store_name: str
    """TorchStore's name for it, unique in the run."""
    place: str
    """Who can share memory with its volume."""
    heartbeat_timeout_s: float = 60.0
    """Seconds after which a store that does not answer counts as dead."""
    index: Any = field(default=None, compare=False, repr=False)
    """TorchStore's actor that knows what is where; None where TorchStore finds it by `store_name`."""

    async def client(self) -> Any:
        """TorchStore's client of this process, cached there."""
        from forge_agents.weights import _torchstore

        connecting = _torchstore.client(self.store_name, self.index, self.place)
        return await mesh.with_deadline(
            connecting, self.heartbeat_timeout_s, who=self.name, what="connection to the store"
        )


class WeightStore:
    """The controller's side of the store. Make one with `start`."""

    def __init__(self, ref: WeightStoreRef, volume_mesh: ProcMesh, heartbeat: Heartbeat) -> None:
        self.ref = ref
        self.heartbeat = heartbeat
        self._volume_mesh = volume_mesh
        self._stopped = False

    @classmethod
    async def start(
        cls, *, name: str = "weights", heartbeat_timeout_s: float = 60.0, timeout_s: float = 60.0
    ) -> WeightStore:
        """Start the volume's process, on the store's host.

        Args:
            name: Said in errors.
            heartbeat_timeout_s: Seconds after which a store that does not answer counts as dead.
            timeout_s: Seconds until a start counts as stalled.
        """
        from forge_agents.runtime.heartbeat import Heartbeat
        from forge_agents.weights import _torchstore

        volume_mesh = mesh.spawn_procs(name, role="store", threads=1)
        heartbeat = Heartbeat(volume_mesh, 1, name=name, heartbeat_timeout_s=heartbeat_timeout_s)
        store_name = f"{name}-{os.getpid()}-{next(_counter)}"
        try:
            what = f"TorchStore, weights go {_torchstore.transport(mesh.has_remote_hosts())}"
            with startup.track("store", name, what, on=mesh.hardware_of(volume_mesh)):
                starting = _torchstore.initialize(store_name, volume_mesh)
                in_time = mesh.with_deadline(starting, timeout_s, who=name, what="start of the store")
                index = await heartbeat.guard(in_time)
            heartbeat.start_timeout()
            place = mesh.memory_domain_of(volume_mesh)
            ref = WeightStoreRef(
                name=name, store_name=store_name, place=place, heartbeat_timeout_s=heartbeat_timeout_s, index=index
            )
            client = await heartbeat.guard(ref.client())
            first = mesh.with_deadline(client.put(_SIGN, 0), timeout_s, who=name, what="first answer of the store")
            await heartbeat.guard(first)
        except BaseException:
            heartbeat.end()
            await mesh.stop(volume_mesh, at_once=True)
            raise
        heartbeat.add_probe(lambda: _answer(client), "answer of the store")
        return cls(ref, volume_mesh, heartbeat)

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Free all weights and end the volume's process. Twice is no error."""
        if self._stopped:
            return
        self._stopped = True
        self.heartbeat.end()
        await mesh.stop(self._volume_mesh, timeout_s=timeout_s)


async def _answer(client: Any) -> None:
    """Ask TorchStore's index, whose errors `get` tells as missing keys, and then the volume."""
    await client.exists(_SIGN)
    await client.get(_SIGN)
