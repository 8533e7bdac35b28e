"""Server of the viewer: read-only pages and JSON about runs, on loopback and behind a token."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException
from fastapi.requests import Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp

from forge_agents.display import visible
from forge_agents.errors import ForgeError
from forge_agents.imports import plugin_object
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
"""Only files of this server, no inline scripts, and no text as markup."""
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
"""Policy of reports: separate pages without scripts."""
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": _PAGE_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",  # the token is in the address
    "x-content-type-options": "nosniff",
}
_VALUE_ERRORS = (ArithmeticError, AttributeError, RecursionError, TypeError)
"""Errors from values that our runs never write."""
_VIEWS: dict[str, Callable[[Run], Any]] = {
    "metrics": Run.metrics,
    "settings": Run.settings,
    "verifiers": Run.verifiers,
    "tables": Run.tables,
    "facets": lambda run: run.index.facets(),
}


class _Json(JSONResponse):
    """JSON in ASCII, because texts of strangers may contain lone surrogates, which UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def make_app(runs: Sequence[Run], token: str) -> ASGIApp:
    """Return the server of `runs`. Every path begins with ``/TOKEN/``."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def run_of(run: int) -> Run:
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
        return _Json(run_of(run).index.find(query))

    @app.get("/api/runs/{run}/episodes/{n}")
    def episode(run: int, n: int) -> Response:
        return _Json(run_of(run).episode(n))

    @app.get("/api/runs/{run}/{name}")
    def view(run: int, name: Literal["metrics", "settings", "verifiers", "tables", "facets"]) -> Response:
        return _Json(_VIEWS[name](run_of(run)))

    @app.get("/reports/{run}/verifiers")
    def verifier_report(run: int) -> Response:
        shown = run_of(run)
        page = shown.computed(("verifiers", shown.stamps()), lambda: _verifier_report(shown))
        return HTMLResponse(page, headers={"content-security-policy": _REPORT_POLICY})

    refusals = [
        (KeyError, 404),
        (ValueError, 400),
        (ForgeError, 409),
        (OSError, 409),
        *((error, 409) for error in _VALUE_ERRORS),
    ]
    for error, status in refusals:
        app.add_exception_handler(error, _error_handler(status))
    return BaseHTTPMiddleware(app, dispatch=_guard(token.encode()))


def _guard(token: bytes) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    """Return a middleware that checks token, host name and method, and adds security headers.

    The middleware wraps the application, so that no part of it answers other requests, and error pages have the headers
    as well.
    """

    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        first, slash, rest = request.scope["path"].removeprefix("/").partition("/")
        hosts = request.headers.getlist("host")
        # a foreign name that resolves to loopback (DNS rebinding) is refused
        if len(hosts) != 1 or not (hosts[0] in HOSTS or hosts[0].rpartition(":")[0] in HOSTS):
            response: Response = PlainTextResponse("This server answers on loopback names only.\n", 403)
        elif not hmac.compare_digest(first.encode(), token):
            text = "Open the address that forge-agents view printed: it contains a token.\n"
            response = PlainTextResponse(text, 403)
        elif request.method not in ("GET", "HEAD"):
            response = PlainTextResponse("This server is read-only.\n", 405)
        elif not slash:
            response = PlainTextResponse("The address must end with a slash.\n", 404)
        else:
            trust(request.scope)
            request.scope.update(path=f"/{rest}", raw_path=f"/{rest}".encode())
            response = await answer(request)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return guard


def _error_handler(status: int) -> Any:
    """Return a handler that answers with the message of an exception."""

    async def handle(request: Request, error: Exception) -> Response:
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        if isinstance(error, _VALUE_ERRORS):
            text = f"a file of the run holds a value that cannot be shown ({type(error).__name__}: {text})"
        return _Json({"detail": text}, status_code=status)

    return handle


def _verifier_report(run: Run) -> str:
    """Return the page that ``forge-agents view RUN --verifiers`` writes."""
    history = plugin_object("forge_trainers.records.run_folder:verifier_history")(run.folder)
    with tempfile.TemporaryDirectory() as folder:
        page: Path = history[-1].report.html(Path(folder) / "report.html")
        return page.read_text(encoding="utf-8")


def watch(runs: Sequence[Run], stop: threading.Event, *, every_s: float = 1.0) -> None:
    """Keep the indexes of `runs` up to date until `stop`. Runs in a separate thread."""
    while not stop.is_set():
        for run in runs:
            run.update(stop)
        stop.wait(every_s)


def serve_page(
    runs: Sequence[str | os.PathLike[str]],
    *,
    port: int | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve the page of `runs` on loopback until Ctrl-C.

    Args:
        runs: Folders of runs, or folders with such folders.
        port: Port to listen on. None: 8765, or a free port if that is in use.
        say: Function that prints a line. The address is printed only there.

    Raises:
        RunFolderError: A folder holds no run.
        ValueError: The port is in use.
    """
    import uvicorn

    found_runs = find_runs(runs)
    token = secrets.token_urlsafe(24)
    listening = _socket(port)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/"
    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(found_runs, stop), name="forge-viewer-index", daemon=True)
    # without an access log, whose lines would contain the token
    settings = uvicorn.Config(make_app(found_runs, token), timeout_graceful_shutdown=2, **http_settings())
    watcher.start()
    names = ", ".join(run.name for run in found_runs).replace("\n", r"\n")  # no name looks like the address below
    say(visible(f"{len(found_runs)} run{'s' if len(found_runs) > 1 else ''}: {names}"))
    say(f"open   {url}\nstop   Ctrl-C")
    try:
        Server(settings).run(sockets=[listening])
    except KeyboardInterrupt:
        say("")
    finally:
        stop.set()
        listening.close()
        watcher.join(timeout=30)


def _socket(port: int | None) -> socket.socket:
    if port is not None and not 0 <= port <= 65535:
        raise ValueError(f"port={port} must be in [0, 65535]")
    try:
        return socket.create_server(("127.0.0.1", PORT if port is None else port), backlog=128)
    except OSError as cause:
        if port is None:
            return socket.create_server(("127.0.0.1", 0), backlog=128)
        raise ValueError(f"port {port} cannot be used ({cause.strerror}). Choose another, or none") from cause
