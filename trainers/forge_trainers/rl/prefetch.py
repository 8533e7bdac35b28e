"""Collects and scores groups ahead of the learner, within the maximum policy lag."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from forge_agents import states
from forge_agents.types import EpisodeGroup

_log = logging.getLogger(__name__)
Put: TypeAlias = Callable[[int, EpisodeGroup], None]
"""Receives a finished group and its number within the step."""
Collect: TypeAlias = Callable[[int, Sequence[int], Put], Coroutine[Any, Any, object]]
"""Collects groups of a step, given their numbers, and puts each as it finishes."""
Score: TypeAlias = Callable[[int, list[EpisodeGroup]], Coroutine[Any, Any, list[EpisodeGroup]]]
"""Scores the groups of a step."""
Key: TypeAlias = tuple[int, int]
"""A step, and the number of a group within the step."""


def ahead_and_late(staleness: int) -> tuple[int, int]:
    """Split a maximum policy lag into (steps started ahead of the learner, steps that a slow group may be late).

    Their sum is `staleness`. The first version overlaps rollouts with training. The second lets slow groups arrive one
    step late, which helps them more than another step ahead, because the batch does not wait for them. Further versions
    start more steps ahead.
    """
    late = min(1, max(0, staleness - 1))
    return staleness - late, late


class TakenGroups:
    """Records which groups the batches have used: with late groups, a batch also holds groups of other steps.

    A group counts as used once the learner has trained on its batch. A resumed run collects the others again.
    """

    def __init__(self) -> None:
        self.early: frozenset[Key] = frozenset()
        """Used groups of steps that were not trained on yet."""
        self.owed: frozenset[Key] = frozenset()
        """Unused groups of steps that were trained on."""
        self.begin()

    def begin(self) -> None:
        """Forget groups that were taken but never trained on."""
        self._newest = self.early, self.owed
        self._by_step: dict[int, tuple[frozenset[Key], frozenset[Key]]] = {}

    def start_at(self, step: int, size: int) -> None:
        """Begin a session at `step` with `size` groups per step. Clears a record of another step or size."""
        fits = all(at == step - 1 for at, _ in self.owed) and all(at >= step for at, _ in self.early)
        if not fits or any(number >= size for _, number in self.early | self.owed):
            _log.warning(
                "the record of late groups does not fit step %d with %d groups per step. Late groups are dropped, and "
                "groups that were used early are used again",
                step + 1,
                size,
            )
            self.early = self.owed = frozenset()
            self.begin()

    def missing(self, step: int, size: int) -> list[int]:
        """Return the numbers of the groups of `step` (of `size`) that must be collected."""
        # A step with owed groups was trained on, so its other groups are used. Of another step, only early groups are.
        owed = [number for owed_step, number in sorted(self.owed) if owed_step == step]
        return owed or [number for number in range(size) if (step, number) not in self.early]

    def take(self, step: int, keys: Collection[Key], size: int) -> None:
        """Record that the batch of `step` consists of the groups `keys`."""
        early, owed = self._newest
        due = owed | ({(step, number) for number in range(size)} - early)
        self._newest = frozenset(key for key in early.union(keys) if key[0] > step), due.difference(keys)
        self._by_step[step] = self._newest

    def settle(self, step: int) -> None:
        """Record that the learner has trained on the batch of `step`."""
        self.early, self.owed = self._by_step.pop(step, (self.early, self.owed))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return int64 ``[groups, 2]`` each, for a checkpoint."""
        return {name: np.array(sorted(getattr(self, name)), np.int64).reshape(-1, 2) for name in ("early", "owed")}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`. Raises ValueError for groups that no run leaves.

        A group is late by one step at most, see `ahead_and_late`, and each one has another step's group in its place.
        """
        early, owed = (
            frozenset((step, number) for step, number in states.whole(state, name, -1, 2).tolist())
            for name in ("early", "owed")
        )
        late = {step for step, _ in owed}
        if len(early) != len(owed) or len(late) > 1 or any(step <= max(late) for step, _ in early):
            raise ValueError(
                f"{len(owed)} late groups of steps {sorted(late)[:3]} and {len(early)} early ones. Expected as many "
                "early groups as late ones, which are all of the step before"
            )
        self.early, self.owed = early, owed
        self.begin()


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """The groups of one step, while they are collected and scored."""

    collected: asyncio.Task[list[EpisodeGroup]]
    scored: asyncio.Task[list[EpisodeGroup]]


class Prefetch:
    """Collects and scores ahead of the learner, by at most `staleness` weight versions.

    Why no sample is older, with ``ahead, late = ahead_and_late(staleness)``:

    1. The groups of step j are started in ``batch(i)`` with ``i >= j - ahead``, when the learner has finished the steps
       below i. `collect` first waits until the engines have these weights, so their samples have version j - ahead or
       newer.
    2. The batch of step k waits for all groups of steps up to k - late and takes finished groups, oldest first. Batch
       k - 1 has taken all groups of steps below k - late, so those that batch k waits for fit into it. Therefore the
       learner trains on the groups of step j in step j + late or before.
    3. In step j + late the learner has version j + late, which is at most ``ahead + late = staleness`` versions newer.

    Args:
        collect: Collects groups of a step, once the engines have the learner's weights of the moment of the call.
        score: Scores the groups of a step. Called for one step at a time, in order.
        staleness: Maximum policy lag in weight versions. 0: the batch of a step is its own groups, in order.
        steps: Number of steps of the run. Later ones are not started.
        size: Number of groups per step.
        taken: Record of the groups that earlier batches used, updated in place.
    """

    def __init__(
        self,
        collect: Collect,
        score: Score,
        *,
        staleness: int,
        steps: int,
        size: int,
        taken: TakenGroups | None = None,
    ) -> None:
        self._collect, self._score, self._steps, self._size = collect, score, steps, size
        self._taken = taken or TakenGroups()
        self._ahead, self._late = ahead_and_late(staleness)
        self._collecting: dict[int, asyncio.Task[object]] = {}
        self._batches: dict[int, PendingBatch] = {}
        self._next = 0
        """The first step that was not started."""
        self._finished: dict[Key, EpisodeGroup] = {}
        """Finished groups that no batch has taken."""
        self._changed = asyncio.Event()

    def batch(self, step: int) -> PendingBatch:
        """Return the batch of `step`, and start all steps that may start now. The learner has finished all before."""
        if not self._next:
            self._taken.start_at(step, self._size)
            for owed_step in sorted({owed_step for owed_step, _ in self._taken.owed}):
                self._start(owed_step)
        for at in range(max(step, self._next), min(step + self._ahead + 1, self._steps)):
            self._start(at)
            before = self._batches.get(at - 1)
            collected = asyncio.ensure_future(self._take(at, before))
            scored = asyncio.ensure_future(self._score_next(at, collected, before))
            self._batches[at] = PendingBatch(collected, scored)
            self._next = at + 1
        self._batches.pop(step - 1, None)
        return self._batches[step]

    async def cancel(self) -> None:
        """Cancel everything that was started and not used."""
        batches = (task for batch in self._batches.values() for task in (batch.collected, batch.scored))
        tasks = [*self._collecting.values(), *batches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, step: int) -> None:
        def put(number: int, group: EpisodeGroup) -> None:
            self._finished[step, number] = group
            self._changed.set()

        numbers = self._taken.missing(step, self._size)
        task = self._collecting[step] = asyncio.ensure_future(self._collect(step, numbers, put))
        task.add_done_callback(lambda _: self._changed.set())

    async def _take(self, step: int, before: PendingBatch | None) -> list[EpisodeGroup]:
        """Wait until the batch of `step` is complete, and take its groups."""
        if before is not None:
            await asyncio.shield(before.collected)  # others wait for it, so it must survive a cancelation of this task
        while True:
            for at in [at for at, task in self._collecting.items() if task.done()]:
                await self._collecting.pop(at)
            overdue = any(at <= step - self._late for at in self._collecting)
            if not overdue and len(self._finished) >= self._size:
                break
            if not self._collecting:
                raise RuntimeError(
                    f"step {step + 1} has {len(self._finished)} of {self._size} groups, and none is being collected"
                )
            self._changed.clear()
            await self._changed.wait()
        keys = sorted(self._finished)[: self._size]
        self._taken.take(step, keys, self._size)
        return [self._finished.pop(key) for key in keys]

    async def _score_next(
        self, step: int, collected: asyncio.Task[list[EpisodeGroup]], before: PendingBatch | None
    ) -> list[EpisodeGroup]:
        groups = await asyncio.shield(collected)
        if before is not None:
            await asyncio.shield(before.scored)  # a reward may learn from the steps, so their order matters
        return await self._score(step, groups)
