"""What stands around a loop: processes, checkpoints, the console, interrupts and deadlines.

In: a run's settings. Out: a loop that can be stopped and resumed. Waits for: processes and the disk, with deadlines.
"""
