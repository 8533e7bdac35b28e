"""Which processes share memory.

In: nothing. Out: a name for the place this process runs in. Waits for nothing.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

HOST_VARIABLE = "FORGE_AGENTS_HOST"
"""Environment variable of processes on another host than the controller's: that host's name in the run."""


@functools.cache
def place() -> str:
    """Names what processes must have in common to share memory: host, kernel, process-id namespace and user.

    Hosts that are processes of one machine count as several: they are there to try what several machines do.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = os.environ.get(HOST_VARIABLE, "")
    return f"{host}/{boot}/{Path('/proc/self/ns/pid').readlink()}/{os.getuid()}"
