"""Language models that grade, rank or compare. Start at `judge`.

In: trajectories and a rubric. Out: scores. Waits for: the model, with deadlines.
"""
