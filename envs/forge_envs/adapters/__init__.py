"""Environments of other libraries, each behind an optional extra, each running that library's code unchanged.

In: the namespaces' names. Out: offers in the registry; a library is imported when one of its environments is made.
Waits for nothing. Start at `catalog` for what is listed and what is not, and why; at `contained` for what every adapter
does around a library's code; else at the library's own module.
"""

from __future__ import annotations

from forge_agents.envs.registry import provide

_CATALOG = "forge_envs.adapters.catalog"

provide("textarena", entry_point=f"{_CATALOG}:textarena", package="textarena", extra="textarena")
provide("reasoning-gym", entry_point=f"{_CATALOG}:reasoning_gym", package="reasoning_gym", extra="reasoning-gym")
provide("pettingzoo", entry_point=f"{_CATALOG}:pettingzoo", package="pettingzoo")
provide("gymnasium", entry_point=f"{_CATALOG}:gymnasium", package="gymnasium")
provide("openenv", entry_point=f"{_CATALOG}:openenv", package="openenv", extra="openenv")
provide("verifiers", entry_point=f"{_CATALOG}:verifiers", package="verifiers", extra="verifiers")
