"""The one door to Monarch: every module that defines an actor imports its names from here.

In: nothing. Out: Monarch's actor names, with types that a type checker can use. Waits for nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_agents.errors import HostError
from forge_agents.runtime.exposure import warn_of_other_users
from forge_agents.runtime.private_folder import log_suffix, private_folder
from forge_agents.runtime.private_sockets import use_private_sockets

os.environ.setdefault("MONARCH_LOG_SUFFIX", log_suffix())
# Where Monarch looks for the files of `use_certificate`, at each connection by TLS.
_CERTIFICATE, _KEY = "tls.crt", "tls.key"
for _part, _file in (("CA", _CERTIFICATE), ("CERT", _CERTIFICATE), ("KEY", _KEY)):
    os.environ[f"HYPERACTOR_TLS_{_part}"] = str(private_folder() / _file)
# Monarch reads these once, when it is first imported; with its own default, a death is noticed after 8 to 10 s.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
# Large messages (weights between hosts) exceed its default of 10 MB or so.
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(2**40))


_LEAVE_S = 0.3
"""At the end of the process, for what Monarch still has to say to others."""


@contextlib.contextmanager
def _without_notice() -> Iterator[None]:
    """Hold back Monarch's line about its log file; let everything else on the error stream through."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught:
                if not line.startswith(b"Monarch internal logs"):
                    os.write(2, line)


if TYPE_CHECKING:
    ProcMesh = Any

    class Actor:
        """Base of every actor."""

    class ActorError(Exception):
        """An endpoint raised; `exception` is what it raised."""

        exception: BaseException
        exception_formatted: str

    class SupervisionError(RuntimeError):
        """An actor's process ended."""

    class Channel:
        """Opens ports that take messages."""

        open: Any

    def endpoint(method: Callable[..., Any]) -> Any:
        """A method that other processes may call; one at a time, in order."""

    def concurrent_endpoint(method: Callable[..., Any]) -> Any:
        """A method that other processes may call; every call is its own task."""

    SOCKETS_ARE_PRIVATE: bool
    """Whether no other user of this machine can connect to Monarch's Unix sockets."""

    attach_to_workers: Any
    configure: Any
    current_rank: Any
    """Where in its mesh the current call runs."""
    current_size: Any
    enable_transport: Any
    invoke_main: Any
    """The program of a process that Monarch starts; ends with SystemExit."""
    run_worker_loop_forever: Any
    send: Any
    """Calls an endpoint and has the answer sent to a given port."""
    shutdown_context: Any
    this_host: Any
    """This machine, as a mesh of one host."""

else:
    with _without_notice():
        from monarch import _rust_bindings
        from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
        from monarch._src.actor import config as _monarch_config
        from monarch._src.actor.bootstrap_main import invoke_main
        from monarch.actor import (
            Actor,
            ActorError,
            Channel,
            ProcMesh,
            attach_to_workers,
            concurrent_endpoint,
            current_rank,
            current_size,
            enable_transport,
            endpoint,
            run_worker_loop_forever,
            send,
            shutdown_context,
            this_host,
        )
        from monarch.config import configure

    SOCKETS_ARE_PRIVATE = use_private_sockets(_rust_bindings.__file__)
    # Monarch would put "[actor=<root>] " before each log message, once per handler, in the user's own loggers, too.
    _monarch_config.prefix_python_logs_with_actor = False

__all__ = [
    "SOCKETS_ARE_PRIVATE",
    "Actor",
    "ActorError",
    "ProcMesh",
    "ReplyPort",
    "SupervisionError",
    "attach",
    "concurrent_endpoint",
    "configure",
    "current_rank",
    "current_size",
    "default_bootstrap_cmd",
    "enable_transport",
    "endpoint",
    "invoke_main",
    "leave_quietly",
    "new_host_address",
    "on_unhandled_fault",
    "run_worker_loop_forever",
    "start_runtime",
    "this_host",
    "use_certificate",
]


