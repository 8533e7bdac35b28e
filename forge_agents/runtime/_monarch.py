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

    def current_rank() -> Any:
        """Where in its mesh the current call runs."""

    def current_size() -> dict[str, int]:
        """Sizes of the mesh of the current call."""

    def default_bootstrap_cmd() -> Any:
        """How Monarch starts a process."""

    def this_host() -> Any:
        """This machine, as a mesh of one host."""

else:
    with _without_notice():
        from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
        from monarch.actor import (
            Actor,
            ActorError,
            ProcMesh,
            concurrent_endpoint,
            current_rank,
            current_size,
            default_bootstrap_cmd,
            endpoint,
            this_host,
        )

__all__ = [
    "Actor",
    "ActorError",
    "ProcMesh",
    "SupervisionError",
    "attach",
    "concurrent_endpoint",
    "current_rank",
    "current_size",
    "default_bootstrap_cmd",
    "endpoint",
    "leave_quietly",
    "listen",
    "new_host_address",
    "on_unhandled_fault",
    "serve_host",
    "set_attach_deadline",
    "start_runtime",
    "this_host",
]


def start_runtime() -> Any:
    """Start Monarch's client in this process, without its notice.

    Returns:
        This machine as a mesh of one host.
    """
    with _without_notice():
        return this_host()


def on_unhandled_fault(hook: Callable[[Any], None]) -> None:
    """Call `hook` with each death nobody supervises; Monarch's own hook ends this process."""
    import monarch.actor  # type: ignore[import-untyped,unused-ignore]

    monarch.actor.unhandled_fault_hook = hook


def listen(address: str) -> None:
    """Talk TCP, before anything else is asked of Monarch in this process.

    Args:
        address: ``tcp://HOST:PORT``, or ``tcp`` for this machine's name and a free port.

    Raises:
        RuntimeError: Monarch runs already, another way.
    """
    from monarch.actor import enable_transport  # type: ignore[import-untyped,unused-ignore]

    enable_transport(address)


def set_attach_deadline(seconds: float) -> None:
    """How long `attach` lets hosts take to answer."""
    from monarch.config import configure  # type: ignore[import-untyped,unused-ignore]

    configure(mesh_attach_config_timeout=f"{seconds:g}s")


def attach(name: str, addresses: Sequence[str]) -> Any:
    """The hosts that listen there, as a mesh with dimension ``hosts``; it connects in the background."""
    from monarch.actor import attach_to_workers

    with _without_notice():
        return attach_to_workers(name=name, ca="trust_all_connections", workers=list(addresses))


def new_host_address(address: str) -> str:
    """`address` with an identity of its own, by which hosts are told apart."""
    from monarch._src.job.service_identity import (  # type: ignore[import-untyped,unused-ignore]
        new_service_proc_id,
        service_proc_addr,
    )

    found: str = service_proc_addr(address, new_service_proc_id())
    return found


def serve_host(address: str) -> None:
    """Be a host; does not return."""
    from monarch.actor import run_worker_loop_forever

    run_worker_loop_forever(address=address, ca="trust_all_connections")


@functools.cache
def leave_quietly() -> None:
    """See to it that this process may end when hosts are gone; Monarch would say at length that they are."""
    from monarch.actor import shutdown_context

    def leave() -> None:
        with contextlib.suppress(TimeoutError):
            shutdown_context(host_timeout=_LEAVE_S).get(timeout=3 * _LEAVE_S)

    atexit.register(leave)
