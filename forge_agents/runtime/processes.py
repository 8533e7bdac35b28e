"""The processes that one controller starts: their environment, log folders and termination."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import fcntl
import functools
import os
import re
import resource
import secrets
import select
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from forge_agents.imports import extend_path, path_variables
from forge_agents.private_folder import make_private, private_folder
from forge_agents.runtime.deaths import oom_kills_before
from forge_agents.runtime.machine import HOST_VARIABLE

RUN_VARIABLE = "FORGE_AGENTS_RUN"
"""Environment variable of all processes of one controller, with the controller's token."""
MESH_VARIABLE = "FORGE_AGENTS_MESH"
"""Environment variable of all processes of one mesh and of their children, with the name of the mesh's log folder."""
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables of processes whose ranks are all on one machine: gloo and NCCL listen on the loopback interface."""
_OPEN_FILES = 65535
"""Limit of open files of processes that strangers can connect to. The usual limit is 1,024."""
_DONE = ".done"
"""Suffix of a file next to a process's log: its exit handlers have run and it is about to end."""


@functools.cache
def _token() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def make_log_folder(name: str) -> Path:
    """Make a log folder for a mesh of that name. The folder has the same, unique path on every host."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name) or "procs"
    oom_kills_before()
    return Path(tempfile.mkdtemp(prefix=f"{safe}-", dir=private_folder()))


def is_ours(pid: int) -> bool:
    """Return whether a process of this controller still runs under that id. The kernel reuses ids."""
    return environment(pid).get(RUN_VARIABLE) == _token()


def environment(pid: int) -> dict[str, str]:
    """Return the initial environment of a process. Empty if it has ended or belongs to another user."""
    try:
        variables: dict[str, str] = psutil.Process(pid).environ()
    except (psutil.Error, OSError):  # the process may end at any moment
        return {}
    return variables


def with_variable(name: str, value: str) -> list[psutil.Process]:
    """Return this machine's processes whose initial environment has that variable and value."""
    return [process for process in psutil.process_iter() if environment(process.pid).get(name) == value]


def kill_mesh(mark: str) -> None:
    """Kill this machine's processes of the mesh whose `MESH_VARIABLE` is `mark`, and their children.

    Resource trackers of `multiprocessing` are not killed. These end with their parents, after the removal of the
    parents' semaphores from /dev/shm, where those would stay until the machine restarts.
    """
    for process in with_variable(MESH_VARIABLE, mark):
        with contextlib.suppress(psutil.Error):  # it ended; psutil does not kill a process that has reused the id
            if not any("multiprocessing.resource_tracker import main" in word for word in process.cmdline()):
                process.kill()


def on_end(pid: int, tell: Callable[[int | None], None]) -> None:
    """Call `tell` on another thread when a process ends, with its exit status, or None if that is not known.

    Raises ProcessLookupError if the process has ended.
    """
    threading.Thread(target=_wait_for_end, args=(os.pidfd_open(pid), tell), daemon=True).start()


def _wait_for_end(fd: int, tell: Callable[[int | None], None]) -> None:
    """Wait for a process's end. Only a thread that already waits gets the exit status before Monarch does."""
    status = None
    try:
        if (seen := os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)) is not None:
            status = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
    except ChildProcessError:  # it is a child of another process, or Monarch was faster, as on a busy machine
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll()
        status = _exit_status(fd)
    finally:
        os.close(fd)
    tell(status)


_GET_INFO, _INFO_EXIT = 0xC040FF0B, 8
"""Linux's ``PIDFD_GET_INFO`` for a ``struct pidfd_info`` of 64 bytes, and ``PIDFD_INFO_EXIT``."""


def _exit_status(fd: int) -> int | None:
    """Return the exit status of an ended process by its pidfd, which Linux keeps since version 6.15.

    The status is there once the parent has fetched it, which may be a moment after the end.
    """
    for _ in range(100):
        info = bytearray(struct.pack("=Q56x", _INFO_EXIT))
        try:
            fcntl.ioctl(fd, _GET_INFO, info)
        except OSError:
            return None
        known, wait_status = struct.unpack("=Q52xi", info)
        if known & _INFO_EXIT:
            return os.waitstatus_to_exitcode(wait_status)
        time.sleep(0.01)
    return None


async def kill_after(grace_s: float, pids: Sequence[int], folder: Path) -> None:
    """Wait until the processes of a mesh with that log folder have ended.

    Processes that take longer than `grace_s` or have run their exit handlers are killed, because large libraries take
    seconds to unload.
    """
    deadline, late = time.monotonic() + grace_s, False
    while not late and (alive := [pid for pid in pids if is_ours(pid)]):
        late = time.monotonic() > deadline
        for pid in alive:
            if late or (folder / f"{pid}{_DONE}").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.02)


def bootstrap_command(environment: Mapping[str, str], program: str = "") -> Any:
    """Return Monarch's command for a new process, which never imports modules from the current folder (``-P``).

    Args:
        environment: Variables in addition to those of the host.
        program: Python source to run. The source must run Monarch's main program. Empty runs only that.
    """
    from forge_agents.runtime._monarch import PROGRAM, default_bootstrap_cmd

    command = default_bootstrap_cmd().with_env(dict(environment))
    command.args = ["-P", "-c", program or PROGRAM]
    return command


def begin(folder: str, cores: frozenset[int]) -> None:
    """Initialize a new process: bind it to `cores`, redirect its output to ``RANK.log`` and write ``RANK.pid``."""
    from forge_agents.runtime._monarch import current_rank, restore_temporary_folder

    restore_temporary_folder()
    extend_path()
    for thread in Path("/proc/self/task").iterdir() if cores else ():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cores)
    # handlers run in reverse order, so this one, registered first, runs last
    atexit.register(lambda: Path(folder, f"{os.getpid()}{_DONE}").touch())
    rank = current_rank().rank
    path = Path(folder)
    path.parents[1].mkdir(parents=True, exist_ok=True)
    for level in (path.parent, path):  # missing if this is another host
        make_private(level)
    (path / f"{rank}.pid").write_text(str(os.getpid()))
    log = os.open(Path(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(file=2)  # a crash by SIGSEGV, SIGILL, ... writes its stack to the log


def variables(host: str) -> dict[str, str]:
    """Return the environment variables of all processes of this run on a host. `host` is empty for this one."""
    common = {RUN_VARIABLE: _token(), **path_variables(), **openmp_variables()}
    return {**common, HOST_VARIABLE: host} if host else common


def openmp_variables() -> dict[str, str]:
    """Return a limit on the busy-waiting of OpenMP threads, unless the user has set one.

    By default libgomp spins 300,000 times, for milliseconds, before a thread sleeps. If another process shares the
    core, a waiting thread burns the time of the thread it waits for: a learner's step of two threads next to one busy
    process took 3.4 times as long, with 4,000 spins 2.2 times, and on quiet cores the same.
    """
    if os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        return {}
    return {"GOMP_SPINCOUNT": "4000"}


def raise_file_limit() -> None:
    """Raise this process's limit of open files to 65,535, or as close as the system allows.

    A server that cannot open another file accepts no connection, and gloo ends the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
