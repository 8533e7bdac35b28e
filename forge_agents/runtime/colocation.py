"""Sharing of GPUs by two sides, such as engines and learners, of which one at a time has its memory there."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

from forge_agents.runtime.mesh import with_deadline

Move: TypeAlias = Callable[[], Awaitable[object]]
DeviceAccess: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]
"""Opens a block in which one side may compute."""

unshared: DeviceAccess = contextlib.nullcontext
"""Access to devices that are not shared."""


class Colocation:
    """Gives sides that share devices access to them, one side at a time.

    A side stays on the devices until another side needs them. Then its current work finishes, the side is offloaded,
    and only then the other one is loaded, so that both are never there at the same time.

    Args:
        first: The side that is on the devices at the start.
        timeout_s: Maximum seconds that one side may keep the other waiting.
    """

    def __init__(self, first: str, timeout_s: float) -> None:
        self._active, self._timeout_s = first, timeout_s
        self._sides: dict[str, tuple[Move, Move]] = {}
        self._users: Counter[str] = Counter()
        self._changing = asyncio.Lock()
        self._left = asyncio.Event()

    def register(self, side: str, *, offload: Move, onload: Move) -> DeviceAccess:
        """Add a side. Returns the context manager in which its work must run.

        Args:
            offload: Moves the side's memory off the devices. May be called twice.
            onload: Moves the memory back.
        """
        self._sides[side] = (offload, onload)
        return lambda: self._access(side)

    @contextlib.asynccontextmanager
    async def _access(self, side: str) -> AsyncIterator[None]:
        async with self._changing:
            if self._active != side:
                await self._change(side)
            self._users[side] += 1
        try:
            yield
        finally:
            self._users[side] -= 1
            self._left.set()

    async def _change(self, side: str) -> None:
        for other, (offload, _) in self._sides.items():
            if other != side:
                what = f"the work that keeps {side} waiting"
                await with_deadline(self._idle(other), self._timeout_s, who=other, what=what)
                self._active = ""  # if the offload fails, no side is known to be loaded, and all are offloaded again
                await offload()
        await self._sides[side][1]()
        self._active = side

    async def _idle(self, side: str) -> None:
        while self._users[side]:
            self._left.clear()
            await self._left.wait()
