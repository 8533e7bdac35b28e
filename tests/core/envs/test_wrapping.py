import copy
import functools
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from pettingzoo import ParallelEnv
from plain_env import Opened
from refusals import raises

import forge_agents as fa
from forge_agents.errors import ForgeError
from forge_agents.testing import check_env


class Nim(Opened):
    """Nim with arrays and an action mask: two players take 1 to 3 of 5 to 9 stones, and the last stone wins."""

    metadata = {"name": "nim_v0", "render_modes": ["ansi"]}
    possible_agents = ["player_0", "player_1"]

    @functools.cache  # noqa: B019  # PettingZoo's own idiom
    def observation_space(self, agent):
        return Dict({"observation": Box(0, 9, (1,), np.int8), "action_mask": Box(0, 1, (3,), np.int8)})

    @functools.cache  # noqa: B019  # PettingZoo's own idiom
    def action_space(self, agent):
        return Discrete(3)

    def reset(self, seed=None, options=None):
        super().reset()
        self.stones = int(np.random.default_rng(seed).integers(5, 10))

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
    """Matching pennies in two rounds: player_0 wins a round if both sides match."""

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


def test_exception_in_a_users_function_is_not_an_illegal_move():
    env = fa.wrap(Nim(), obs_to_text=lambda o, a: "", text_to_action=lambda t, a, s: None.what)
    env.reset(seed=0)
    with pytest.raises(AttributeError):
        env.step("1")
    env = fa.wrap(Nim(), obs_to_text=lambda o, a: o, text_to_action=lambda t, a, s: 0)
    env.reset(seed=0)
    raises(TypeError, "obs_to_text returned dict", env.last)


def test_a_parallel_environment_is_played_agent_by_agent():
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
def test_wrapped_environments_pass_all_checks(make):
    assert check_env(make).ok


def test_wrapped_environments_register_like_any_other(own_registry):
    fa.register("t/Nim-v0", max_turns=3)(nim)
    env = fa.make("t/Nim-v0", illegal_reward=-2.0)
    assert str(env) == "t/Nim-v0" and env.max_turns == 3 and env.render is not None


def test_wrap_rejects_other_objects_and_hints_to_call_a_class():
    with pytest.raises(TypeError, match="AECEnv or ParallelEnv, or a Gymnasium Env, got dict$"):
        fa.wrap({}, obs_to_text=str, text_to_action=str)
    raises(TypeError, r"got type. Call it, or its env\(\)", fa.wrap, Pennies, obs_to_text=str, text_to_action=str)
    numbered = Pennies()
    numbered.possible_agents = [0, 1]
    with pytest.raises(TypeError, match="has an agent 0 of type int. Agents must be strings"):
        fa.wrap(numbered, obs_to_text=str, text_to_action=str)
    numbered.possible_agents = []
    with pytest.raises(ValueError, match="has empty possible_agents. Name one or more agents"):
        fa.wrap(numbered, obs_to_text=str, text_to_action=str)


class Lives(ParallelEnv):
    """Three agents earn 1 per round for two, four and six rounds. `shape` omits results as some games do."""

    metadata = {"name": "lives_v0"}
    render_mode = None
    possible_agents = ["a", "b", "c"]
    first = possible_agents

    @functools.cache  # noqa: B019  # PettingZoo's own idiom
    def observation_space(self, agent):
        return Discrete(9)

    @functools.cache  # noqa: B019  # PettingZoo's own idiom
    def action_space(self, agent):
        return Discrete(2, start=1)

    def reset(self, seed=None, options=None):
        self.agents, self.round, self.asked = list(self.first), 0, []
        return dict.fromkeys(self.agents, 0), self.infos({agent: {} for agent in self.agents})

    def infos(self, infos):
        return infos

    def shape(self, observations, rewards, over, cut, infos):
        return observations, rewards, over, cut, infos

    def step(self, actions):
        self.round += 1
        self.asked.append("".join(actions))
        acting = list(self.agents)
        over = {agent: self.round >= 2 * (1 + self.possible_agents.index(agent)) for agent in acting}
        self.agents = [agent for agent in acting if not over[agent]]
        rewards, seen = {a: 1.0 for a in acting if actions[a]}, dict.fromkeys(acting, self.round)
        infos = self.infos({agent: {} for agent in acting})
        return self.shape(seen, rewards, over, dict.fromkeys(acting, False), infos)


def _left(values, agents):
    return {agent: value for agent, value in values.items() if agent in agents}


