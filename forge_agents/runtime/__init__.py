"""Processes on one machine or many: Monarch's meshes, who lives, who died and of what. Start at `mesh`.

In: which roles run, and on which hosts. Out: meshes of actors. Waits for: processes that start, answer and end, each
with a deadline.
"""
