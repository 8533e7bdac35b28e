"""Where worker processes of environments run: on this host, or on others that the mesh gives them.

In: a request for a process. Out: a connection to it, and a hand to end it. Waits for a process to connect, with a
deadline that names its host.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

from forge_agents.errors import HostError

KNOCK_S = 30.0
"""Seconds that a new process of another host may take to connect."""
CONTROL_S = 10.0
"""Seconds that another host may take to start or to end a process."""

_PROGRAM = (
    "import os, sys; place, cores, *sys.path = sys.argv[1:]; "
    "cores and os.sched_setaffinity(0, map(int, cores.split(','))); "
    "from forge_agents._worker_process import serve; serve(place)"
)


class Process(Protocol):
    """A worker's process, wherever it runs."""

    @property
    def pid(self) -> int:
        """Its number on its host."""

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""

    def end(self, grace_s: float) -> int:
        """Kill it and what it started, at once or after `grace_s`. Returns its exit status."""


class Home(Protocol):
    """A host for worker processes."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def capacity(self) -> int:
        """Processes that it should have at once."""

    @property
    def lost(self) -> str:
        """What was seen of its end; empty while it lives."""

    def start(self) -> tuple[Connection, Process]:
        """Start a process.

        Raises:
            HostError: The host is lost, or did not answer in time.
        """


@dataclass(frozen=True)
class Here:
    """This host."""

    cores: frozenset[int] = frozenset()
    """That processes may run on; empty: all."""
    name: str = "this host"
    capacity: int = max(4, os.cpu_count() or 1)
    lost: str = ""

    def start(self) -> tuple[Connection, Process]:
        ours, theirs = Pipe()
        with theirs:
            return ours, Child(str(theirs.fileno()), self.cores, sys.path, pass_fds=(theirs.fileno(),))


class Child:
    """A worker's process as a child of this one, in a session of its own.

    Args:
        place: Where it is given commands; see `forge_agents._worker_process.serve`.
        cores: That it may run on; empty: all.
        paths: Where it finds modules.
        pass_fds: Descriptors that it inherits.
    """

    def __init__(self, place: str, cores: frozenset[int], paths: list[str], pass_fds: tuple[int, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, place, ",".join(map(str, cores)), *paths],
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.poll = self._process.poll
        self._ended = False

    def end(self, grace_s: float) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        if not self._ended:  # later the number may be another's
            self._ended = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()


# ---- other hosts: a `Door` here, `obey` there


class Door:
    """Where processes of other hosts connect. Each says a secret of its own first; who knows none is sent away.

    Args:
        bind: Address to listen at.
        reached_at: Name or address under which other hosts find it.
    """

    def __init__(self, bind: str, reached_at: str) -> None:
        self._server = socket.create_server((bind, 0))
        self.address = f"{reached_at}:{self._server.getsockname()[1]}"
        self._expected: dict[str, Future[Connection]] = {}
        threading.Thread(target=self._answer, name="worker-door", daemon=True).start()

    def expect(self) -> tuple[str, Future[Connection]]:
        """A place for one process to connect to, as `knock` takes it, and its connection to come."""
        secret, future = secrets.token_hex(16), Future[Connection]()
        self._expected[secret] = future
        return f"{self.address}:{secret}", future

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
        self._server.close()

    def _answer(self) -> None:
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(line,), daemon=True).start()

    def _greet(self, line: socket.socket) -> None:
        line.settimeout(CONTROL_S)
        future, said = None, b""
        with contextlib.suppress(OSError, ValueError):
            while len(said) < 32 and (more := line.recv(32 - len(said))):
                said += more
            future = self._expected.pop(said.decode("ascii"), None)
        if future is None:
            line.close()
        elif future.set_running_or_notify_cancel():
            future.set_result(_connection(line))
        else:
            line.close()  # it came too late


def knock(place: str) -> Connection:
    """Connect to a `Door`."""
    host, port, secret = place.rsplit(":", 2)
    line = socket.create_connection((host, int(port)), KNOCK_S)
    line.sendall(secret.encode("ascii"))
    return _connection(line)


def _connection(line: socket.socket) -> Connection:
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(line)
    return Connection(line.detach())


def keep_alive(line: socket.socket) -> None:
    """Let the kernel give up on a peer whose machine is gone, after 7 s."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 4)):
        line.setsockopt(socket.IPPROTO_TCP, option, value)


