"""The server that programs talk to: models' protocols on loopback, a token per episode, seats by the model's name.

In: requests of programs. Out: calls, to whoever plays the episode, in the order in which they arrive; its answers, as
responses. Waits for requests; a call waits for its answer until its episode ends, which every episode does.

The gateway asks no engine. A call becomes the turn of a seat, and who decides there is no matter of the program's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import queue
import resource
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar

from forge_agents.errors import NotReadyError, did_you_mean
from forge_agents.programs.calls import Call, RefusedError, Reply, Said, as_text, reply_to, shown
from forge_agents.programs.protocols import PROTOCOLS, THREAD_UNSUPPORTED, Protocol
from forge_agents.runtime.stalls import waiting
from forge_agents.runtime.threads import LoopThread

if TYPE_CHECKING:
    from uvicorn import Config, Server

MAX_BODY_BYTES = 8 << 20
"""Of one request: a conversation that fills a context of a million tokens."""
_BODY_S = 30.0
"""Seconds in which a request's body must have arrived."""
_MOST_WAITING = 1024
"""Calls of one episode that may wait for their turn."""
_MOST_WAITING_BYTES = 8 * MAX_BODY_BYTES
"""Of all requests of one episode that arrive or wait at one time."""
_MOST_REFUSALS = 8
"""Of one episode that are remembered."""
_MOST_CONNECTIONS = _MOST_WAITING
"""Of one command that is shut in; each holds a file of this process open. What is not shut in could open them here."""
_OPEN_FILES = 65535
"""That this process may hold, where it is let: each function that asks holds two, and 1,024 is the usual limit."""
_LOOK_S = 1.0
"""Seconds between two looks at whether the gateway is there."""
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""What Anthropic calls errors, by status; to OpenAI's clients it is any text."""



def error_body(refused: RefusedError) -> dict[str, Any]:
    """The body of a refusal, which OpenAI's clients and Anthropic's both read."""
    kind = _KINDS.get(refused.status, "invalid_request_error")
    error: dict[str, Any] = {"message": str(refused), "type": kind, "code": refused.code, "param": None}
    if refused.code == THREAD_UNSUPPORTED:
        error["details"] = {"error_code": refused.code}
    return {"type": "error", "error": error}


def invalid_key(*, given: bool) -> RefusedError:
    """The refusal of a request with a wrong key, or with none."""
    problem = "invalid API key" if given else "no API key"
    return RefusedError(
        f"{problem}: send the key that the program was given, or that forge-agents serve shows, as Authorization: "
        "Bearer KEY or as x-api-key; the key of an episode is invalid once the episode is over",
        status=401,
        code="invalid_api_key",
    )


T = TypeVar("T")
S = TypeVar("S", bound="Session")
_Scope: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Sender: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A call whose turn it is."""

    seat: str
    call: Call
    number: int
    """Of the call in its episode, from 0."""
    after: int | None
    """Which of the seat's decisions it goes on from, counted from 0; None: from none, it begins a conversation."""
    new: tuple[Said, ...]
    """What was said since; all of it where a conversation begins."""

    def conversation(self) -> dict[str, Any]:
        """What a player is told beside the observation, as ``infos[agent]["conversation"]``."""
        told = "" if self.after is not None else self.call.told
        wishes = {"max_tokens": self.call.max_tokens, "stop": list(self.call.stop), "asked": dict(self.call.asked)}
        return {
            "messages": as_text(self.new, told),
            "after": self.after,
            "only_results": all(message.role == "tool" for message in self.new),
            "tools": [tool.schema for tool in self.call.tools],
            **{name: value for name, value in wishes.items() if value},
        }

    def text(self) -> str:
        """The observation: one message as it is, several with their roles."""
        messages = self.conversation()["messages"]
        if len(messages) == 1:
            return str(messages[0]["content"])
        return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)


class _Waiting:
    """A call that nobody has answered yet."""

    def __init__(self, seat: str, call: Call, loop: asyncio.AbstractEventLoop) -> None:
        self.seat, self.loop = seat, loop
        self.call: Call | None = call
        """None once the program hung up: what it said, up to 8 MiB, need not wait for its turn."""
        self.answered: asyncio.Future[Reply] = loop.create_future()

    def end(self, reply: Reply | RefusedError) -> None:
        def tell() -> None:
            if not self.answered.done():
                if isinstance(reply, RefusedError):
                    self.answered.set_exception(reply)
                else:
                    self.answered.set_result(reply)

        with contextlib.suppress(RuntimeError):  # the gateway is closed
            self.loop.call_soon_threadsafe(tell)


