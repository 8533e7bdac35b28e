"""Environments in worker processes, so that a crash or hang costs one episode.

`env` has the environment that a trainer plays, and the pool of workers. `actor` and `process` run in the workers.
"""