PROGRAM = "from forge_agents.runtime._monarch import run_process; run_process()"
"""Python that a process runs which Monarch starts."""


def default_bootstrap_cmd() -> Any:
    """Monarch's command of a new process, with `PROGRAM` as the process's program."""
    from monarch._src.actor.host_mesh import default_bootstrap_cmd as command_of_monarch

    command = command_of_monarch()
    command.args = ["-c", PROGRAM]
    return command


def run_process() -> None:
    """Run this process for Monarch until it ends; its sockets are private, because this module is imported first."""
    multiprocessing.set_start_method("forkserver", force=True)  # as in Monarch's own program
    invoke_main()


class ReplyPort:
    """Receives the answers of one actor, for one call at a time.

    Monarch 0.7 opens a port for each call, and the process that answers keeps 350 bytes for every port. Endpoints that
    are called at every step therefore answer to the same port each time. A call does not fail when the actor's process
    ends: the caller must watch the process by other means. After a call that was given up, its answer may still
    arrive, so the port must not be used again.
    """

    def __init__(self) -> None:
        self._port, self._receiver = Channel.open()

    def call(self, endpoint: Any, *args: Any) -> Any:
        """Call an endpoint of an actor mesh of one. Returns a Monarch future of its answer."""
        send(endpoint, args, {}, port=self._port, selection="choose")
        return self._receiver.recv()


def start_runtime() -> Any:
    """Start Monarch's client in this process, without its notice. Returns this machine as a mesh of one host."""
    _warn_of_other_users()
    with _without_notice():
        return this_host()


def _warn_of_other_users() -> None:
    if not SOCKETS_ARE_PRIVATE:
        warn_of_other_users()


def on_unhandled_fault(hook: Callable[[Any], None]) -> None:
    """Call `hook` with each death nobody supervises; Monarch's own hook ends this process."""
    import monarch.actor  # type: ignore[import-untyped,unused-ignore]

    monarch.actor.unhandled_fault_hook = hook


def attach(name: str, addresses: Sequence[str]) -> Any:
    """The hosts that listen there, as a mesh with dimension ``hosts``; it connects in the background."""
    _warn_of_other_users()
    with _without_notice():
        return attach_to_workers(name=name, ca="trust_all_connections", workers=list(addresses))


def use_certificate(folder: str | Path) -> None:
    """Use the certificate of a run for connections by TLS, in both directions.

    Args:
        folder: Holds ``tls.crt``, a certificate that signs itself and names every host, and its key ``tls.key``. Both
            are copied to this process's private folder.

    Raises:
        HostError: A file is missing, or other users may read the key.
    """
    certificate, key = Path(folder, _CERTIFICATE), Path(folder, _KEY)
    try:
        if key.stat().st_mode & 0o077:
            raise HostError(
                f"other users may read or write {key}, the key of the run's certificate; run chmod 600 on it"
            )
        for file in (certificate, key):
            copy = os.open(private_folder() / file.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(copy, "wb") as output:
                output.write(file.read_bytes())
    except OSError as cause:
        raise HostError(
            f"the certificate of the run cannot be read: {cause}; {folder} should hold {_CERTIFICATE} and {_KEY}, as "
            "docs/hardware.md makes them"
        ) from cause


def new_host_address(address: str) -> str:
    """`address` with an identity of its own, by which hosts are told apart."""
    from monarch._src.job import service_identity  # type: ignore[import-untyped,unused-ignore]

    found: str = service_identity.service_proc_addr(address, service_identity.new_service_proc_id())
    return found


@functools.cache
def leave_quietly() -> None:
    """See to it that this process may end when hosts are gone, or its own processes are slow to end.

    Monarch would say so at length. What it registers itself comes after, and finds it done.
    """

    def leave() -> None:
        with contextlib.suppress(TimeoutError):
            shutdown_context(host_timeout=_LEAVE_S).get(timeout=3 * _LEAVE_S)

    atexit.register(leave)
