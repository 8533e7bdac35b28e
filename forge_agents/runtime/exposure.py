"""Warns that other users or machines can reach a run. Monarch runs code for any process that connects to it."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable

import psutil

_FIRST_USER = 1000
"""Lowest id of human users, by convention."""
_NOBODY = 65534
_PROTECTED = ("tls://", "ipc://")
"""Prefixes of addresses to which only holders of the run's certificate, or this user, can connect."""


def other_users() -> list[int]:
    """Return the ids of other human users with processes on this machine."""
    ids: set[int] = set()
    for process in psutil.process_iter(["uids"]):
        if process.info["uids"] is not None:
            ids.add(process.info["uids"].real)
    return sorted(uid for uid in ids if uid >= _FIRST_USER and uid not in (_NOBODY, os.getuid()))


@functools.cache
def warn_of_other_users() -> None:
    """Warn once per process if other users are present and Monarch's sockets cannot be made private here."""
    if users := other_users():
        warnings.warn(
            f"any user of this machine can run code as you while this run lasts: its sockets could not be made private "
            f"on this system, and users {', '.join(map(str, users))} have processes here. Use a machine, a virtual "
            "machine or a container with its own network. See docs/hardware.md",
            RuntimeWarning,
            stacklevel=2,
        )


def warn_of_open_ports(addresses: Iterable[str]) -> None:
    """Warn of hosts whose addresses need no certificate."""
    if reachable := sorted({address for address in addresses if not address.startswith(_PROTECTED)}):
        warnings.warn(
            f"{', '.join(reachable[:3])}{' and others' if len(reachable) > 3 else ''}: any machine or user that can "
            "connect to these ports can run code as you. Keep hosts in a private network, or use tls:// "
            "addresses with a certificate of the run. See docs/hardware.md",
            RuntimeWarning,
            stacklevel=2,
        )
