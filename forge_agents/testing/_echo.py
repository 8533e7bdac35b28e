"""The smallest actor, for tests of the installation."""

from __future__ import annotations

import os

from forge_agents.runtime._monarch import Actor, endpoint


class Echo(Actor):
    """Returns the id of its process."""

    @endpoint
    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()
