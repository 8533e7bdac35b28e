"""What the processes of one controller have in common: a mark, import paths, and folders for what they print.

In: names. Out: variables, folders, process ids. Waits for the end of processes, with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from forge_agents.runtime.places import HOST_VARIABLE

RUN_VARIABLE = "FORGE_AGENTS_RUN"
"""Environment variable that marks every process of one controller; its value is the controller's token."""


@functools.cache
def _token() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def run_folder() -> Path:
    """Holds a folder for each mesh; the same path on every host."""
    return Path(tempfile.gettempdir()) / f"forge-agents-{os.getuid()}" / _token()


def new_log_folder(name: str) -> Path:
    """A new folder for a mesh of that name; its own name is unique in the run."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name) or "procs"
    base = run_folder()
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Path(tempfile.mkdtemp(prefix=f"{safe}-", dir=base))


def _python_path() -> str:
    """Import paths of this process, so that what it can import, its actors can."""
    entries = [Path(entry).resolve() for entry in sys.path]
    installed = (sys.prefix, sys.base_prefix)
    ours = [str(entry) for entry in entries if not str(entry).startswith(installed) and entry.is_dir()]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join(dict.fromkeys(ours + inherited))


def is_ours(pid: int) -> bool:
    """Whether a process of this controller still runs under that id (ids are reused)."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{RUN_VARIABLE}={_token()}".encode() in environment


async def kill_after(grace_s: float, pids: Sequence[int]) -> None:
    """Wait until the processes are gone, and kill those that take longer: big libraries take seconds to unload."""
    deadline = time.monotonic() + grace_s
    while alive := [pid for pid in pids if is_ours(pid)]:
        if time.monotonic() > deadline:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        await asyncio.sleep(0.02)


def begin(folder: str, cores: frozenset[int]) -> None:
    """Runs first in every spawned process: what it prints goes to a file; its id is noted beside it."""
    from forge_agents.runtime._monarch import current_rank

    for thread in Path("/proc/self/task").iterdir() if cores else ():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cores)
    rank = current_rank().rank
    Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)  # another host has no such folder yet
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    log = os.open(Path(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(file=2)  # a death by SIGSEGV, SIGILL, ... leaves its stack there


def variables(host: str) -> dict[str, str]:
    """What every process of this run finds in its environment; those on another host also its name."""
    variables = {RUN_VARIABLE: _token(), "PYTHONPATH": _python_path()}
    return {**variables, HOST_VARIABLE: host} if host else variables
