import copy

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from pettingzoo import ParallelEnv
from plain_env import Opened, Plain, PlainRound, act

import forge_agents as fa
from forge_agents.bench.records import forfeits_of
from forge_agents.envs.foreign import turn_based
from forge_agents.envs.wrappers import InvalidAction, ObservationWindow, RewardScale, RoleShuffle, TimeLimit
from forge_agents.errors import ArgumentError, ForgeError

KUHN = "forge/KuhnPoker-v0"


class Talk(fa.TurnEnv):
    """Two agents without an end. "bad" is illegal and pays both -5. Other texts pay the agent 1 and the other 2."""

    possible_agents = ["a", "b"]

    def setup(self, rng):
        self.said = []
        self.number = int(rng.integers(1000, 10_000))

    def instructions(self, agent):
        return f"You are {agent}."

    def observe_text(self, agent):
        return f"To {agent}:\n" + "\n".join(self.said)

    def secrets(self, agent):
        return [str(self.number)] if agent == "a" else []

    def act(self, agent, action):
        self.said.append(action[:100])
        if action == "bad":
            why = {agent: {"illegal": "bad is bad"}}
            return fa.Outcome(rewards={"a": -5.0, "b": -5.0}, info=why)
        return fa.Outcome(rewards={"a": 2.0, "b": 2.0} | {agent: 1.0})


def started(env, seed=0):
    env.reset(seed=seed)
    return env


def rest(env, texts=()):
    """Play to the end and sum the reported rewards."""
    told, texts = dict.fromkeys(env.possible_agents, 0.0), iter(texts)
    for agent in env.agent_iter(50):
        _, reward, terminated, truncated, _ = env.last()
        told[agent] += reward
        env.step(None if terminated or truncated else next(texts))
    return told


# ---- time limit


def test_a_time_limit_truncates_for_everybody():
    env = started(TimeLimit(Talk(), 3))
    assert rest(env, ["x", "x", "x"]) == {"a": 1 + 2 + 1, "b": 2 + 1 + 2}
    env = started(TimeLimit(Talk(), 2))
    env.step("x")
    assert not any(env.truncations.values())
    env.step("x")
    assert env.truncations == {"a": True, "b": True} and not any(env.terminations.values())
    env.reset(seed=1)
    assert env.num_turns == 0 and env.agents == ["a", "b"]


@pytest.mark.usefixtures("own_registry")
def test_environment_without_max_turns_gets_a_time_limit():
    fa.register("t/Doubled-v0", entry_point=lambda: RewardScale(Talk(), 2.0), max_turns=2)
    env = started(fa.make("t/Doubled-v0"))
    assert isinstance(env, TimeLimit) and rest(env, ["x", "x"]) == {"a": 6, "b": 6}
    assert env.spec.max_turns == 2


# ---- invalid actions


def test_policy_end_replaces_the_games_own_penalty():
    env = started(InvalidAction(Talk(), penalty=-3))
    act(env, "x", "bad")
    assert env.infos["b"]["illegal"] == "bad is bad" and all(env.terminations.values())
    assert rest(env) == {"a": 1, "b": -3}
    assert env.env.said == ["x"], "the move is undone"


def test_ask_gives_the_agent_another_try_and_says_why():
    env = started(InvalidAction(Talk(), "ask", tries=2))
    env.step("bad")
    assert env.agent_selection == "a"
    assert env.last()[:2] == ("That was not a legal action (bad is bad).\nTo a:\n", 0.0)
    assert env.observe("b") == "To b:\n"
    act(env, "bad", "fine")
    assert env.agent_selection == "b" and env.last()[:2] == ("To b:\nfine", 2.0)
    for _ in range(3):
        assert not any(env.terminations.values())
        env.step("bad")
    assert rest(env) == {"a": 1, "b": -1}, "two more tries, then the end"


@pytest.mark.parametrize(("penalty", "cost"), [(-1.0, -7.0), (-20.0, -20.0)])
def test_game_that_ends_by_an_illegal_action_pays_its_stakes(penalty, cost):
    env = started(InvalidAction(fa.make("forge/LeducPoker-v0"), "ask", tries=1, penalty=penalty))
    act(env, "raise", "no idea")
    assert not any(env.terminations.values())
    env.step("call")
    act(env, "raise", "raise", "shout")
    assert env.agent_selection == "player_0" and not any(env.terminations.values())
    env.step("shout")
    assert rest(env) == {"player_0": cost, "player_1": 7.0}


@pytest.mark.parametrize("listed", [np.array([1, 2]), (1, 2), {"1", "2"}])
def test_legal_actions_of_an_info_may_be_any_collection(listed):
    class Numbers(Talk):
        def act(self, agent, action):
            self.said.append(action)
            info = {"b": {"legal_actions": listed, "illegal": action == "bad" or None}}
            return fa.Outcome(info=info)

    env = started(InvalidAction(Numbers(), "ask"))
    act(env, "x", "bad")
    assert env.env.said == ["x"] and env.observe("b").startswith("That was not a legal action (choose one of: 1, 2).")


