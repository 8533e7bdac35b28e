"""HTTP server for the model calls of programs: one token per episode, one agent per model name.

The gateway runs no model. A call becomes a turn of an agent, and the agent's policy answers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias, TypeVar

from forge_agents.errors import NotReadyError, did_you_mean
from forge_agents.programs import http
from forge_agents.programs.branches import BranchIndex, Key
from forge_agents.programs.calls import (
    ChatMessage,
    ChatRequest,
    ChatResponse,
    RefusedError,
    abbreviate,
    instructed,
    make_response,
)
from forge_agents.programs.http import BODY_TIMEOUT_S, LOOPBACK_HOSTS, MAX_BODY_BYTES, Receive, Scope, Send
from forge_agents.programs.protocols import PROTOCOLS, Protocol
from forge_agents.runtime.processes import raise_file_limit
from forge_agents.runtime.stalls import waiting
from forge_agents.runtime.threads import LoopThread, in_thread

_MAX_PENDING = 1024
"""Maximum number of unanswered calls of one episode."""
_MAX_PENDING_BYTES = 8 * MAX_BODY_BYTES
"""Maximum size of all requests of one episode that are being read or wait."""
_ALWAYS_ALLOWED = MAX_BODY_BYTES // 32
"""Number of characters below which the length of a call's text is not measured."""
_MAX_SHORT_BYTES = 1 << 14
"""Size of requests that are parsed in less than 5 ms."""
_LONG_S = 0.05
"""Time of parsing after which other calls get as much time."""
_MAX_ERRORS = 8
"""Number of error messages that an episode keeps."""
_POLL_S = 1.0
"""Seconds between checks that the gateway is alive."""

S = TypeVar("S", bound="Session")
CallKey: TypeAlias = tuple[str, int, bytes]
"""See `ModelCall.key`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelCall:
    """A program's call, to be answered by an agent."""

    agent: str
    request: ChatRequest
    number: int
    """Index of the call in its episode, from 0."""
    after: int | None
    """The agent's decision that the call continues, counted from 0. None: the call starts a new conversation."""
    new_messages: tuple[ChatMessage, ...]
    """Messages after that decision. All messages for a new conversation."""
    session: int = 0
    """Number of the call's session among those of the agent. See `Session.sessions`."""

    @property
    def key(self) -> CallKey:
        """The agent, the number of its session, whose name may be random, and the digest of all messages."""
        return self.agent, self.session, self.request.digests[-1][1]

    def conversation(self) -> dict[str, Any]:
        """Return ``infos[agent]["conversation"]`` for the player."""
        instructions = "" if self.after is not None else self.request.instructions
        request, num_old = self.request, len(self.request.messages) - len(self.new_messages)
        texts = [{"role": role, "content": text} for end, role, text in request.texts if end > num_old]
        options = {"max_tokens": request.max_tokens, "stop": list(request.stop), "asked": dict(request.sampling)}
        return {
            "messages": instructed(texts, instructions),
            "after": self.after,
            "session": self.session,
            "only_results": all(message.role == "tool" for message in self.new_messages),
            "tools": [tool.schema for tool in request.tools],
            **{name: value for name, value in options.items() if value},
        }

    def text(self) -> str:
        """Return the observation: the text of a single message, or several messages with their roles."""
        messages = self.conversation()["messages"]
        if len(messages) == 1:
            return str(messages[0]["content"])
        return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)


def _read(protocol: Protocol, body: bytes, session: str) -> ChatRequest:
    request = replace(protocol.read(http.parse_body(body)), session=session)
    _check_length(request)
    _ = request.texts, request.digests
    return request


def _check_length(request: ChatRequest) -> None:
    """Reject a request whose text is longer than an observation may be. Descriptions of tools may be longer than JSON.

    The environment would fail otherwise, and an episode that its own program can make fail is never punished.
    """
    arguments = sum(len(call.arguments) for message in request.messages for call in message.calls)
    if len(request.instructions) + arguments + sum(len(m.text) for m in request.messages) < _ALWAYS_ALLOWED:
        return
    call = ModelCall(agent="", request=request, number=0, after=None, new_messages=request.messages)
    if (length := len(call.text())) > MAX_BODY_BYTES:
        raise RefusedError(f"the conversation and the tools have {length} characters of text", status=413)


