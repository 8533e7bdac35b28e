"""Worlds in which seats with parts of the knowledge work together, bargain or argue.

In: nothing but the core. Out: an environment a module; each is registered in `forge_envs`. Waits for: tests that run in
a sandbox, with deadlines.
"""
