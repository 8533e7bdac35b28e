"""Programs judged by their tests, run in a sandbox.

In: trajectories that hold programs. Out: the share of tests that pass. Waits for the sandbox, with deadlines. Start at
`unit_tests`; `_runner` is the program inside.
"""
