"""Rendezvous of a learner's or engine's ranks, and their network interfaces.

On one machine the ranks meet at a file in a folder that only this user can read, and gloo and NCCL listen on the
loopback interface. On several machines the first rank listens on one interface. torch.distributed has no passwords: any
process that can connect to that interface can take part.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from forge_agents.runtime._monarch import Actor, endpoint
from forge_agents.runtime.group_ports import guard_groups
from forge_agents.runtime.interfaces import address_towards, interface_of, own_address
from forge_agents.runtime.processes import raise_file_limit

RENDEZVOUS_VARIABLE = "FORGE_AGENTS_RENDEZVOUS"
"""Environment variable of ranks: the rendezvous, as ``file:///path`` or ``tcp://10.0.0.1:29500``."""
_listening: list[socket.socket] = []
"""The first rank's socket, from `RankSetup.listen` until `join`."""


class RankSetup(Actor):
    """Prepares the processes of one mesh for `join`."""

    @endpoint
    async def hostname(self) -> str:
        """Return the name of this rank's machine."""
        return socket.gethostname()

    @endpoint
    async def listen(self, other: str) -> tuple[str, str]:
        """Open the socket of the rendezvous, on the interface that leads to the host `other`.

        Returns the rendezvous, as ``tcp://10.0.0.1:29500``, and the interface's name.

        Raises:
            HostError: No interface leads to other hosts.
        """
        address = own_address(other)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        _listening[:] = [listener]
        host = f"[{address}]" if ":" in address else address
        return f"tcp://{host}:{listener.getsockname()[1]}", interface_of(address)

    @endpoint
    async def set_variables(self, rank: int, ranks: int, ranks_per_host: int, rendezvous: str) -> None:
        """Set the environment variables that `join` and the libraries read."""
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % ranks_per_host),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            RENDEZVOUS_VARIABLE: rendezvous,
        }
        if rendezvous.startswith("tcp://"):
            host = rendezvous.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address_towards(host)))


def join(backend: str, timeout_s: float) -> None:
    """Create torch's default process group of all ranks that `RankSetup` has prepared.

    Args:
        backend: As for `torch.distributed.init_process_group`.
        timeout_s: Timeout for the other ranks to join, and of each collective.

    Raises:
        HostError: A process of another user has connected in the place of a rank.
    """
    import torch.distributed as dist

    raise_file_limit()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind, _, where = os.environ[RENDEZVOUS_VARIABLE].partition("://")
    timeout = timedelta(seconds=timeout_s)
    guard_groups(on_one_machine=kind == "file")
    if kind == "file":
        store: Any = dist.FileStore(where, ranks)  # type: ignore[attr-defined]
    else:
        host, _, port = where.rpartition(":")
        listener = _listening.pop().detach() if rank == 0 else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host.strip("[]"), int(port), ranks, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener
        )
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
