"""Whatever ends an episode, each seat has been paid what its environment paid until then."""

import asyncio
import re
from collections import Counter

import pytest
from gymnasium.spaces import Text
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo import ParallelEnv
from pettingzoo.utils import BaseWrapper
from pettingzoo.utils.conversions import parallel_to_aec
from plain_env import Opened, Plain

import forge_agents as fa
from forge_agents.bench.records import reported_success
from forge_agents.envs.wrappers import InvalidAction, TimeLimit
from forge_agents.rollout.episode import play
from forge_agents.rollout.policy_engine import PolicyEngine

from .fakes import Engine  # noqa: TID252 (tests are no installed package)

SEATS = ("a", "b", "c")
REWARD = st.integers(-2, 2)


@st.composite
def scripts(draw):
    """Payments by agent, agents that leave, and next agent, for each step."""
    seats = SEATS[: draw(st.integers(1, 3))]
    zero_sum = draw(st.booleans())
    steps = []
    for _ in range(draw(st.integers(1, 7))):
        pay = {seat: float(draw(REWARD)) for seat in seats}
        if zero_sum:
            pay[seats[0]] -= sum(pay.values())
        leaves = draw(st.sets(st.sampled_from(seats), max_size=1)) if draw(st.booleans()) else set()
        steps.append((pay, leaves, draw(st.sampled_from(seats))))
    return seats, steps


class Scripted:
    """Pays as the script says, counts steps, and raises after the last one."""

    def __init__(self, seats, steps, breaks):
        super().__init__()
        self.possible_agents, self.steps, self.breaks = list(seats), steps, breaks

    def setup(self, rng):
        self.paid, self.at = Counter(), 0

    def instructions(self, agent):
        return ""

    def observe_text(self, agent):
        if self.breaks == "observe" and self.at == len(self.steps):
            raise RuntimeError("broken")
        return f"{self.at}"

    def outcome(self):
        if self.at == len(self.steps) and self.breaks:
            raise RuntimeError("broken")
        over = self.at + 1 >= len(self.steps) and not self.breaks
        pay, leaves, following = self.steps[min(self.at, len(self.steps) - 1)]
        self.at += 1
        pay = {seat: reward for seat, reward in pay.items() if seat in self.agents}
        self.paid.update(pay)
        leaves = {seat for seat in leaves if seat in self.agents}
        if len(leaves) == len(self.agents):
            over = True
        stays = following in self.agents and following not in leaves and not over
        return pay, over or leaves, following if stays else None


class Turns(Scripted, fa.TurnEnv):
    def act(self, agent, action):
        rewards, done, following = self.outcome()
        return fa.Outcome(rewards=rewards, done=done, next=following)


class Rounds(Scripted, fa.ParallelTurnEnv):
    def act_all(self, actions):
        rewards, done, _ = self.outcome()
        return fa.Outcome(rewards=rewards, done=done)


KINDS = {
    "turns": lambda game: game,
    "time limit": lambda game: TimeLimit(game, 3),
    "PettingZoo's wrapper": BaseWrapper,
    "asked again": lambda game: InvalidAction(game, "ask"),
    "wrap": lambda game: fa.wrap(game, obs_to_text=lambda o, a: o, text_to_action=lambda t, a, s: t, max_turns=5),
}


def played_with_cuts(env, game, *, max_turns, room, breaks_players=0):
    """Return the episode of a game that ends by its script, a cut, or an error, and what the game paid each agent."""
    calls = Counter()

    def say(seen):
        calls["all"] += 1
        if calls["all"] == breaks_players:
            raise RuntimeError("a player broke")
        return "x"

    engine = Engine(room)
    seats = {}
    for place, seat in enumerate(game.possible_agents):  # a model in the first seat, functions elsewhere
        seats[seat] = fa.Policy("m", name="m") if place == 0 and room else fa.Scripted(say)
    episode = asyncio.run(play(env, seats, seed=1, engines={"m": PolicyEngine(engine, engine)}, max_turns=max_turns))
    assert episode.error is None or game.breaks or "a player broke" in episode.error.message
    return episode, {seat: game.paid[seat] for seat in game.possible_agents}


cuts = st.fixed_dictionaries(
    {
        "max_turns": st.integers(1, 12),
        "room": st.sampled_from([0, 3, 5, 7, 100]),
        "breaks_players": st.sampled_from([0, 0, 2, 4]),
    }
)


@settings(max_examples=50, deadline=None)
@given(scripts(), cuts, st.sampled_from(["", "step", "observe"]), st.sampled_from(sorted(KINDS)))
def test_rewards_of_turn_based_games_are_complete(script, cut, breaks, kind):
    game = Turns(*script, breaks)
    episode, paid = played_with_cuts(KINDS[kind](game), game, **cut)
    assert episode.rewards == pytest.approx(paid), (episode.end_reason, episode.error)


