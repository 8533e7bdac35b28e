"""A language model as a judge: `prompts` says what it is asked, `clients` who answers, `judge` puts both together.

In: trajectories, a rubric. Out: scores, NaN where the judge makes no sense, and what was asked. Waits for the judge's
model, each wait with a deadline. Start at `judge`.
"""
