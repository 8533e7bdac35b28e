"""Environments that come with forge_agents. Importing this package registers them; their code loads when one is made.

In: nothing. Out: ids in the registry, and the suite "core-v1". Waits for nothing.
"""

from __future__ import annotations

from forge_agents.registry import register, register_suite

register(
    "forge/KuhnPoker-v0",
    entry_point="forge_envs.kuhn_poker:KuhnPoker",
    max_turns=3,
    tags=("2p", "zero-sum", "hidden-information"),
)
register("forge/Relay-v0", entry_point="forge_envs.relay:Relay", tags=("2p", "cooperative", "tool"))
register("forge/AlphabetSort-v0", entry_point="forge_envs.alphabet_sort:AlphabetSort", tags=("1p", "multi-turn"))
register_suite("core-v1", ["forge/KuhnPoker-v0", "forge/Relay-v0", "forge/AlphabetSort-v0"])
