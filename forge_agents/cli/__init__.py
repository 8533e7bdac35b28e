"""The command line.

In: words that a user typed. Out: text, files, an exit status. Waits for: whatever the command starts.

Start at `main`, which finds the command and turns errors into lines and statuses. ``commands`` holds all of them, with
the examples of their help; what takes more than a screen has a module of its own: ``play``, ``serve``, ``doctor``,
``scaffold`` (init and new-env). ``config`` reads dataclasses from YAML and flags, ``completion`` answers the shell.
"""
