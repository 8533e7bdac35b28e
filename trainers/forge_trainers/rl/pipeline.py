"""Stages that overlap: playing and judging ahead of the learner, and weights that travel behind it.

In: coroutines that play, judge and load. Out: batches, in the order of steps. Waits for those coroutines; deadlines are
the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

G = TypeVar("G")
J = TypeVar("J")

Put: TypeAlias = Callable[[int, G], None]
"""Takes a group that has been played, and its number within the step."""


def window(staleness: int) -> tuple[int, int]:
    """How many steps may start ahead of the learner's, and how many steps a slow group may come late.

    Their sum is `staleness`. The first version lets engines and learner work at the same time; of the second, slow
    groups have more than of one more step ahead, as the batch does not wait for them; more versions start more steps.
    """
    late = min(1, max(0, staleness - 1))
    return staleness - late, late


Key: TypeAlias = tuple[int, int]
"""A step, and the number of a group within it."""


class TakenGroups:
    """Which groups batches have taken: where slow groups may come late, not only those of the steps before.

    What a batch takes counts once its step is learned from; a run that goes on elsewhere plays the rest.
    """

    def __init__(self) -> None:
        self.early: frozenset[Key] = frozenset()
        """Taken, of steps that are not learned from yet."""
        self.owed: frozenset[Key] = frozenset()
        """Not taken, of steps that are."""
        self.begin()

    def begin(self) -> None:
        """Forget what was taken and never learned from."""
        self._newest = self.early, self.owed
        self._by_step: dict[int, tuple[frozenset[Key], frozenset[Key]]] = {}

    def fit(self, size: int) -> None:
        """A step has `size` groups from here on; where it had more, and any of those counts, all is forgotten."""
        if any(number >= size for _, number in self.early | self.owed):
            self.early = self.owed = frozenset()
            self.begin()

    def missing(self, step: int, size: int) -> list[int]:
        """Numbers of the groups of `step` that are to be played, of `size`."""
        owed = [number for at, number in sorted(self.owed) if at == step]
        return owed or [number for number in range(size) if (step, number) not in self.early]

    def take(self, step: int, keys: Collection[Key], size: int) -> None:
        """The batch of `step` is made of the groups `keys`."""
        early, owed = self._newest
        due = owed | ({(step, number) for number in range(size)} - early)
        self._newest = frozenset(key for key in early.union(keys) if key[0] > step), due.difference(keys)
        self._by_step[step] = self._newest

    def settle(self, step: int) -> None:
        """`step` has been learned from."""
        self.early, self.owed = self._by_step.pop(step, (self.early, self.owed))

    def state_dict(self) -> dict[str, np.ndarray]:
        """int64 ``[groups, 2]`` each, for a checkpoint."""
        return {name: np.array(sorted(getattr(self, name)), np.int64).reshape(-1, 2) for name in ("early", "owed")}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`."""
        self.early, self.owed = (frozenset((int(a), int(n)) for a, n in state[name]) for name in ("early", "owed"))
        self.begin()


@dataclass(frozen=True, slots=True)
class Batch(Generic[G, J]):
    """What one step learns from, on its way."""

    groups: asyncio.Task[list[G]]
    judged: asyncio.Task[J]


