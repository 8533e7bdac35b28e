"""Processes on one machine or many: Monarch's meshes, who lives, who died and of what. Start at `mesh`.

In: which roles run, and on which hosts (`hosts`). Out: meshes of actors. Waits for: processes that start, answer and
end, each with a deadline.

`mesh` starts and ends processes where `layout` places them, on hosts that `jobs` asks for; `host_process` is what
runs there. `processes` knows how they ended, `heartbeat` sees it happen, `faults` counts it and says when it is too
often. `waits` is who waits for whom, `interrupts` what Ctrl-C does.
`_monarch` is the door to Monarch.
"""
