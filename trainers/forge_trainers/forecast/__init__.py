"""What a run would take on other hardware, before anybody rents it. Loaded by `forge-agents simulate` only.

In: a run's settings, and folders of short runs that were measured. Out: a `Prediction`: seconds and idle shares of each
stage, staleness, cost. Waits for the disk; all other time in it is simulated.

Start reading in `simulate`, which predicts. `measured` reads runs and fits how long each stage takes, `simulation` is
the trainer's loop over stages that only take time, `engine` has the engines and processor cores that it runs on.
"""
