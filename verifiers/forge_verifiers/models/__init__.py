"""Models that score a text in one pass, reward models and embeddings. Start at `text_models`.

In: trajectories. Out: scores. Waits for the model.
"""
