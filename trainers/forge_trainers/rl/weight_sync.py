"""Sends the learners' weights to the engines, in the background if the policy lag allows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from forge_agents.runtime.mesh import with_deadline

if TYPE_CHECKING:
    from forge_trainers.run.processes import Processes


class WeightSync:
    """Transfers the learners' weights to the engines, one version at a time."""

    def __init__(self, max_staleness: int, timeout_s: float) -> None:
        self._max_staleness, self._timeout_s = max_staleness, timeout_s
        self.reset()

    def reset(self) -> None:
        """Prepare for new processes, maybe in another event loop."""
        self._transfer: asyncio.Task[None] | None = None
        self.is_current = True
        """Whether the engines have the learners' weights. True at first, because both start with the same model."""

    async def publish(self, processes: Processes) -> None:
        """Send new weights after the last transfer, whose error this raises.

        Returns when the learners may continue: without a policy lag, when the engines have loaded the weights, and
        otherwise when all weights are in the store.
        """
        await self.done()
        published = asyncio.Event()
        self._transfer = asyncio.ensure_future(self._sync(processes, published.set))
        self._transfer.add_done_callback(lambda _: published.set())  # also if it fails
        await published.wait()
        if self._max_staleness == 0:
            await self.done()

    async def done(self) -> None:
        """Wait until the engines have the weights of the last `publish`. Older samples would exceed the policy lag.

        Raises the error of the transfer.
        """
        if self._transfer is not None:
            await asyncio.shield(self._transfer)

    async def refresh(self, processes: Processes) -> None:
        """Send weights if the engines have others, such as after learners were restored from a checkpoint."""
        if not self.is_current:
            await self._sync(processes)
            self.is_current = True

    async def cancel(self) -> None:
        """Cancel a transfer and drop its error. The engines' weights are then unknown."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.cancel()
            (outcome,) = await asyncio.gather(transfer, return_exceptions=True)
            self.is_current = self.is_current and outcome is None

    async def _sync(self, processes: Processes, published: Callable[[], None] = lambda: None) -> None:
        await with_deadline(processes.sync(published), self._timeout_s, who="weights", what="return")
