"""Batches: `packing` makes the learner's batch from trajectories, `layout` spreads it over ranks and forward passes."""
