"""What a run leaves behind, and how it is read again: start at `run_folder`. `trackers` and `plots` show its curves.

In: episodes and numbers. Out: files, and what trackers show. Waits for: the disk.
"""
