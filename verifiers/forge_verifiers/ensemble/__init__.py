"""Many weak verifiers as one reward: `panel` asks them, `belief` weighs what they say, `alarms` watches the reward.

In: verifiers and trajectories. Out: P(correct) of each trajectory, and alarms. Waits for the verifiers, each with a
deadline. Start at `ensemble`.
"""
