"""Models that score a text in one pass: reward models and embeddings.

In: trajectories. Out: scores. Waits for: the model.
"""
