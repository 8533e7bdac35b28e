"""The learner: training steps on TorchTitan components, in processes of its own.

`client` is the controller's handle, `actor` runs in the processes, and `core` does the work. Start reading at
`core.LearnerCore.train_step`. All modules import TorchTitan through `titan`.
"""
