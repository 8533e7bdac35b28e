"""Limits of HTTP connections, on a server that answers /open to all and other paths to clients with a token."""

import asyncio
import contextlib
import errno
import gc
import http.client
import logging
import re
import resource
import socket
import threading
import time

import h11
import pytest
import uvicorn

from forge_agents.runtime import connections

WAIT_S = 120.0
BIG = 20 << 20


async def app(scope, receive, send):
    if (b"x-token", b"good") in scope["headers"]:
        connections.trust(scope)
    elif scope["path"] != "/open":
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        return
    if scope["path"] == "/read":
        while (await receive()).get("more_body"):
            pass
    body = bytes(BIG) if scope["path"] == "/big" else b"fine"
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def address():
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    settings = uvicorn.Config(app, lifespan="off", log_config=None, **connections.http_settings())
    server = connections.Server(settings)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    yield listening.getsockname()
    server.should_exit = True
    thread.join(WAIT_S)
    listening.close()


def connect(address):
    return socket.create_connection(address, WAIT_S)


def asks(connection, path="/", token="good"):
    """Return the status of the answer, or 0 without one. The answer is read to its end."""
    try:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nx-token: {token}\r\n\r\n".encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        answer.read()
    except (OSError, http.client.HTTPException):
        return 0
    return answer.status


