"""From trajectories to tensors: samples, and the rows and microbatches that they are laid out in.

In: scored trajectories. Out: tensors of one optimiser step. Waits for: nothing.
"""
