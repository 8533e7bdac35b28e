"""What a verifier is, how verifiers are combined into one, and what a score is. Start at `verifier`.

In: trajectories. Out: scores, and where there is none the reason. Waits for: the verifier's own work.
"""
