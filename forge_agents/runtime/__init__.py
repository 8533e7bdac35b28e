"""Processes on one machine or several: Monarch meshes, hosts, timeouts and failures.

`mesh` starts and ends processes on the hosts of a `cluster`, which `jobs` requests. `heartbeat` detects that a process
died, `deaths` explains how, `faults` counts deaths. `_monarch` is the only module that imports Monarch.
"""
