"""Sends the learners' weights to the engines, in the background if the policy lag allows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from forge_agents.runtime.mesh import with_deadline

if TYPE_CHECKING:
    from forge_trainers.run.processes import Processes


class Background:
    """Runs one task at a time in the background. A task says when its caller may continue."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def start(self, work: Callable[[Callable[[], None]], Coroutine[Any, Any, None]]) -> None:
        """Start `work` after the previous task, and wait until it calls its argument or ends.

        Raises the error of the previous task.
        """
        await self.done()
        released = asyncio.Event()
        self._task = asyncio.ensure_future(work(released.set))
        self._task.add_done_callback(lambda _: released.set())
        await released.wait()

    async def done(self) -> None:
        """Wait for the last task, if there is one. Raises its error."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def cancel(self) -> bool:
        """Cancel the last task and drop its error. Returns whether it had succeeded, or there was none."""
        task, self._task = self._task, None
        if task is None:
            return True
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        return outcome is None


class WeightSync(Background):
    """Transfers of the learners' weights to the engines.

    `done` waits until the engines have the weights of the last `publish`: older samples would exceed the policy lag.
    """

    def __init__(self, max_staleness: int, timeout_s: float) -> None:
        super().__init__()
        self._max_staleness, self._timeout_s = max_staleness, timeout_s
        self.is_current = True
        """Whether the engines have the learners' weights. True at first, because both start with the same model."""

    async def publish(self, processes: Processes) -> None:
        """Send new weights. Returns when the learners may continue: without a policy lag, after the engines loaded."""
        await self.start(partial(self._sync, processes))
        if self._max_staleness == 0:
            await self.done()

    async def refresh(self, processes: Processes) -> None:
        """Send weights if the engines have others, such as after learners were restored from a checkpoint."""
        if not self.is_current:
            await self._sync(processes)
            self.is_current = True

    async def cancel(self) -> bool:
        """Cancel a transfer. The engines' weights are then unknown."""
        succeeded = await super().cancel()
        self.is_current = succeeded and self.is_current
        return succeeded

    def reset(self) -> None:
        """Prepare for new processes, maybe in another event loop."""
        self._task, self.is_current = None, True

    async def _sync(self, processes: Processes, published: Callable[[], None] = lambda: None) -> None:
        await with_deadline(processes.sync(published), self._timeout_s, who="weights", what="return")
