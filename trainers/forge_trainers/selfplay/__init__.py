"""Self-play leagues: a policy trains against earlier versions of itself and fixed opponents."""
