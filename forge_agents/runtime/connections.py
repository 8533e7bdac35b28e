"""HTTP servers with limits: how many connections, how large a request's head, how long a client may take.

A stranger can reach a server's port but has no token. Connections without a token are closed after a short time, and
first if there are too many, so that they never block clients with a token.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import resource
import time
from collections.abc import MutableMapping
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 16 << 10
"""Maximum size of a request's head."""
_MAX_LINES = 128
"""Maximum number of lines of a request's head."""
_STRANGER_PARTS = 32
"""Number of parts of a body that are read before a token is shown. A part is a chunk, or what arrives at once."""
_MAX_SMALL_PARTS, _PART_BYTES = 1000, 1024
"""Number of parts of a body that may have any size, and minimum mean size of the others."""
MAX_CONNECTIONS = 1024
"""Maximum number of connections of one server."""
REQUEST_S = 30.0
"""Maximum seconds for a request's head from its first byte on, for an unwanted body, for a response that is not
read, and for a client to show a token."""
IDLE_S = 300
"""Maximum seconds between requests of a connection with a token. A program may compute in between."""
_BACKLOG = 128
_LOG_EVERY_S = 60.0
_HEAD_END = re.compile(rb"\n\r?\n")
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_open: set[Connection] = set()
"""Connections of all servers of this process."""
_log = logging.getLogger(__name__)
_quiet = logging.getLogger(f"{__name__}.http")
"""Logger without uvicorn's warnings of invalid requests, which any stranger can cause without end. The logger is not a
child of uvicorn's loggers, because uvicorn's settings reset those."""
_quiet.setLevel(logging.ERROR)


