"""Choice of the replica: the one that holds the conversation, else the one with the fewest requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_agents.serving.config import EngineConfig
from forge_agents.serving.routing import LeastLoaded, PrefixAffine, router_class


def test_least_loaded_replica_is_picked_in_turn():
    router = LeastLoaded()
    assert router.pick([1], {0: 3, 1: 2, 2: 5}) == 1
    assert [router.pick([1], {0: 0, 1: 0, 2: 0}) for _ in range(6)] == [0, 2, 1, 0, 2, 1]


def test_conversation_returns_to_its_replica():
    router = PrefixAffine(capacity=8)
    first = [5, 6, 7]
    router.answered(first, [8, 9], 2)
    assert router.pick([*first, 8, 9, 10, 11], {0: 0, 1: 0, 2: 7}) == 2
    assert router.pick([*first, 8, 1, 10, 11], {0: 4, 1: 0, 2: 7}) == 1  # another response: another conversation
    router.answered([*first, 8, 9, 10, 11], [12], 0)  # it moved, and then the longest beginning counts
    assert router.pick([*first, 8, 9, 10, 11, 12, 13], {0: 1, 1: 0, 2: 0}) == 0
    assert router.pick([*first, 8, 9, 99], {0: 1, 1: 0, 2: 0}) == 2


def test_equal_first_prompts_spread_over_replicas():
    router = PrefixAffine(capacity=8)
    loads = {0: 0, 1: 0}
    for _ in range(8):
        loads[router.pick([1, 2, 3], loads)] += 1
    assert loads == {0: 4, 1: 4}
    router.answered([1, 2, 3], [4], 0)
    assert router.pick([1, 2, 3], {0: 0, 1: 0}) in {0, 1}


def test_full_or_dead_replica_is_skipped():
    router = PrefixAffine(capacity=4)
    router.answered([1, 2], [3], 1)
    prompt = [1, 2, 3, 4]
    assert router.pick(prompt, {0: 3, 1: 4}) == 0
    assert router.pick(prompt, {0: 4, 1: 9}) == 1  # nobody has room, and the cache is there
    assert router.pick(prompt, {0: 9}) == 0


def test_least_recent_conversations_are_forgotten():
    router = PrefixAffine(capacity=4, max_conversations=2)
    for conversation in (1, 2, 3):
        router.answered([conversation], [0], 1)
    assert router.pick([2, 0, 5], {0: 0, 1: 3}) == 1
    assert router.pick([1, 0, 5], {0: 0, 1: 3}) == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 200_000), min_size=1, max_size=12), min_size=1, max_size=20), st.data())
def test_every_conversation_finds_its_replica(prompts, data):
    router = PrefixAffine(capacity=100)
    homes = {}
    for prompt in prompts:
        home = data.draw(st.integers(0, 3))
        router.answered(prompt, [7], home)
        homes[tuple(prompt)] = home
    for prompt, home in homes.items():
        longer = {p for p in homes if len(p) > len(prompt) and p[: len(prompt) + 2] == (*prompt, 7, 200_001)}
        assert not longer
        assert router.pick([*prompt, 7, 200_001], dict.fromkeys(range(4), 0)) == home


class Last(LeastLoaded):
    """One of a user's own."""

    def pick(self, prompt_ids, loads):
        return max(loads)


def test_router_is_named_or_imported():
    result = {
        name: router_class(EngineConfig(routing=name, replicas=2).routing)
        for name in ("prefix", "load", f"{__name__}:Last")
    }
    assert list(result.values()) == [PrefixAffine, LeastLoaded, Last]


@pytest.mark.parametrize(
    ("routing", "told"),
    [
        ("prefxi", "is none of prefix, load and no 'package.module:Class'. Did you mean 'prefix'"),
        ("no_such_module:Mine", "cannot be imported .No module named 'no_such_module'"),
        (f"{__name__}:Lost", "cannot be imported .*'Lost'"),
        (f"{__name__}:pytest", "Give a class with pick"),
    ],
)
def test_invalid_router_is_refused(routing, told):
    with pytest.raises(ValueError, match=told):
        EngineConfig(routing=routing, replicas=2)


@pytest.mark.parametrize("routing", ["load", f"{__name__}:Last"])
def test_router_without_replicas_is_refused(routing):
    with pytest.raises(ValueError, match=f"routing='{routing}' has no effect with replicas=1"):
        EngineConfig(routing=routing)
    assert EngineConfig(routing="prefix").routing == "prefix"
