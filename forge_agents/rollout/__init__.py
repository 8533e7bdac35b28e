"""Policies act in environments: a seed in, a scored trajectory per seat out.

In: environments and policies. Out: episodes of `forge_agents.types`. Waits for: engines, endpoints, people and
environments, each with a deadline. Start at `rollout`, which plays a game; `players` bring a policy to life in a seat.
"""

from forge_agents.rollout.rollout import Rollout
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import EpisodeGroup

__all__ = ["EpisodeGroup", "Rollout", "all_or_first_error"]
