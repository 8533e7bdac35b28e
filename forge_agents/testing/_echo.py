"""The smallest actor.

In: a call. Out: the id of its process. Waits for nothing.
"""

from __future__ import annotations

import os

from forge_agents.runtime._monarch import Actor, endpoint


class Echo(Actor):
    """Says which process it lives in."""

    @endpoint
    async def pid(self) -> int:
        """The process's id."""
        return os.getpid()
