"""One host of a run: ``python -m forge_agents.runtime.host_process --port 26600``.

In: where to listen. Out: the processes that a controller asks for. Waits for one controller, and ends with it.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
from collections.abc import Sequence


def main(words: Sequence[str] | None = None) -> None:
    """Serve one run; does not return."""
    parser = argparse.ArgumentParser(prog="python -m forge_agents.runtime.host_process", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="listen on all interfaces, as the name this machine has")
    where.add_argument("--address", help="listen there: tcp://HOST:PORT or ipc://PATH")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when the standard input ends")
    chosen = parser.parse_args(words)
    if chosen.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    name = socket.getfqdn() if chosen.address is None else ""
    from forge_agents.runtime import _monarch

    _monarch.serve_host(chosen.address or f"tcp://{name}:{chosen.port}@tcp://0.0.0.0:{chosen.port}")


def _end_with_stdin() -> None:
    """The other end of the pipe is held by the controller, and the kernel closes it whatever ends that."""
    while os.read(0, 4096):
        continue
    os._exit(0)


if __name__ == "__main__":
    main()
