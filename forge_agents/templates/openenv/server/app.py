"""Serves an environment to clients of OpenEnv. `openenv_app` documents actions and observations.

python -m server.app [PORT]
"""

import os
import secrets
import sys

import forge_agents as fa
from forge_agents.episodes.openenv import openenv_app, serve

CLIENTS = ["player_0"]  # agents that clients play
PLAYERS = {"player_1": fa.Random()}  # or fa.Oracle(), fa.Scripted(function), fa.Endpoint(url, model)
TOKEN = os.environ.get("OPENENV_TOKEN") or secrets.token_urlsafe(32)  # begins the path: http://HOST:PORT/TOKEN

app = openenv_app("WORD_DUEL", token=TOKEN, clients=CLIENTS, players=PLAYERS)


def main(port: int = 8000) -> None:
    """Serve on this machine only."""
    serve(app, port=port)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