class _PendingCall:
    def __init__(self, agent: str, request: ChatRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.agent, self.loop = agent, loop
        self.request: ChatRequest | None = request
        """None after the program disconnected, to free up to 8 MiB before the call's turn."""
        self.response: asyncio.Future[ChatResponse] = loop.create_future()

    def resolve(self, result: ChatResponse | RefusedError) -> None:
        """Set the response or an error, from any thread."""
        response = self.response

        def set_result() -> None:
            if not response.done():
                response.set_exception(result) if isinstance(result, RefusedError) else response.set_result(result)

        with contextlib.suppress(RuntimeError):  # the gateway is closed
            self.loop.call_soon_threadsafe(set_result)


class Session:
    """Calls of an episode. At most one thread at a time takes and answers them. Created by `Gateway.open`."""

    _scope, _closed_message = "this episode", "this episode is over"

    def __init__(self, gateway: Gateway, models: Mapping[str, str], *, token: str = "") -> None:
        self._gateway, self.models = gateway, dict(models)
        """Agents by model name."""
        self.token = token or f"fa-{secrets.token_urlsafe(24)}"
        """API key of this episode."""
        self.url = gateway.url
        """Base URL of the API, ending in ``/v1``."""
        self.errors: list[str] = []
        """Messages of requests that were rejected since the last answer, oldest first. Only the last few are kept."""
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: set[_PendingCall] = set()
        self._pending_bytes = 0
        self._servers: list[Callable[[], None]] = []
        self._current: tuple[ModelCall, _PendingCall, Key] | None = None
        self._branches: BranchIndex[int] = BranchIndex()
        self._num_decisions: Counter[str] = Counter()
        self.sessions: dict[str, dict[str, int]] = {}
        """By agent: numbers of the sessions that its calls named, in the order of their first calls."""
        self._num_calls, self._closed, self._lock = 0, False, threading.Lock()
        self._parsing = asyncio.Lock()

    @property
    def port(self) -> int:
        """Port of the gateway."""
        return self._gateway.port

    @property
    def closed(self) -> bool:
        """Whether all further calls are rejected."""
        return self._closed

    def listen(self, listener: socket.socket) -> None:
        """Serve at another socket until the session is closed, e.g. in a network namespace without a route here."""
        with self._lock:
            if not self._closed:
                self._servers.append(self._gateway.serve(listener))
                return
        listener.close()

    async def parse(self, protocol: Protocol, body: bytes, session: str) -> ChatRequest:
        """Read a request. Long ones take turns, by episodes, in a thread, and a turn is followed by as long a break.

        All work whose time grows with the conversation is done here.
        """
        if len(body) <= _MAX_SHORT_BYTES:
            return _read(protocol, body, session)
        async with self._parsing, self._gateway.parsing:
            start = time.perf_counter()
            try:
                return await in_thread(_read, protocol, body, session, name="request")
            finally:
                if (seconds := time.perf_counter() - start) > _LONG_S:
                    await asyncio.sleep(seconds)

    def post(self, event: object) -> None:
        """Make `next` return `event` after the calls that arrived before."""
        self._events.put(event)

    def next(self, name: str, timeout_s: float) -> ModelCall | Any:
        """Return the next call, or the next event of `post`. Answer a call before you take another.

        Args:
            name: Name of the program for reports of stalls.
            timeout_s: Time limit of the program in seconds.

        Raises:
            TimeoutError: No call or event arrived in time.
            NotReadyError: The session was closed, or the gateway has ended.
        """
        deadline = time.monotonic() + timeout_s
        with waiting(name, "the next call of the program, or its end", timeout_s):
            while True:
                remaining, event = deadline - time.monotonic(), None
                with contextlib.suppress(queue.Empty):
                    event = self._events.get(timeout=max(0.0, min(remaining, _POLL_S)))
                if event is _CLOSED:
                    raise NotReadyError(f"{name}: the episode was closed while its program ran")
                if not self._gateway.alive:  # also if there is an event
                    raise NotReadyError(f"{name}: the gateway has ended with its episodes. Others get a new one")
                if event is None:
                    if remaining <= _POLL_S:
                        raise TimeoutError(f"no call and no end of the program within {timeout_s:g} s")
                    continue
                if not isinstance(event, _PendingCall):
                    return event
                if (request := event.request) is not None:
                    return self._start_call(event, request)

    def answer(self, action: str, details: Mapping[str, Any] | None = None) -> ChatResponse:
        """Answer the call that `next` returned last, and return the response that the program receives.

        `details` are facts about the answer. See `forge_agents.programs.calls.make_response`.
        """
        assert self._current is not None, "there is no call to answer"
        call, pending, key = self._current
        self._current = None
        response = make_response(call.request, call.number, action, details or {})
        self._branches.add(key, response.message, self._num_decisions[call.agent])
        self._num_decisions[call.agent] += 1
        self._pending.discard(pending)
        pending.resolve(response)
        return response

    def close(self, reason: str = "") -> None:
        """Reject unanswered calls and all later requests with this token. May be called twice."""
        with self._lock:
            self._closed = True
        self._gateway.remove(self)
        self._events.put(_CLOSED)
        for pending in list(self._pending):
            pending.resolve(RefusedError(reason or self._closed_message, status=410, code="episode_over"))
        self._pending.clear()
        with contextlib.suppress(RuntimeError):  # the gateway is closed
            while self._servers:
                self._gateway._thread.call(self._servers.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def record_error(self, message: str) -> None:
        """Note a rejected request."""
        self.errors.append(message)
        del self.errors[:-_MAX_ERRORS]

    def unknown_model(self, model: str) -> RefusedError:
        """Return the error for an unknown model name."""
        return RefusedError(
            f"{self._scope} has no model {abbreviate(model)}. Send one of {', '.join(self.models)}."
            f"{did_you_mean(model[:256], self.models)}",
            status=404,
            code="model_not_found",
        )

    def submit(self, request: ChatRequest, loop: asyncio.AbstractEventLoop) -> _PendingCall:
        """Queue a call. Runs in the gateway's loop."""
        pending = self._add_pending(request, loop)
        self._events.put(pending)
        return pending

    def discard(self, pending: _PendingCall) -> None:
        """Drop a call whose program disconnected. Runs in the gateway's loop."""
        pending.request = None
        self._pending.discard(pending)
        pending.response.cancel()

    def _add_pending(self, request: ChatRequest, loop: asyncio.AbstractEventLoop) -> _PendingCall:
        agent = self.models.get(request.model)
        if agent is None:
            raise self.unknown_model(request.model)
        if len(self._pending) >= _MAX_PENDING:
            raise RefusedError(f"{len(self._pending)} calls wait already", status=429, code="too_many_calls")
        pending = _PendingCall(agent, request, loop)
        with self._lock:
            if self._closed:
                raise RefusedError(self._closed_message, status=410, code="episode_over")
            self._pending.add(pending)
        return pending

    @contextlib.contextmanager
    def count_bytes(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a request while it is read and waits. Runs in the gateway's loop."""
        counted = 0

        def add(size: int) -> None:
            nonlocal counted
            counted += size
            self._pending_bytes += size
            if self._pending_bytes > _MAX_PENDING_BYTES:
                raise RefusedError(
                    f"calls of more than {_MAX_PENDING_BYTES} bytes wait already. Send fewer at once",
                    status=429,
                    code="too_many_calls",
                )

        try:
            yield add
        finally:
            self._pending_bytes -= counted

    def _start_call(self, pending: _PendingCall, request: ChatRequest) -> ModelCall:
        after, new_messages, key = self._branches.match(pending.agent, request)
        sessions = self.sessions.setdefault(pending.agent, {})
        call = ModelCall(
            agent=pending.agent,
            request=request,
            number=self._num_calls,
            after=after,
            new_messages=new_messages,
            session=sessions.setdefault(request.session, len(sessions)),
        )
        self._num_calls += 1
        self._current = call, pending, key
        return call


_CLOSED = object()


class Gateway:
    """A loopback HTTP server that passes the calls of programs to whoever plays their episodes.

    Example:
        >>> with Gateway() as gateway, gateway.open({"gpt-4o": "agent"}) as session:
        ...     start_something(base_url=session.url, api_key=session.token)
        ...     call = session.next("something", timeout_s=60)
        ...     session.answer("Hello.")

    Args:
        port: Port to listen on. 0 selects a free one.
        host: Address to listen on. Addresses other than loopback are reachable from the network.

    Raises:
        ValueError: The port is in use.
    """

    def __init__(self, *, port: int = 0, host: str = "127.0.0.1") -> None:
        import uvicorn

        from forge_agents.runtime.connections import Server, http_settings

        raise_file_limit()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._hosts = set(LOOPBACK_HOSTS) if host in ("::1", *LOOPBACK_HOSTS) else set[str]()
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except (OSError, OverflowError) as cause:
            reason = getattr(cause, "strerror", cause)
            raise ValueError(f"{host} port {port} cannot be used ({reason}). Give another, or none") from cause
        # inherited by connections; asyncio does not set it, and the second part of an answer would wait for 40 ms
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"
        """Base URL of the API."""
        self._sessions: dict[bytes, Session] = {}
        self.parsing = asyncio.Lock()
        """Held while a long request is parsed."""
        self._thread = LoopThread("gateway")
        settings = uvicorn.Config(
            self._handle,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            date_header=False,
            timeout_graceful_shutdown=1,
            **http_settings(),
        )
        self._server = Server(settings)
        self._serving = self._thread.begin(self._server.serve(sockets=[self._socket]))

    @property
    def alive(self) -> bool:
        """False after `close`, and in a forked process."""
        return self._thread.alive

    def open(self, models: Mapping[str, str]) -> Session:
        """Start the session of an episode. `models` are agents by the model names that the program uses."""
        if not isinstance(models, Mapping):
            raise TypeError(f"models is {models!r:.200}. Give agents by model name, as in {{'gpt-4o': 'agent'}}")
        return self.add(Session(self, models))

    def add(self, session: S) -> S:
        """Accept requests with the session's token."""
        self._sessions[http.key_digest(session.token)] = session
        return session

    def remove(self, session: Session) -> None:
        """Reject requests with the session's token."""
        self._sessions.pop(http.key_digest(session.token), None)

    def close(self) -> None:
        """Close all sessions and stop the server. May be called twice."""
        for session in list(self._sessions.values()):
            session.close("the gateway is closed")
        if self._thread.alive:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                self._serving.result(5)
            self._thread.close()
        self._socket.close()  # otherwise programs wait on it after the server has ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def serve(self, listener: socket.socket) -> Callable[[], None]:
        """Serve at another socket. Returns a function for the server's thread that ends this and closes connections."""
        from uvicorn.server import ServerState

        from forge_agents.runtime.connections import Connection

        if self._hosts:  # no foreign name resolves to a literal address
            self._hosts.add(listener.getsockname()[0])
        state = ServerState()

        def connection() -> Connection:
            return Connection(config=self._server.config, server_state=state, app_state={})

        async def start() -> asyncio.Server:
            return await asyncio.get_running_loop().create_server(connection, sock=listener)

        server = self._thread.begin(start()).result(BODY_TIMEOUT_S)

        def end() -> None:
            server.close()
            for each in list(state.connections):
                if not each.transport.is_closing():
                    each.shutdown()

        return end

    # ---- requests

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        session = None
        try:
            path, method = scope["path"].rstrip("/"), scope["method"]
            if (method, path) == ("GET", "/health"):
                await http.send_json(send, 200, {})
                return
            session = self._authorize(scope)
            if (method, path) == ("GET", "/v1/models"):
                await http.send_json(send, 200, http.models_body(session.models, scope))
            elif method == "GET" and (name := path.removeprefix("/v1/models/")) in session.models:
                await http.send_json(send, 200, http.model_body(name, scope))
            elif method == "GET" and path.startswith("/v1/models/"):
                raise session.unknown_model(name)
            elif method == "POST" and path in PROTOCOLS:
                await _handle_call(session, PROTOCOLS[path], scope, receive, send)
            else:
                request = abbreviate(f"{method} {path}")
                raise RefusedError(f"there is no {request}; POST to {', '.join(PROTOCOLS)}", status=404)
        except Exception as cause:  # noqa: BLE001  # the boundary: the program gets the error, and the episode notes it
            failure = RefusedError(f"failed: {abbreviate(cause)}", status=500)
            error = cause if isinstance(cause, RefusedError) else failure
            if session is not None and error.status != 410:
                session.record_error(str(error))
            with contextlib.suppress(OSError):
                await http.send_json(send, error.status, http.error_body(error))

    def _authorize(self, scope: Scope) -> Session:
        """Return the session of a request's key. Requests with two different keys or a foreign host are rejected."""
        from forge_agents.runtime.connections import trust

        hosts = http.header_values(scope, b"host")
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        # DNS rebinding: a web page's own name may resolve to loopback
        if self._hosts and not {host, host.rpartition(":")[0]} & self._hosts:
            raise RefusedError("this server answers on loopback names only", status=403, code="forbidden")
        keys = http.read_keys(scope)
        session = self._sessions.get(http.key_digest(keys[0].decode("latin-1"))) if len(set(keys)) == 1 else None
        if session is None:
            raise http.invalid_key(given=bool(keys))
        trust(scope)
        return session


async def _handle_call(session: Session, protocol: Protocol, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a call. The response is sent as a whole, as JSON or as a stream."""
    with session.count_bytes() as count:
        body = await http.read_body(receive, count)
        request = await session.parse(protocol, body, http.session_id(scope))
        pending = session.submit(request, asyncio.get_running_loop())
        disconnected = asyncio.ensure_future(receive())
        futures: set[asyncio.Future[Any]] = {pending.response, disconnected}
        try:
            await asyncio.wait(futures, return_when="FIRST_COMPLETED")
            if not pending.response.done():
                session.discard(pending)
                return
            response = pending.response.result()
        finally:
            disconnected.cancel()
    created = int(time.time())
    if not request.stream:
        await http.send_json(send, 200, protocol.write(request, response, created))
        return
    lines = []
    for name, data in protocol.events(request, response, created):
        lines += [f"event: {name}"] if name else []
        lines += [f"data: {data if isinstance(data, str) else json.dumps(data)}", ""]
    await http.send_text(send, 200, b"text/event-stream; charset=utf-8", "\n".join([*lines, ""]).encode())


_lock = threading.Lock()
_shared: list[Gateway] = []


def gateway() -> Gateway:
    """Return the gateway of this process. The gateway starts on first use and ends with the process."""
    with _lock:
        if not _shared or not _shared[-1].alive:
            for old in _shared:
                old._socket.close()
            _shared[:] = [Gateway()]
        return _shared[-1]
