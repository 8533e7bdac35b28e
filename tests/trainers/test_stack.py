"""Work that needs the weight store, and outlives it."""

import asyncio
from types import SimpleNamespace

import pytest

from forge_agents.errors import ActorDiedError, StallError
from forge_trainers.stack import Stack


class Stores:
    """What `Stack.with_store` uses of a stack: stores "weights", each mended by the next."""

    def __init__(self):
        self.mended = []
        self.store = self._fresh()
        self._mending, self._mends = asyncio.Lock(), set()

    def _fresh(self):
        return SimpleNamespace(ref=SimpleNamespace(name="weights"), number=len(self.mended))

    async def _replace_store(self, broken, cause):
        async with self._mending:
            assert broken is self.store
            self.mended.append(cause)
            self.store = self._fresh()
            await asyncio.sleep(0.02)

    _mend_store = Stack._mend_store


def test_work_is_done_again_with_the_store_that_takes_a_dead_ones_place():
    stack, seen = Stores(), []

    async def work(store):
        seen.append(store.number)
        if store.number == 0:
            raise ActorDiedError("weights died during put", "weights")
        if store.number == 1:
            raise StallError("weights did not answer", "weights")
        return "loaded"

    assert asyncio.run(Stack.with_store(stack, work)) == "loaded"
    assert seen == [0, 1, 2] and stack.mended == ["weights died during put", "weights did not answer"]


def test_another_ones_death_is_not_the_stores():
    stack = Stores()

    async def work(store):
        raise ActorDiedError("hero-opponent died", "hero-opponent")

    with pytest.raises(ActorDiedError, match="hero-opponent died"):
        asyncio.run(Stack.with_store(stack, work))
    assert stack.mended == []


def test_whoever_stops_waiting_for_a_new_store_does_not_stop_it_and_the_next_waits_until_all_know_it():
    async def main():
        stack = Stores()

        async def work(store):
            if store.number == 0:
                raise ActorDiedError("weights died during put", "weights")
            assert not stack._mending.locked()
            return store.number

        first = asyncio.ensure_future(Stack.with_store(stack, work))
        await asyncio.sleep(0.01)
        first.cancel()
        assert await Stack.with_store(stack, work) == 1
        assert stack.mended == ["weights died during put"]

    asyncio.run(main())