class Session:
    """One episode's side of the gateway. One thread at a time takes and answers its calls.

    Made by `Gateway.open`; a context manager that closes it.
    """

    _where, _over = "no seat of this episode", "this episode is over"

    def __init__(self, gateway: Gateway, models: Mapping[str, str], *, token: str = "") -> None:
        self._gateway, self._models = gateway, dict(models)
        self.token = token or f"fa-{secrets.token_urlsafe(24)}"
        """What requests of this episode bring along, and no other's do."""
        self.url = gateway.url
        """Base of the API, ending in ``/v1``."""
        self.refusals: list[str] = []
        """What programs asked for in vain, oldest first; the last few are kept."""
        self.num_refused = 0
        """Of them all."""
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._open: set[_Waiting] = set()
        self._held_bytes = 0
        self._also: list[asyncio.Server] = []
        self._current: tuple[Question, _Waiting, bytes] | None = None
        self._histories: _Histories[int] = _Histories()
        self._decisions: Counter[str] = Counter()
        self._number, self._closed, self._lock = 0, False, threading.Lock()

    @property
    def port(self) -> int:
        """Of the gateway."""
        return self._gateway.port

    def listen(self, asking: socket.socket) -> None:
        """Answer at `asking`, too, until the session is closed: as in a network namespace whence no way leads here."""
        with self._lock:
            if not self._closed:
                if self._gateway._hosts:  # no foreign name resolves to an address that is written out
                    self._gateway._hosts.add(asking.getsockname()[0])
                self._also.append(self._gateway._serve(asking, self._refused))
                return
        asking.close()

    def tell(self, event: object) -> None:
        """Let `next` return `event`, after the calls that came before it."""
        self._events.put(event)

    def next(self, who: str, timeout_s: float) -> Question | Any:
        """The next call, or what `tell` was given; answer a call before you take another.

        Args:
            who: The program's name, for pictures of a stall.
            timeout_s: Seconds that the program may take.

        Raises:
            TimeoutError: Nothing came in time.
            NotReadyError: The session was closed meanwhile, or the gateway has ended.
        """
        deadline = time.monotonic() + timeout_s
        with waiting(who, "the next call of the program, or its end", timeout_s):
            while True:
                left, event = deadline - time.monotonic(), None
                with contextlib.suppress(queue.Empty):
                    event = self._events.get(timeout=max(0.0, min(left, _LOOK_S)))
                if event is _CLOSED:
                    raise NotReadyError(f"{who}: the episode was closed while its program ran")
                if not self._gateway.alive:  # whatever the program came to
                    raise NotReadyError(f"{who}: the gateway has ended, and its episodes with it; others get a new one")
                if event is None:
                    if left <= _LOOK_S:
                        raise TimeoutError(f"no call and no end of the program within {timeout_s:g} s")
                    continue
                if not isinstance(event, _Waiting):
                    return event
                if (call := event.call) is not None:
                    return self._question(event, call)

    def answer(self, action: str, about: Mapping[str, Any] | None = None) -> Reply:
        """Answer the call that `next` returned last.

        Args:
            action: What the seat says.
            about: What else is known of the answer; see `forge_agents.programs.calls.reply_to`.

        Returns:
            What the program is told.
        """
        assert self._current is not None, "there is no call to answer"
        question, asked, heard = self._current
        self._current = None
        reply = reply_to(question.call, question.number, action, about or {})
        self._histories.answered(heard, reply.said, self._decisions[question.seat])
        self._decisions[question.seat] += 1
        self._open.discard(asked)
        asked.end(reply)
        return reply

    def close(self, why: str = "") -> None:
        """Refuse what is not answered, and whatever comes with this token from now on. Twice is no error."""
        with self._lock:
            self._closed = True
        self._gateway._forget(self)
        with contextlib.suppress(RuntimeError):  # the gateway is closed
            while self._also:
                self._gateway._thread.call(self._also.pop().close)
        self._events.put(_CLOSED)
        for asked in list(self._open):
            asked.end(RefusedError(why or self._over, status=410, code="episode_over"))
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refused(self, why: str) -> None:
        self.num_refused += 1
        self.refusals.append(why)
        del self.refusals[:-_MOST_REFUSALS]

    def _ask(self, call: Call, loop: asyncio.AbstractEventLoop) -> _Waiting:
        """Queue a call, in the gateway's loop."""
        asked = self._waiting(call, loop)
        self._events.put(asked)
        return asked

    def _unknown(self, model: str) -> RefusedError:
        known = ", ".join(self._models)
        return RefusedError(
            f"{self._where} answers to the model {shown(model)}; known are {known}."
            f"{did_you_mean(model[:256], self._models)}",
            status=404,
            code="model_not_found",
        )

    def _waiting(self, call: Call, loop: asyncio.AbstractEventLoop) -> _Waiting:
        seat = self._models.get(call.model)
        if seat is None:
            raise self._unknown(call.model)
        if len(self._open) >= _MOST_WAITING:
            raise RefusedError(f"{len(self._open)} calls wait already", status=429, code="too_many_calls")
        asked = _Waiting(seat, call, loop)
        with self._lock:
            if self._closed:
                raise RefusedError(self._over, status=410, code="episode_over")
            self._open.add(asked)
        return asked

    @contextlib.contextmanager
    def _holding(self) -> Iterator[Callable[[int], None]]:
        """Counts the bytes of a request while it is here, in the gateway's loop."""
        mine = 0

        def hold(more: int) -> None:
            nonlocal mine
            mine += more
            self._held_bytes += more
            if self._held_bytes > _MOST_WAITING_BYTES:
                raise RefusedError(
                    f"calls of more than {_MOST_WAITING_BYTES} bytes wait already; send fewer at once",
                    status=429,
                    code="too_many_calls",
                )

        try:
            yield hold
        finally:
            self._held_bytes -= mine

    def _question(self, asked: _Waiting, call: Call) -> Question:
        after, new, heard = self._histories.place(asked.seat, call)
        question = Question(seat=asked.seat, call=call, number=self._number, after=after, new=new)
        self._number += 1
        self._current = question, asked, heard
        return question