def test_penalty_costs_each_time():
    env = started(TimeLimit(InvalidAction(Talk(), "penalty", tries=2, penalty=-0.5), 5))
    assert rest(env, ["bad", "bad", "x", "bad", "y"]) == {"a": 2 * -0.5 + 1 + 2, "b": 2 - 0.5 + 1}


def test_legal_actions_are_listed_without_a_copy(monkeypatch):
    env = started(fa.make(KUHN, invalid_action="ask"))
    env.step("shout")
    assert env.last()[0].startswith("That was not a legal action (choose one of: check, bet).\nYour card")
    copies = []
    monkeypatch.setattr(copy, "deepcopy", lambda *args: copies.append(args))
    env.step("bet")
    assert env.agent_selection == "player_1" and env.env.moves == ["bet"] and copies == []


def test_a_wrapped_array_game_asks_again():
    env = started(fa.make("forge/TicTacToe-v0", invalid_action="ask"))
    for text in ("4", "4", "nothing"):
        env.step(text)
    assert env.agent_selection == "player_2" and "Free: 0, 1, 2, 3, 5" in env.last()[0]
    env.step("0")
    assert env.last()[0].startswith("O 3 6")


class Rounds(PlainRound):
    """Both speak at once. "bad" is illegal."""

    max_turns = 4

    def act_all(self, actions):
        return fa.Outcome(info={agent: {"illegal": "bad"} for agent, text in actions.items() if text == "bad"})


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("more", [{}, {"role_shuffle": True}])
def test_illegal_action_among_simultaneous_ones_cannot_be_undone(more):
    """It would be found after the round, and blamed on the agent's next action."""
    fa.register("t/Rounds-v0", entry_point=Rounds)
    with pytest.raises(ArgumentError, match="invalid_action='ask' of t/Rounds-v0: its agents act together"):
        fa.make("t/Rounds-v0", invalid_action="ask", **more)


def test_game_that_leaves_an_illegal_action_in_the_info_blames_no_later_one():
    class Leaving(Talk):
        """Looks at both moves after the second one, as a game of simultaneous moves does."""

        def step(self, action):
            super().step(action)
            self.infos["a"] |= {"illegal": "bad is bad"} if self.said[:2] == ["fie", "fine"] else {}

    env = started(InvalidAction(Leaving()))
    act(env, "fie", "fine", "fine", "fine")
    assert not any(env.terminations.values()) and env.env.said == ["fie", "fine", "fine", "fine"]


# ---- windows and scales


def test_a_window_shows_the_end():
    env = started(ObservationWindow(Talk(), 12))
    assert env.observe("a") == "To a:\n"
    env.step("0123456789")
    assert env.observe("b") == "...123456789" and env.observation_space("b").max_length == 12


def test_rewards_are_scaled_where_configured():
    env = started(RewardScale(Talk(), -0.5))
    env.step("x")
    assert env.rewards == {"a": -0.5, "b": -1.0} and env.last()[1] == -1.0
    env.step("x")
    assert env.last()[1] == -0.5 * (1 + 2)


# ---- roles


def test_roles_change_with_the_seed_and_everything_follows():
    env = RoleShuffle(Talk())
    roles = set()
    for seed in range(10):
        env.reset(seed=seed)
        role = {agent: env.infos[agent]["role"] for agent in env.agents}
        roles.add(tuple(role.values()))
        first = env.agent_selection
        other = next(agent for agent in env.agents if agent != first)
        assert role[first] == "a" and env.instructions(first) == "You are a." and env.observe(other) == "To b:\n"
        assert env.secrets(first) == [str(env.env.number)] and env.secrets(other) == []
        env.step("x")
        assert env.rewards == {first: 1.0, other: 2.0} and env.agent_selection == other
        assert env.last()[1] == 2.0
    assert roles == {("a", "b"), ("b", "a")}


def test_forfeits_name_the_agent_and_not_its_role():
    named = set()
    for seed in range(6):
        players = {"player_1": fa.Scripted(lambda seen: "no move"), "player_2": fa.Random()}
        episode = fa.play("forge/TicTacToe-v0", players, seed=seed, env_args={"role_shuffle": True})
        assert forfeits_of(episode) == {"player_1"} and episode.rewards == {"player_1": -1.0, "player_2": 0.0}
        named.add(episode.trajectories["player_1"].info["role"])
    assert named == {"player_1", "player_2"}


