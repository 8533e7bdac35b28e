"""Rules that read the text: patterns, final answers, mathematics, agreement of siblings.

In: trajectories. Out: scores. Waits for nothing but a pattern's time limit, and math-verify's where it is asked. Start
at `text`; how a final answer is found is `answers`, whether it is right as mathematics `maths.equal`.
"""
