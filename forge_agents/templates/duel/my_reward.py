"""What the hero is trained on: the stakes, and a little for words that the game knows."""

import forge_agents as fa


@fa.Rule
def legal(trajectory):
    """The share of its words that were legal."""
    words = [turn.action.strip().strip(".'\"").lower() for turn in trajectory.turns]
    return sum(word in ("raise", "show") for word in words) / len(words) if words else None


reward = fa.EnvReward(low=-4, high=4) + 0.2 * legal
