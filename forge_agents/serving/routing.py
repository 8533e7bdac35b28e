"""Which replica answers a prompt.

In: a prompt and how busy the replicas are. Out: one of them. Waits for nothing.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from forge_agents.errors import did_you_mean
from forge_agents.imports import import_user_module

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Router(Protocol):
    """Picks replicas, which are numbers here.

    It is made with one argument, the requests that a replica works on at the same time. One that sends conversations
    back to where they were says so to predictions with ``keeps_conversations = True``.
    """

    def pick(self, prompt_ids: Sequence[int], loads: Mapping[int, int]) -> int:
        """One of `loads`, which holds the unfinished requests of every replica that lives; never empty."""
        ...

    def answered(self, prompt_ids: Sequence[int], response_ids: Sequence[int], replica: int) -> None:
        """`replica` has completed `prompt_ids`, and holds keys and values of both."""
        ...


class LeastLoaded:
    """The replica with the fewest unfinished requests; among equals the one that was asked longest ago.

    Args:
        room: Of all routers; it makes no difference to this one.
    """

    keeps_conversations = False

    def __init__(self, room: int = 0) -> None:
        self._turn = 0
        self._asked: dict[int, int] = {}

    def pick(self, prompt_ids: Sequence[int], loads: Mapping[int, int]) -> int:
        """See `Router`."""
        replica = min(loads, key=lambda replica: (loads[replica], self._asked.get(replica, 0), replica))
        self._turn += 1
        self._asked[replica] = self._turn
        return replica

    def answered(self, prompt_ids: Sequence[int], response_ids: Sequence[int], replica: int) -> None:
        """Nothing to remember."""


class PrefixAffine:
    """The replica that answered the conversation's last turn, whose cache holds it; a new one goes to the least loaded.

    A conversation is known by its tokens: a prompt that begins with an earlier prompt and its response continues it.
    So siblings, whose first prompts are equal, spread over the replicas, and each stays where it began. A replica
    whose batch is full is passed over as long as another has room.

    Args:
        room: Requests that a replica works on at the same time.
        remembered: Conversations; those that were quiet longest are forgotten first.
    """

    keeps_conversations = True

    def __init__(self, room: int, *, remembered: int = 65_536) -> None:
        self._room = room
        self._remembered = remembered
        self._homes: OrderedDict[int, int] = OrderedDict()
        self._others = LeastLoaded()
        self._base = secrets.randbits(64) | 1

    def pick(self, prompt_ids: Sequence[int], loads: Mapping[int, int]) -> int:
        """See `Router`."""
        home = self._home(prompt_ids)
        if home is not None and home in loads and (loads[home] < self._room or min(loads.values()) >= self._room):
            return home
        return self._others.pick(prompt_ids, loads)

    def answered(self, prompt_ids: Sequence[int], response_ids: Sequence[int], replica: int) -> None:
        """See `Router`."""
        key = int(self._hashes((*prompt_ids, *response_ids))[-1])
        self._homes[key] = replica
        self._homes.move_to_end(key)
        if len(self._homes) > self._remembered:
            self._homes.popitem(last=False)

    def _home(self, prompt_ids: Sequence[int]) -> int | None:
        """Who answered the longest beginning of the prompt that is a whole earlier exchange."""
        if not self._homes:
            return None
        hashes = reversed(self._hashes(prompt_ids).tolist())
        return next((self._homes[known] for known in hashes if known in self._homes), None)

    def _hashes(self, token_ids: Sequence[int]) -> NDArray[np.uint64]:
        """uint64 [T]: a hash of each beginning of T tokens, the sum of a polynomial in a random odd base."""
        powers = np.cumprod(np.full(len(token_ids), self._base, dtype=np.uint64))
        terms = (np.asarray(token_ids, dtype=np.uint64) + np.uint64(1)) * powers
        return np.cumsum(terms, dtype=np.uint64)


ROUTERS: Mapping[str, Callable[[int], Router]] = {"prefix": PrefixAffine, "load": LeastLoaded}
"""By the names that `EngineConfig.routing` takes beside ``package.module:Class``."""


def router_class(routing: str) -> Callable[[int], Router]:
    """The router called `routing`, or the one of that module.

    Raises:
        ValueError: There is none, or it is no router.
    """
    module, _, name = routing.rpartition(":")
    if not module:
        if routing not in ROUTERS:
            known, near = ", ".join(ROUTERS), did_you_mean(routing, ROUTERS)
            raise ValueError(f"routing={routing!r} is none of {known} and no 'package.module:Class'.{near}")
        return ROUTERS[routing]
    try:
        found = getattr(import_user_module(module), name)
    except (ImportError, AttributeError, ValueError) as cause:
        raise ValueError(f"routing={routing!r} cannot be imported ({cause}); write 'package.module:Class'") from cause
    if not (isinstance(found, type) and all(callable(getattr(found, method, None)) for method in ("pick", "answered"))):
        raise ValueError(
            f"routing={routing!r} is {found!r:.80}; give a class with pick(prompt_ids, loads) and "
            "answered(prompt_ids, response_ids, replica)"
        )
    return found
