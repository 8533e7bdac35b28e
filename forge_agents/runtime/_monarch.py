"""Monarch's names, with types and settings. All other modules import Monarch through this one."""
# ruff: noqa: F401  # names for other modules

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_agents.errors import HostError
from forge_agents.private_folder import (
    SOCKET_VARIABLE,
    log_suffix,
    private_folder,
    socket_folder,
    use_code_folder,
)
from forge_agents.runtime.exposure import warn_of_other_users
from forge_agents.runtime.private_sockets import use_private_sockets

os.environ.setdefault("MONARCH_LOG_SUFFIX", log_suffix())
os.environ.setdefault("MONARCH_FILE_LOG", "error")  # with its default, "info", the file grows with each call
# Monarch reads these files, which `use_certificate` writes, at each TLS connection.
_CERTIFICATE, _KEY = "tls.crt", "tls.key"
for _part, _file in (("CA", _CERTIFICATE), ("CERT", _CERTIFICATE), ("KEY", _KEY)):
    os.environ[f"HYPERACTOR_TLS_{_part}"] = str(private_folder() / _file)
# The defaults of PyTorch and vLLM lie in a folder that other users can write to.
use_code_folder()
os.environ[SOCKET_VARIABLE] = str(socket_folder())
# Monarch ends actors that their controller has not asked for a minute, as after a pause of the machine. The processes
# of a run end with the controller without that.
os.environ.setdefault("HYPERACTOR_MESH_ORPHAN_TIMEOUT", "360d")
# Messages with weights exceed Monarch's default limit of about 10 MB.
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(2**40))


_LOADED_IN = os.getpid()
"""Id of the process that loaded Monarch, whose threads do not run in forked children."""
_temporary_folder = ""
"""Folder for temporary files of this process, while Monarch uses another one."""
_SHUTDOWN_TIMEOUT_S = 0.3
"""Time that Monarch gets at the exit of the process to send its last messages."""


@contextlib.contextmanager
def _without_notice() -> Iterator[None]:
    """Remove Monarch's line about its log file from the standard error stream."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            for line in captured:
                if not line.startswith(b"Monarch internal logs"):
                    os.write(2, line)


if TYPE_CHECKING:
    ProcMesh = Any

    class Actor:
        """Base class of all actors."""

    class ActorError(Exception):
        """An endpoint raised `exception`."""

        exception: BaseException
        exception_formatted: str

    class SupervisionError(RuntimeError):
        """An actor's process ended."""

    class Channel:
        """Opens ports that receive messages."""

        open: Any

    def endpoint(method: Callable[..., Any]) -> Any:
        """Mark a method that other processes may call. Calls run one at a time, in order."""

    def concurrent_endpoint(method: Callable[..., Any]) -> Any:
        """Mark a method that other processes may call. Each call is a separate task."""

    SOCKETS_ARE_PRIVATE: bool
    """Whether no other user of this machine can connect to Monarch's Unix sockets."""

    attach_to_workers: Any
    configure: Any
    current_rank: Any
    """Rank of the current call in its mesh."""
    enable_transport: Any
    invoke_main: Any
    """Main program of a process that Monarch starts. The program ends with SystemExit."""
    reload_config_from_env: Any
    """Read Monarch's settings again from the environment variables."""
    run_worker_loop_forever: Any
    send: Any
    """Call an endpoint and have the answer sent to a given port."""
    shutdown_context: Any
    this_host: Any
    """This machine as a mesh of one host."""

else:
    with _without_notice():
        from monarch import _rust_bindings
        from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
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
            enable_transport,
            endpoint,
            run_worker_loop_forever,
            send,
            shutdown_context,
            this_host,
        )
        from monarch.config import configure

    SOCKETS_ARE_PRIVATE = use_private_sockets(_rust_bindings.__file__)
    # Otherwise Monarch prefixes each log message with "[actor=<root>] ", also in the user's loggers.
    _monarch_config.prefix_python_logs_with_actor = False


PROGRAM = "from forge_agents.runtime._monarch import run_process; run_process()"
"""Python source that each process of Monarch runs."""


def default_bootstrap_cmd() -> Any:
    """Return Monarch's command for a new process, with `PROGRAM` as its program."""
    from monarch._src.actor.host_mesh import default_bootstrap_cmd as monarch_command

    command = monarch_command()
    command.args = ["-c", PROGRAM]
    return command


def run_process() -> None:
    """Run this process for Monarch until it ends. Its sockets are private, because this module is imported first."""
    multiprocessing.set_start_method("forkserver", force=True)  # as Monarch's own program does
    shorten_socket_paths()
    invoke_main()


def shorten_socket_paths() -> None:
    """Let Monarch make its sockets in the private folder, until `restore_temporary_folder`.

    Monarch makes sockets in subfolders of the folder for temporary files. The path of a socket has at most 107 bytes.
    A folder that is too long for the private folder is too long for these sockets as well.
    """
    global _temporary_folder
    if Path(tempfile.gettempdir()) != private_folder().parent:
        _temporary_folder, os.environ["TMPDIR"] = tempfile.gettempdir(), str(private_folder())


def restore_temporary_folder() -> None:
    """Let programs that this process starts use the user's folder for temporary files."""
    if _temporary_folder:
        os.environ["TMPDIR"] = _temporary_folder


