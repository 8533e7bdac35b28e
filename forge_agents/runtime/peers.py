"""Users of TCP sockets on this machine, which the kernel shows to everybody."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LISTENING, _ESTABLISHED = "0A", "01"
_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104  # only compared with
_FIRST_PERSON = 1000
"""Lower ids of users belong to root's services, such as a model server that the system starts (login.defs, UID_MIN)."""
_NO_OWNER = "0"
"""Inode of a connection that no process has accepted yet, or that its process has closed."""


def check_server(connection: socket.socket) -> None:
    """Check that a new connection to this machine's loopback is with a process of the same user, root or a service.

    Any user can listen on a port that is free: before a server has started, or after it has ended.

    Raises:
        PermissionError: Another user's process is at the other end. Nothing was sent to it.
        ConnectionResetError: The process at the other end has closed the connection, so its user is unknown.
    """
    there, here = connection.getpeername(), connection.getsockname()
    host, port = _plain(there[0]), there[1]
    if not ipaddress.ip_address(host).is_loopback:
        return
    ends = {(host, port), (_plain(here[0]), here[1])}
    users: set[int] = set()
    listeners: dict[str, set[int]] = {}
    for local, remote, state, user, inode in tcp_rows():
        if int(local.rpartition(":")[2], 16) != port:
            continue
        if state == _LISTENING:
            listeners.setdefault(_endpoint(local)[0], set()).add(int(user))
        elif ends == {_endpoint(local), _endpoint(remote)}:
            if inode != _NO_OWNER:
                users.add(int(user))
            elif state != _ESTABLISHED:
                raise ConnectionResetError(f"the server at port {port} of {host} has closed the connection")
    # a connection that no process has accepted is in the queue of the socket with the most specific address
    specific = next((listeners[address] for address in (host, *_ANY_ADDRESS) if address in listeners), set())
    if strangers := {user for user in users or specific if user >= _FIRST_PERSON} - {os.geteuid()}:
        raise PermissionError(
            f"user {min(strangers)} of this machine listens on port {port} of {host}, and nothing was sent there. Use "
            "another port. If you trust the server, run it as your user or give it an https:// address"
        )


async def check_connections(request: Any) -> None:
    """Check each connection that a request of an httpx client opens, as `check_server`. For clients that send a secret.

    An event hook of the client for its requests. TLS proves by itself who answers.
    """
    if request.url.scheme == "http":
        request.extensions["trace"] = _check_connection


async def _check_connection(event: str, details: Mapping[str, Any]) -> None:
    if event == "connection.connect_tcp.complete":
        stream = details["return_value"]
        try:
            check_server(stream.get_extra_info("socket"))
        except PermissionError as foreign:
            await stream.aclose()
            raise PermissionError(f"{foreign}, or leave out the key if the server needs none") from None
        except ConnectionResetError:
            pass  # no process can read what is sent, and the client reports the end


def tcp_rows() -> list[tuple[str, str, str, str, str]]:
    """Return this machine's TCP sockets: both addresses and the state in the kernel's notation, user and inode."""
    lines = []
    for name in ("tcp", "tcp6"):
        file = Path("/proc/self/net", name)
        lines += file.read_text().splitlines()[1:] if file.exists() else []
    cells = [line.split() for line in lines]
    return [(row[1], row[2], row[3], row[7], row[9]) for row in cells]


def _endpoint(cell: str) -> tuple[str, int]:
    """Return address and port of the kernel's notation, as 0100007F:1F90 for 127.0.0.1 and 8080."""
    words, _, port = cell.rpartition(":")
    packed = b"".join(bytes.fromhex(words[start : start + 8])[::-1] for start in range(0, len(words), 8))
    return _plain(packed), int(port, 16)


def _plain(address: str | bytes) -> str:
    """Return an address as text. An IPv4 address in the form of IPv6 is returned as IPv4."""
    parsed = ipaddress.ip_address(address)
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
