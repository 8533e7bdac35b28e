"""Oracles of the worlds: each plays all seats of one well, and reads what its seat reads, no more.

In: an observation, and the world's settings. Out: what the seat writes. Waits for nothing. `fa.Oracle()` sits down as
the one that `forge_envs` registered for an environment; `script.Script` is what most of them have in common.
"""
