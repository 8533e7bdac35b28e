"""Main program and Monarch actor of a worker process.

Environments run in the main thread, because graders limit their time by an alarm and Python handles signals only there.
Monarch runs in a thread of its own.
"""

from __future__ import annotations

import pickle
import queue
import sys
import threading
from concurrent.futures import Future
from typing import Any

from forge_agents.envs.workers.process import Environments, end_children_with_this_process
from forge_agents.runtime._monarch import Actor, endpoint, invoke_main, shorten_socket_paths

PROGRAM = "from forge_agents.envs.workers.actor import main; main()"

_calls: queue.SimpleQueue[tuple[Environments, str, tuple[Any, ...], Future[bytes]] | None] = queue.SimpleQueue()
"""Calls for the main thread. None ends the process."""


class EnvActor(Actor):
    """Actor that runs environments, one call at a time."""

    def __init__(self) -> None:
        end_children_with_this_process()
        self._environments = Environments()

    @endpoint
    def do(self, what: str, args: tuple[Any, ...]) -> bytes:
        """Run `Environments.answer` in the main thread."""
        answer: Future[bytes] = Future()
        _calls.put((self._environments, what, args, answer))
        return answer.result()


def main() -> None:
    """Run a worker process."""
    status: Any = 1

    def monarch() -> None:
        nonlocal status
        try:
            shorten_socket_paths()
            invoke_main()
        except SystemExit as end:
            status = end.code
        finally:
            _calls.put(None)

    threading.Thread(target=monarch, name="monarch", daemon=True).start()
    while (call := _calls.get()) is not None:
        environments, what, args, answer = call
        try:
            packed = environments.answer(what, *args)
        except BaseException as error:  # noqa: BLE001  # such as SystemExit. The caller ends this process
            packed = pickle.dumps((None, f"{type(error).__name__}: {error}"))
        answer.set_result(packed)
    sys.exit(status)
