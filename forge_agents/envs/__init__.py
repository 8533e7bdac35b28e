"""Text environments: base classes, the registry, wrappers, worker processes and conformance checks.

`env` has the base classes and is the place to start. `registry` maps ids to environments, `wrappers` adapts array
environments to text, `workers` runs environments in processes of their own, and `conformance` checks them.
"""
