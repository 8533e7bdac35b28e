"""What a run leaves behind: its folder, episodes, batches, verdicts, trackers and plots.

In: episodes and numbers. Out: files, and what trackers show. Waits for: the disk.
"""
