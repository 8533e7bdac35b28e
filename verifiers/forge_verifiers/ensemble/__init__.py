"""Many weak verifiers as one reward. Start at `ensemble`.

In: verifiers and trajectories. Out: p(correct) of each trajectory, and alarms. Waits for: the verifiers, each with a
deadline.
"""
