"""Predictions of a run before it starts: step time (`simulate`), and whether it fits into GPUs (`fit`).

`measured` reads short runs and fits the stage times, `model` is the analytic model of a training step.
"""
