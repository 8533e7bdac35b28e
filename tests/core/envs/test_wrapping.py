import functools

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.test import api_test, seed_test

import forge_agents as fa
from forge_agents.testing import check_env

HANDS = ["rock", "paper", "scissors"]


class Nim(AECEnv):
    """Two players take 1 to 3 of 5 to 9 stones; who takes the last one wins. Arrays and an action mask."""

    metadata = {"name": "nim_v0", "render_modes": ["ansi"]}
    possible_agents = ["player_0", "player_1"]

    @functools.cache  # noqa: B019  # PettingZoo's own idiom
    def observation_space(self, agent):
        return Dict({"observation": Box(0, 9, (1,), np.int8), "action_mask": Box(0, 1, (3,), np.int8)})

    @functools.cache  # noqa: B019  # PettingZoo's own idiom
    def action_space(self, agent):
        return Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.stones = int(np.random.default_rng(seed).integers(5, 10))
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0), dict.fromkeys(self.agents, 0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos, self.agent_selection = {a: {} for a in self.agents}, "player_0"

    def observe(self, agent):
        mask = np.array([n <= self.stones for n in (1, 2, 3)], np.int8)
        return {"observation": np.array([self.stones], np.int8), "action_mask": mask}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            return self._was_dead_step(action)
        assert action + 1 <= self.stones, "an illegal action got through"
        self.stones -= action + 1
        self._cumulative_rewards[agent] = 0
        other = self.possible_agents[1 - self.possible_agents.index(agent)]
        self._clear_rewards()
        if self.stones == 0:
            self.rewards = {agent: 1, other: -1}
            self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self.agent_selection = other
        return self._deads_step_first()

    def render(self):
        return f"{self.stones} stones"


class Pennies(ParallelEnv):
    """Both show a side at once, twice; player_0 wins if they match."""

    metadata = {"name": "pennies_v0"}
    possible_agents = ["player_0", "player_1"]

    @functools.cache  # noqa: B019  # PettingZoo's own idiom
    def observation_space(self, agent):
        return Discrete(3)

    @functools.cache  # noqa: B019  # PettingZoo's own idiom
    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.rounds = list(self.possible_agents), 0
        return dict.fromkeys(self.agents, 2), {a: {} for a in self.agents}

    def step(self, actions):
        self.rounds += 1
        sign = 1.0 if actions["player_0"] == actions["player_1"] else -1.0
        seen = {"player_0": actions["player_1"], "player_1": actions["player_0"]}
        over, both = self.rounds == 2, self.agents
        if over:
            self.agents = []
        rewards = {"player_0": sign, "player_1": -sign}
        return seen, rewards, dict.fromkeys(both, over), dict.fromkeys(both, False), {a: {} for a in both}


def nim(**kwargs):
    return fa.wrap(
        Nim(),
        obs_to_text=lambda obs, agent: f"{obs['observation'][0]} stones",
        text_to_action=lambda text, agent, space: int(text) - 1,
        instructions="Take 1 to 3 stones.",
        **kwargs,
    )


def pennies(**kwargs):
    return fa.wrap(
        Pennies(),
        obs_to_text=lambda obs, agent: ["heads", "tails", "start"][obs],
        text_to_action=lambda text, agent, space: ["heads", "tails"].index(text),
        instructions=lambda agent: f"You are {agent}.",
        **kwargs,
    )


def stones(count, **kwargs):
    env = nim(**kwargs)
    env.reset(seed=0)
    env.env.stones = count
    return env


def test_arrays_become_text_and_text_actions():
    env = stones(5)
    assert env.last()[0] == "5 stones" and env.instructions("player_0") == "Take 1 to 3 stones."
    env.step("2")
    assert (env.agent_selection, env.last()[0], env.env.stones) == ("player_1", "3 stones", 3)
    env.step("3")
    assert env.terminations == {"player_0": True, "player_1": True}
    told = {}
    for agent in env.agent_iter(5):
        told[agent] = env.last()[1]
        env.step(None)
    assert told == {"player_0": -1, "player_1": 1} and env.agents == []


@pytest.mark.parametrize(
    ("text", "why"), [("four", "ValueError"), ("4", "not an action: 3"), ("3", "masked"), ("9" * 5000, "ValueError")]
)
def test_illegal_text_ends_the_game_and_never_reaches_the_environment(text, why):
    env = stones(2, illegal_reward=-3)
    env.step(text)
    assert env.env.stones == 2 and why in env.infos["player_0"]["illegal"]
    assert env.rewards == {"player_0": -3, "player_1": 0} and all(env.terminations.values())
    seen = []
    for agent in env.agent_iter(5):
        seen.append((agent, env.last()[1]))
        env.step(None)
    assert seen == [("player_0", -3), ("player_1", 0)]


def test_a_mistake_in_the_users_function_is_not_an_illegal_move():
    env = fa.wrap(Nim(), obs_to_text=lambda o, a: "", text_to_action=lambda t, a, s: None.what)
    env.reset(seed=0)
    with pytest.raises(AttributeError):
        env.step("1")
    env = fa.wrap(Nim(), obs_to_text=lambda o, a: o, text_to_action=lambda t, a, s: 0)
    env.reset(seed=0)
    with pytest.raises(TypeError, match="obs_to_text returned dict"):
        env.last()


def test_the_turn_limit_truncates():
    env = stones(9, max_turns=2)
    env.step("1")
    assert not any(env.truncations.values())
    env.step("1")
    assert all(env.truncations.values()) and not any(env.terminations.values())


def test_a_parallel_environment_is_played_seat_by_seat():
    env = pennies()
    env.reset(seed=0)
    rewards = dict.fromkeys(env.possible_agents, 0)
    texts = {"player_0": iter(["heads", "tails"]), "player_1": iter(["heads", "heads"])}
    seen = []
    for agent in env.agent_iter(10):
        text, reward, terminated, truncated, _ = env.last()
        rewards[agent] += reward
        seen.append(text)
        env.step(None if terminated or truncated else next(texts[agent]))
    assert rewards == {"player_0": 0, "player_1": 0} and seen[:4] == ["start", "start", "heads", "heads"]


@pytest.mark.parametrize("make", [nim, pennies])
def test_wrapped_environments_pass_pettingzoos_tests_and_ours(make):
    api_test(make(), num_cycles=30)
    seed_test(make, num_cycles=30)
    assert check_env(make).ok


def test_wrapped_environments_register_like_any_other(monkeypatch):
    from forge_agents.envs import registry

    registry.spec("forge/KuhnPoker-v0")  # the plugins are loaded before the registry is set aside
    monkeypatch.setattr(registry, "_specs", dict(registry._specs))
    fa.register("t/Nim-v0", max_turns=3)(nim)
    env = fa.make("t/Nim-v0", illegal_reward=-2.0)
    assert str(env) == "t/Nim-v0" and env.max_turns == 3 and env.render is not None


def test_only_pettingzoo_environments_are_wrapped():
    with pytest.raises(TypeError, match="AECEnv or ParallelEnv, got dict"):
        fa.wrap({}, obs_to_text=str, text_to_action=str)
