"""Tools of an MCP server for agents.

The connection runs in its own thread with an event loop, so that tools can be called like any function.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from forge_agents.display import visible
from forge_agents.envs.env import writable
from forge_agents.errors import ForgeError, MissingExtraError
from forge_agents.http_body import ENCODINGS, bounded_json, limit_cookies, read_as_utf8, read_bounded
from forge_agents.runtime.peers import check_connections
from forge_agents.runtime.threads import LoopThread
from forge_agents.tools import Tool
from forge_agents.tools.definition import repeated_name

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

T = TypeVar("T")
_log = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 10.0
"""Time limit for a server to stop."""
_PING_S = 1.0
_MAX_TOOLS = 4096
"""Maximum number of tools of a server. Each is described in the system prompt."""
_MAX_TOOL_BYTES = 8 << 20
"""Maximum size of all descriptions of a server's tools together."""
_MAX_VALUES = 100_000
"""Maximum number of values of an answer that the library checks. It takes up to 30 us and 6 KB for each, and holds the
interpreter's lock meanwhile."""
_FREE_FORM = frozenset(("structuredContent", "inputSchema", "outputSchema", "_meta"))
"""Keys of an answer whose values may be anything, so that the library does not check them."""
_INVALID_ANSWER = -32000
"""Code of JSON-RPC for an error of the client."""
_SESSION = "mcp-session-id"
"""Header of requests after the first one to a server that has sessions."""
_RECONNECT_S = 10.0
"""Seconds after a failed connection in which calls do not try again."""


class McpServerError(ForgeError, ConnectionError):
    """An MCP server cannot be reached or violates the protocol."""


