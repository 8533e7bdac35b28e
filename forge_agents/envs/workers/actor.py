"""The actor of a worker process. Apart from the rest, because it loads Monarch.

In: commands of `forge_agents.envs.workers.pool`. Out: packed answers. Waits for nothing.
"""

from __future__ import annotations

from typing import Any

from forge_agents.envs.workers.process import Environments, end_children_with_this_process
from forge_agents.runtime._monarch import Actor, endpoint


class EnvActor(Actor):
    """Plays environments, one call at a time."""

    def __init__(self) -> None:
        end_children_with_this_process()
        self._environments = Environments()

    @endpoint
    def do(self, what: str, args: tuple[Any, ...]) -> bytes:
        """As `Environments.answer`."""
        return self._environments.answer(what, *args)