class _Strict(h11.Connection):
    """h11's parser for servers, with limits, which also refuses requests with two meanings.

    A proxy in front of the server might use the length of a body that is sent in chunks, and take its rest for the
    request of another client. Each line of a head and each chunk takes time, of which other clients wait for the end.
    """

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self.trusted = False
        """Whether a request of the connection has shown a valid token."""
        self._num_parts = self._num_bytes = 0

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError, to which uvicorn answers with status 400.

        A stranger's body pauses after a few parts, until a token is shown or the connection is closed.
        """
        if self.their_state is h11.IDLE:
            self._num_parts = self._num_bytes = 0
            head = self.trailing_data[0][: MAX_HEADER_BYTES + 1]
            end = _HEAD_END.search(head)
            if (end is None and len(head) > MAX_HEADER_BYTES) or head.count(b"\n", 0, end and end.end()) > _MAX_LINES:
                raise h11.RemoteProtocolError("the head is too large")
        elif self._num_parts >= _STRANGER_PARTS and not self.trusted:
            return h11.PAUSED
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("a body in chunks has a length, or the protocol has no chunks")
        elif isinstance(event, h11.Data):
            self._num_parts += 1
            self._num_bytes += len(event.data)
            if self._num_parts > _MAX_SMALL_PARTS + self._num_bytes // _PART_BYTES:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


class Connection(H11Protocol):
    """uvicorn's connection by h11, with limits of time, size and number.

    Applications call `trust` once a request has shown a valid token.
    """

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self.conn: _Strict = _Strict(config.h11_max_incomplete_event_size)
        self.logger = _quiet
        self.opened = time.monotonic()
        self._unread = False
        self._late: asyncio.TimerHandle | None = None
        self._stranger: asyncio.TimerHandle | None = None
        self._within_s: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for a token, and close another connection if there are too many."""
        super().connection_made(transport)
        for other in list(_open):  # a copy, because servers of other threads change it
            if other.loop.is_closed():  # its server ended first
                _open.discard(other)
        _open.add(self)
        self._stranger = self.loop.call_later(REQUEST_S, self._give_up_stranger)
        if self._fits(self.connections, MAX_CONNECTIONS) and self._fits(_open, _max_open()):
            self._look()

    def data_received(self, data: bytes) -> None:
        """Read requests, and set the timeout of the present state."""
        super().data_received(data)
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Refuse an invalid request, or hang up if its response has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timeouts."""
        super().connection_lost(exc)
        self._end()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection to the new protocol, whose application checks the token."""
        self._end()
        super().handle_websocket_upgrade(event)

    def _end(self) -> None:
        _open.discard(self)
        self._close_within(None)
        if self._stranger is not None:
            self._stranger.cancel()  # otherwise the timer would keep the connection in memory
        self.conn.trusted = True  # no timeout applies any more

    def pause_writing(self) -> None:
        """Start the timeout of a client that does not read its response."""
        super().pause_writing()
        self._unread = True
        self._look()

    def resume_writing(self) -> None:
        """Stop that timeout."""
        super().resume_writing()
        self._unread = False
        self._look()

    def on_response_complete(self) -> None:
        """Start the timeout until the next request."""
        super().on_response_complete()
        self._look()  # a part of the next request may have arrived already

    def _look(self) -> None:
        """Set the timeout of the present state: unread response, unwanted body, no request, or a partial head."""
        if self._unread or self.conn.our_state is h11.DONE:
            self._close_within(REQUEST_S)
        elif self.conn.their_state is h11.IDLE:
            self._close_within(REQUEST_S if self.conn.trailing_data[0] else IDLE_S)
        else:
            self._close_within(None)

    def _close_within(self, within_s: float | None) -> None:
        if within_s == self._within_s:
            return
        if self._late is not None:
            self._late.cancel()
        self._within_s = within_s
        self._late = None if within_s is None else self.loop.call_later(within_s, self.transport.abort)

    def _give_up_stranger(self) -> None:
        if not self.conn.trusted:
            self.transport.abort()

    def _fits(self, connections: set[Any], limit: int) -> bool:
        """Return whether this connection may stay. If there are too many, the oldest one without a token is closed."""
        if len(connections) <= limit:
            return True
        strangers = (other for other in list(connections) if isinstance(other, Connection) and not other.conn.trusted)
        oldest = min(strangers, key=lambda other: other.opened, default=self)
        _open.discard(oldest)
        oldest.connections.discard(oldest)
        oldest.loop.call_soon_threadsafe(oldest.transport.abort)
        return oldest is not self


class Server(uvicorn.Server):
    """uvicorn's server, which logs at most once a minute that it cannot accept connections.

    By default asyncio tries again each second and logs hundreds of tracebacks each time.
    """

    async def startup(self, sockets: Any = None) -> None:
        """Start to listen."""
        asyncio.get_running_loop().set_exception_handler(_Failures())
        await super().startup(sockets)


class _Failures:
    """Exception handler of the server's event loop."""

    def __init__(self) -> None:
        self._logged = -_LOG_EVERY_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NO_RESOURCES and "socket" in context):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._logged >= _LOG_EVERY_S:
            self._logged = time.monotonic()
            _log.warning("the server cannot accept connections (%s) and tries again each second", error.strerror)


def trust(scope: MutableMapping[str, Any]) -> None:
    """Note that a request has shown a valid token, so that its connection stays."""
    connection = scope.get("state", {}).get("connection")
    if isinstance(connection, Connection):
        connection.conn.trusted = True
        if connection.flow.read_paused:
            connection.flow.resume_reading()
            connection.handle_events()


def http_settings() -> dict[str, Any]:
    """Arguments for `uvicorn.Config` that every server of this package needs."""
    return {
        "http": Connection,
        "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
        "ws": "none",
        "loop": "asyncio",
        "backlog": _BACKLOG,
        "proxy_headers": False,
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": IDLE_S,
    }


def _max_open() -> int:
    """Maximum connections of this process: half of its file limit, because other code opens files as well.

    asyncio accepts a whole backlog before any of these connections is set up.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(8, soft // 2 - _BACKLOG)
