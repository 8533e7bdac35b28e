"""Checks whether an environment meets the requirements of the framework: `check` runs `checks` on `play`ed episodes."""
