"""A small classifier that answers as an ensemble does, on a CPU in well under a millisecond. Start at `model`.

In: trajectories with the ensemble's verdicts. Out: a verifier. Waits for the ensemble.
"""
