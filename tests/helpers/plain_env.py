"""A minimal game to derive test environments from."""

from pettingzoo import AECEnv, ParallelEnv

import forge_agents as fa
from forge_agents.envs.env import TextSpace


def act(env, *texts):
    """Play actions in order."""
    for text in texts:
        env.step(text)


class _Silent:
    """A game without state and texts."""

    def setup(self, rng):
        pass

    def instructions(self, agent):
        return ""

    def observe_text(self, agent):
        return "?"


class Plain(_Silent, fa.TurnEnv):
    """One agent, one question, and any answer ends the game."""

    possible_agents = ["a"]

    def act(self, agent, action):
        return fa.Outcome(done=True)


class PlainRound(_Silent, fa.ParallelTurnEnv):
    """Two agents are asked together. Derived games define `act_all`."""

    possible_agents = ["a", "b"]


class Opened(AECEnv):
    """An environment whose ``reset`` sets the attributes that PettingZoo asks of all of them."""

    def reset(self, seed=None, options=None):
        self.agents, self.agent_selection = list(self.possible_agents), self.possible_agents[0]
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}


class PlainAEC(Opened):
    """The same in PettingZoo's own terms, without a base class of ours."""

    metadata = {"name": "plain", "render_modes": []}
    render_mode = None
    possible_agents = ["a"]

    def __init__(self):
        super().__init__()
        self.observation_spaces = {"a": TextSpace(100)}
        self.action_spaces = {"a": TextSpace(100)}

    def observe(self, agent):
        return "Why?"

    def step(self, action):
        if self.terminations["a"]:
            self._was_dead_step(action)
            return
        self.rewards = {"a": float(action == "Because.")}
        self.terminations = {"a": True}
        self._cumulative_rewards = {"a": 0.0}
        self._accumulate_rewards()


class PlainParallel(ParallelEnv):
    """The same as a parallel environment."""

    metadata, render_mode, possible_agents = PlainAEC.metadata, None, ["a"]
    observe = PlainAEC.observe

    def __init__(self):
        self.observation_spaces = {"a": TextSpace(100)}
        self.action_spaces = {"a": TextSpace(100)}

    def reset(self, seed=None, options=None):
        self.agents = ["a"]
        return {"a": self.observe("a")}, {"a": {}}

    def step(self, actions):
        self.agents = []
        return {"a": "The end."}, {"a": float(actions["a"] == "Because.")}, {"a": True}, {"a": False}, {"a": {}}
