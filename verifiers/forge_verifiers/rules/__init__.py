"""Rules that read the text: patterns, answers, units, agreement of siblings.

In: trajectories. Out: scores. Waits for: nothing, but for a pattern's time limit.
"""