@settings(max_examples=35, deadline=None)
@given(scripts(), cuts, st.sampled_from(["", "step", "observe"]))
def test_rewards_of_parallel_games_are_complete(script, cut, breaks):
    game = Rounds(*script, "step" if breaks else "")
    episode, paid = played_with_cuts(game, game, **cut)
    assert episode.rewards == pytest.approx(paid), (episode.end_reason, episode.error)


@settings(max_examples=50, deadline=None)
@given(scripts(), cuts, st.booleans(), st.booleans())
def test_rewards_of_converted_games_are_complete(script, cut, breaks, limited):
    game = Rounds(*script, "step" if breaks else "")
    env = parallel_to_aec(game)
    episode, paid = played_with_cuts(TimeLimit(env, 4) if limited else env, game, **cut)
    assert episode.rewards == pytest.approx(paid), (episode.end_reason, episode.error)


class Bank(Plain):
    """The acting agent takes one from the other. The third agent never acts."""

    possible_agents = ["a", "b", "house"]

    def act(self, agent, action):
        other = "b" if agent == "a" else "a"
        return fa.Outcome(next=other, rewards={agent: 2.0, other: -1.0, "house": -1.0})


def test_truncation_pays_the_last_decision_of_each_agent():
    episode = asyncio.run(play(Bank(), dict.fromkeys(Bank.possible_agents, fa.Random()), seed=1, max_turns=3))
    assert episode.end_reason == "turn_limit"
    assert [(t.agent, t.reward, t.truncated) for t in episode.turns] == [
        ("a", 1.0, False),
        ("b", 1.0, True),
        ("a", 2.0, True),
    ]
    assert episode.trajectories["house"].initial_reward == -3.0
    assert episode.rewards == {"a": 3.0, "b": 0.0, "house": -3.0}


class Estate(ParallelEnv):
    """Three rounds. "b" leaves after the first one and is paid in each."""

    metadata, render_mode = {"name": "estate_v0"}, None
    possible_agents = ["a", "b"]

    def action_space(self, agent):
        return Text(99)

    def reset(self, seed=None, options=None):
        self.agents, self.round = ["a", "b"], 0
        return dict.fromkeys(self.agents, ""), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.round += 1
        acting, self.agents = self.agents, ["a"] if self.round < 3 else []
        left = {agent: agent not in self.agents for agent in acting}
        seen, infos = dict.fromkeys(acting, ""), {agent: {} for agent in acting}
        return seen, {"a": 1.0, "b": 2.0}, left, dict.fromkeys(acting, False), infos


ESTATES = {
    "rounds": Estate,
    "turns": lambda: parallel_to_aec(Estate()),
    "wrap": lambda: fa.wrap(Estate(), obs_to_text=lambda seen, agent: seen, text_to_action=lambda text, *_: text),
}


@pytest.mark.parametrize("how", ESTATES)
def test_agents_that_left_are_paid(how):
    episode = asyncio.run(play(ESTATES[how](), dict.fromkeys(Estate.possible_agents, fa.Random()), seed=1))
    assert episode.error is None and episode.rewards == {"a": 3.0, "b": 6.0}


class Pension(Opened):
    """ "a" is truncated by its only move, with a fact in its info, and is paid for the last of two moves of "b"."""

    metadata, possible_agents = {"name": "pension"}, ["a", "b"]
    observation_spaces = action_spaces = dict.fromkeys(possible_agents, Text(99))

    def observe(self, agent):
        return "?"

    def reset(self, seed=None, options=None):
        super().reset()
        self.num_moves = 0

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.num_moves, self.agent_selection = self.num_moves + 1, "b"
        self.rewards = dict.fromkeys(self.agents, 0.0)
        if agent == "a":
            self.truncations["a"], self.infos["a"] = True, {"success": True}
        if self.num_moves == 3:
            self.terminations["b"] = True
            self.rewards, self._cumulative_rewards["a"] = {"a": 5.0, "b": 1.0}, 0.0
        self._accumulate_rewards()
        self._deads_step_first()


def test_later_reward_of_an_agent_that_left_keeps_its_end_and_its_info():
    episode = asyncio.run(play(Pension(), dict.fromkeys("ab", fa.Random()), seed=1))
    assert episode.error is None and episode.rewards == {"a": 5.0, "b": 1.0}
    (turn,) = episode.trajectories["a"].turns
    assert (turn.reward, turn.terminated, turn.truncated) == (5.0, False, True)
    assert episode.trajectories["a"].info == {"success": True} == turn.info
    assert reported_success(episode)["a"] is True


class Undying(Pension):
    """Ignores the steps of agents that have ended."""

    def step(self, action):
        if action is not None:
            super().step(action)


def test_step_that_does_not_remove_an_agent_that_ended_is_an_error():
    """The episode would never end, and no other episode of the process could go on."""
    episode = asyncio.run(play(Undying(), dict.fromkeys("ab", fa.Random()), seed=1))
    assert re.search(r"'a' has ended and step\(None\) did not remove it.*self._was_dead_step", episode.error.message)


