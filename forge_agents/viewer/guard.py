"""Who may ask: the token in the address, the host's name, the method. Stands before every other part of the server.

In: requests. Out: a refusal, or the request with the token cut from its path, and headers that bind the browser. Waits
for nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

HOSTS = ("127.0.0.1", "localhost", "[::1]")
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""Nothing from elsewhere, no script that is not a file of ours, no text made markup."""
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
"""Of reports, which are pages of their own without scripts."""
_HEADERS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",  # the token is in the address
    "x-content-type-options": "nosniff",
}


class Guard:
    """An ASGI application around another.

    Args:
        app: What is guarded.
        token: The first part of the path of every request, compared in constant time.
    """

    def __init__(self, app: App, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        first, slash, rest = str(scope["path"]).removeprefix("/").partition("/")
        if not _is_ours(scope["headers"]):
            await _refuse(send, 403, "This server answers on loopback names only.")
        elif not hmac.compare_digest(first.encode(), self._token):
            await _refuse(send, 403, "Open the address that forge-agents view printed: it holds a token.")
        elif scope["method"] not in ("GET", "HEAD"):
            await _refuse(send, 405, "Nothing here can be changed.")
        elif not slash:
            await _refuse(send, 404, "The address ends with a slash.")
        else:
            path = f"/{rest}"
            await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, _bound(send))


def _is_ours(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the browser meant this machine: a foreign name that resolves to loopback is not it."""
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    return len(hosts) == 1 and (hosts[0] in HOSTS or hosts[0].rpartition(":")[0] in HOSTS)


def _bound(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            given = {name for name, _ in message["headers"]}
            ours = {"content-security-policy": PAGE_POLICY, **_HEADERS}
            more = [(n.encode(), v.encode()) for n, v in ours.items() if n.encode() not in given]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return sending


async def _refuse(send: Send, status: int, text: str) -> None:
    body = f"{text}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    bound = _bound(send)
    await bound({"type": "http.response.start", "status": status, "headers": headers})
    await bound({"type": "http.response.body", "body": body})
