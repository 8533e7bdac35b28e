"""Processes of a run (`processes`), their placement and settings, checkpoints, and the view on the console."""
