"""Reinforcement learning on multi-agent episodes: `trainer` is the API, `session` has the training step."""
