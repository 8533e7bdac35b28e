"""Rendezvous of ranks: at a private file and on loopback on one machine, on one interface on several."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from process_checks import keeps_connections, ports_of

from forge_agents.errors import HostError
from forge_agents.runtime import group_ports, interfaces

STRANGER = 65534
RANK = """
import os, socket, sys
os.environ |= {"RANK": sys.argv[1], "WORLD_SIZE": sys.argv[2], "FORGE_AGENTS_RENDEZVOUS": sys.argv[3]}
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
from forge_agents.runtime import ranks
import torch.distributed as dist
"""
JOINS = """
ranks.join("gloo", 120)
numbers = [None] * dist.get_world_size()
dist.all_gather_object(numbers, dist.get_rank(), group=dist.new_group(backend="gloo"))
print(numbers, flush=True)
sys.stdin.readline()
dist.destroy_process_group()
os._exit(0)
"""


def start(*words: str, program: str = RANK + JOINS) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.timeout(600)
def test_ranks_of_one_machine_meet_at_a_file_and_listen_on_loopback_only(tmp_path: Path) -> None:
    pair = [start(str(rank), "2", f"file://{tmp_path}/rendezvous") for rank in range(2)]
    with ended(*pair):
        for rank in pair:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "[0, 1]\n", rank.communicate()[1]
            sockets = psutil.Process(rank.pid).net_connections("inet")
            listening = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
            assert listening == {"127.0.0.1"}


CONNECTS = """
import os, socket, struct, sys, time
import encodings.idna
if sys.argv[2] != "0":
    os.setuid(int(sys.argv[2]))
sockets = []
for sequence in range(8):
    sockets.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
    if sys.argv[3:] != ["silent"]:
        sockets[-1].sendall(struct.pack("<q", sequence))
print("connected", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def ranks_with_stranger(folder: Path, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks, of which the first had connections of another user before the second connected to it."""
    folder.chmod(0o700)
    waiting = start("0", "2", f"file://{folder}/rendezvous")
    with ended(waiting):
        while not (ports := ports_of(waiting.pid)):
            assert waiting.poll() is None, waiting.communicate()[1]
            time.sleep(0.05)
        stranger = start(str(ports[0]), str(STRANGER), *words, program=CONNECTS)
        assert stranger.stdout is not None and stranger.stdout.readline() == "connected\n"
        other = start("1", "2", f"file://{folder}/rendezvous")
        with ended(stranger, other):
            yield [waiting, other]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.timeout(600)
def test_connection_of_another_user_is_refused(tmp_path: Path) -> None:
    with ranks_with_stranger(tmp_path) as (waiting, _):
        _, errors = waiting.communicate(timeout=500)
        assert f"HostError: user {STRANGER} of this machine has connected to a rank" in errors


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.timeout(600)
def test_silent_connection_of_another_user_ends_no_run(tmp_path: Path) -> None:
    with ranks_with_stranger(tmp_path, "silent") as pair:
        for rank in pair:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "[0, 1]\n", rank.communicate()[1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [1, 2])
def test_strangers_do_not_fill_a_group_with_connections(size: int, tmp_path: Path) -> None:
    group = [start(str(rank), str(size), f"file://{tmp_path}/rendezvous") for rank in range(size)]
    with ended(*group):
        for rank in group:
            assert rank.stdout is not None
            assert rank.stdout.readline() == f"{[*range(size)]}\n", rank.communicate()[1]
        for rank in group:
            assert ports_of(rank.pid) and not keeps_connections(rank.pid)
        for rank in group:  # ends the groups, and the connections of gloo
            rank.communicate("\n", timeout=60)
            assert rank.returncode == 0


@pytest.mark.parametrize("user", [0, STRANGER])
def test_peers_are_checked_by_their_user(user: int) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can act as another user")
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = frozenset(group_ports._own_sockets())
        peer = start(str(server.getsockname()[1]), str(user), program=CONNECTS)
        with ended(peer):
            connection, _ = server.accept()
            with connection, contextlib.nullcontext() if user == 0 else pytest.raises(HostError, match=f"{user}"):
                group_ports.check_users(before)


@pytest.mark.parametrize(
    ("local", "remote", "user", "refused"),
    [
        ("0100007F:1F90", "0100007F:A000", "1000", "user 1000 of this machine"),
        ("00000000000000000000000001000000:1F90", "00000000000000000000000001000000:A000", "1000", "user 1000"),
        ("0100007F:1F90", "0100007F:A000", "", "does not say which user is at the other end of 1 connections"),
        ("0100007F:1F90", "0100007F:A000", str(os.geteuid()), ""),
        ("0500000A:1F90", "0600000A:A000", "", ""),
    ],
    ids=["another user", "another user over IPv6", "an unknown user", "the same user", "another machine"],
)
def test_only_loopback_connections_are_checked(
    local: str, remote: str, user: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(local, remote, "01", str(os.geteuid()), "7")] + [(remote, local, "01", user, "8")] * bool(user)
    monkeypatch.setattr(group_ports, "tcp_rows", lambda: rows)
    monkeypatch.setattr(group_ports, "_own_sockets", lambda: {"7": -1})
    monkeypatch.setattr(group_ports, "_PEER_WAIT_S", 0.0)
    with pytest.raises(HostError, match=refused) if refused else contextlib.nullcontext():
        group_ports.check_users()


LISTENS = """
if sys.argv[1] == "0":
    ranks._listening.append(socket.create_server(("127.0.0.1", int(sys.argv[3].rpartition(":")[2]))))
"""


def test_ranks_of_several_machines_meet_at_a_socket_of_one_interface() -> None:
    program = RANK + LISTENS + JOINS
    with socket.create_server(("127.0.0.1", 0)) as free:
        rendezvous = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    pair = [start(str(rank), "2", rendezvous, program=program) for rank in range(2)]
    with ended(*pair):
        for rank in pair:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "[0, 1]\n", rank.communicate()[1]
            sockets = psutil.Process(rank.pid).net_connections("inet")
            assert {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("hostname", "route", "address"),
    [
        (["127.0.1.1"], "10.0.0.7", "10.0.0.7"),
        (["10.0.0.8"], "10.0.0.7", "10.0.0.8"),
        (["192.168.9.9"], "10.0.0.7", "10.0.0.7"),
        (["127.0.1.1"], "127.0.0.1", ""),
    ],
    ids=["name leads to loopback", "name is an interface", "name is elsewhere", "no interface at all"],
)
def test_own_address_comes_from_the_name_or_the_route(
    hostname: list[str], route: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    entry = type(next(iter(psutil.net_if_addrs().values()))[0])
    ours = {
        name: [entry(socket.AF_INET, ip, None, None, None)]
        for name, ip in (("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("eth1", "10.0.0.8"))
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: ours)
    monkeypatch.setattr(interfaces, "_resolved", lambda host: hostname)
    monkeypatch.setattr(interfaces, "address_towards", lambda host: route)
    if address:
        assert interfaces.own_address("node2") == address
        assert interfaces.interface_of(address) == {"10.0.0.7": "eth0", "10.0.0.8": "eth1"}[address]
    else:
        with pytest.raises(HostError, match="Set GLOO_SOCKET_IFNAME to the interface between the hosts"):
            interfaces.own_address("node2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert interfaces.own_address("node2") == "10.0.0.8"