class NoInfos(Lives):
    def infos(self, infos):
        return {}


class OnlyTheLiving(Lives):
    def shape(self, *parts):
        seen, rewards, *rest = parts
        return (_left(seen, self.agents), rewards, *(_left(part, self.agents) for part in rest))


class NoTruncations(Lives):
    def shape(self, seen, rewards, over, cut, infos):
        return seen, rewards, over | {"__all__": False}, {}, infos


class KeepsTheDead(Lives):
    def shape(self, *parts):
        self.agents = list(self.first) if self.agents else []
        return parts


class LateJoiner(Lives):
    first = ["b", "c"]

    def shape(self, seen, rewards, over, cut, infos):
        if self.round == 1:
            self.agents.append("a")
            seen["a"] = 1
        return seen, rewards, over, cut, infos


def lives(cls, **kwargs):
    kwargs = {"legal_actions": lambda obs, agent: ["1", "2"]} | kwargs
    return fa.wrap(cls(), obs_to_text=str_of, text_to_action=lambda t, a, s: int(t), instructions="1 or 2", **kwargs)


def str_of(observation, agent):
    return f"round {observation}"


@pytest.mark.parametrize("cls", [Lives, NoInfos, OnlyTheLiving, NoTruncations, KeepsTheDead, LateJoiner])
def test_missing_results_of_a_parallel_game_are_filled_in(cls):
    """PettingZoo's conversion raises KeyError at most of these, and loses the last reward of `OnlyTheLiving`."""
    env, paid = lives(cls), dict.fromkeys("abc", 0.0)
    env.reset(seed=0)
    for agent in env.agent_iter(60):
        _, reward, over, _, info = env.last()
        paid[agent] += reward
        assert over or info["legal_actions"] == ["1", "2"]
        env.step(None if over else "2")
    joined_late = cls is LateJoiner  # a round later, and over in the next one
    assert paid == {"a": 1.0 if joined_late else 2.0, "b": 4.0, "c": 6.0} and env.agents == []
    assert env.env.unwrapped.asked[-1] == ("abc" if cls is KeepsTheDead else "c")
    assert check_env(functools.partial(lives, cls)).ok


def test_an_agent_without_an_observation_is_named():
    class Blind(LateJoiner):
        def shape(self, seen, *rest):
            return super().shape(seen, *rest) and (_left(seen, "bc"), *rest)

    env = lives(Blind)
    env.reset(seed=0)
    env.step("1")
    raises(ValueError, "lives_v0: 'a' takes part but has no observation", env.step, "1")


def test_a_mask_counts_from_where_its_space_starts():
    class Masked(Lives):
        def infos(self, infos):
            return {agent: {"action_mask": np.array([0, 1]), "to": np.array([2])} for agent in infos}

    env = lives(Masked, legal_actions=None)
    env.reset(seed=0)
    assert env.refusal("a", "1") == "action 1 is masked" and env.refusal("a", "2") == ""
    # plain values; PettingZoo would take a mask of actions for one of texts
    assert env.last()[4] == {"to": [2], "legal_actions": ["2"]}
    assert check_env(lambda: lives(Masked, legal_actions=lambda obs, agent: ["2"])).ok
    wordy = lives(Masked, legal_actions=lambda obs, agent: "21")
    raises(TypeError, "legal_actions returned the text '21' for 'a'. Return a list of texts", wordy.reset, seed=0)


