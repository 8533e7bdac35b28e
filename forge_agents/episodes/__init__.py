"""One game at a time, and the episodes that runs keep.

In: an environment, who sits in its seats, a seed; or the folder of a run. Out: an `Episode`, which prints as a
conversation; or a table of episodes. Waits for the players, and for the disk. Start at `play`, then `stored`.
"""
