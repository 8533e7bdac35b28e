"""Reward of the team: the reward of the game, and a bonus for short answers."""

import forge_agents as fa


@fa.Rule
def brief(trajectory):
    """1 for an answer of at most ten words."""
    return len(trajectory.turns[-1].action.split()) <= 10 if trajectory.turns else None


reward = fa.EnvReward() + 0.1 * brief
