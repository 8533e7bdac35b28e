"""Games of two or more seats whose rules are known elsewhere, and puzzles of one.

In: nothing but the core. Out: an environment a module; each is registered in `forge_envs`. Waits for: nothing.
"""
