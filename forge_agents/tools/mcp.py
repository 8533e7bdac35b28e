"""Tools of an MCP server for agents.

The connection runs in its own thread with an event loop, so that tools can be called like any function.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from forge_agents.display import visible
from forge_agents.errors import ForgeError, MissingExtraError
from forge_agents.http_body import ENCODINGS, read_as_utf8, read_bounded
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

    A call that fails, exceeds its time limit or finds the server closed results in an error text for the model. A
    result contains the texts, also of embedded resources, and the structured content as JSON if no text contains it.
    Images, sounds, binary resources and links are only named. Deep copies of an environment share the connection.
    Errors name the program and its script, or the host, and contain nothing else of the command or address, `env` and
    `headers`, because these may contain tokens and errors become prompts and stored episodes.

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
        yield connection.open(lambda: _client(server, env, headers), connect_s, call_s)
    finally:
        connection.close()


@contextlib.asynccontextmanager
async def _client(
    server: str | Sequence[str], env: Mapping[str, str] | None, headers: Mapping[str, str] | None
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
                "response": [_read_answer],
            }
            http.event_hooks, http.headers["accept-encoding"] = hooks, ENCODINGS
            transport: Any = streamable_http_client(server, http_client=http)
        else:
            command, *args = server
            transport = stdio_client(StdioServerParameters(command=command, args=args, env=dict(env or {})))
        yield await stack.enter_async_context(Client(_only_answers(transport)))


@contextlib.asynccontextmanager
async def _only_answers(transport: Any) -> AsyncIterator[tuple[Any, Any]]:
    async with transport as (messages, to_server):
        yield _Answers(messages), to_server


class _Answers:
    """A stream of a server's messages without those that tools do not need, and with at most one ping per `_PING_S`.

    The library starts a task for each, which stays in memory until the server accepts the answer.
    """

    def __init__(self, messages: Any) -> None:
        self._messages, self._last_ping = messages, -math.inf

    def __getattr__(self, name: str) -> Any:
        return getattr(self._messages, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while True:
            message = await self._messages.__anext__()
            method = getattr(getattr(message, "message", None), "method", None)
            if method is None:  # an answer, or an exception of the library
                return message
            if method == "ping" and time.monotonic() - self._last_ping >= _PING_S:
                self._last_ping = time.monotonic()
                return message

    async def __aenter__(self) -> Self:
        await self._messages.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._messages.__aexit__(*exc)


async def _read_answer(response: Any) -> None:
    """Read a response with a limit. The library limits the events of streams, but not other responses."""
    read_as_utf8(response)
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        await read_bounded(response)


class _Connection:
    """A client in a thread. One task opens and closes the client, as its cancel scopes require."""

    def __init__(self, name: str, secrets: Sequence[str]) -> None:
        self._name, self._secrets = name, secrets
        self._thread = LoopThread(f"mcp {name}")
        self._stop = asyncio.Event()
        self._serving: Future[None] | None = None

    def open(self, connect: Callable[[], Any], connect_s: float, call_s: float) -> list[Tool]:
        ready: Future[tuple[Client, list[Any]]] = Future()
        self._serving = self._thread.begin(self._serve(connect, ready, connect_s))
        try:
            # the inner time limit comes first, unless a client blocks
            client, definitions = ready.result(connect_s + _STOP_TIMEOUT_S)
        except TimeoutError:
            raise self._error(f"gave no answer within {connect_s:g} s and blocks") from None
        if name := repeated_name(definitions):
            raise self._error(f"it lists several tools that are called {name!r}, so a call cannot choose among them")
        return [self._tool(client, tool, call_s) for tool in definitions]

    async def _serve(
        self, connect: Callable[[], Any], ready: Future[tuple[Client, list[Any]]], connect_s: float
    ) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(connect_s):
                    client = await stack.enter_async_context(connect())
                    client.session.validate_tool_result = _accept
                    ready.set_result((client, await _all_tools(client)))
                await self._stop.wait()
        except BaseException as error:  # noqa: BLE001  # carried to the thread that connects
            if not ready.done():
                late = isinstance(error, TimeoutError)
                reason = f"gave no answer within {connect_s:g} s" if late else self._describe(error)
                # without its cause: a traceback would show the secrets
                ready.set_exception(self._error(reason))

    def _error(self, reason: str) -> McpServerError:
        return McpServerError(f"MCP server {self._name!r}: {reason}. Start it by hand to see what it says")

    def _tool(self, client: Client, tool: Any, call_s: float) -> Tool:
        def call(**arguments: Any) -> str:
            result = self._within(client.call_tool(tool.name, arguments, read_timeout_seconds=call_s), call_s)
            text = _text(result)
            if result.is_error:
                raise ValueError(text or f"{tool.name} failed")
            return text

        description = tool.description or ""
        return Tool(name=tool.name, description=description, parameters=tool.input_schema, fn=call, waits=True)

    def _within(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        if self._serving is None or self._serving.done():
            work.close()
            raise ValueError(f"the connection to the MCP server {self._name!r} is closed")
        try:  # the client's own time limit comes first
            return self._thread.run(work, timeout_s=timeout_s + 1.0, what="call of a tool")
        except TimeoutError as late:
            raise ValueError(f"the MCP server {self._name!r} gave no result within {timeout_s:g} s") from late
        except Exception as error:  # noqa: BLE001  # any exception of the library, without it as cause, as above
            raise ValueError(f"the MCP server {self._name!r}: {self._describe(error)}") from None

    def _describe(self, error: BaseException) -> str:
        """Return the text of an exception, without secrets. Of a group, the text of its first exception."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        description = visible(str(error))
        for text in self._secrets:
            description = description.replace(text, "***")
        return f"{type(error).__name__}: {description}" if description else type(error).__name__

    def close(self) -> None:
        self._thread.call(self._stop.set)
        if self._serving is not None:
            try:
                self._serving.result(_STOP_TIMEOUT_S)
            except TimeoutError:
                _log.warning("MCP server %r did not stop within %g s", self._name, _STOP_TIMEOUT_S)
        self._thread.close()


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


def _contain(texts: Sequence[str], structured: Mapping[str, Any]) -> bool:
    """Return whether the texts repeat the structured content, as most servers do.

    Servers of the Python SDK write values other than objects as ``{"result": value}``, and texts in another form.
    """
    if texts and structured.keys() == {"result"}:
        return True
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            if json.loads(text) == structured:
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
