"""Where worker processes of environments run: on this host, or on others that the mesh gives them.

In: a request for a process. Out: a connection to it, and a hand to end it. Waits for a process to connect, with a
deadline that names its host.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

from forge_agents.errors import HostError

START_TIMEOUT_S = 120.0
"""Seconds that a worker may take to start, to import an environment's module and to build the environment."""
KNOCK_S = 30.0
"""Seconds that a process of another host that runs already may take to connect, and one that connects to say who."""

_AGAIN_S = 0.1
_PLACE = "FORGE_AGENTS_WORKER_PLACE"
"""Environment variable, which only a process's owner can read: a place may hold a secret."""
_PROGRAM = (
    "import os, sys; cores, *sys.path = sys.argv[1:]; "
    "cores and os.sched_setaffinity(0, map(int, cores.split(','))); "
    f"from forge_agents.envs.workers.process import serve; serve(os.environ.pop('{_PLACE}'))"
)
_log = logging.getLogger(__name__)


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
    lost: str = ""

    @property
    def capacity(self) -> int:
        return room(len(self.cores) or os.cpu_count() or 1)

    def start(self) -> tuple[Connection, Process]:
        try:
            ours, theirs = Pipe()
            with theirs:
                place, descriptors = str(theirs.fileno()), (theirs.fileno(),)
                return ours, Child(place, self.cores, sys.path, env=os.environ, pass_fds=descriptors)
        except OSError as error:
            raise HostError(f"this host cannot start a worker process: {error}") from error


def room(cores: int) -> int:
    """Processes that a host of so many cores should have at once: some wait for their players most of the time."""
    return max(4, cores)


