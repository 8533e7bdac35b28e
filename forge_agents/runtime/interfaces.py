"""Finds the network interface of this machine that leads to other hosts."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from forge_agents.errors import HostError

_ANY_PORT = 9
"""Port of a probe address. No data is sent there. The kernel only chooses the route."""


def interface_of(address: str) -> str:
    """Return the name of this machine's interface with that IP address.

    Raises:
        HostError: No interface has that address.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    raise HostError(f"no network interface of {socket.gethostname()} has the address {address}. See `ip address`")


def own_address(other: str) -> str:
    """Return this machine's address for other hosts, by GLOO_SOCKET_IFNAME, its name, or the route to `other`."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        for entry in psutil.net_if_addrs().get(interface, ()):
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                return str(entry.address)
        raise HostError(f"GLOO_SOCKET_IFNAME={interface!r}: {socket.gethostname()} has no such interface with an IP")
    local = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    for address in _resolved(socket.gethostname()):
        if address in local and not ipaddress.ip_address(address).is_loopback:
            return address
    address = address_towards(other)
    if ipaddress.ip_address(address).is_loopback:
        raise HostError(
            f"{socket.gethostname()} does not know at which address other hosts reach it: its own name and {other} "
            "lead to the loopback interface. Set GLOO_SOCKET_IFNAME to the interface between the hosts, as eth0"
        )
    return address


def _resolved(host: str) -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def address_towards(host: str) -> str:
    """Return this machine's address on the interface that leads to `host`.

    Raises:
        HostError: The name is unknown, or no route leads there.
    """
    for address in _resolved(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, _ANY_PORT))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise HostError(f"{socket.gethostname()} finds no route to {host}. Check that it can resolve the name of that host")
