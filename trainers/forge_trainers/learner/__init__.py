"""One optimiser step on TorchTitan's parts, in processes of its own. `client` is what others hold, `core` does it.

In: packed batches. Out: new weights, metrics, checkpoints. Waits for: each call to its processes, with deadlines.
"""
