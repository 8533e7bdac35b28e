"""Reinforcement learning on multi-agent episodes: `trainer` is the API, `session` has the training step.

    tasks, policy_mapping -> collect -> prefetch -> scoring -> samples -> train_step -> weight_sync

`evaluation`, `stopping`, `failures`, `report`, `state` and `lifecycle` surround the step.
"""
