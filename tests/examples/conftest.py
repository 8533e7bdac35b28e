"""A trainer without an engine, and trajectories, for the examples."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import forge_agents as fa


class NoEngine:
    """Stands in for `GRPOTrainer`. The reward starts at the last digit of the id, and grows with steps and rate."""

    def __init__(self, policies, config, out_dir):
        self.policies, self.config, self.folder, self.done = policies, config, Path(out_dir), 0
        self.trained, self.evaluated = [], []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def fork(self, out_dir, *, config):
        return fa.GRPOTrainer(self.policies, config=config, out_dir=out_dir)

    @property
    def learners(self):
        policies = getattr(self.policies, "policy", self.policies)  # of a league
        policies = policies.values() if isinstance(policies, dict) else [policies]
        return {policy.name: policy for policy in policies if getattr(policy, "trainable", False)}

    def fit(self, env, *, steps, env_args=None):
        self.trained.append(env)
        self.done = steps
        for name in self.learners:
            (self.folder / "export" / (name if len(self.learners) > 1 else "")).mkdir(parents=True, exist_ok=True)
        row = {"time/step_s": 2.0, "eval/reward": self.config.learner.lr * steps, "learner/grad_norm": 0.5 * steps}
        return SimpleNamespace(metrics=[{"step": n + 1, **row} for n in range(steps)])

    def evaluate(self, env, *, episodes, env_args=None):
        self.evaluated.append(env)
        reward = int(env[-1]) / 10 + (self.config.learner.lr or 0.0) * self.done
        return SimpleNamespace(reward=reward, ci=0.0, by_agent={"clerk": reward, "accountant": reward / 2})


@pytest.fixture
def trainers(monkeypatch):
    """The trainers that an example makes, in order, none of which has an engine."""
    made = []

    def make(policies, config, out_dir):
        made.append(NoEngine(policies, config, out_dir))
        return made[-1]

    monkeypatch.setattr(fa, "GRPOTrainer", make)
    return made
