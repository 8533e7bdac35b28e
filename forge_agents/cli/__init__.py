"""The command line: `main` finds the command, and each module below registers the commands of one group.

`registry` holds the commands, `config` reads dataclasses from YAML and flags, and `completion` answers the shell.
"""
