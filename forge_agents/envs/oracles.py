"""Oracles: scripted policies registered with an environment, for benchmark scales, play and demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from forge_agents.envs.registry import ids_with_oracles, settings_of
from forge_agents.envs.spec import EnvSpec
from forge_agents.errors import ForgeError

ActionFunction: TypeAlias = Callable[[str], str]
"""``act(observation) -> action``, called once per decision of its agent, in order."""

OracleFactory: TypeAlias = Callable[[str, Mapping[str, Any], random.Random], ActionFunction]
"""``oracle(agent, settings, rng) -> act``: a class with a method ``__call__``, or a function that returns a function.

The factory is called once per agent and episode, so ``act`` may store what it has read. `agent` is the agent whose
observations ``act`` receives; with role shuffling, its role. `settings` holds all constructor arguments of the
environment, defaults included. `rng` is derived from the episode seed, the agent and the index within the group.
"""

AgentFactory: TypeAlias = Callable[[str, Mapping[str, Any], random.Random], ActionFunction]
"""``factory(agent, info, rng) -> act``, where `info` came with the agent's first observation."""


def oracle_of(spec: object, env_id: str) -> AgentFactory:
    """Import the oracle of an environment, whose attribute ``spec`` may be anything.

    Raises ValueError if there is no oracle, and ForgeError if it cannot be imported.
    """
    if not isinstance(spec, EnvSpec) or spec.oracle is None:
        raise ValueError(
            f"{env_id} has no oracle, which fa.Oracle needs. Environments with an oracle: "
            f"{', '.join(ids_with_oracles()) or 'none'}. Add one by fa.register(..., oracle=...)"
        )
    try:
        return partial(_make_oracle, spec, spec.load_oracle())
    except ImportError as cause:
        raise ForgeError(f"the oracle {spec.oracle!r} of {env_id} cannot be imported: {cause}") from cause


def _make_oracle(
    spec: EnvSpec, factory: OracleFactory, agent: str, info: Mapping[str, Any], rng: random.Random
) -> ActionFunction:
    role = str(info.get("role", agent)) if spec.kwargs.get("role_shuffle") else agent
    return factory(role, settings_of(spec), rng)
