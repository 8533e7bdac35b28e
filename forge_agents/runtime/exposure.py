"""Warnings of a run that other users or machines can reach: Monarch runs code for any process that connects to it."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable

import psutil

_FIRST_USER = 1000
"""Lowest user id of a person, by convention."""
_NOBODY = 65534
_PROTECTED = ("tls://", "ipc://")
"""Beginnings of addresses that only holders of the run's certificate, or this user, can connect to."""


def other_users() -> list[int]:
    """Ids of users, other than this one and the system's, that have processes on this machine."""
    ids: set[int] = set()
    for process in psutil.process_iter(["uids"]):
        if process.info["uids"] is not None:
            ids.add(process.info["uids"].real)
    return sorted(uid for uid in ids if uid >= _FIRST_USER and uid not in (_NOBODY, os.getuid()))


@functools.cache
def warn_of_other_users() -> None:
    """Warn, once in a process, that Monarch's sockets cannot be made private here while other users are present."""
    if users := other_users():
        warnings.warn(
            f"any user of this machine can run code as you while this run lasts: its sockets could not be made private "
            f"on this system, and users {', '.join(map(str, users))} have processes here. Use a machine, a virtual "
            "machine or a container with a network of its own; see docs/hardware.md",
            RuntimeWarning,
            stacklevel=2,
        )


def warn_of_open_ports(addresses: Iterable[str]) -> None:
    """Warn of hosts whose address asks for no certificate."""
    if reachable := sorted({address for address in addresses if not address.startswith(_PROTECTED)}):
        warnings.warn(
            f"{', '.join(reachable[:3])}{' and others' if len(reachable) > 3 else ''}: any machine or user that can "
            "connect to these ports can run code as you. Keep hosts in a network of their own, or use tls:// "
            "addresses with a certificate of the run; see docs/hardware.md",
            RuntimeWarning,
            stacklevel=2,
        )
