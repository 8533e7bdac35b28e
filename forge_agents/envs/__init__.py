"""What an environment is, how it is found, wrapped, isolated and checked.

In: a class or a function of a user. Out: an environment that speaks PettingZoo's AEC or Parallel API, in text. Waits
for: the environment's own code; where it is isolated, a worker process, with deadlines.

Each stands on those before it: `spec` (what is known before an environment is made), `env` (what users derive from;
start there), `wrappers`, `workers`, `registry` (ids, suites, `make`), `conformance` (`check_env`).
"""
