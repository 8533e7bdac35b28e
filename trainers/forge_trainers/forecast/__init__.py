"""Predictions of a run before it starts: step time (`simulate`), and whether it fits into GPUs (`fit`)."""
