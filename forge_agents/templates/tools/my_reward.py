"""What the keeper is trained on: the right number, and a little for a call that works."""

import forge_agents as fa


@fa.Rule
def called(trajectory):
    """Whether a call worked."""
    return trajectory.info.get("tool_calls", 0) > trajectory.info.get("tool_errors", 0)


reward = fa.EnvReward() + 0.2 * called