class Push(gymnasium.Env):
    """Push until the sum is 1: one agent with a Box of actions and dict observations."""

    observation_space = Dict({"sum": Box(-9, 9, (), np.float32)})
    action_space = Box(-1, 1, (2,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.sum = float(self.np_random.random())
        return {"sum": self.sum}, {"start": np.float32(self.sum)}

    def step(self, action):
        assert action.dtype == np.float32 and action.shape == (2,)
        self.sum += float(action.sum())
        return {"sum": self.sum}, np.float64(self.sum >= 1), np.bool_(self.sum >= 1), False, {}


def push(**kwargs):
    return fa.wrap(
        Push(),
        obs_to_text=lambda obs, agent: f"{obs['sum']:.3f}",
        text_to_action=lambda text, agent, space: [float(word) for word in text.split()],
        legal_actions=lambda obs, agent: ["0.5 0.25", "-0.1 0"],
        max_turns=20,
        **kwargs,
    )


def test_a_gymnasium_environment_is_a_game_of_one_agent():
    env = push()
    env.reset(seed=3)
    assert env.possible_agents == ["player"] and str(env) == "text<Push>"
    assert env.last()[4]["start"] == pytest.approx(env.env.unwrapped.sum)
    env.step("0.5 0.5")
    assert env.terminations == {"player": True} and env.rewards == {"player": 1.0}
    assert check_env(push).ok


@pytest.mark.parametrize(
    ("text", "why"), [("0.5", "is not in Box"), ("2 0", "is not in Box"), ("nan 0", "is not in Box"), ("a b", "float")]
)
def test_numbers_that_a_box_does_not_hold_are_illegal(text, why):
    env = push()
    env.reset(seed=3)
    env.step(text)
    assert why in env.infos["player"]["illegal"] and env.rewards == {"player": -1.0}


def test_an_asked_again_wrapped_game_needs_no_copy(monkeypatch):
    class Drawing(Nim):
        def reset(self, seed=None, options=None):
            super().reset(seed, options)
            self.font = threading.Lock()  # as a pygame font: nothing that can be copied

    from forge_agents.envs.wrappers import InvalidAction

    arguments = {"obs_to_text": lambda o, a: "?", "text_to_action": lambda text, a, s: int(text) - 1}
    env = InvalidAction(fa.wrap(Drawing(), **arguments), "ask")
    env.reset(seed=0)
    env.step("many")
    assert env.agent_selection == "player_0" and env.observe("player_0").startswith("That was not a legal action (Val")
    before = env.env.env.stones
    env.step("1")
    assert env.env.env.stones == before - 1 and env.agent_selection == "player_1"
    raises(ForgeError, r"Drawing has an attribute font of type lock that cannot be copied", copy.deepcopy, env)


def numbered_nim(text_to_action, **kwargs):
    read = lambda seen, agent: f"{seen['observation'][0]} stones"  # noqa: E731
    return fa.wrap(Nim(), obs_to_text=read, text_to_action=text_to_action, **kwargs)


@pytest.mark.parametrize(
    ("text_to_action", "texts"),
    [
        (lambda text, agent, space: int(text), ["0", "1", "2"]),
        (lambda text, agent, space: int(text) - 1, ["1", "2", "3"]),
        (lambda text, agent, space: {"0": 0, "1": 1, "2": 2}[text], ["0", "1", "2"]),
    ],
)
def test_legal_numbers_are_listed_by_the_action_mask(text_to_action, texts):
    env = numbered_nim(text_to_action)
    env.reset(seed=0)
    while env.env.stones > 2:
        assert env.infos[env.agent_selection]["legal_actions"] == texts[: min(3, env.env.stones)]
        env.step(texts[0])
    assert env.infos[env.agent_selection]["legal_actions"] == texts[:2]
    env.step(texts[1])
    assert not any("legal_actions" in info for info in env.infos.values())


@pytest.mark.parametrize(
    "text_to_action",
    [
        lambda text, agent, space: ["one", "two", "three"].index(text),
        lambda text, agent, space: {"0": 0, "2": 2}[text],
        lambda text, agent, space: 1 / 0 if text == "1" else int(text),
    ],
)
def test_no_numbers_are_listed_unless_they_name_every_action(text_to_action):
    env = numbered_nim(text_to_action)
    env.reset(seed=0)
    assert "legal_actions" not in env.infos["player_0"]


def test_random_players_of_masked_games_play_to_the_end():
    for seed in range(5):
        episode = fa.play(numbered_nim(lambda text, agent, space: int(text)), fa.Random(), seed=seed)
        assert sorted(episode.rewards.values()) == [-1.0, 1.0]
        assert not any(turn.info.get("illegal") for turn in episode.turns)


def test_random_players_warn_if_letters_are_illegal():
    env = numbered_nim(lambda text, agent, space: ["one", "two", "three"].index(text))
    with pytest.warns(RuntimeWarning, match="does not always list legal actions, so fa.Random"):
        fa.play(env, fa.Random(), seed=0)


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ({"obs_to_text": lambda observation: ""}, r"obs_to_text <lambda> must take \(observation, agent\): too many"),
        ({"text_to_action": lambda text: 0}, r"text_to_action <lambda> must take \(text, agent, action_space\)"),
        ({"legal_actions": list}, r"legal_actions list must take \(observation, agent\)"),
    ],
)
def test_functions_with_other_parameters_are_refused_by_name(functions, reason):
    given = {"obs_to_text": lambda observation, agent: "", "text_to_action": lambda text, agent, space: 0, **functions}
    raises(TypeError, reason, fa.wrap, gymnasium.make("CartPole-v1"), **given)