@contextlib.contextmanager
def mcp_tools(
    server: str | Sequence[str],
    *,
    connect_s: float = 30.0,
    call_s: float = 30.0,
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Iterator[list[Tool]]:
    """Connect to an MCP server for the duration of a ``with`` block.

    A call that fails, exceeds its time limit or finds the server closed results in an error text for the model. After
    a connection to an address was lost, the next call opens a new one. A command is not started again. A result
    contains the texts, also of embedded resources, and the structured content as JSON if no text contains it. Images,
    sounds, binary resources and links are only named. Deep copies of an environment share the connection. Errors name
    the program and its script, or the host, and contain nothing else of the command or address, `env` and `headers`,
    because these may contain tokens and errors become prompts and stored episodes.

    Args:
        server: The address of a server (streamable HTTP), such as ``"http://127.0.0.1:8000/mcp"``, or the command that
            starts one (stdio), such as ``["python", "server.py"]``. A command runs with your rights: name only servers
            that you trust.
        connect_s: Time limit in seconds to start, connect and list the tools.
        call_s: Time limit of a call in seconds.
        env: Environment variables of a command, in addition to the few that it inherits (such as PATH).
        headers: Headers of every request to an address, such as a token.

    Raises:
        McpServerError: The server did not start, connect or answer in time. The message names its program or host.
        MissingExtraError: The package ``mcp`` is missing.
    """
    if not server or not server[0]:
        raise ValueError("server is empty. Pass an address or a command")
    try:
        import mcp  # noqa: F401  # so that a missing package is reported here, not in the thread
    except ImportError as error:
        raise MissingExtraError("MCP tools need the package mcp. Run: pip install 'forge-agents-rl[mcp]'") from error
    connection = _Connection(_public_name(server), _secret_texts(server, {**(env or {}), **(headers or {})}))
    try:
        again = isinstance(server, str)
        yield connection.open(lambda lost: _client(server, env, headers, lost), connect_s, call_s, again=again)
    finally:
        connection.close()


@contextlib.asynccontextmanager
async def _client(
    server: str | Sequence[str],
    env: Mapping[str, str] | None,
    headers: Mapping[str, str] | None,
    lost: Callable[[], None],
) -> AsyncIterator[Client]:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async with contextlib.AsyncExitStack() as stack:
        if isinstance(server, str):
            http = await stack.enter_async_context(create_mcp_http_client(headers=dict(headers or {})))
            hooks: dict[str, list[Any]] = {
                "request": [check_connections] if headers else [],
                "response": [partial(_read_answer, lost=lost)],
            }
            http.event_hooks, http.headers["accept-encoding"] = hooks, ENCODINGS
            limit_cookies(http)
            transport: Any = streamable_http_client(server, http_client=http)
        else:
            command, *args = server
            # an error in one line of the output would end the reader, and all later calls would wait for their limit
            parameters = StdioServerParameters(
                command=command, args=args, env=dict(env or {}), encoding_error_handler="replace"
            )
            transport = stdio_client(parameters)
        yield await stack.enter_async_context(Client(_only_answers(transport, lost)))


@contextlib.asynccontextmanager
async def _only_answers(transport: Any, lost: Callable[[], None]) -> AsyncIterator[tuple[Any, Any]]:
    async with transport as (messages, to_server):
        yield _Answers(messages, lost), to_server


class _Answers:
    """A stream of a server's messages without those that tools do not need, and with at most one ping per `_PING_S`.

    The library starts a task for each, which stays in memory until the server accepts the answer. Answers of too many
    values become errors. `lost` is called at the end of the stream.
    """

    def __init__(self, messages: Any, lost: Callable[[], None]) -> None:
        self._messages, self._lost, self._last_ping = messages, lost, -math.inf

    def __getattr__(self, name: str) -> Any:
        return getattr(self._messages, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                message = await self._messages.__anext__()
            except BaseException:
                self._lost()
                raise
            if isinstance(message, Exception):
                message = _read_again(message)
            method = getattr(getattr(message, "message", None), "method", None)
            if method is None:  # an answer, or an exception of the library
                return _bounded(message)
            if method == "ping" and time.monotonic() - self._last_ping >= _PING_S:
                self._last_ping = time.monotonic()
                return message

    async def __aenter__(self) -> Self:
        await self._messages.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._messages.__aexit__(*exc)


def _read_again(error: Exception) -> Any:
    """Return the message that the library refused because of half a surrogate pair, and otherwise the error.

    Servers in JavaScript write such a half where they cut a text. Without an answer, the call would wait for its limit.
    """
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        with contextlib.suppress(ValueError, RecursionError):
            line = error.errors(include_url=False)[0]["input"]
            text = writable(json.dumps(bounded_json(line), ensure_ascii=False))
            return SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
    return error


def _bounded(message: Any) -> Any:
    """Return a message, or an error in its place if it has more than `_MAX_VALUES` values outside of `_FREE_FORM`."""
    waiting, count = [getattr(getattr(message, "message", None), "result", None)], 0
    while waiting and count <= _MAX_VALUES:
        value = waiting.pop()
        if isinstance(value, dict):
            value = [part for key, part in value.items() if key not in _FREE_FORM]
        if isinstance(value, list):
            count += len(value)
            waiting += value
    return _error_answer(message, f"the answer has more than {_MAX_VALUES} values") if waiting else message


def _error_answer(message: Any, reason: str) -> Any:
    from mcp.types import ErrorData, JSONRPCError

    error = ErrorData(code=_INVALID_ANSWER, message=reason)
    return replace(message, message=JSONRPCError(jsonrpc="2.0", id=message.message.id, error=error))


async def _read_answer(response: Any, *, lost: Callable[[], None]) -> None:
    """Read a response with a limit. The library limits the events of streams, but not other responses.

    A response that cannot be read becomes an error of its call. The library would close the connection of all calls.
    `lost` is called if the server has forgotten the session, as after a restart: it would refuse all further calls.
    """
    read_as_utf8(response)
    if response.status_code == 404 and response.request.method == "POST" and _SESSION in response.request.headers:
        lost()
    if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        return
    try:
        await read_bounded(response)
    except Exception as error:  # noqa: BLE001  # of the network, or of what the server sent
        await response.aclose()
        answer = {"jsonrpc": "2.0", "id": _request_id(response.request)}
        response._content = json.dumps({**answer, "error": {"code": _INVALID_ANSWER, "message": str(error)}}).encode()
        response.headers["content-type"] = "application/json"


def _request_id(request: Any) -> Any:
    """Return the id of the message in a request. None if there is none."""
    try:
        return json.loads(request.content).get("id")
    except (ValueError, AttributeError):
        return None


class _Connection:
    """A client in a thread. One task opens and closes the client, as its cancel scopes require."""

    def __init__(self, name: str, secrets: Sequence[str]) -> None:
        self._name, self._secrets = name, secrets
        self._thread = LoopThread(f"mcp {name}")
        self._lock = threading.Lock()
        self._connect: Callable[[], list[Any]] | None = None
        """Opens the connection again. None if calls do not."""
        self._next_try = 0.0
        self._client: Client | None = None
        self._ended = asyncio.Event()
        """Set when the connection of `_client` was lost or is to end."""
        self._serving: Future[None] | None = None

    def open(
        self, connect: Callable[[Callable[[], None]], Any], connect_s: float, call_s: float, *, again: bool = False
    ) -> list[Tool]:
        """Connect and return the tools. With `again`, a call after the connection was lost opens a new one."""
        definitions = self._begin(connect, connect_s)
        if name := repeated_name(definitions):
            raise self._error(f"it lists several tools that are called {name!r}, so a call cannot choose among them")
        if again:
            self._connect = lambda: self._begin(connect, connect_s)
        return [self._tool(tool, call_s) for tool in definitions]

    def _begin(self, connect: Callable[[Callable[[], None]], Any], connect_s: float) -> list[Any]:
        ready: Future[tuple[Client, list[Any]]] = Future()
        self._client, self._ended = None, (ended := asyncio.Event())
        self._serving = self._thread.begin(self._serve(lambda: connect(ended.set), ready, connect_s, ended))
        try:
            # the inner time limit comes first, unless a client blocks
            self._client, definitions = ready.result(connect_s + _STOP_TIMEOUT_S)
        except TimeoutError:
            raise self._error(f"gave no answer within {connect_s:g} s and blocks") from None
        return definitions

    async def _serve(
        self,
        connect: Callable[[], Any],
        ready: Future[tuple[Client, list[Any]]],
        connect_s: float,
        ended: asyncio.Event,
    ) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(connect_s):
                    client = await stack.enter_async_context(connect())
                    client.session.validate_tool_result = _accept
                    ready.set_result((client, await _all_tools(client)))
                await ended.wait()
        except BaseException as error:  # noqa: BLE001  # carried to the thread that connects
            if not ready.done():
                late = isinstance(_first(error), TimeoutError)
                reason = f"gave no answer within {connect_s:g} s" if late else self._describe(error)
                # without its cause: a traceback would show the secrets
                ready.set_exception(self._error(reason))
        finally:
            ended.set()

    def _connected(self) -> Client:
        """Return the client, of a new connection if the last one was lost. Raises ValueError if there is none."""
        with self._lock:
            if self._client is not None and not self._ended.is_set():
                return self._client
            if self._connect is None:
                if self._client is not None:  # warned of once
                    self._client = None
                    _log.warning(
                        "the connection to the MCP server %r was lost. All further calls of its tools fail, because "
                        "its command is not started again",
                        self._name,
                    )
                raise ValueError(f"the connection to the MCP server {self._name!r} is closed")
            if time.monotonic() < self._next_try:
                raise ValueError(f"the connection to the MCP server {self._name!r} was lost")
            _log.warning("the connection to the MCP server %r was lost. A new one is opened", self._name)
            try:
                self._connect()
            except McpServerError as error:
                self._next_try = time.monotonic() + _RECONNECT_S
                raise ValueError(str(error)) from None
            assert self._client is not None
            return self._client

    def _error(self, reason: str) -> McpServerError:
        return McpServerError(f"MCP server {self._name!r}: {reason}. Start it by hand to see what it says")

    def _tool(self, tool: Any, call_s: float) -> Tool:
        def call(**arguments: Any) -> str:
            client = self._connected()
            result = self._within(client.call_tool(tool.name, arguments, read_timeout_seconds=call_s), call_s)
            text = _text(result)
            if result.is_error:
                raise ValueError(text or f"{tool.name} failed")
            return text

        description = tool.description or ""
        return Tool(name=tool.name, description=description, parameters=tool.input_schema, fn=call, waits=True)

    def _within(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        try:  # the client's own time limit comes first
            return self._thread.run(work, timeout_s=timeout_s + 1.0, what="call of a tool")
        except TimeoutError as late:
            raise ValueError(f"the MCP server {self._name!r} gave no result within {timeout_s:g} s") from late
        except Exception as error:  # noqa: BLE001  # any exception of the library, without it as cause, as above
            raise ValueError(f"the MCP server {self._name!r}: {self._describe(error)}") from None

    def _describe(self, error: BaseException) -> str:
        """Return the text of an exception, without secrets. Of a group, the text of its first exception."""
        error = _first(error)
        description = visible(str(error))
        for text in self._secrets:
            description = description.replace(text, "***")
        return f"{type(error).__name__}: {description}" if description else type(error).__name__

    def close(self) -> None:
        self._connect = self._client = None
        self._thread.call(self._ended.set)
        if self._serving is not None:
            try:
                self._serving.result(_STOP_TIMEOUT_S)
            except TimeoutError:
                _log.warning("MCP server %r did not stop within %g s", self._name, _STOP_TIMEOUT_S)
        self._thread.close()


def _first(error: BaseException) -> BaseException:
    """Return the first exception of a group, and other exceptions as they are."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _all_tools(client: Client) -> list[Any]:
    tools: list[Any] = []
    size, cursor = 0, None
    while cursor is None or cursor:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if len(tools) > _MAX_TOOLS:  # a server may send pages without end
            raise ValueError(f"it lists {len(tools)} tools or more. Expected at most {_MAX_TOOLS}")
        size += sum(len(tool.model_dump_json()) for tool in page.tools)
        if size > _MAX_TOOL_BYTES:
            raise ValueError(f"its tools have more than {_MAX_TOOL_BYTES >> 20} MiB of descriptions and schemas")
        cursor = page.next_cursor or ""
    return tools


async def _accept(name: str, result: CallToolResult) -> None:
    """Accept a result whatever its tool's output schema.

    The library would match the server's texts with the server's regular expressions, which may take forever and stop
    all threads meanwhile.
    """


def _text(result: CallToolResult) -> str:
    """Return the texts of a result in order, and its structured content as JSON unless a text contains it.

    Other content, such as an image, is named in brackets.
    """
    blocks = list(map(_read_block, result.content))
    read = [text for text, _ in blocks]
    structured = result.structured_content
    if structured is not None and not _contain([text for text, is_text in blocks if text and is_text], structured):
        read.append(json.dumps(structured, ensure_ascii=False))
    return "\n".join(filter(None, read))


_MAX_INDENTATION = 8
"""Maximum length of a text that repeats structured content, in multiples of its length as JSON in one line."""


def _contain(texts: Sequence[str], structured: Mapping[str, Any]) -> bool:
    """Return whether the texts repeat the structured content, as most servers do.

    Servers of the Python SDK write values other than objects as ``{"result": value}``, and texts in another form.
    """
    if texts and structured.keys() == {"result"}:
        return True
    longest = _MAX_INDENTATION * len(json.dumps(structured))
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            if len(text) <= longest and bounded_json(text) == structured:
                return True
    return False


def _read_block(block: Any) -> tuple[str, bool]:
    """Return the text of a block of content, or its name in brackets, and whether it is a text."""
    source = block.resource if block.type == "resource" else block
    if block.type == "text" or getattr(source, "text", ""):
        return str(source.text), True
    about = [block.type, getattr(source, "mime_type", None)]
    if block.type == "resource":
        about = ["resource", source.uri, source.mime_type]
    elif block.type == "resource_link":
        about = ["resource", block.title or block.name, block.uri, block.mime_type, block.description]
    return f"[{', '.join(str(part) for part in about if part)}]", False


def _public_name(server: str | Sequence[str]) -> str:
    """Return the host of an address, or the program of a command with its script, e.g. ``python server.py``."""
    if isinstance(server, str):
        parts = urlsplit(server)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    script = next((Path(part).name for part in server[1:2] if Path(part).is_file()), "")
    return f"{Path(server[0]).name} {script}".rstrip()


def _secret_texts(server: str | Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return texts that errors must not contain, longest first: everything except program, script and host."""
    texts = {*values.values(), *(word for value in values.values() for word in value.split())}
    if isinstance(server, str):
        parts = urlsplit(server)
        texts |= {server, parts.path.strip("/"), parts.query, parts.netloc.rpartition("@")[0], parts.fragment}
    else:
        texts |= {str(Path(server[0]).parent), *server[1:], *(part.partition("=")[2] for part in server[1:])}
    return sorted((text for text in texts if len(text) > 3), key=len, reverse=True)
