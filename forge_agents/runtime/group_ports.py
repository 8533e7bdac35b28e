"""Ports of torch's process groups: no stranger fills them with connections, or takes a rank's place.

gloo listens as long as a group exists. It accepts the first connection as the rank that it waits for, and torch
unpickles objects that ranks send. It also keeps every later connection, and ends the process if it can open no more.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from forge_agents.errors import HostError
from forge_agents.runtime.peers import tcp_rows

_PEER_TRIES = 20
_PEER_WAIT_S = 0.05
_ESTABLISHED, _LISTENING = "01", "0A"
_LOOPBACK = re.compile(r"[0-9A-F]{6}7F:|0{24}01000000:|0{16}FFFF0000[0-9A-F]{6}7F:")
"""Matches local addresses 127.0.0.0/8, ::1 or ::ffff:127.0.0.0/104 in the kernel's notation."""
_WATCHED = re.compile(r"^tfd:\s*(\d+) events:\s*19 data:\s*([0-9a-f]+)", re.MULTILINE)
"""Matches a descriptor that gloo watches, and the pointer that belongs to it, in what the kernel shows of an epoll
instance. Monarch watches for other events."""
_EPOLL_CTL_MOD = 3
_BYTES_RECEIVED = slice(128, 136)
"""Place of ``tcpi_bytes_received`` in ``struct tcp_info``."""
_GREETING_BYTES = 8
"""Size of the number by which gloo tells ranks apart, the first bytes of each connection between them."""


@functools.cache
def guard_groups(*, on_one_machine: bool) -> None:
    """Close the ports of each group that this process makes from now on, once its ranks are connected.

    Connections of a group on one machine are checked by `check_users` before anything is received.
    """
    from torch.distributed import distributed_c10d

    make_group = distributed_c10d._new_process_group_helper
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # ranks connect when the group is made

    @functools.wraps(make_group)
    def make_and_check(group_size: int, *args: Any, **kwargs: Any) -> Any:
        before = frozenset(_own_sockets())
        group = make_group(group_size, *args, **kwargs)
        close_ports(before)
        if on_one_machine and group_size > 1:
            check_users(before)
        return group

    distributed_c10d._new_process_group_helper = make_and_check


def close_ports(before: frozenset[str] = frozenset()) -> None:
    """Make gloo accept no further connections. One may wait at each port, and the kernel drops all others.

    gloo's sockets must stay open and watched: it ends the process if it cannot accept, or later stop watching. They are
    watched for nothing instead. NCCL's are not watched, and stay as they are.

    Args:
        before: Inodes of sockets to ignore.
    """
    sockets = _own_sockets()
    ports = [
        sockets[inode]
        for _, _, state, _, inode in tcp_rows()
        if state == _LISTENING and inode in sockets.keys() - before
    ]
    libc = ctypes.CDLL(None)
    for entry in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed by another thread
            for descriptor, pointer in _WATCHED.findall(entry.read_text()):
                if int(descriptor) in ports:
                    event = struct.pack("=IQ", 0, int(pointer, 16))
                    libc.epoll_ctl(int(entry.name), _EPOLL_CTL_MOD, int(descriptor), event)
                    libc.listen(int(descriptor), 0)


def check_users(before: frozenset[str] = frozenset()) -> None:
    """Check that this process's TCP connections on the loopback interface are with processes of the same user, or root.

    Connections to its own ports on which nothing has arrived are ignored: they are in no rank's place.

    Args:
        before: Inodes of sockets to ignore.

    Raises:
        HostError: A connection is with another user's process, or its other end is unknown. It is no OSError, which
            would be taken for a full disk where a checkpoint is written, and training would go on without this rank.
    """
    unknown: list[str] = []
    for _ in range(_PEER_TRIES):  # both ends of a connection do not appear at the same moment
        sockets = {inode: descriptor for inode, descriptor in _own_sockets().items() if inode not in before}
        rows = tcp_rows()
        users = {(local, remote): int(user) for local, remote, _, user, _ in rows}
        own_ports = {local for local, _, state, _, inode in rows if state == _LISTENING and inode in sockets}
        ends = [
            (remote, local)
            for local, remote, state, _, inode in rows
            if inode in sockets
            and state == _ESTABLISHED
            and _LOOPBACK.match(local)
            and not (local in own_ports and _is_silent(sockets[inode]))
        ]
        strangers = {users[end] for end in ends if end in users} - {os.geteuid(), 0}
        if strangers:
            raise HostError(
                f"user {min(strangers)} of this machine has connected to a rank of process {os.getpid()} in the place "
                "of another rank. Nothing was read from the connection. Start the run again, and find out who that is"
            )
        unknown = [remote for remote, local in ends if (remote, local) not in users]
        if not unknown:
            return
        time.sleep(_PEER_WAIT_S)
    raise HostError(
        f"the kernel does not say which user is at the other end of {len(unknown)} connections between ranks"
    )


def _is_silent(descriptor: int) -> bool:
    """Return whether fewer bytes have arrived on a connection than a rank sends first."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
    except OSError:  # closed by another thread
        return True
    return len(info) == _BYTES_RECEIVED.stop and int.from_bytes(info[_BYTES_RECEIVED], sys.byteorder) < _GREETING_BYTES


def _own_sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets by inode."""
    sockets = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # closed by another thread
            continue
        if target.startswith("socket:["):
            sockets[target[8:-1]] = int(entry.name)
    return sockets
