"""Reward of the keeper: the right number, and a bonus for a successful call."""

import forge_agents as fa


@fa.Rule
def called(trajectory):
    """Whether a call succeeded."""
    return trajectory.info.get("tool_calls", 0) > trajectory.info.get("tool_errors", 0)


reward = fa.EnvReward() + 0.2 * called
