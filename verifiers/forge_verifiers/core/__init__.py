"""What a verifier is, how verifiers are combined into one, what a score is, and a check of all that.

In: trajectories. Out: scores, and where there is none the reason. Waits for the verifier's own work.
Start at `verifier`.
"""
