"""Devices that two sides share, of which one at a time has its memory there: `Turns`.

In: who wants to compute. Out: that it may, once the other side has left. Waits for the other side's work in progress,
and for its leaving, with deadlines.
"""

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
"""Opens a block in which one side computes."""

unshared: DeviceAccess = contextlib.nullcontext
"""Of who has its devices for itself."""


class Colocation:
    """Lets whoever is asked for something compute, alone on the devices.

    A side stays where it is until the other one is asked for something. It leaves when its work in progress is done:
    first it leaves, then the other one comes, so at no time are both there.

    Args:
        first: The side that is there at the start.
        timeout_s: Seconds that one side may keep the other waiting.
    """

    def __init__(self, first: str, timeout_s: float) -> None:
        self._there, self._timeout_s = first, timeout_s
        self._sides: dict[str, tuple[Move, Move]] = {}
        self._users: Counter[str] = Counter()
        self._changing = asyncio.Lock()
        self._left = asyncio.Event()

    def register(self, side: str, *, offload: Move, onload: Move) -> DeviceAccess:
        """Name a side. Returns what its work runs in.

        Args:
            leave: Takes its memory off the devices; twice is no error.
        """
        self._sides[side] = (offload, onload)
        return lambda: self._of(side)

    @contextlib.asynccontextmanager
    async def _of(self, side: str) -> AsyncIterator[None]:
        async with self._changing:
            if self._there != side:
                await self._change(side)
            self._users[side] += 1
        try:
            yield
        finally:
            self._users[side] -= 1
            self._left.set()

    async def _change(self, side: str) -> None:
        for other, (leave, _) in self._sides.items():
            if other != side:
                await with_deadline(self._at_rest(other), self._timeout_s, who=other, what=f"what keeps {side} waiting")
                self._there = ""  # where this fails nobody is known to be there, and all are told to leave again
                await leave()
        await self._sides[side][1]()
        self._there = side

    async def _at_rest(self, side: str) -> None:
        while self._users[side]:
            self._left.clear()
            await self._left.wait()
