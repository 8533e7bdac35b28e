"""The viewer's server: pages and JSON about runs on loopback, for whoever holds the token; nothing changes anything.

In: runs, a token. Out: an ASGI application, or one that is served until Ctrl-C. Waits for the browser's requests, and
in threads for the disk.
"""

from __future__ import annotations

import contextlib
import hmac
import html
import json
import os
import secrets
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException
from fastapi.requests import Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp

from forge_agents.errors import ForgeError
from forge_agents.runtime.connections import Server, http_settings, trust
from forge_agents.viewer.index import SORTS, Query
from forge_agents.viewer.page import FILES, static_text
from forge_agents.viewer.runs import Run, find_runs

PORT = 8765
HOSTS = ("127.0.0.1", "localhost", "[::1]")
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""Nothing from elsewhere, no script that is not a file of ours, no text made markup."""
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
"""Of reports, which are pages of their own without scripts."""
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": _PAGE_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",  # the token is in the address
    "x-content-type-options": "nosniff",
}
_UNSHOWN = (ArithmeticError, AttributeError, RecursionError, TypeError)
"""Errors of values that no run of ours writes."""
_LOOKS: dict[str, Callable[[Run], Any]] = {
    "metrics": Run.metrics,
    "settings": Run.settings,
    "verifiers": Run.verifiers,
    "tables": Run.tables,
    "facets": lambda run: run.index.facets(),
}


class _Json(JSONResponse):
    """JSON in ASCII. Texts of strangers may hold lone surrogates, which UTF-8 cannot."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def make_app(runs: Sequence[Run], token: str) -> ASGIApp:
    """The server of `runs`; every path begins with ``/TOKEN/``."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def chosen(run: int) -> Run:
        if not 0 <= run < len(runs):
            raise HTTPException(404, f"there is no run {run}; there are {len(runs)}")
        return runs[run]

    @app.get("/")
    def page() -> Response:
        return HTMLResponse(static_text("index.html"))

    @app.get("/static/{name:path}")
    def static(name: str) -> Response:
        if name not in FILES:
            raise HTTPException(404, f"there is no file {name}")
        return Response(static_text(name), media_type=f"text/{'css' if name.endswith('.css') else 'javascript'}")

    @app.get("/api/runs")
    def list_runs() -> Response:
        return _Json({"runs": [run.status() for run in runs], "sorts": list(SORTS)})

    @app.get("/api/runs/{run}/episodes")
    def episodes(run: int, query: Annotated[Query, Depends()]) -> Response:
        return _Json(chosen(run).index.find(query))

    @app.get("/api/runs/{run}/episodes/{n}")
    def episode(run: int, n: int) -> Response:
        return _Json(chosen(run).episode(n))

    @app.get("/api/runs/{run}/{what}")
    def look(run: int, what: Literal["metrics", "settings", "verifiers", "tables", "facets"]) -> Response:
        return _Json(_LOOKS[what](chosen(run)))

    @app.get("/reports/{run}/verifiers")
    def verifier_report(run: int) -> Response:
        return HTMLResponse(_verifier_report(chosen(run)), headers={"content-security-policy": _REPORT_POLICY})

    refusals = [(KeyError, 404), (ValueError, 400), (ForgeError, 409), *((error, 409) for error in _UNSHOWN)]
    for error, status in refusals:
        app.add_exception_handler(error, _told(status))
    return BaseHTTPMiddleware(app, dispatch=_guard(token.encode()))


def _guard(token: bytes) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    """Who may ask: the token in the address, the host's name, the method; and headers that bind the browser.

    It stands outside of the application, so that no part of that answers others, and pages of errors are bound as well.
    """

    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        first, slash, rest = request.scope["path"].removeprefix("/").partition("/")
        hosts = request.headers.getlist("host")
        # A foreign name that resolves to loopback (DNS rebinding) is not this machine.
        if len(hosts) != 1 or not (hosts[0] in HOSTS or hosts[0].rpartition(":")[0] in HOSTS):
            response: Response = PlainTextResponse("This server answers on loopback names only.\n", 403)
        elif not hmac.compare_digest(first.encode(), token):
            told = "Open the address that forge-agents view printed: it holds a token.\n"
            response = PlainTextResponse(told, 403)
        elif request.method not in ("GET", "HEAD"):
            response = PlainTextResponse("Nothing here can be changed.\n", 405)
        elif not slash:
            response = PlainTextResponse("The address ends with a slash.\n", 404)
        else:
            trust(request.scope)
            request.scope.update(path=f"/{rest}", raw_path=f"/{rest}".encode())
            response = await answer(request)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return guard


def _told(status: int) -> Any:
    """A handler that answers with what an exception says."""

    async def tell(request: Request, error: Exception) -> Response:
        said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        if isinstance(error, _UNSHOWN):
            said = f"a file of the run holds something that cannot be shown ({type(error).__name__}: {said})"
        return _Json({"detail": said}, status_code=status)

    return tell


def _verifier_report(run: Run) -> str:
    """What ``forge-agents view RUN --verifiers`` writes."""
    from forge_trainers.records.run_folder import verifier_history

    history = verifier_history(run.folder)
    with tempfile.TemporaryDirectory() as folder:
        return history[-1].report.html(Path(folder) / "report.html", history).read_text(encoding="utf-8")


def watch(runs: Sequence[Run], stop: threading.Event, *, every_s: float = 1.0) -> None:
    """Keep the indexes of `runs` up to date until `stop`. Runs in a thread of its own."""
    while not stop.is_set():
        for run in runs:
            run.look(stop)
        stop.wait(every_s)


def serve_page(
    runs: Sequence[str | os.PathLike[str]],
    *,
    port: int | None = None,
    browser: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Serve the page of `runs` on loopback until Ctrl-C.

    Args:
        runs: Folders of runs, or folders that hold them.
        port: None takes 8765, or another where that is in use.
        say: Shows a line; the page's address goes there, and nowhere else.

    Raises:
        RunFolderError: There is no such run.
        ValueError: The port is in use.
    """
    import uvicorn

    found = find_runs(runs)
    token = secrets.token_urlsafe(24)
    listening = _socket(port)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/"
    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(found, stop), name="forge-viewer-index", daemon=True)
    # no access log: every line would hold the token
    settings = uvicorn.Config(make_app(found, token), timeout_graceful_shutdown=2, **http_settings())
    watcher.start()
    say(f"{len(found)} run{'s' if len(found) > 1 else ''}: {', '.join(run.name for run in found)}")
    say(f"open   {url}\nstop   Ctrl-C")
    with _door(url) if browser else contextlib.nullcontext() as door:
        if door:
            webbrowser.open(door)
        try:
            Server(settings).run(sockets=[listening])
        except KeyboardInterrupt:
            say("")
        finally:
            stop.set()
            listening.close()
            watcher.join(timeout=30)


@contextlib.contextmanager
def _door(url: str) -> Iterator[str]:
    """The address of a file that leads to `url` and that only this user can read: command lines are everybody's."""
    with tempfile.TemporaryDirectory(prefix="forge-view-") as folder:
        file = Path(folder) / "open.html"
        file.touch(mode=0o600)
        file.write_text(
            '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0; url={html.escape(url, quote=True)}"><title>runs</title>'
        )
        yield file.as_uri()


def _socket(port: int | None) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", PORT if port is None else port), backlog=128)
    except OSError as cause:
        if port is None:
            return socket.create_server(("127.0.0.1", 0), backlog=128)
        raise ValueError(f"port {port} cannot be used ({cause.strerror}); give another, or none") from cause
