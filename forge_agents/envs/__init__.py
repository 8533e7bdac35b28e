"""What an environment is, how it is found, wrapped and isolated. Start at `env`.

In: a class or a function of a user. Out: an environment that speaks PettingZoo's AEC or Parallel API. Waits for: the
environment's own code.
"""
