"""Weak verifiers of trajectories, and combiners that make one reward of them."""
