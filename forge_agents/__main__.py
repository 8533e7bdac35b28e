"""``python -m forge_agents``: the command line, where ``forge-agents`` is on no path."""

import sys

from forge_agents.cli.main import main

sys.exit(main())
