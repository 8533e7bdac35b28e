"""The processes of one controller: their mark, import paths and memory, what they print, and how they end.

In: names, and how the kernel says that a process ended. Out: variables, folders, process ids, `Death`. Waits for the
end of processes, with a deadline.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import functools
import os
import re
import secrets
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from forge_agents.imports import extend_path, path_variables
from forge_agents.runtime import deaths as _deaths
from forge_agents.runtime.machine import HOST_VARIABLE

RUN_VARIABLE = "FORGE_AGENTS_RUN"
"""Environment variable that marks every process of one controller; its value is the controller's token."""
MESH_VARIABLE = "FORGE_AGENTS_MESH"
"""Environment variable that marks every process of one mesh, and what these start."""

LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables of processes whose ranks are all on one machine: gloo and NCCL listen on its loopback interface."""

_DONE = ".done"
"""Ends the name of a file beside a process's log: it is about to end, and has done what it does then."""


@functools.cache
def _token() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def run_folder() -> Path:
    """Holds a folder for each mesh; the same path on every host."""
    return Path(tempfile.gettempdir()) / f"forge-agents-{os.getuid()}" / _token()


def new_log_folder(name: str) -> Path:
    """A new folder for a mesh of that name; its own name is unique in the run."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name) or "procs"
    _deaths.oom_kills_before()
    base = run_folder()
    for level in (base.parent, base):
        _make_own(level)
    return Path(tempfile.mkdtemp(prefix=f"{safe}-", dir=base))


def _make_own(folder: Path) -> None:
    """Make a folder that nobody else may write to, or see that one is there.

    Its name can be guessed, and whoever makes it first could leave links in it, which logs would follow.

    Raises:
        PermissionError: What is there is somebody else's, or no folder.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(
            f"{folder} is no folder of yours (its owner is user {found.st_uid}); logs of processes go there. Remove "
            "it, or set TMPDIR to a folder of your own"
        )
    if found.st_mode & 0o022:  # made by an earlier version
        folder.chmod(0o700)


def is_ours(pid: int) -> bool:
    """Whether a process of this controller still runs under that id (ids are reused)."""
    return environment(pid).get(RUN_VARIABLE) == _token()


def environment(pid: int) -> dict[str, str]:
    """The variables that a process began with; none if it has ended or belongs to another user."""
    try:
        found: dict[str, str] = psutil.Process(pid).environ()
    except (psutil.Error, OSError):  # the process may end at any moment
        return {}
    return found


def with_variable(name: str, value: str) -> list[psutil.Process]:
    """The processes of this machine that began with a variable of that value."""
    return [process for process in psutil.process_iter() if environment(process.pid).get(name) == value]


def kill_marked(mark: str) -> None:
    """Kill the processes of a mesh here, and what they have started."""
    for process in with_variable(MESH_VARIABLE, mark):
        with contextlib.suppress(psutil.Error):  # it ended; `kill` leaves a process alone that has taken over its id
            process.kill()


async def kill_after(grace_s: float, pids: Sequence[int], folder: Path) -> None:
    """Wait until the processes are gone, and kill those that take longer or have nothing left to do.

    Big libraries take seconds to unload, which nobody needs to wait for.

    Args:
        grace_s: Seconds for what they have to do at their end.
        folder: That they `begin` with.
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
    """Return how Monarch starts a process, which never imports modules of the current folder for being there.

    Args:
        environment: Variables in addition to those of its host.
        program: Python source to run, with Monarch's own main program somewhere in it; empty runs that alone.
    """
    from forge_agents.runtime._monarch import default_bootstrap_cmd

    command = default_bootstrap_cmd().with_env(dict(environment))
    command.args = ["-P", *(["-c", program] if program else command.args)]
    return command


def begin(folder: str, cores: frozenset[int]) -> None:
    """Runs first in every spawned process: what it prints goes to a file; its id is noted beside it."""
    from forge_agents.runtime._monarch import current_rank

    extend_path()
    for thread in Path("/proc/self/task").iterdir() if cores else ():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cores)
    atexit.register(lambda: Path(folder, f"{os.getpid()}{_DONE}").touch())  # the first that registers is called last
    rank = current_rank().rank
    path = Path(folder)
    path.parents[2].mkdir(parents=True, exist_ok=True)
    for level in (*path.parents[1::-1], path):  # another host has no such folder yet
        _make_own(level)
    (path / f"{rank}.pid").write_text(str(os.getpid()))
    log = os.open(Path(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(file=2)  # a death by SIGSEGV, SIGILL, ... leaves its stack there


def variables(host: str) -> dict[str, str]:
    """What every process of this run finds in its environment; those on another host also its name."""
    variables = {RUN_VARIABLE: _token(), **path_variables(), **waiting()}
    return {**variables, HOST_VARIABLE: host} if host else variables


def waiting() -> dict[str, str]:
    """How long OpenMP's threads wait awake for each other, where the user has not said it.

    libgomp turns 300,000 times, milliseconds, before a thread sleeps. Where anything else runs on a core, a thread
    that waits burns its time while the one it waits for is not on: a learner's step of two threads beside one busy
    process took 3.4 times as long, with 4,000 turns 2.2 times, and on quiet cores the same.
    """
    if os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        return {}
    return {"GOMP_SPINCOUNT": "4000"}
