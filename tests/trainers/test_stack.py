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

    def _fresh(self):
        return SimpleNamespace(ref=SimpleNamespace(name="weights"), number=len(self.mended))

    async def _mend_store(self, broken, cause):
        assert broken is self.store
        self.mended.append(cause)
        self.store = self._fresh()


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
