"""One optimiser step on TorchTitan's parts, in processes of its own: `client` is what others hold, `core` does it.

In: packed batches, a folder with a Hugging Face model. Out: metrics, weights in the store, checkpoints, exports. Waits
for: each call to its processes, with a deadline; within them ranks wait for each other in collectives.

Start with `core.LearnerCore.train_step`. `model` builds what it trains, `attention` and `lora` are parts of that,
`checkpoint` writes and reads it, `actor` puts it into a process. `titan` is the only door to TorchTitan, and must be
imported before it.
"""
