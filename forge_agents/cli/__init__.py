"""The command line: `main` finds the command, `commands` holds the short ones, the longer ones have a module each.

In: words that a user typed. Out: text, files, an exit status. Waits for: whatever the command starts.
"""
