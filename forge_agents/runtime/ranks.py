"""Rendezvous of a learner's or engine's ranks: network interfaces, and a check of the users that connect.

On one machine the ranks meet at a file in a folder that only this user can read, and gloo and NCCL listen on the
loopback interface. On several machines the first rank listens on one interface. torch.distributed has no passwords: any
process that can connect to that interface can take part.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from forge_agents.runtime._monarch import Actor, endpoint
from forge_agents.runtime.interfaces import address_towards, interface_of, own_address
from forge_agents.runtime.peers import tcp_rows
from forge_agents.runtime.processes import raise_file_limit

RENDEZVOUS_VARIABLE = "FORGE_AGENTS_RENDEZVOUS"
"""Environment variable of ranks: the rendezvous, as ``file:///path`` or ``tcp://10.0.0.1:29500``."""
_PEER_TRIES = 20
_PEER_WAIT_S = 0.05
_ESTABLISHED = "01"
_LOOPBACK = re.compile(r"[0-9A-F]{6}7F:|0{24}01000000:|0{16}FFFF0000[0-9A-F]{6}7F:")
"""Matches local addresses 127.0.0.0/8, ::1 or ::ffff:127.0.0.0/104 in the kernel's notation."""
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
        PermissionError: A process of another user has connected in the place of a rank.
    """
    import torch.distributed as dist

    raise_file_limit()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind, _, where = os.environ[RENDEZVOUS_VARIABLE].partition("://")
    timeout = timedelta(seconds=timeout_s)
    if kind == "file":
        _check_users_of_groups()
        store: Any = dist.FileStore(where, ranks)  # type: ignore[attr-defined]
    else:
        host, _, port = where.rpartition(":")
        listener = _listening.pop().detach() if rank == 0 else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host.strip("[]"), int(port), ranks, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener
        )
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


# ---- connections


@functools.cache
def _check_users_of_groups() -> None:
    """Check each new process group by `check_users` before it receives anything.

    gloo accepts the first connection as the rank that it waits for, and torch unpickles objects that ranks send.
    """
    from torch.distributed import distributed_c10d

    make_group = distributed_c10d._new_process_group_helper

    @functools.wraps(make_group)
    def make_and_check(*args: Any, **kwargs: Any) -> Any:
        before = frozenset(_own_sockets())
        group = make_group(*args, **kwargs)
        check_users(before)
        return group

    distributed_c10d._new_process_group_helper = make_and_check


def check_users(before: frozenset[str] = frozenset()) -> None:
    """Check that this process's TCP connections on the loopback interface are with processes of the same user, or root.

    Args:
        before: Inodes of sockets to ignore.

    Raises:
        PermissionError: A connection is with another user's process, or its other end is unknown.
    """
    unknown: list[str] = []
    for _ in range(_PEER_TRIES):  # both ends of a connection do not appear at the same moment
        sockets = _own_sockets() - before
        rows = tcp_rows()
        users = {(local, remote): int(user) for local, remote, _, user, _ in rows}
        ends = [
            (remote, local)
            for local, remote, state, _, inode in rows
            if inode in sockets and state == _ESTABLISHED and _LOOPBACK.match(local)
        ]
        strangers = {users[end] for end in ends if end in users} - {os.geteuid(), 0}
        if strangers:
            raise PermissionError(
                f"user {min(strangers)} of this machine has connected to a rank of process {os.getpid()} in the place "
                "of another rank. Nothing was read from the connection. Start the run again, and find out who that is"
            )
        unknown = [remote for remote, local in ends if (remote, local) not in users]
        if not unknown:
            return
        time.sleep(_PEER_WAIT_S)
    raise PermissionError(
        f"the kernel does not say which user is at the other end of {len(unknown)} connections between ranks"
    )


def _own_sockets() -> set[str]:
    """Return the inodes of this process's sockets."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # closed by another thread
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes
