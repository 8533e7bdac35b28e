"""The one door to Monarch: every module that defines an actor imports its names from here.

In: nothing. Out: Monarch's actor names, with types that a type checker can use. Waits for nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

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

    def endpoint(method: Callable[..., Any]) -> Any:
        """A method that other processes may call; one at a time, in order."""

    def concurrent_endpoint(method: Callable[..., Any]) -> Any:
        """A method that other processes may call; every call is its own task."""

    attach_to_workers: Any
    configure: Any
    current_rank: Any
    """Where in its mesh the current call runs."""
    current_size: Any
    default_bootstrap_cmd: Any
    """How Monarch starts a process."""
    enable_transport: Any
    invoke_main: Any
    """The program of a process that Monarch starts; ends with SystemExit."""
    run_worker_loop_forever: Any
    shutdown_context: Any
    this_host: Any
    """This machine, as a mesh of one host."""

else:
    with _without_notice():
        from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
        from monarch._src.actor import config as _monarch_config
        from monarch._src.actor.bootstrap_main import invoke_main
        from monarch.actor import (
            Actor,
            ActorError,
            ProcMesh,
            attach_to_workers,
            concurrent_endpoint,
            current_rank,
            current_size,
            default_bootstrap_cmd,
            enable_transport,
            endpoint,
            run_worker_loop_forever,
            shutdown_context,
            this_host,
        )
        from monarch.config import configure

    # Monarch would put "[actor=<root>] " before each log message, once per handler, in the user's own loggers, too.
    _monarch_config.prefix_python_logs_with_actor = False

__all__ = [
    "Actor",
    "ActorError",
    "ProcMesh",
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
]


def start_runtime() -> Any:
    """Start Monarch's client in this process, without its notice. Returns this machine as a mesh of one host."""
    with _without_notice():
        return this_host()


def on_unhandled_fault(hook: Callable[[Any], None]) -> None:
    """Call `hook` with each death nobody supervises; Monarch's own hook ends this process."""
    import monarch.actor  # type: ignore[import-untyped,unused-ignore]

    monarch.actor.unhandled_fault_hook = hook


def attach(name: str, addresses: Sequence[str]) -> Any:
    """The hosts that listen there, as a mesh with dimension ``hosts``; it connects in the background."""
    with _without_notice():
        return attach_to_workers(name=name, ca="trust_all_connections", workers=list(addresses))


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
