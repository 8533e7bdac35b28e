"""What a run would take on other hardware, before anybody rents it. Loaded by `forge-agents simulate` only.

In: a run's settings and measured runs. Out: seconds and bytes a step. Waits for: nothing.
"""
