"""Who plays whom: a league of versions of a policy, and the opponents drawn from it.

In: ratings and results of games. Out: opponents. Waits for: nothing.
"""
