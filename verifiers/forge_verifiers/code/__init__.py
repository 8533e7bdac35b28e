"""Unit tests of agents' programs in a sandbox. `unit_tests` is the verifier, `_runner` the program in the sandbox."""