def obey(place: str) -> None:
    """On another host: start and end worker processes until the controller's end of the line closes."""
    control, children = knock(place), dict[int, Child]()
    try:
        while True:
            what, args = pickle.loads(control.recv_bytes())  # noqa: S301  # from our own controller
            if what == "start":
                child = Child(*args)
                children[child.pid] = child
                answer = child.pid
            else:
                pid, grace_s = args
                answer = children[pid].end(grace_s)
            control.send_bytes(pickle.dumps(answer))
    except (EOFError, OSError):
        for child in children.values():
            child.end(0.0)


class There:
    """Another host, on which `obey` runs.

    Args:
        name: For messages.
        door: Where its processes connect.
        control: The line to `obey`.
        cores: That processes may run on; empty: all.
        capacity: Processes that it should have at once.
    """

    def __init__(self, name: str, door: Door, control: Connection, *, cores: frozenset[int], capacity: int) -> None:
        self.name, self.capacity, self.lost = name, capacity, ""
        self._door, self._control, self._cores = door, control, cores
        self._lock = threading.Lock()
        self._lines: dict[int, Connection] = {}

    def start(self) -> tuple[Connection, Process]:
        place, knocked = self._door.expect()
        pid = self._ask("start", place, self._cores, sys.path)
        try:
            pipe = knocked.result(KNOCK_S)
        except NotYetError:
            knocked.cancel()
            raise HostError(
                f"worker process {pid} on host {self.name} did not connect to {self._door.address} within "
                f"{KNOCK_S:g} s; see that hosts of the role envs can connect to the controller"
            ) from None
        self._lines[pid] = pipe
        return pipe, _Distant(self, pid, pipe)

    def end(self, pid: int, grace_s: float) -> int:
        """End a process there; -9 where nobody is left to say how it ended."""
        try:
            return int(self._ask("end", pid, grace_s, more_s=grace_s))
        except HostError:
            return -signal.SIGKILL
        finally:
            self._lines.pop(pid, None)

    def lose(self, why: str) -> None:
        """The host is gone, or is to be used no more: whoever waits for one of its processes hears of it now."""
        self.lost = self.lost or why
        for line in (self._control, *self._lines.values()):
            _hang_up(line)

    def _ask(self, what: str, *args: Any, more_s: float = 0.0) -> Any:
        timeout_s = CONTROL_S + more_s
        with self._lock:
            if self.lost:
                raise HostError(self.lost)
            try:
                self._control.send_bytes(pickle.dumps((what, args)))
                if self._control.poll(timeout_s):
                    return pickle.loads(self._control.recv_bytes())  # noqa: S301  # from our own warden
                why = f"host {self.name} did not {what} a worker process within {timeout_s:g} s"
            except (EOFError, OSError):
                why = f"host {self.name} is lost: its line for worker processes ended"
        self.lose(why)
        raise HostError(self.lost)


@dataclass(frozen=True)
class _Distant:
    home: There
    pid: int
    pipe: Connection

    def poll(self) -> int | None:
        """A process that says something unasked has ended: its line has."""
        try:
            gone = bool(self.home.lost) or self.pipe.closed or self.pipe.poll(0)
        except OSError:
            gone = True
        return -signal.SIGKILL if gone else None

    def end(self, grace_s: float) -> int:
        return self.home.end(self.pid, grace_s)


def _hang_up(line: Connection) -> None:
    """End a connection for both sides, and for a thread that waits on it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
