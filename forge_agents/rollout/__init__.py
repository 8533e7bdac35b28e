"""Rollouts: policies act in environments and produce episodes. `rollout` plays episodes, `players` run policies."""

from forge_agents.rollout.rollout import Rollout
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import EpisodeGroup

__all__ = ["EpisodeGroup", "Rollout", "all_or_first_error"]