def test_shuffling_leaves_the_game_as_it_is():
    plain, shuffled = started(Talk(), 7), started(RoleShuffle(Talk()), 7)
    assert plain.number == shuffled.number
    again = started(RoleShuffle(Talk()), 7)
    assert again.infos == shuffled.infos, "siblings share the roles"


class Meet(PlainRound):
    """Both name a place simultaneously. If they meet, left gets 1 and right 2."""

    possible_agents = ["left", "right"]

    def instructions(self, agent):
        return f"You are {agent}."

    def act_all(self, actions):
        met = float(len(set(actions.values())) == 1)
        return fa.Outcome(rewards={"left": met, "right": 2 * met}, done=True)


@pytest.mark.usefixtures("own_registry")
def test_a_simultaneous_game_takes_turns_when_it_is_wrapped():
    fa.register("t/Meet-v0", entry_point=Meet)
    env = fa.make("t/Meet-v0", role_shuffle=True, reward_scale=10.0)
    for seed in range(4):
        env.reset(seed=seed)
        role = {agent: env.infos[agent]["role"] for agent in env.agents}
        assert all(env.instructions(agent) == f"You are {role[agent]}." for agent in env.agents)
        told = rest(env, ["bridge", "bridge"])
        assert told == {agent: 10.0 if role[agent] == "left" else 20.0 for agent in role}


# ---- by keyword


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(("scale", "most"), [(0.5, 2.0), (10.0, 40.0), (-1.0, None)])
def test_scaled_rewards_have_a_scaled_maximum(scale, most):
    fa.register("t/Most-v0", type("Most", (Plain,), {"max_reward": 4.0}), max_turns=2)
    assert fa.make("t/Most-v0", reward_scale=scale).max_reward == most
    fa.register("t/Unknown-v0", Plain, max_turns=2)
    assert fa.make("t/Unknown-v0", reward_scale=scale).max_reward is None


@pytest.mark.usefixtures("own_registry")
def test_make_and_register_take_wrappers_by_keyword():
    env = fa.make(KUHN, reward_scale=0.5, observation_window=40, role_shuffle=True, invalid_action="penalty")
    names = []
    while hasattr(type(env), "fork") and "env" in vars(env):
        names.append(type(env).__name__)
        env = env.env
    assert names == ["RewardScale", "ObservationWindow", "InvalidAction", "RoleShuffle"]
    fa.register("t/Half-v0", entry_point="forge_envs.games.poker:KuhnPoker", max_turns=3, reward_scale=0.5)
    env = started(fa.make("t/Half-v0"))
    env.step("bad")
    assert (
        env.rewards == {"player_0": -0.5, "player_1": 0.5}
        and env.spec.kwargs == {"reward_scale": 0.5}
        and env.max_turns == 3
    )
    assert type(fa.make("t/Half-v0", reward_scale=None)).__name__ == "KuhnPoker"


@pytest.mark.usefixtures("own_registry")
def test_a_constructor_keeps_its_own_argument():
    class Own(Talk):
        def __init__(self, reward_scale=1.0):
            super().__init__()
            self.given = reward_scale

    fa.register("t/Own-v0", entry_point=Own)
    env = fa.make("t/Own-v0", reward_scale=3.0)
    assert type(env) is Own and env.given == 3.0


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"reward_scale": 0}, "reward_scale=0"),
        ({"reward_scale": float("nan")}, "reward_scale=nan"),
        ({"observation_window": 3}, "chars=3"),
        ({"invalid_action": "retry"}, "end, penalty, ask"),
        ({"role_shuffle": "yes"}, "role_shuffle='yes'"),
    ],
)
def test_mistakes_are_named(wrong, error):
    with pytest.raises((ValueError, ForgeError), match=error):
        fa.make(KUHN, **wrong)
    with pytest.raises(TypeError, match="Did you mean 'reward_scale'"):
        fa.make(KUHN, reward_scal=2)


# ---- the contract

ALL = {"role_shuffle": True, "invalid_action": "penalty", "observation_window": 60, "reward_scale": 2.0}


@pytest.mark.parametrize("chosen", [ALL, {"role_shuffle": True}])
def test_wrapped_environments_keep_the_contract(chosen):
    report = fa.check_env("forge/LeducPoker-v0", episodes=4, max_turns=30, **chosen)
    assert {f.check for f in report.skipped} >= {"pettingzoo parallel", "num agents"}


def test_a_time_limit_keeps_the_contract():
    assert fa.check_env(lambda: TimeLimit(Talk(), 4), episodes=2).ok


def test_a_fork_is_wrapped_like_the_original():
    env = started(fa.make("forge/LeducPoker-v0", **ALL))
    env.step("raise")
    saved, twin = env.snapshot(), env.fork()
    assert type(twin) is RewardScale and twin.last()[:2] == env.last()[:2]
    env.step("fold")
    assert not any(twin.terminations.values())
    env.restore(saved)
    assert env.last()[:2] == twin.last()[:2]


