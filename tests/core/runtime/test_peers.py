"""Servers of other users at loopback ports."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from forge_agents.runtime import peers

STRANGER = 65534
LISTENS = """
import os, socket, sys
import encodings.idna
os.setuid(int(sys.argv[1]))
family = socket.AF_INET6 if ":" in sys.argv[2] else socket.AF_INET
server = socket.create_server((sys.argv[2], 0), family=family, dualstack_ipv6=sys.argv[2] == "::")
print(server.getsockname()[1], flush=True)
accepted, _ = server.accept() if sys.argv[3] == "accepts" else (None, None)
print("accepted", flush=True)
if sys.argv[3] == "accepts":
    server.close()
sys.stdin.read()
"""


@contextlib.contextmanager
def listening(user: int, address: str, accepts: bool) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    words = [sys.executable, "-c", LISTENS, str(user), address, "accepts" if accepts else "waits"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize(
    ("listens", "connects"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.2"),
        ("::", "127.0.0.1"),
        ("::1", "::1"),
        ("0.0.0.0", "::ffff:127.0.0.1"),
    ],
)
@pytest.mark.parametrize("user", [0, STRANGER])
def test_server_of_another_user_is_refused(user: int, listens: str, connects: str, accepts: bool) -> None:
    refused = pytest.raises(PermissionError, match=f"user {STRANGER} of this machine listens on port")
    with (
        listening(user, listens, accepts) as (port, process),
        socket.create_connection((connects, port), 10) as connection,
    ):
        assert process.stdout is not None and process.stdout.readline() == "accepted\n"
        with refused if user else contextlib.nullcontext():
            peers.check_server(connection)


HERE, CLIENT, NONE = "0100007F:1F90", "0100007F:A000", "00000000:0000"
OURS, THEIRS = str(os.geteuid()), "4711"


@pytest.mark.parametrize(
    ("peer", "rows", "error"),
    [
        ("127.0.0.1", [(HERE, CLIENT, "01", THEIRS, "9")], PermissionError),
        ("127.0.0.1", [(HERE, "0100007F:A001", "01", THEIRS, "9"), (HERE, CLIENT, "01", OURS, "8")], None),
        ("127.0.0.1", [(HERE, CLIENT, "01", THEIRS, "9"), (HERE, NONE, "0A", OURS, "8")], PermissionError),
        ("127.0.0.1", [(HERE, CLIENT, "01", "0", "0"), (HERE, NONE, "0A", THEIRS, "8")], PermissionError),
        ("127.0.0.1", [("0100007F:1F91", NONE, "0A", THEIRS, "8")], None),
        ("10.0.0.5", [("0500000A:1F90", NONE, "0A", THEIRS, "8")], None),
        ("127.0.0.1", [(HERE, NONE, "0A", OURS, "7"), ("0200007F:1F90", NONE, "0A", THEIRS, "8")], None),
        ("127.0.0.1", [("00000000:1F90", NONE, "0A", OURS, "7"), (f"{'0' * 32}:1F90", NONE, "0A", THEIRS, "8")], None),
        ("127.0.0.1", [("00000000:1F90", NONE, "0A", THEIRS, "7")], PermissionError),
        ("127.0.0.1", [(HERE, CLIENT, "01", "998", "9"), (HERE, NONE, "0A", "998", "8")], None),
        ("127.0.0.1", [(HERE, CLIENT, "05", "0", "0"), (HERE, NONE, "0A", OURS, "8")], ConnectionResetError),
    ],
    ids=[
        "accepted", "another's client", "listener replaced", "not accepted", "another port", "another machine",
        "stranger at another address", "stranger at the IPv6 port", "any address", "a service of root",
        "closed by its server",
    ],
)  # fmt: skip
def test_the_user_at_the_other_end_is_read_from_the_kernel(
    peer: str, rows: list[tuple[str, ...]], error: type[OSError] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Connection:
        def getpeername(self) -> tuple[str, int]:
            return peer, 0x1F90

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", 0xA000

    monkeypatch.setattr(peers, "tcp_rows", lambda: rows)
    with pytest.raises(error) if error else contextlib.nullcontext():
        peers.check_server(Connection())  # type: ignore[arg-type]  # has the two methods that are called