def closed(connection):
    """Wait until the server has closed the connection."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_strangers_do_not_block_clients_with_a_token(address, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    client = connect(address)
    assert asks(client) == 200
    strangers = [connect(address) for _ in range(20)]
    assert asks(strangers[-1], token="bad") == 401
    assert asks(client) == 200
    another = connect(address)
    assert asks(another) == 200 and asks(client) == 200
    for stranger in strangers[:12]:  # the oldest of them made room
        assert closed(stranger)
    for connection in (client, another, *strangers):
        connection.close()


def test_excess_connection_is_closed_if_all_others_have_a_token(address, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    clients = [connect(address) for _ in range(3)]
    assert [asks(client) for client in clients] == [200] * 3
    late = connect(address)
    assert closed(late)
    assert [asks(client) for client in clients] == [200] * 3
    for client in (*clients, late):
        client.close()


def test_servers_leave_half_of_the_file_limit(address, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, before[1]))
        assert connections._max_open() == 500 - 128
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    monkeypatch.setattr(connections, "_max_open", lambda: 5)
    monkeypatch.setattr(connections, "_open", set())  # servers of earlier tests may have clients with a token
    strangers = [connect(address) for _ in range(20)]
    for stranger in strangers[:15]:
        assert closed(stranger)
    with connect(address) as client:
        assert asks(client) == 200 and len(connections._open) <= 5
    for stranger in strangers:
        stranger.close()


def test_strangers_are_closed_after_a_timeout(address, monkeypatch):
    client = connect(address)
    assert asks(client) == 200
    monkeypatch.setattr(connections, "REQUEST_S", 1.0)
    silent, healthy = connect(address), connect(address)
    while not (status := asks(healthy, "/open", token="bad")):  # a busy machine may be late
        healthy = connect(address)
    assert status == 200
    assert closed(silent) and closed(healthy)
    assert asks(client) == 200
    client.close()


def test_closed_connections_are_not_kept_until_the_timeout(address, monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_S", 10 * WAIT_S)
    gc.collect()
    before = sum(isinstance(each, connections.Connection) for each in gc.get_objects())
    for _ in range(20):
        connect(address).close()
    deadline, kept = time.monotonic() + WAIT_S, 20
    while kept > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
        kept = sum(isinstance(each, connections.Connection) for each in gc.get_objects()) - before
    assert kept <= 0


@pytest.mark.parametrize("num_bytes", [20_000, 300_000, 50_000_000])
@pytest.mark.parametrize("line", [b"x: y\r\n", b"x: " + b"y" * 60_000 + b"\r\n"], ids=["many", "long"])
def test_large_request_head_is_refused(address, num_bytes, line):
    head = b"GET / HTTP/1.1\r\nhost: x\r\nx-token: good\r\n" + line * (num_bytes // len(line) + 1) + b"\r\n"
    with connect(address) as client:
        try:
            client.sendall(head)
            answer = client.recv(4096)
        except OSError:  # closed before all of it was sent
            answer = b""
        assert answer == b"" or answer.split()[1] in (b"431", b"400")
    with connect(address) as client:
        assert asks(client) == 200


def test_client_that_reads_no_response_is_closed(address, monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_S", 1.0)
    others = set(connections._open)
    with connect(address) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /big HTTP/1.1\r\nhost: x\r\nx-token: good\r\n\r\n")
        last = time.monotonic() + WAIT_S
        while set(connections._open) - others and time.monotonic() < last:
            time.sleep(0.05)
        assert not set(connections._open) - others
    monkeypatch.setattr(connections, "REQUEST_S", WAIT_S)
    with connect(address) as client:
        assert asks(client, "/big") == 200  # one that reads has its answer


def test_connections_of_ended_servers_do_not_count(address, monkeypatch):
    class Ended:
        trusted, opened = True, 0.0
        loop = asyncio.new_event_loop()

    Ended.loop.close()
    stale = {Ended() for _ in range(5)}
    monkeypatch.setattr(connections, "_open", stale)
    monkeypatch.setattr(connections, "_max_open", lambda: 5)
    with connect(address) as client:
        assert asks(client) == 200
        assert not any(isinstance(other, Ended) for other in connections._open)


def test_failures_to_accept_are_logged_once_a_minute(caplog):
    loop = asyncio.new_event_loop()
    handler = connections._Failures()
    loop.set_exception_handler(handler)
    failure = {"message": "no files", "exception": OSError(errno.EMFILE, "Too many open files"), "socket": None}
    with caplog.at_level(logging.WARNING):
        for _ in range(2048):
            loop.call_exception_handler(failure)
        assert [record.getMessage() for record in caplog.records] == [
            "the server cannot accept connections (Too many open files) and tries again each second"
        ]
        assert caplog.records[0].exc_info is None
        loop.call_exception_handler({"message": "another", "exception": ValueError("bad")})
    assert "another" in caplog.records[-1].getMessage()
    loop.close()


def test_invalid_requests_are_not_logged(address, caplog):
    with caplog.at_level(logging.INFO):
        for request in (b"\x16\x03\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100 + b"\r\n\r\n"):
            with connect(address) as stranger:
                stranger.sendall(request)
                stranger.shutdown(socket.SHUT_WR)
                assert closed(stranger)
        with connect(address) as stranger:  # the body is invalid after the answer
            stranger.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            assert b" 401 " in stranger.recv(4096)
            stranger.sendall(b"x\r\n")
            assert closed(stranger)
        upgrade = "/ HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
        with connect(address) as stranger:
            stranger.sendall(f"GET {upgrade}".encode())
            assert b" 401 " in stranger.recv(4096)
    assert [record for record in caplog.records if record.name.startswith(("uvicorn", "forge_agents"))] == []
    assert not connections._quiet.name.startswith("uvicorn")  # whose settings reset the children of its loggers


@pytest.mark.parametrize(
    ("version", "framing", "status"),
    [
        ("1.1", "content-length: 3\r\ntransfer-encoding: chunked", 400),
        ("1.1", "Transfer-Encoding: chunked\r\nContent-Length: 0", 400),
        ("1.0", "transfer-encoding: chunked", 400),
        ("1.1", "transfer-encoding: chunked", 200),
        ("1.1", "content-length: 5", 200),
    ],
)
def test_body_with_two_meanings_is_refused_and_the_connection_closed(address, version, framing, status):
    with connect(address) as connection:
        head = f"POST / HTTP/{version}\r\nhost: x\r\nx-token: good\r\n{framing}\r\n\r\n"
        hidden = "GET /open HTTP/1.1\r\nhost: x\r\n\r\n" if status == 400 else ""
        connection.sendall(f"{head}0\r\n\r\n{hidden}".encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        text = answer.read()
        assert (answer.status, text == b"fine") == (status, status == 200)
        if status == 400:
            assert closed(connection)


def chunks(connection, token, num_chunks, size=1):
    """Post a body in chunks. Returns the status of the answer."""
    head = f"POST /read HTTP/1.1\r\nhost: x\r\nx-token: {token}\r\ntransfer-encoding: chunked\r\n\r\n"
    with contextlib.suppress(ConnectionError):
        connection.sendall(head.encode() + f"{size:x}\r\n{'x' * size}\r\n".encode() * num_chunks + b"0\r\n\r\n")
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def test_few_parts_of_a_body_are_read_before_a_token_is_shown(address, monkeypatch):
    num_events, next_event = [], h11.Connection.next_event
    monkeypatch.setattr(h11.Connection, "next_event", lambda self: [next_event(self), num_events.append(1)][0])
    with connect(address) as stranger:
        assert chunks(stranger, "bad", 20_000) == 401
    assert len(num_events) < 100
    with connect(address) as client:
        assert chunks(client, "good", 900) == 200
        assert asks(client) == 200 and len(num_events) > 900


@pytest.mark.parametrize(("num_chunks", "size", "status"), [(2000, 1, 400), (2000, 2000, 200)])
def test_body_in_many_small_chunks_is_refused(address, num_chunks, size, status):
    with connect(address) as client:
        assert chunks(client, "good", num_chunks, size) == status
    with connect(address) as client:
        assert asks(client) == 200


def test_head_of_many_short_lines_is_refused_also_behind_another_request(address):
    head = b"GET / HTTP/1.1\r\nhost: x\r\nx-token: good\r\n"
    with connect(address) as client:
        client.sendall(head + b"\r\n" + head + b"a:\r\n" * 200 + b"\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"400"]