class Pipeline(Generic[G, J]):
    """Plays and judges ahead of the learner, by at most `staleness` versions.

    Let ``ahead, late = window(staleness)``. The groups of step j are started only in ``batch(i)`` with
    ``i >= j - ahead``. Before it the learner has finished the steps below i, and `play` asks nothing before the
    engines have those weights: a sample of step j is at least j - ahead updates old in count. A batch takes what is
    finished, oldest first, and waits for all groups of steps up to its own minus `late`. No more than a batch is ever
    due: those before have taken as many groups as there are older steps, all of the overdue among them. So step j is
    learned from at j + late or before, by a learner that is at most ``ahead + late = staleness`` versions on. Versions
    never move otherwise, so the bound holds whatever the timing.

    Args:
        play: Plays a step and puts each group as it ends, once the weights that the learner has when it is called
            have arrived. It returns when all are put.
        judge: Judges the groups of a step; one step at a time, in order.
        staleness: Versions that a sample may lie behind; with 0 a step's batch is its own groups, in order.
        steps: Steps of the run; none at or past it is started.
        size: Groups of a step.
        taken: What batches before have taken, brought up to date; `play` plays what it says is missing.
    """

    def __init__(
        self,
        play: Callable[[int, Put[G]], Coroutine[Any, Any, object]],
        judge: Callable[[int, list[G]], Coroutine[Any, Any, J]],
        *,
        staleness: int,
        steps: int,
        size: int,
        taken: TakenGroups | None = None,
    ) -> None:
        self._play, self._judge, self._steps, self._size = play, judge, steps, size
        self._book = taken or TakenGroups()
        self._ahead, self._late = window(staleness)
        self._playing: dict[int, asyncio.Task[object]] = {}
        self._batches: dict[int, Batch[G, J]] = {}
        self._next = 0
        """The first step that is not started."""
        self._played: dict[tuple[int, int], G] = {}
        """By step and number, what no batch has taken."""
        self._news = asyncio.Event()

    def batch(self, step: int) -> Batch[G, J]:
        """What `step` learns from; starts all that may start now. The learner has finished every step before."""
        if not self._next:
            self._book.fit(self._size)
            for at in sorted({at for at, _ in self._book.owed}):
                self._start(at)
        for at in range(max(step, self._next), min(step + self._ahead + 1, self._steps)):
            self._start(at)
            before = self._batches.get(at - 1)
            groups = asyncio.ensure_future(self._taken(at, before))
            judged = asyncio.ensure_future(self._judged(at, groups, before))
            self._batches[at] = Batch(groups, judged)
            self._next = at + 1
        self._batches.pop(step - 1, None)
        return self._batches[step]

    async def cancel(self) -> None:
        """Stop what was played and judged ahead and will not be used."""
        batches = (task for one in self._batches.values() for task in (one.groups, one.judged))
        tasks = [*self._playing.values(), *batches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, step: int) -> None:
        def put(number: int, group: G) -> None:
            self._played[step, number] = group
            self._news.set()

        task = self._playing[step] = asyncio.ensure_future(self._play(step, put))
        task.add_done_callback(lambda _: self._news.set())

    async def _taken(self, step: int, before: Batch[G, J] | None) -> list[G]:
        if before is not None:
            await asyncio.shield(before.groups)  # others wait for it, too: it goes on where this one is cancelled
        while True:
            for at in [at for at, task in self._playing.items() if task.done()]:
                await self._playing.pop(at)
            due = any(at <= step - self._late for at in self._playing)
            if not due and len(self._played) >= self._size:
                break
            if not self._playing:
                raise RuntimeError(
                    f"step {step + 1} has {len(self._played)} of {self._size} groups; none is played any more"
                )
            self._news.clear()
            await self._news.wait()
        keys = sorted(self._played)[: self._size]
        self._book.take(step, keys, self._size)
        return [self._played.pop(key) for key in keys]

    async def _judged(self, step: int, played: asyncio.Task[list[G]], before: Batch[G, J] | None) -> J:
        groups = await asyncio.shield(played)
        if before is not None:
            await asyncio.shield(before.judged)  # a verifier learns from the steps in their order
        return await self._judge(step, groups)


class Background:
    """Work of which one piece at a time goes on in the background, once it lets go of the caller.

    Whoever needs it done waits.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def start(self, work: Callable[[Callable[[], None]], Coroutine[Any, Any, None]]) -> None:
        """Begin `work` when the piece before is done, and wait until it calls its argument or ends.

        Raises what the piece before raised.
        """
        await self.done()
        free = asyncio.Event()
        self._task = asyncio.ensure_future(work(free.set))
        self._task.add_done_callback(lambda _: free.set())
        await free.wait()

    async def done(self) -> None:
        """Wait for the piece that was begun last; at once if there is none. Raises what it raised."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def cancel(self) -> bool:
        """Give the piece up, and what it raised. Returns whether it had been done well, or there was none."""
        task, self._task = self._task, None
        if task is None:
            return True
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        return outcome is None
