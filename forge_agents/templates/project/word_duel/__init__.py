"""Registers the environments. forge_agents imports this package through the entry point in pyproject.toml."""

from forge_agents.envs.registry import register

register("word_duel/WordDuel-v0", entry_point="word_duel.game:WordDuel", max_turns=2, tags=("2p", "cooperative"))
