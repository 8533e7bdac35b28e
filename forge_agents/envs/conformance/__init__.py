"""Is this an environment that a trainer can use? Plays it every way, and says what it found.

In: an environment. Out: a list of findings, or nothing. Waits for: the environment's own code, with deadlines. Start at
`check`; what is asked stands in `checks`, how it is played in `play`.
"""
