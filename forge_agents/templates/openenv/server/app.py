"""Serves an environment to clients of OpenEnv. `openenv_app` documents actions and observations.

python -m server.app [PORT]
"""

import sys

import uvicorn

import forge_agents as fa
from forge_agents.episodes.openenv import openenv_app

CLIENTS = ["player_0"]  # agents that clients play
PLAYERS = {"player_1": fa.Random()}  # or fa.Oracle(), fa.Scripted(function), fa.Endpoint(model, base_url=...)

app = openenv_app("WORD_DUEL", clients=CLIENTS, players=PLAYERS)


def main(port: int = 8000) -> None:
    """Serve on this machine only. OpenEnv has no authentication."""
    uvicorn.run(app, host="127.0.0.1", port=port)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
