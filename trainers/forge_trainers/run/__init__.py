"""What stands around a loop: start at `processes`, which knows who runs and what becomes of the dead.

`config` has their settings; `checkpoints` saves and restores a run and exports its models; `supervision` has the event
loop, Ctrl-C, the stopwatch and the watchdog; `console` shows the steps.

In: a run's settings. Out: a loop that can be stopped and resumed. Waits for: processes and the disk, with deadlines.
"""
