"""Environments in processes of their own: one that hangs or dies takes nobody with it. Start at `env`.

In: the specification of an environment, and the places that `forge_agents.runtime` has for the role "envs". Out: an
environment like any other whose calls go to a worker: a Monarch actor in a process of its own. Waits for: a free
worker, and each answer, with deadlines.

`env` is what is played, and lends processes; `actor` and `process` are what runs there.
"""
