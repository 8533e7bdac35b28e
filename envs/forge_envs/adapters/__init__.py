"""Adapters that run environments of other libraries unchanged.

Each library is an optional extra and has a module here with its environments and a function `list_ids`, which
registers its ids without importing the library. To add a library, write such a module and add a line below.
"""

from __future__ import annotations

from forge_agents.envs.registry import provide

_HERE = "forge_envs.adapters"

provide("textarena", entry_point=f"{_HERE}.textarena_games:list_ids", package="textarena", extra="textarena")
provide("reasoning-gym", entry_point=f"{_HERE}.reasoning_gym:list_ids", package="reasoning_gym", extra="reasoning-gym")
provide("pettingzoo", entry_point=f"{_HERE}.pettingzoo:list_ids", package="pettingzoo")
provide("gymnasium", entry_point=f"{_HERE}.gymnasium:list_ids", package="gymnasium")
provide("openenv", entry_point=f"{_HERE}.openenv:list_ids", package="openenv", extra="openenv")
