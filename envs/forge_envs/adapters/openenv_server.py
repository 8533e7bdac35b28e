"""OpenEnv servers as processes of this machine."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forge_agents.credentials import is_secret_variable, redact_command
from forge_agents.errors import ForgeError
from forge_agents.runtime.peers import check_server
from forge_agents.sandbox.sandbox import CommandLine, SandboxError

_PORT, _TOKEN = "{port}", "OPENENV_TOKEN"
_POLL_S = 0.1
_log = logging.getLogger(__name__)


class OpenEnvServerError(ForgeError, ConnectionError):
    """A server of OpenEnv ended, or did not answer in time."""


@contextlib.contextmanager
def openenv_server(
    command: Sequence[str],
    *,
    folder: str | os.PathLike[str] = ".",
    env: Mapping[str, str] | None = None,
    port: int = 0,
    start_s: float = 120.0,
) -> Iterator[str]:
    """Start a server of OpenEnv for the duration of a ``with`` block, and yield its address.

    All environments with this address share the server, also those in worker processes. The server and its children
    end with the block, and with this process. The command runs with your rights: name only servers that you trust.

    Args:
        command: Command line. ``{port}`` in its words stands for the port, as in ``["python", "-m", "server.app",
            "{port}"]``. The server must listen on 127.0.0.1.
        folder: Working folder.
        env: Environment variables, in addition to those of this process without secrets. If ``OPENENV_TOKEN`` is not
            among them, the server gets a new token. Servers of ``forge-agents init --template openenv`` expect it in
            the path, and the address then contains it.
        port: Port. 0 (default) chooses a free one. A run that is resumed needs the same port and token.
        start_s: Maximum seconds until the server answers ``/health``.

    Raises:
        ValueError: The command is no list of texts with ``{port}``, or `folder` does not exist.
        OpenEnvServerError: The port is in use, or another user's; or the server ended before it answered, or did not
            answer in time.
    """
    if isinstance(command, str) or not all(isinstance(word, str) for word in command):
        raise ValueError(f"command={command!r:.200} must be a list of texts, such as ['python', 'app.py', '{_PORT}']")
    if not any(_PORT in word for word in command):
        raise ValueError(f"no word of the command contains {_PORT}, so the server would not know its port")
    if not Path(folder).is_dir():
        raise ValueError(f"folder={str(folder)!r} does not exist")
    port = _free_port(port)
    token = (env or {}).get(_TOKEN) or secrets.token_urlsafe(32)
    variables = {name: value for name, value in os.environ.items() if not is_secret_variable(name, value)}
    server = _Server(
        [word.replace(_PORT, str(port)) for word in command], Path(folder), {**variables, **(env or {}), _TOKEN: token}
    )
    try:
        path = server.ready(port, ("", f"/{token}"), start_s)
        yield f"http://127.0.0.1:{port}{path}"
    finally:
        server.stop()


def _free_port(port: int) -> int:
    """Return `port`, or a free one for 0. Raises OpenEnvServerError if a process listens there."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier server may just have ended
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise OpenEnvServerError(f"port {port} of 127.0.0.1 cannot be used ({error.strerror})") from None
        return int(listener.getsockname()[1])


class _Server:
    """A running command, and a thread that waits for its end."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._name, self._token = redact_command(words)[:200], environment[_TOKEN]
        self._command = CommandLine(words, stdin="", environment=environment, folder=folder.resolve())
        self._end = "it ended"
        self._ended, self._is_stopped = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="openenv-server", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._command.begin()
            result = self._command.wait()
            output = (result.stderr or result.stdout).replace(self._token, "(hidden)").strip()
            self._end = f"it ended with exit status {result.exit_code}, and printed last {output[-1000:]!r}"
        except SandboxError as error:
            self._end = str(error)
        if not self._is_stopped:
            self._ended.set()
            _log.warning("OpenEnv server %r: %s", self._name, self._end)

    def ready(self, port: int, paths: Sequence[str], start_s: float) -> str:
        """Wait until the server answers, and return the path under which it does."""
        deadline = time.monotonic() + start_s
        while time.monotonic() < deadline:
            try:
                for path in paths:
                    if _answers(port, path):
                        return path
            except PermissionError as error:
                raise OpenEnvServerError(f"OpenEnv server {self._name!r}: {error}") from None
            if self._ended.wait(_POLL_S):
                raise OpenEnvServerError(f"OpenEnv server {self._name!r}: {self._end}")
        self.stop()
        raise OpenEnvServerError(
            f"OpenEnv server {self._name!r} did not answer /health on port {port} within {start_s:g} s: {self._end}"
        )

    def stop(self) -> None:
        self._is_stopped = True
        self._command.stop()
        self._thread.join(5)


def _answers(port: int, path: str) -> bool:
    """Return whether the server answers. Raises PermissionError if it is another user's."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.connect()
        check_server(connection.sock)
        connection.request("GET", f"{path}/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except PermissionError:
        raise
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
