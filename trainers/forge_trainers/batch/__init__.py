"""From trajectories to tensors: token-exact samples, packed end to end, and the rows that they are computed in.

In: trajectories, an advantage per turn. Out: an `EpisodeBatch`, and from it a rank's rows. Waits for nothing. Start
with `packing.samples_from` and `packing.pack`, which the controller calls; `layout.lay_out` is the learner's.
"""