@contextlib.contextmanager
def _short_socket_paths() -> Iterator[None]:
    shorten_socket_paths()
    try:
        yield
    finally:
        restore_temporary_folder()


def check_not_forked() -> None:
    """Raise HostError if this process was forked from one that had loaded Monarch: every call would wait forever."""
    if os.getpid() != _LOADED_IN:
        raise HostError(
            f"this process was forked from process {_LOADED_IN}, which had started engines or learners before. Their "
            "threads do not exist here. Start it with multiprocessing.get_context('spawn'), or fork before the first "
            "call of fit, evaluate or benchmark"
        )


class ReplyPort:
    """Receives the answers of one actor, for one call at a time.

    Monarch 0.7 opens a port for each call, and the answering process keeps 350 bytes for every port. Endpoints that are
    called often therefore answer to one port. A call does not fail when the actor's process ends, so the caller
    must watch the process. The answer to an abandoned call may arrive later, so its port must not be used again.
    """

    def __init__(self) -> None:
        self._port, self._receiver = Channel.open()
        # Else Monarch returns an answer that comes too late, and ends this process if its sender has ended meanwhile.
        self._port.return_undeliverable = False

    def call(self, endpoint: Any, *args: Any) -> Any:
        """Call an endpoint of an actor mesh of size 1. Returns a Monarch future of its answer."""
        send(endpoint, args, {}, port=self._port, selection="choose")
        return self._receiver.recv()


def start_runtime() -> Any:
    """Start Monarch's client in this process. Returns this machine as a mesh of one host."""
    if not SOCKETS_ARE_PRIVATE:
        warn_of_other_users()
    with _without_notice(), _short_socket_paths():
        return this_host()


def poll_processes(every_s: int) -> None:
    """Have Monarch look for ended processes every `every_s` seconds, unless the user has set its variable.

    Monarch 0.7 keeps about 2.5 KB in this process each time, for every actor of every mesh, and each mesh has two
    actors of Monarch's own. Two minutes without a look end calls, so this limit is raised, also for later processes.
    """
    settings = {"SUPERVISION_POLL_FREQUENCY": every_s, "SUPERVISION_WATCHDOG_TIMEOUT": 120 + 2 * every_s}
    variables = {f"HYPERACTOR_MESH_{name}": f"{seconds}s" for name, seconds in settings.items()}
    added = variables.keys() - os.environ.keys()
    os.environ.update({name: variables[name] for name in added})
    reload_config_from_env()
    for name in added:  # they are not for other programs that this process starts
        del os.environ[name]


def end_calls(actors: Iterable[Any]) -> None:
    """End all calls of actors whose processes have ended. In each calling process they raise SupervisionError.

    Monarch itself does this at its next check for ended processes. See `poll_processes`.
    """
    for actor in actors:
        actor.stop()  # begins at once, and takes 30 s to end


def on_unhandled_fault(hook: Callable[[Any], None]) -> None:
    """Call `hook` with each unsupervised failure. Monarch's default hook ends this process."""
    import monarch.actor  # type: ignore[import-untyped,unused-ignore]

    monarch.actor.unhandled_fault_hook = hook


def attach(name: str, addresses: Sequence[str]) -> Any:
    """Return the hosts at `addresses` as a mesh with dimension ``hosts``. The mesh connects in the background."""
    if not SOCKETS_ARE_PRIVATE:
        warn_of_other_users()
    with _without_notice(), _short_socket_paths():
        return attach_to_workers(name=name, ca="trust_all_connections", workers=list(addresses))


def use_certificate(folder: str | Path) -> None:
    """Use the certificate of a run for TLS connections, in both directions.

    The folder holds ``tls.crt``, a self-signed certificate that names every host, and its key ``tls.key``. Certificate
    and key are copied to this process's private folder.

    Raises:
        HostError: A file is missing, or other users may read the key.
    """
    certificate, key = Path(folder, _CERTIFICATE), Path(folder, _KEY)
    try:
        if key.stat().st_mode & 0o077:
            raise HostError(
                f"other users may read or write {key}, the key of the run's certificate. Run chmod 600 on it"
            )
        for file in (certificate, key):
            copy = os.open(private_folder() / file.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(copy, "wb") as output:
                output.write(file.read_bytes())
    except OSError as cause:
        raise HostError(
            f"the certificate of the run cannot be read: {cause}; {folder} should hold {_CERTIFICATE} and {_KEY}"
        ) from cause


def new_host_address(address: str) -> str:
    """Return `address` with a unique host identity, as Monarch expects it."""
    from monarch._src.job import service_identity  # type: ignore[import-untyped,unused-ignore]

    unique: str = service_identity.service_proc_addr(address, service_identity.new_service_proc_id())
    return unique


@functools.cache
def leave_quietly() -> None:
    """Shut Monarch down at the exit of this process, within a second and without messages.

    Monarch's own exit handler runs later and finds nothing left to do. Without this function, that handler waits for
    hosts that are gone and reports them at length.
    """

    def leave() -> None:
        with contextlib.suppress(TimeoutError):
            shutdown_context(host_timeout=_SHUTDOWN_TIMEOUT_S).get(timeout=3 * _SHUTDOWN_TIMEOUT_S)

    atexit.register(leave)