_CLOSED = object()


class _Histories(Generic[T]):
    """Which answer a call goes on from: that at the end of the longest part of its messages that was said here.

    Messages are compared by what they say. Where two conversations read alike, as after a call that was sent twice,
    the first that nobody has gone on from yet is taken. Answers are known by whatever `answered` is given.
    """

    def __init__(self) -> None:
        self._ends: dict[bytes, list[T]] = {}
        self._continued: set[tuple[str, T]] = set()

    def place(self, seat: str, call: Call) -> tuple[T | None, tuple[Said, ...], bytes]:
        """The decision that a call goes on from, what is new since, and the mark of all that it says."""
        mark = hashlib.blake2b(f"{seat}\0{call.told}".encode()).digest()
        after: T | None = None
        since = 0
        for at, message in enumerate(call.said, 1):
            mark = hashlib.blake2b(mark + message.echo).digest()
            if message.role == "assistant" and (found := self._ends.get(mark)):
                fresh = (number for number in found if (seat, number) not in self._continued)
                after, since = next(fresh, found[-1]), at
        if after is not None:
            self._continued.add((seat, after))
        return after, call.said[since:], mark

    def answered(self, heard: bytes, said: Said, decision: T) -> bytes:
        """Note an answer to a call with this mark. Returns the answer's own."""
        mark = hashlib.blake2b(heard + said.echo).digest()
        self._ends.setdefault(mark, []).append(decision)
        return mark

    def forget(self, seat: str, mark: bytes, decision: T) -> None:
        """Let nobody go on from an answer any more."""
        self._continued.discard((seat, decision))
        left = [other for other in self._ends.pop(mark, ()) if other != decision]
        if left:
            self._ends[mark] = left


