"""The program of a worker process and its actor. Apart from the rest, because they load Monarch.

In: commands of `forge_agents.envs.workers.env`. Out: packed answers. Waits for commands.

Environments play in the main thread: Python lets no other handle signals, and graders limit their time by an alarm.
Monarch has a thread of its own.
"""

from __future__ import annotations

import queue
import sys
import threading
from concurrent.futures import Future
from typing import Any

from forge_agents.envs.workers.process import Environments, end_children_with_this_process
from forge_agents.runtime._monarch import Actor, endpoint, invoke_main

PROGRAM = "from forge_agents.envs.workers.actor import main; main()"

_calls: queue.SimpleQueue[tuple[Environments, str, tuple[Any, ...], Future[bytes]] | None] = queue.SimpleQueue()
"""For the main thread; None where the process is to end."""


class EnvActor(Actor):
    """Plays environments, one call at a time."""

    def __init__(self) -> None:
        end_children_with_this_process()
        self._environments = Environments()

    @endpoint
    def do(self, what: str, args: tuple[Any, ...]) -> bytes:
        """As `Environments.answer`."""
        answer: Future[bytes] = Future()
        _calls.put((self._environments, what, args, answer))
        return answer.result()


def main() -> None:
    """What a worker's process runs."""
    status: Any = 1

    def monarch() -> None:
        nonlocal status
        try:
            invoke_main()
        except SystemExit as end:
            status = end.code
        finally:
            _calls.put(None)

    threading.Thread(target=monarch, name="monarch", daemon=True).start()
    while (call := _calls.get()) is not None:
        environments, what, args, answer = call
        try:
            answer.set_result(environments.answer(what, *args))
        except BaseException as error:  # noqa: BLE001  # the actor raises it, and Monarch says who left by sys.exit
            answer.set_exception(error)
    sys.exit(status)
