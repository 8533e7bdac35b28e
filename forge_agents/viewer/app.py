"""The viewer's server: pages and JSON about runs, nothing that changes anything.

In: runs, a token. Out: an ASGI application. Waits for the disk, in threads.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException
from fastapi.requests import Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from forge_agents.errors import ForgeError
from forge_agents.viewer.guard import REPORT_POLICY, App, Guard
from forge_agents.viewer.index import SORTS, Query
from forge_agents.viewer.runs import Run

SCRIPTS = tuple(
    f"{name}.js" for name in ("dom", "source", "chart", "curves", "turns", "episodes", "timeline", "tables", "app")
)
"""Modules of the page, each after those it imports."""
_LOOKS: dict[str, Callable[[Run], Any]] = {
    "metrics": Run.metrics,
    "settings": Run.settings,
    "verifiers": Run.verifiers,
    "tables": Run.tables,
    "facets": lambda run: run.index.facets(),
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def make_app(runs: Sequence[Run], token: str) -> App:
    """The server of `runs`; every path begins with ``/TOKEN/``."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def chosen(run: int) -> Run:
        if not 0 <= run < len(runs):
            raise HTTPException(404, f"there is no run {run}; there are {len(runs)}")
        return runs[run]

    @app.get("/")
    def page() -> Response:
        return _static("index.html")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        return _static(name)

    @app.get("/api/runs")
    def list_runs() -> Response:
        return JSONResponse({"runs": [run.status() for run in runs], "sorts": list(SORTS)})

    @app.get("/api/runs/{run}/episodes")
    def episodes(run: int, query: Annotated[Query, Depends()]) -> Response:
        return JSONResponse(chosen(run).index.find(query))

    @app.get("/api/runs/{run}/episodes/{n}")
    def episode(run: int, n: int) -> Response:
        return JSONResponse(chosen(run).episode(n))

    @app.get("/api/runs/{run}/{what}")
    def look(run: int, what: Literal["metrics", "settings", "verifiers", "tables", "facets"]) -> Response:
        return JSONResponse(_LOOKS[what](chosen(run)))

    @app.get("/reports/{run}/verifiers")
    def verifier_report(run: int) -> Response:
        return HTMLResponse(_verifier_report(chosen(run)), headers={"content-security-policy": REPORT_POLICY})

    app.add_exception_handler(KeyError, _told(404))
    app.add_exception_handler(ValueError, _told(400))
    app.add_exception_handler(ForgeError, _told(409))
    return Guard(app, token)


def watch(runs: Sequence[Run], stop: threading.Event, *, every_s: float = 1.0) -> None:
    """Keep the indexes of `runs` up to date until `stop`. Runs in a thread of its own."""
    while not stop.is_set():
        for run in runs:
            run.look(stop)
        stop.wait(every_s)


def static_text(name: str) -> str:
    """A file of the page. Raises FileNotFoundError where there is none of that name."""
    file = resources.files("forge_agents.viewer") / "static" / name
    if Path(name).name != name or not file.is_file():
        raise FileNotFoundError(name)
    return file.read_text(encoding="utf-8")


def _static(name: str) -> Response:
    try:
        return Response(static_text(name), media_type=f"{_TYPES[Path(name).suffix]}; charset=utf-8")
    except (FileNotFoundError, KeyError):
        raise HTTPException(404, f"there is no file {name}") from None


def _verifier_report(run: Run) -> str:
    """What ``forge-agents verifiers report`` writes."""
    import forge_agents as fa

    history = fa.verifier_history(run.folder)
    with tempfile.TemporaryDirectory() as folder:
        return history[-1].report.html(Path(folder) / "report.html", history).read_text(encoding="utf-8")


def _told(status: int) -> Any:
    """A handler that answers with what an exception says."""

    async def tell(request: Request, error: Exception) -> Response:
        said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        return JSONResponse({"detail": said}, status_code=status)

    return tell