class Gateway:
    """A server on loopback that hands the calls of programs to whoever plays their episodes.

    Example:
        >>> with Gateway() as gateway, gateway.open({"gpt-4o": "agent"}) as session:
        ...     start_something(base_url=session.url, api_key=session.token)
        ...     question = session.next("something", timeout_s=60)
        ...     session.answer("Hello.")

    Args:
        port: To listen on; 0 takes any that is free.
        host: Address to listen on. Others than loopback let the network in.

    Raises:
        ValueError: The port is in use.
    """

    def __init__(self, *, port: int = 0, host: str = "127.0.0.1") -> None:
        import uvicorn

        from forge_agents.runtime.connections import http_settings

        _may_open(_OPEN_FILES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._hosts = set(_HOSTS) if host in ("::1", *_HOSTS) else set[str]()
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except (OSError, OverflowError) as cause:
            why = getattr(cause, "strerror", cause)
            raise ValueError(f"{host} port {port} cannot be used ({why}); give another, or none") from cause
        # inherited by connections, which asyncio leaves without it: the second part of an answer would wait for 40 ms
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"
        """Base of the API."""
        self._sessions: dict[bytes, Session] = {}
        self._thread = LoopThread("gateway")
        settings = uvicorn.Config(
            self._answer,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            date_header=False,
            timeout_graceful_shutdown=1,
            **http_settings(),
        )
        self._ended = asyncio.Event()
        self._server = _server()(settings, self._ended)
        self._serving = self._thread.begin(self._server.serve(sockets=[self._socket]))

    @property
    def alive(self) -> bool:
        """False after `close`, and in a process that was forked from its own."""
        return self._thread.alive

    def open(self, models: Mapping[str, str]) -> Session:
        """A new episode.

        Args:
            models: Who answers: seats by the names under which the program asks for them.
        """
        if not isinstance(models, Mapping):
            raise TypeError(f"models is {models!r:.200}; give seats by name, as in {{'gpt-4o': 'agent'}}")
        return self._admit(Session(self, models))

    def _admit(self, session: S) -> S:
        self._sessions[_mark(session.token)] = session
        return session

    def close(self) -> None:
        """End the episodes and the server. Twice is no error."""
        for session in list(self._sessions.values()):
            session.close("the gateway is closed")
        if self._thread.alive:
            self._thread.call(self._ended.set)
            with contextlib.suppress(TimeoutError):
                self._serving.result(5)
            self._thread.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _serve(self, asking: socket.socket, refused: Callable[[str], None]) -> asyncio.Server:
        """Answer at another socket; `refused` is told of connections that are too many."""
        from uvicorn.server import ServerState

        from forge_agents.runtime.connections import Connection

        theirs = ServerState()

        def connection() -> asyncio.Protocol:
            if len(theirs.connections) < _MOST_CONNECTIONS:
                return Connection(config=self._server.config, server_state=theirs, app_state={})
            refused(f"{_MOST_CONNECTIONS} connections are open already; close some")
            return _HangsUp()

        async def serve() -> asyncio.Server:
            return await asyncio.get_running_loop().create_server(connection, sock=asking)

        return self._thread.begin(serve()).result(_BODY_S)

    def _forget(self, session: Session) -> None:
        self._sessions.pop(_mark(session.token), None)

    # ---- the server

    async def _answer(self, scope: _Scope, receive: _Receive, send: _Sender) -> None:
        if scope["type"] != "http":
            return
        session = None
        try:
            path, method = scope["path"].rstrip("/"), scope["method"]
            if (method, path) == ("GET", "/health"):
                await _send_json(send, 200, {})
                return
            session = self._session(scope)
            if (method, path) == ("GET", "/v1/models"):
                await _send_json(send, 200, _models(session._models, scope))
            elif method == "GET" and (name := path.removeprefix("/v1/models/")) in session._models:
                await _send_json(send, 200, _model(name, scope))
            elif method == "GET" and path.startswith("/v1/models/"):
                raise session._unknown(name)
            elif method == "POST" and path in PROTOCOLS:
                await _converse(session, PROTOCOLS[path], receive, send)
            else:
                raise RefusedError(f"there is no {method} {path}; POST to {', '.join(PROTOCOLS)}", status=404)
        except Exception as error:  # noqa: BLE001  # the boundary: the program hears it, and the episode remembers it
            refused = error if isinstance(error, RefusedError) else RefusedError(f"failed: {shown(error)}", status=500)
            if session is not None and refused.status != 410:
                session._refused(str(refused))
            with contextlib.suppress(OSError):
                await _send_json(send, refused.status, error_body(refused))

    def _session(self, scope: _Scope) -> Session:
        from forge_agents.runtime.connections import trust

        given: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            given.setdefault(name, []).append(value)
        hosts = given.get(b"host", [])
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        # a foreign name that resolves to loopback
        if self._hosts and not {host, host.rpartition(":")[0]} & self._hosts:
            raise RefusedError("this server answers on loopback names only", status=403, code="forbidden")
        keys = [_key(value) for value in given.get(b"authorization", [])]
        keys += given.get(b"x-api-key", [])
        session = self._sessions.get(_mark(keys[0].decode("latin-1"))) if len(set(keys)) == 1 else None
        if session is None:
            raise invalid_key(given=bool(keys))
        trust(scope)
        return session


@functools.cache
def _server() -> Callable[[Any, asyncio.Event], Server]:
    """A server that is told to end; uvicorn's looks ten times a second whether it should."""
    from forge_agents.runtime.connections import Server

    class Told(Server):
        def __init__(self, config: Config, ended: asyncio.Event) -> None:
            super().__init__(config)
            self._ended = ended

        async def main_loop(self) -> None:
            await self._ended.wait()

    return Told


class _HangsUp(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _may_open(files: int) -> None:
    """Raise this process' limit of open files to `files`, or as near as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files if hard == resource.RLIM_INFINITY else min(files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _key(authorization: bytes) -> bytes:
    """The token in the value of a header, behind the word Bearer in whichever letters."""
    scheme, _, token = authorization.partition(b" ")
    return (token if scheme.lower() == b"bearer" else authorization).strip()


def _mark(token: str) -> bytes:
    """What is looked up: how long that takes says nothing about tokens."""
    return hashlib.sha256(token.encode()).digest()


async def _body(receive: _Receive, hold: Callable[[int], None]) -> Any:
    """The JSON of a request; `hold` is told of each part's bytes."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RefusedError("the request ended early")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                hold(len(parts[-1]))
                if size > MAX_BODY_BYTES:
                    raise RefusedError(
                        f"the body is larger than {MAX_BODY_BYTES} bytes; send a shorter conversation",
                        status=413,
                        code="context_length_exceeded",
                    )
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise RefusedError(f"the body did not arrive within {_BODY_S:g} s", status=408) from None
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as cause:
        raise RefusedError(f"the body is no JSON ({cause})") from None


async def _converse(session: Session, protocol: Protocol, receive: _Receive, send: _Sender) -> None:
    """A call: the answer is sent when it is whole, in one piece or as a stream."""
    with session._holding() as hold:
        call = protocol.read(await _body(receive, hold))
        asked = session._ask(call, asyncio.get_running_loop())
        left = asyncio.ensure_future(receive())  # comes when the program hangs up
        both: set[asyncio.Future[Any]] = {asked.answered, left}
        try:
            await asyncio.wait(both, return_when="FIRST_COMPLETED")
            if not asked.answered.done():
                asked.call = None
                session._open.discard(asked)
                asked.answered.cancel()
                return
            reply = asked.answered.result()
        finally:
            left.cancel()
    created = int(time.time())
    if not call.stream:
        await _send_json(send, 200, protocol.written(call, reply, created))
        return
    lines = []
    for name, data in protocol.events(call, reply, created):
        lines += [f"event: {name}"] if name else []
        lines += [f"data: {data if isinstance(data, str) else json.dumps(data)}", ""]
    await _send(send, 200, b"text/event-stream; charset=utf-8", "\n".join([*lines, ""]).encode())


def _is_anthropics(scope: _Scope) -> bool:
    """Whether the client is one of Anthropic's, whose protocol has the same paths for models and other answers."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def _models(names: Mapping[str, str], scope: _Scope) -> dict[str, Any]:
    data = [_model(name, scope) for name in names]
    if _is_anthropics(scope):
        return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return {"object": "list", "data": data}


def _model(name: str, scope: _Scope) -> dict[str, Any]:
    if _is_anthropics(scope):
        known = {"display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
        return {"id": name, "type": "model", **known}
    return {"id": name, "object": "model", "created": 0, "owned_by": "seat"}


async def _send_json(send: _Sender, status: int, body: Mapping[str, Any]) -> None:
    await _send(send, status, b"application/json", json.dumps(body).encode())


async def _send(send: _Sender, status: int, kind: bytes, text: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(text)).encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


_lock = threading.Lock()
_shared: list[Gateway] = []


def gateway() -> Gateway:
    """The gateway of this process, started when it is first needed; it ends with the process."""
    with _lock:
        if not _shared or not _shared[-1].alive:
            for ended in _shared:
                ended._socket.close()  # else programs would wait there
            _shared[:] = [Gateway()]
        return _shared[-1]
