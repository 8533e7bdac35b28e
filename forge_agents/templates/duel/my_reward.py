"""Reward of the hero: the stakes, and a bonus for legal words."""

import forge_agents as fa


@fa.Rule
def legal(trajectory):
    """Fraction of legal words."""
    words = [turn.action.strip().strip(".'\"").lower() for turn in trajectory.turns]
    return sum(word in ("raise", "show") for word in words) / len(words) if words else None


reward = fa.EnvReward(low=-4, high=4) + 0.2 * legal