class Falling(Opened):
    """Three agents in turn, for ten decisions. The agent of decision `deadly` dies."""

    metadata = {"name": "falling_v0"}
    possible_agents = ["a", "b", "c"]

    def __init__(self, deadly):
        self.deadly = deadly

    def observation_space(self, agent):
        return Discrete(20)

    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset()
        self.decisions = 0

    def observe(self, agent):
        return str(self.decisions)

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            return self._was_dead_step(action)
        self.decisions += 1
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self.rewards[agent] = 1.0
        self._accumulate_rewards()
        self.terminations[agent] = self.decisions == self.deadly
        if self.decisions == 10:
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = self.agents[(self.agents.index(agent) + 1) % len(self.agents)]
        return self._deads_step_first()


class FallingTogether(ParallelEnv):
    """The same in parallel: agent b dies in round `deadly`."""

    metadata = {"name": "falling_together_v0"}
    possible_agents = ["a", "b", "c"]

    def __init__(self, deadly):
        self.deadly = deadly

    observation_space = Falling.observation_space
    action_space = Falling.action_space

    def reset(self, seed=None, options=None):
        self.agents, self.rounds = list(self.possible_agents), 0
        return dict.fromkeys(self.agents, "0"), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.rounds += 1
        acting = self.agents
        out = {agent: self.rounds == 5 or (agent == "b" and self.rounds == self.deadly) for agent in acting}
        self.agents = [agent for agent in acting if not out[agent]]
        cut = dict.fromkeys(acting, False)
        return dict.fromkeys(acting, "x"), dict.fromkeys(acting, 1.0), out, cut, {agent: {} for agent in acting}


def limited(env, max_turns):
    return TimeLimit(turn_based(env), max_turns)


def wrapped_alike(env, max_turns):
    return fa.wrap(env, obs_to_text=lambda seen, agent: seen, text_to_action=lambda text, *_: 1, max_turns=max_turns)


def played_by_hand(env):
    """Play PettingZoo's loop. Returns the decisions, and the end and the reward of each agent."""
    env.reset(seed=0)
    decisions, ends, earned = 0, {}, dict.fromkeys(env.possible_agents, 0.0)
    for agent in env.agent_iter(100):
        _, reward, terminated, truncated, _ = env.last()
        earned[agent] += reward
        if terminated or truncated:
            ends[agent] = "over" if terminated else "cut"
        else:
            decisions += 1
        env.step(None if terminated or truncated else "1")
    return decisions, ends, earned


@pytest.mark.parametrize("limit", [limited, wrapped_alike])
@pytest.mark.parametrize("deadly", [1, 4, 5, 6])
def test_a_death_on_any_turn_leaves_the_turn_limit_as_it_is(limit, deadly):
    decisions, ends, earned = played_by_hand(limit(Falling(deadly), 5))
    dead = {1: "a", 4: "a", 5: "b"}.get(deadly)
    assert decisions == 5 == sum(earned.values())
    assert ends == {agent: "over" if agent == dead else "cut" for agent in "abc"}


@pytest.mark.parametrize("limit", [limited, wrapped_alike])
@pytest.mark.parametrize(("deadly", "max_turns"), [(1, 3), (1, 5), (2, 6), (2, 5), (2, 7)])
def test_death_in_a_parallel_round_keeps_the_turn_limit(limit, deadly, max_turns):
    decisions, ends, _ = played_by_hand(limit(FallingTogether(deadly), max_turns))
    assert decisions == max_turns
    assert ends == {"a": "cut", "b": "over" if max_turns >= 3 * deadly else "cut", "c": "cut"}


@pytest.mark.parametrize(("deadly", "end"), [(3, "over"), (9, "cut")])
def test_gymnasium_game_ends_on_its_limiting_turn(deadly, end):
    class Alone(gymnasium.Env):
        observation_space, action_space = Discrete(20), Discrete(2)

        def reset(self, seed=None, options=None):
            self.steps = 0
            return 0, {}

        def step(self, action):
            self.steps += 1
            return self.steps, 1.0, self.steps == deadly, False, {}

    env = fa.wrap(Alone(), obs_to_text=lambda seen, agent: str(seen), text_to_action=lambda *_: 1, max_turns=3)
    assert played_by_hand(env) == (3, {"player": end}, {"player": 3.0})


def test_illegal_text_ends_the_game_of_all_live_agents():
    env = fa.wrap(Falling(2), obs_to_text=lambda seen, agent: seen, text_to_action=lambda text, *_: int(text))
    env.reset(seed=0)
    for text in ("1", "1", None, "what?"):
        env.step(text)
    assert env.terminations == {"a": True, "c": True} and not any(env.truncations.values())
