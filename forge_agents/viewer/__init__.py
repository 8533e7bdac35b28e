"""Look at runs in a browser: ``forge-agents view RUN``.

In: folders of runs. Out: a page on loopback until Ctrl-C, or one HTML file. Waits for the browser's requests.
"""

from __future__ import annotations

import contextlib
import html
import os
import secrets
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from forge_agents.viewer.page import write_page
from forge_agents.viewer.runs import find_runs

__all__ = ["save_page", "serve_page"]

PORT = 8765


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
        browser: Open it.
        say: Shows a line; the page's address goes there, and nowhere else.

    Raises:
        RunFolderError: There is no such run.
        ValueError: The port is in use.
    """
    import uvicorn

    from forge_agents.viewer.app import make_app, watch

    found = find_runs(runs)
    token = secrets.token_urlsafe(24)
    listening = _socket(port)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/"
    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(found, stop), name="forge-viewer-index", daemon=True)
    # no access log: every line would hold the token
    settings = uvicorn.Config(
        make_app(found, token), log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=2
    )
    watcher.start()
    say(f"{len(found)} run{'s' if len(found) > 1 else ''}: {', '.join(run.name for run in found)}")
    say(f"open   {url}\nstop   Ctrl-C")
    with _door(url) if browser else contextlib.nullcontext() as door:
        if door:
            webbrowser.open(door)
        try:
            uvicorn.Server(settings).run(sockets=[listening])
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


def save_page(runs: Sequence[str | os.PathLike[str]], target: str | os.PathLike[str], *, episodes: int = 200) -> Path:
    """Write the page of `runs` as one HTML file that needs no server and loads nothing.

    Args:
        episodes: How many episodes of each run go along, the newest.

    Raises:
        RunFolderError: There is no such run.
    """
    if episodes < 0:
        raise ValueError(f"episodes={episodes} must be at least 0")
    return write_page(find_runs(runs), target, episodes=episodes)


def _socket(port: int | None) -> socket.socket:
    wanted = [PORT, 0] if port is None else [port]
    for number in wanted:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", number))
            listening.listen(128)  # a browser that comes before the server is ready waits
        except OSError as cause:
            listening.close()
            if number == wanted[-1]:
                raise ValueError(f"port {number} cannot be used ({cause.strerror}); give another, or none") from cause
        else:
            return listening
    raise AssertionError("unreachable: the last port is used or raises")