class Child:
    """A worker's process as a child of this one, in a session of its own.

    Args:
        place: Where it is given commands; see `forge_agents.envs.workers.process.serve`.
        cores: That it may run on; empty: all.
        paths: Where it finds modules.
        env: Its environment variables.
        pass_fds: Descriptors that it inherits.
    """

    def __init__(
        self,
        place: str,
        cores: frozenset[int],
        paths: list[str],
        *,
        env: Mapping[str, str],
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, ",".join(map(str, cores)), *paths],
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            env={**env, _PLACE: place},
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.poll, self.wait = self._process.poll, self._process.wait
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
        self._server = socket.create_server((bind, 0), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)
        self.address = f"{reached_at}:{self._server.getsockname()[1]}"
        self._expected: dict[str, Future[Connection]] = {}
        self._closed = False
        threading.Thread(target=self._answer, name="worker-door", daemon=True).start()

    def expect(self) -> tuple[str, Future[Connection]]:
        """A place for one process to connect to, as `knock` takes it, and its connection to come."""
        secret, future = secrets.token_hex(16), Future[Connection]()
        self._expected[secret] = future
        future.add_done_callback(lambda _: self._expected.pop(secret, None))
        return f"{self.address}:{secret}", future

    def close(self) -> None:
        """Take no more connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
        self._server.close()

    def _answer(self) -> None:
        while not self._closed:
            try:
                line, _ = self._server.accept()
                threading.Thread(target=self._greet, args=(line,), daemon=True).start()
            except (OSError, RuntimeError):  # no descriptor or thread is left for it; its end will try no more
                time.sleep(_AGAIN_S)

    def _greet(self, line: socket.socket) -> None:
        line.settimeout(KNOCK_S)
        future, said = None, b""
        with contextlib.suppress(OSError, ValueError):
            while len(said) < 32 and (more := line.recv(32 - len(said))):
                said += more
            future = self._expected.pop(said.decode("ascii"), None)
        try:
            if future is not None:
                future.set_result(_connection(line))
        except (OSError, InvalidStateError):
            _log.warning("a worker process connected, and nobody waited for it any more")
        finally:
            line.close()  # a connection has taken its descriptor, if there is one


def knock(place: str) -> Connection:
    """Connect to a `Door`."""
    host, port, secret = place.rsplit(":", 2)
    line = socket.create_connection((host.strip("[]"), int(port)), KNOCK_S)
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
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 7000)  # also while something is on its way


def obey(place: str) -> None:
    """On another host: start and end worker processes until the controller's end of the line closes.

    Of each it says, by number, that it has started, or why not, and how it ended.
    """
    control, sending, children = knock(place), threading.Lock(), dict[int, Child]()
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # that is the warden's own

    def tell(number: int, what: str, value: object) -> None:
        with sending, contextlib.suppress(OSError):
            control.send_bytes(pickle.dumps((number, what, value)))

    def attend(number: int, child: Child) -> None:
        status = child.wait()
        child.end(0.0)  # what it has started
        children.pop(number, None)
        tell(number, "ended", status)

    try:
        while True:
            number, what, args = pickle.loads(control.recv_bytes())  # noqa: S301  # from our own controller
            if what == "end" and number in children:
                children[number].end(0.0)
            elif what == "start":
                try:
                    child = children[number] = Child(*args, env=env)
                except OSError as error:
                    tell(number, "failed", str(error))
                    continue
                tell(number, "started", child.pid)
                threading.Thread(target=attend, args=(number, child), daemon=True).start()
    except (EOFError, OSError):
        pass  # the controller is gone, or wants no more of this host
    finally:
        for child in tuple(children.values()):
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
        self._sending = threading.Lock()
        self._processes: dict[int, Distant] = {}
        self._numbers = itertools.count()
        threading.Thread(target=self._listen, name=f"workers of {name}", daemon=True).start()

    def start(self) -> tuple[Connection, Process]:
        place, knocked = self._door.expect()
        number = next(self._numbers)
        process = self._processes[number] = Distant(lambda: self._tell(number, "end"), knocked)
        if self.lost:
            process.over(self.lost)
        self._tell(number, "start", place, self._cores, [str(Path(path).absolute()) for path in sys.path])
        try:
            process.line = knocked.result(START_TIMEOUT_S)
        except NotYetError:
            process.end(0.0)
            raise HostError(
                f"a worker process on host {self.name} did not connect to {self._door.address} within "
                f"{START_TIMEOUT_S:g} s; see that hosts of the role envs can connect to the controller"
            ) from None
        if process.poll() is not None:
            process.hang_up()  # it ended just now
        return process.line, process

    def lose(self, why: str) -> None:
        """The host is gone: whoever waits for one of its processes hears of it now."""
        if not self.lost:
            _log.warning("%s; its episodes are played on the hosts that are left", why)
        self.close(why)

    def close(self, why: str) -> None:
        """Use the host no more. What runs there ends."""
        self.lost = self.lost or why
        _hang_up(self._control)
        for process in tuple(self._processes.values()):
            process.over(self.lost)

    def _tell(self, number: int, what: str, *args: Any) -> None:
        try:
            with self._sending:
                self._control.send_bytes(pickle.dumps((number, what, args)))
        except OSError:
            self.lose(f"host {self.name} is lost: its line for worker processes ended")

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, what, value = pickle.loads(self._control.recv_bytes())  # noqa: S301  # from our own warden
                if what == "started":
                    self._processes[number].pid = value
                elif what == "ended":
                    self._processes.pop(number).over(f"a worker process on {self.name} ended with {value}", value)
                else:
                    self._processes.pop(number).over(f"host {self.name} cannot start a worker process: {value}")
        self.lose(f"host {self.name} is lost: its line for worker processes ended")


class Distant:
    """A worker's process on another host.

    Args:
        end: Asks its host to kill it.
        knocked: Its line, once it has connected.
    """

    def __init__(self, end: Callable[[], None], knocked: Future[Connection]) -> None:
        self.pid = 0
        self.line: Connection | None = None
        self._end, self._knocked = end, knocked
        self._over = threading.Event()
        self._status = -int(signal.SIGKILL)

    def over(self, why: str, status: int = -signal.SIGKILL) -> None:
        """It has ended, or may as well have. Whoever waits for it is told."""
        if not self._over.is_set():
            self._status = int(status)
            self._over.set()
        with contextlib.suppress(InvalidStateError):
            self._knocked.set_exception(HostError(why))
        self.hang_up()

    def hang_up(self) -> None:
        """End its line for both sides, and for a thread that waits there."""
        if self.line is not None:
            _hang_up(self.line)

    def poll(self) -> int | None:
        return self._status if self._over.is_set() else None

    def end(self, grace_s: float) -> int:
        if not self._over.wait(grace_s):
            self._end()
            self.over("it was ended")
        return self._status


def _hang_up(line: Connection) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
