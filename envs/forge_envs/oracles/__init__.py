"""Oracles: scripted policies of the environments. Each plays all agents from their own observations only."""
