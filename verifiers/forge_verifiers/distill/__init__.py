"""A small classifier that answers as an ensemble does, on a CPU in microseconds.

In: trajectories with the ensemble's verdicts. Out: a verifier. Waits for: nothing.
"""