class Ledger(Opened):
    """Two agents take turns, and each wins 1 or 2 from the other. Subclasses sum rewards in other ways."""

    metadata, possible_agents = {"name": "ledger"}, ["a", "b"]
    observation_spaces = action_spaces = dict.fromkeys(possible_agents, Text(99))

    def observe(self, agent):
        return "how much?"

    def reset(self, seed=None, options=None):
        super().reset()
        self.num_moves = 0

    def step(self, action):
        acted = self.agent_selection
        if self.terminations[acted]:
            self._was_dead_step(action)
            return
        other, self.num_moves = "ab".replace(acted, ""), self.num_moves + 1
        stake = 1.0 if action == "1" else 2.0
        self.pay(acted, {acted: stake, other: -stake})
        self.terminations = dict.fromkeys(self.agents, self.num_moves == 4)
        self.agent_selection = other

    def pay(self, acted, rewards):
        self._cumulative_rewards[acted] = 0.0
        self.rewards = rewards
        self._accumulate_rewards()


class OnlyAccounts(Ledger):  # tianshou#900: pays into accounts and clears the stated rewards
    def pay(self, acted, rewards):
        self._cumulative_rewards[acted] = 0.0
        for agent, reward in rewards.items():
            self._cumulative_rewards[agent] += reward


class NeverAdds(Ledger):
    def pay(self, acted, rewards):
        self.rewards = rewards


class AddsBefore(Ledger):
    def pay(self, acted, rewards):
        self._cumulative_rewards[acted] = 0.0
        self._accumulate_rewards()
        self.rewards = rewards


class NeverEmpties(Ledger):
    def pay(self, acted, rewards):
        self.rewards = rewards
        self._accumulate_rewards()


def played(env):
    policies = {"a": fa.Scripted(lambda text: "2"), "b": fa.Scripted(lambda text: "1")}
    return asyncio.run(play(env, policies, seed=0))


@pytest.mark.parametrize("kind", [Ledger, OnlyAccounts])
def test_accounts_reported_by_last_are_complete(kind):
    episode = played(kind())
    assert episode.error is None and episode.rewards == {"a": 2.0, "b": -2.0}
    scaled = played(fa.envs.wrappers.RewardScale(kind(), 0.5))
    assert scaled.error is None and scaled.rewards == {"a": 1.0, "b": -1.0}


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (NeverAdds, r"'a' has a reward of 2 in `rewards`, but last\(\) reports 0. Call self._accumulate_rewards\(\)"),
        (AddsBefore, r"'a' has a reward of 2 in `rewards`, but last\(\) reports 0. Call self._accumulate_rewards\(\)"),
        (NeverEmpties, r"'b' has a reward of 1 in `rewards`, but last\(\) reports -1 because it counts"),
    ],
)
def test_lost_reward_fails_the_episode_and_the_check(kind, says):
    episode = played(kind())
    assert episode.error.where == "reward" and re.search(says, episode.error.message)
    report = fa.check_env(kind, raise_on_failure=False)
    (finding,) = [finding for finding in report.failures if finding.check == "rewards and infos"]
    assert " has a reward of 2 in `rewards`, but last() reports " in finding.message and finding.fix


class Abrupt(Bank):
    """Empties the list of its agents with the last decision, so that nobody has a turn to hear of it."""

    def step(self, action):
        super().step(action)
        if self.num_turns == 3:
            self.terminations = dict.fromkeys(self.agents, True)
            self.agents = []


def test_game_that_ends_at_once_pays_its_last_turns():
    episode = asyncio.run(play(Abrupt(), dict.fromkeys(Bank.possible_agents, fa.Random()), seed=1))
    assert episode.end_reason == "terminated" and episode.rewards == {"a": 3.0, "b": 0.0, "house": -3.0}
    assert episode.turns[-1].terminated


class Forgetful(Plain):
    """Clears all infos in each step, as a plain PettingZoo environment may. Any text but "go" is illegal."""

    possible_agents = ["a", "b"]
    max_turns = 6

    def act(self, agent, action):
        return fa.Outcome()

    def step(self, action):
        agent = self.agent_selection
        super().step(action)
        self.infos = {name: {} for name in self.possible_agents}
        if action not in ("go", None):
            self.infos[agent]["illegal"] = f"{action} is no move"


def test_illegal_decision_is_recorded_although_its_info_is_cleared_before_the_next_turn():
    actions = iter(["junk", "go", "jump"])
    players = {"a": fa.Scripted(lambda _: next(actions)), "b": fa.Scripted(lambda _: "go")}
    trajectories = fa.play(Forgetful(), players).trajectories
    recorded = {name: [turn.info.get("illegal") for turn in t.turns] for name, t in trajectories.items()}
    assert recorded == {"a": ["junk is no move", None, "jump is no move"], "b": [None] * 3}
