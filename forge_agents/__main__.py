"""``python -m forge_agents``: the command line, where ``forge-agents`` is on no path."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, whose modules could take the place of installed ones

from forge_agents.cli.main import main

sys.exit(main())
