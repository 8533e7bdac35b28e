"""Fakes of a run's processes and of its collector, and groups to learn from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np

import forge_agents as fa
from forge_agents.types import Episode, EpisodeGroup, Trajectory, Turn, VersionSpan

TEAM = fa.Policy("m", name="team")


def sampled_turn(agent, index, reward, policy, response_ids=(3,), **changes):
    """Return a turn in which weight version 0 of a policy sampled `response_ids`."""
    fields = {
        "observation": "o",
        "action": "x",
        "prompt_ids": (1, 2),
        "response_ids": response_ids,
        "logprobs": (-1.0,) * len(response_ids),
        "versions": (VersionSpan(version=0, start=0, end=len(response_ids)),) if response_ids else (),
        "finish_reason": "stop",
    }
    return Turn(agent=agent, index=index, reward=reward, policy=policy, **fields | changes)


def episode(*rewards, env_id="t", seed=0, error=None, sampled=True, end="terminated", turns=True):
    """Return an episode with one agent per reward. The first belongs to the team, the others to a rival."""

    def one(at, reward):
        response_ids = (3,) if at == 0 and sampled else ()
        turn = sampled_turn(f"player_{at}", at, reward, "rival" if at else "team", response_ids)
        return Trajectory(agent=turn.agent, policy=turn.policy, turns=(turn,) if turns else (), env_id=env_id)

    return Episode(
        env_id=env_id,
        seed=seed,
        error=error,
        end_reason=end,
        trajectories={f"player_{at}": one(at, reward) for at, reward in enumerate(rewards)},
    )


def group(*rewards, seed=0, env_id="t", **options):
    """Return a group of episodes with `rewards`. A rival earns the opposite."""
    siblings = tuple(episode(r, -r, env_id=env_id, seed=seed, **options) for r in rewards)
    return EpisodeGroup(env_id=env_id, seed=seed, episodes=siblings)


def collect_with(trainer, collect):
    """Replace the collector of `trainer` by ``await collect(collector, step, numbers, put, attempt)``."""
    make = trainer._lifecycle.collector

    def collector(plan):
        made = make(plan)
        made.collect = lambda step, numbers, put: collect(made, step, numbers, put, 0)
        made.resample = lambda step, count, attempt: collect(made, step, range(count), None, attempt)
        return made

    trainer._lifecycle.collector = collector


class Counting:
    """A reward whose state is the number of the trajectories that it has seen."""

    name = "counting"

    def __init__(self, seen=0):
        self.seen = seen

    def __call__(self, trajectories):
        self.seen += len(trajectories)
        return np.array([t.reward for t in trajectories])

    def state_dict(self):
        return {"seen": np.array(self.seen)}

    def load_state_dict(self, state):
        self.seen = int(state["seen"])


class Learner:
    name, version, busy_s, compute_dtype = "learner", 0, 0.0, "float32"

    async def set_total_steps(self, total):
        pass

    async def train_step(self, batch, **_):
        return {"logprob_gap_mean": 0.0}

    async def start_save(self, folder, **_):
        folder.mkdir()

    async def finish_save(self, **_):
        return {}

    async def load(self, folder, **_):
        pass

    async def export(self, folder, **_):
        folder.mkdir(parents=True, exist_ok=True)


class Processes:
    """A fake of a run's processes."""

    policies: ClassVar = {"team": TEAM}
    max_sample_tokens: ClassVar = {}
    answers = 0

    def __init__(self):
        self.learners, self.faults = {"team": Learner()}, SimpleNamespace(all=())

    def busy_s(self):
        return {}

    async def engines_memory(self):
        return {}

    async def start_learners(self, policies=None):
        pass

    async def unless_a_learner_dies(self, work):
        return await work

    async def sync(self, published):
        published()

    async def stop_learners_after(self, error):
        return False

    async def stop(self):
        pass


class Duel(fa.TurnEnv):
    possible_agents = ["player_0", "player_1"]


Duel.__name__ = "t"  # its id in these groups
