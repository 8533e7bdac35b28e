"""Oracles: scripts that play an environment well. They set a benchmark's scale, take a seat, and are imitated.

In: a spec that was registered with ``oracle=``. Out: its factory, which makes a player for one seat of one episode, and
what the factory is told. Waits for its import.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from forge_agents.envs.registry import ids_with_oracles, settings_of
from forge_agents.envs.spec import EnvSpec
from forge_agents.errors import ForgeError

Player: TypeAlias = Callable[[str], str]
"""``player(observation) -> action``, called once for each decision of its seat, in their order."""

OracleFactory: TypeAlias = Callable[[str, Mapping[str, Any], random.Random], Player]
"""``oracle(agent, settings, rng) -> player``: a class, or a function that returns one.

It is called once for each seat and episode, so a player may keep what it has read, and no two share anything: whatever
it knows, its seat has read. `agent` is the seat whose observations it will read: in an environment that shuffles roles
the role. `settings` are the arguments of the environment's constructor, those that have defaults included. `rng` is the
player's own; it follows from the episode's seed, the seat and the sibling.
"""


Seat: TypeAlias = Callable[[str, Mapping[str, Any], random.Random], Player]
"""``seat(agent, info, rng) -> player``, of the info that came with the seat's first observation."""


def oracle_of(spec: object, env_id: str) -> Seat:
    """What seats an environment's oracle, who is imported if need be.

    Args:
        spec: The environment's attribute ``spec``; anything but an `EnvSpec` says nothing of an oracle.
        env_id: What errors call it.

    Raises:
        ValueError: It has none; the message names those that have one.
        ForgeError: It cannot be imported.
    """
    if not isinstance(spec, EnvSpec) or spec.oracle is None:
        raise ValueError(
            f"{env_id} has no oracle, which fa.Oracle plays by. These have one: "
            f"{', '.join(ids_with_oracles()) or 'none'}. fa.register(..., oracle=...) gives an environment its own"
        )
    try:
        return partial(_seat, spec, spec.load_oracle())
    except ImportError as cause:
        raise ForgeError(f"the oracle {spec.oracle!r} of {env_id} cannot be imported: {cause}") from cause


def _seat(spec: EnvSpec, factory: OracleFactory, agent: str, info: Mapping[str, Any], rng: random.Random) -> Player:
    role = str(info.get("role", agent)) if spec.kwargs.get("role_shuffle") else agent
    return factory(role, settings_of(spec), rng)
