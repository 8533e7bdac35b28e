"""Routers: which replica of an engine answers a prompt."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from forge_agents.errors import did_you_mean
from forge_agents.imports import check_origin, import_advice, import_user_module

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Router(Protocol):
    """Picks replicas, which are numbered.

    Routers are created with one argument, the number of requests that a replica works on at once. A router that
    returns conversations to the replica that knows them sets ``keeps_conversations = True``, for predictions.
    """

    def pick(self, prompt_ids: Sequence[int], loads: Mapping[int, int]) -> int:
        """One of the keys of `loads`: the numbers of unfinished requests by live replica. Never empty."""
        ...

    def answered(self, prompt_ids: Sequence[int], response_ids: Sequence[int], replica: int) -> None:
        """Called when `replica` has completed `prompt_ids` and caches the keys and values of both."""
        ...


class LeastLoaded:
    """Picks the replica with the fewest unfinished requests; among equals, the one that was picked longest ago."""

    keeps_conversations = False

    def __init__(self, capacity: int = 0) -> None:
        self._num_picks = 0
        self._last_pick: dict[int, int] = {}

    def pick(self, prompt_ids: Sequence[int], loads: Mapping[int, int]) -> int:
        """See `Router`."""
        replica = min(loads, key=lambda replica: (loads[replica], self._last_pick.get(replica, 0), replica))
        self._num_picks += 1
        self._last_pick[replica] = self._num_picks
        return replica

    def answered(self, prompt_ids: Sequence[int], response_ids: Sequence[int], replica: int) -> None:
        """Nothing to remember."""


class PrefixAffine:
    """Picks the replica that answered the conversation's last turn. New conversations go to the least loaded one.

    A prompt continues a conversation if it begins with an earlier prompt and its response. The episodes of a group,
    whose first prompts are equal, therefore spread over the replicas, and each stays where it began. A replica that
    works on `capacity` requests is skipped if another has room. The least recent conversations are forgotten first.
    """

    keeps_conversations = True

    def __init__(self, capacity: int, *, max_conversations: int = 65_536) -> None:
        self._capacity = capacity
        self._max_conversations = max_conversations
        self._replica_of: OrderedDict[int, int] = OrderedDict()
        """By the hash of prompt and response."""
        self._fallback = LeastLoaded()
        self._base = secrets.randbits(64) | 1

    def pick(self, prompt_ids: Sequence[int], loads: Mapping[int, int]) -> int:
        """See `Router`."""
        replica = self._find(prompt_ids)
        if replica in loads and (loads[replica] < self._capacity or min(loads.values()) >= self._capacity):
            return replica
        return self._fallback.pick(prompt_ids, loads)

    def answered(self, prompt_ids: Sequence[int], response_ids: Sequence[int], replica: int) -> None:
        """See `Router`."""
        key = int(self._hashes((*prompt_ids, *response_ids))[-1])
        self._replica_of[key] = replica
        self._replica_of.move_to_end(key)
        if len(self._replica_of) > self._max_conversations:
            self._replica_of.popitem(last=False)

    def _find(self, prompt_ids: Sequence[int]) -> int:
        """The replica that answered the longest earlier exchange that `prompt_ids` begins with, -1 if there is none."""
        if not self._replica_of:
            return -1
        hashes = reversed(self._hashes(prompt_ids).tolist())
        return next((self._replica_of[key] for key in hashes if key in self._replica_of), -1)

    def _hashes(self, token_ids: Sequence[int]) -> NDArray[np.uint64]:
        """uint64 [T]: a hash of each of the T prefixes, the sum of a polynomial in a random odd base."""
        powers = np.cumprod(np.full(len(token_ids), self._base, dtype=np.uint64))
        terms = (np.asarray(token_ids, dtype=np.uint64) + np.uint64(1)) * powers
        return np.cumsum(terms, dtype=np.uint64)


ROUTERS: Mapping[str, Callable[[int], Router]] = {"prefix": PrefixAffine, "load": LeastLoaded}
"""Built-in routers, by the names that `EngineConfig.routing` accepts."""


def router_class(routing: str) -> Callable[[int], Router]:
    """The built-in router called `routing`, or the class ``package.module:Class``.

    Raises:
        ValueError: The router does not exist or is no router.
    """
    module, _, name = routing.rpartition(":")
    if not module:
        if routing not in ROUTERS:
            names, hint = ", ".join(ROUTERS), did_you_mean(routing, ROUTERS)
            raise ValueError(f"routing={routing!r} is none of {names} and no 'package.module:Class'.{hint}")
        return ROUTERS[routing]
    try:
        router = check_origin(getattr(import_user_module(module), name), routing)
    except (ImportError, AttributeError, ValueError) as cause:
        advice = import_advice(module, cause, "Write 'package.module:Class'")
        raise ValueError(f"routing={routing!r} cannot be imported ({cause}). {advice}") from cause
    methods = ("pick", "answered")
    if not (isinstance(router, type) and all(callable(getattr(router, method, None)) for method in methods)):
        raise ValueError(
            f"routing={routing!r} is {router!r:.80}. Give a class with pick(prompt_ids, loads) and "
            "answered(prompt_ids, response_ids, replica)"
        )
    return router
