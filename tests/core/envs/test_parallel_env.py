import asyncio
import copy
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from fake_models import Tokens, completion
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test
from pettingzoo.utils.conversions import aec_to_parallel, parallel_to_aec, turn_based_aec_to_parallel
from plain_env import PlainParallel
from refusals import raises

import forge_agents as fa
from forge_agents.envs.env import listed_actions
from forge_agents.rollout.episode import play
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.testing import check_env


class Auction(fa.ParallelTurnEnv):
    """A parallel auction: the lowest bidder loses a life and leaves at 0, and the last agent wins."""

    possible_agents = ["player_0", "player_1", "player_2"]
    min_agents = 2

    def setup(self, rng):
        self.prize = {agent: int(rng.integers(100, 1000)) for agent in self.agents}
        self.lives = dict.fromkeys(self.agents, 2)
        self.last = "nothing"

    def instructions(self, agent):
        return f"You are {agent}. Bid a number."

    def observe_text(self, agent):
        return f"Your prize is {self.prize[agent]}. {self.lives[agent]} lives. Low was {self.last}."

    def legal_actions(self, agent):
        return [str(n) for n in range(5)]

    def secrets(self, agent):
        return [str(prize) for other, prize in self.prize.items() if other != agent]

    def swap_secrets(self, agent, rng):
        self.prize |= {other: int(rng.integers(1000, 2000)) for other in self.prize if other != agent}

    def act_all(self, actions):
        bids = {agent: int(text) if text in "01234" and text else 0 for agent, text in actions.items()}
        self.last = min(bids, key=lambda agent: bids[agent])
        self.lives[self.last] -= 1
        left = [agent for agent in actions if self.lives[agent]]
        return fa.Outcome(
            rewards={self.last: -1.0} | ({left[0]: 1.0} if len(left) == 1 else {}),
            done=True if len(left) == 1 else [agent for agent in actions if agent not in left],
            info={agent: {"bids": bids} for agent in actions},
        )


def started(seed=0, **kwargs):
    env = Auction(**kwargs)
    env.reset(seed=seed)
    return env


def bids(*numbers):
    return {f"player_{index}": str(number) for index, number in enumerate(numbers)}


def test_it_passes_pettingzoos_own_tests_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(Auction(), num_cycles=30)
        parallel_seed_test(Auction, num_cycles=30)


def test_it_passes_ours():
    report = check_env(Auction, episodes=3)
    assert {finding.check: finding.message for finding in report.findings}["num agents"] == "2 to 3 agents"
    assert not {"pettingzoo parallel", "leak", "information sets"} & {finding.check for finding in report.skipped}


def test_an_agent_that_is_out_is_reported_once_and_leaves():
    env = started()
    env.step(bids(0, 1, 2))
    _, rewards, terminated, truncated, infos = env.step(bids(0, 1, 2))
    assert rewards == {"player_0": -1, "player_1": 0, "player_2": 0}
    assert terminated == {"player_0": True, "player_1": False, "player_2": False} and not any(truncated.values())
    assert env.agents == ["player_1", "player_2"] and "legal_actions" not in infos["player_0"]
    seen, *_ = env.step({"player_1": "1", "player_2": "2"})
    assert set(seen) == {"player_1", "player_2"} and "Low was player_1" in seen["player_2"]


def test_the_turn_limit_counts_decisions_and_truncates():
    env = started(max_turns=4)
    *_, truncated, _ = env.step(bids(0, 1, 2))
    assert not any(truncated.values())
    _, _, terminated, truncated, _ = env.step(bids(1, 0, 2))
    assert all(truncated.values()) and not any(terminated.values()) and env.agents == []
    raises(RuntimeError, "reset", env.step, {})


@pytest.mark.parametrize(
    ("actions", "error", "says"),
    [
        ({"player_0": "1"}, ValueError, "Pass one for each"),
        ({**bids(1, 2, 3), "player_9": "1"}, ValueError, "player_9"),
        ({**bids(1, 2, 3), "player_1": 7}, TypeError, "'player_1' must act with text, got int"),
    ],
)
def test_wrong_actions_are_named(actions, error, says):
    raises(error, says, started().step, actions)


def test_no_agent_goes_first_in_a_simultaneous_game(monkeypatch):
    monkeypatch.setattr(Auction, "act_all", lambda self, actions: fa.Outcome(next="player_0"))
    raises(ValueError, "all agents act together", started().step, bids(1, 2, 3))
    monkeypatch.setattr(Auction, "setup", lambda self, rng: "player_0")
    raises(ValueError, "setup returned a first agent", started)


def test_both_conversions_keep_the_texts_and_pass():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        api_test(parallel_to_aec(Auction()), num_cycles=30)
        seed_test(lambda: parallel_to_aec(Auction()), num_cycles=30)
    turns = parallel_to_aec(Auction())
    turns.reset(seed=0)
    assert turns.last()[4]["legal_actions"] == ["0", "1", "2", "3", "4"]
    assert turns.unwrapped.instructions("player_1") == "You are player_1. Bid a number."
    assert turns.action_space("player_0").contains("any text")
    back = aec_to_parallel(turns)
    assert isinstance(back, Auction)


def test_a_turn_based_game_that_says_so_becomes_parallel():
    class Rounds(fa.TurnEnv):
        possible_agents = ["a", "b"]
        metadata = {"name": "rounds", "is_parallelizable": True}

        def setup(self, rng):
            self.said = []

        def observe_text(self, agent):
            return f"{len(self.said)} said"

        def act(self, agent, action):
            self.said.append(action)
            return fa.Outcome(rewards={agent: float(len(action))}, done=len(self.said) == 4)

    env = aec_to_parallel(Rounds())
    env.reset(seed=0)
    env.step({"a": "x", "b": "xx"})
    seen, _, terminated, _, _ = env.step({"a": "xxx", "b": ""})
    assert env.aec_env.said == ["x", "xx", "xxx", ""] and all(terminated.values()) and seen["a"] == "4 said"
    one = turn_based_aec_to_parallel(Rounds())
    one.reset(seed=0)
    one.step({"a": "x"})
    assert one.aec_env.said == ["x"] and one.aec_env.agent_selection == "b"


def test_fork_and_snapshot_continue_equally_and_independently():
    env = started()
    env.step(bids(0, 1, 2))
    fork, before = env.fork(), env.snapshot()
    result = env.step(bids(0, 1, 2))
    assert fork.lives["player_0"] == 1 and fork.step(bids(0, 1, 2)) == result
    env.restore(before)
    assert env.lives["player_0"] == 1 and env.step(bids(0, 1, 2)) == result
    other = Auction()
    other.restore(before)
    assert copy.deepcopy(other).step(bids(0, 1, 2)) == result


# ---- in the rollout


class Engine:
    """Answers only when the requests of all agents are waiting, which shows that they act together."""

    max_model_len = 1000

    def __init__(self, together):
        self.together, self.waiting, self.asked = together, [], []

    async def generate(self, prompt_ids, sampling):
        self.asked.append(prompt_ids)
        mine = asyncio.get_running_loop().create_future()
        self.waiting.append(mine)
        if len(self.waiting) == self.together:
            for future in self.waiting:
                future.set_result(None)
            self.waiting = []
        await asyncio.wait_for(mine, 60)
        return completion(len(prompt_ids))


class Numbered(Tokens):
    def begin(self, messages):
        return (int(messages[0][1].split("_")[1][0]),)


def run(env, policies, **kwargs):
    return asyncio.run(play(env, policies, seed=5, env_id="t", **kwargs))


def test_agents_act_together_with_separate_token_streams():
    model = fa.Policy("m", name="m")
    engine = Engine(together=2)

    class Two(Auction):
        def select_agents(self, rng):
            return self.possible_agents[:2]

    episode = run(Two(), dict.fromkeys(Auction.possible_agents, model), engines={"m": PolicyEngine(engine, Numbered())})
    assert episode.error is None and episode.end_reason == "terminated"
    assert list(episode.trajectories) == ["player_0", "player_1"], "an agent that does not take part has no trajectory"
    assert [(t.agent, t.index) for t in episode.turns][:4] == [
        ("player_0", 0),
        ("player_1", 1),
        ("player_0", 2),
        ("player_1", 3),
    ]
    first, second = (episode.trajectories[agent].turns for agent in ("player_0", "player_1"))
    assert first[1].prompt_ids == (0, 1, 9) and second[1].prompt_ids == (1, 1, 9)


def test_rewards_ends_and_infos_go_to_their_turns():
    policies = {agent: fa.Scripted(lambda _, n=n: str(n), name=f"n{n}") for n, agent in enumerate(bids(0, 1, 2))}
    episode = run(Auction(), policies)
    turns = {agent: trajectory.turns for agent, trajectory in episode.trajectories.items()}
    assert [t.reward for t in turns["player_0"]] == [-1, -1] and turns["player_0"][-1].terminated
    assert [t.reward for t in turns["player_1"]] == [0, 0, -1, -1] and turns["player_1"][-1].terminated
    assert episode.rewards == {"player_0": -2, "player_1": -2, "player_2": 1}
    assert turns["player_2"][-1].info["bids"] == {"player_1": 1, "player_2": 2}
    assert [t.index for t in episode.turns] == list(range(10))


def test_limits_and_failures_are_the_episodes():
    everyone = dict.fromkeys(Auction.possible_agents, fa.Scripted(lambda _: "1"))
    episode = run(Auction(), everyone, max_turns=4)
    assert episode.end_reason == "turn_limit" and len(episode.turns) == 6, "a round that has begun is played"
    last = [trajectory.turns[-1] for trajectory in episode.trajectories.values()]
    assert [(turn.terminated, turn.truncated) for turn in last] == [(True, False), (False, True), (False, True)]

    def broken(observation, agent):
        raise KeyError(agent)

    episode = run(Auction(), everyone | {"player_1": fa.Scripted(broken, name="broken")})
    assert episode.error is not None and (episode.error.where, episode.error.kind) == ("policy", "KeyError")
    full = Engine(together=3)
    full.max_model_len = 2
    model = fa.Policy("m", name="m")
    episode = run(Auction(), dict.fromkeys(everyone, model), engines={"m": PolicyEngine(full, Numbered())})
    assert episode.end_reason == "context" and len(episode.turns) == 3
    env, alone = Auction(), Engine(together=1)
    env.spec, alone.max_model_len = SimpleNamespace(tags=("competitive",), max_turns=None), 1
    policies = {**dict.fromkeys(everyone, fa.Scripted(lambda observation: "2", name="two")), "player_0": model}
    episode = run(env, policies, engines={"m": PolicyEngine(alone, Numbered())})
    assert episode.end_reason == "terminated" and episode.error is None
    assert [turn.action for turn in episode.trajectories["player_0"].turns] == ["", ""], "it has lost both lives"


class Rounds(PlainParallel):
    """Three rounds of two agents in PettingZoo's own terms, of which subclasses report less."""

    possible_agents = ["a", "b"]

    def reset(self, seed=None, options=None):
        self.agents, self.round = ["a", "b"], 0
        return dict.fromkeys(self.agents, "?"), dict.fromkeys(self.agents)

    def step(self, actions):
        self.round += 1
        acting, over = list(self.agents), self.round == 3
        self.agents = [] if over else self.agents
        ended = dict.fromkeys(acting, over)
        return dict.fromkeys(acting, "?"), dict.fromkeys(acting, np.float32(1)), ended, dict.fromkeys(acting, False), {}


class KeepsTheDead(Rounds):
    """Agent "a" ends in the first round, stays in `agents`, and has no observation any more."""

    def step(self, actions):
        _, _, ended, cut, infos = super().step(actions)
        if self.round == 1:
            ended["a"] = True
        return {"b": "?"}, {"b": 1.0}, ended, cut, infos


class EndsForAll(Rounds):
    """The end of "a" empties `agents`, as in PettingZoo's tutorial, and "b" is not said to have ended."""

    def step(self, actions):
        seen, rewards, _, cut, infos = super().step(actions)
        self.agents = []
        return seen, rewards, {"a": True, "b": False}, cut, infos


@pytest.mark.parametrize(("kind", "rewards"), [(Rounds, (3, 3)), (KeepsTheDead, (0, 3)), (EndsForAll, (1, 1))])
def test_plain_environments_may_report_less(kind, rewards):
    episode = run(kind(), dict.fromkeys("ab", fa.Scripted(lambda _: "x")))
    assert episode.error is None and tuple(episode.rewards.values()) == rewards
    assert [len(trajectory.turns) for trajectory in episode.trajectories.values()] == [max(each, 1) for each in rewards]
    assert all(trajectory.turns[-1].terminated for trajectory in episode.trajectories.values())


def test_agent_without_an_observation_is_named():
    class Blind(Rounds):
        def step(self, actions):
            _, *rest = super().step(actions)
            return ({"a": "?"}, *rest)

    episode = run(Blind(), dict.fromkeys("ab", fa.Scripted(lambda _: "x")))
    assert episode.error.message == "'b' takes part but has no observation. Return one for each agent"


@pytest.mark.parametrize("listed", [np.array(["go", "stop"]), {"go": 1, "stop": 2}.keys(), {"stop", "go"}])
def test_legal_actions_of_a_plain_environment_may_be_any_collection(listed):
    class Listed(Rounds):
        def reset(self, seed=None, options=None):
            seen, _ = super().reset()
            return seen, {agent: {"legal_actions": listed} for agent in seen}

    assert listed_actions({"legal_actions": listed}) == ("go", "stop")  # in all processes, also if it is a set
    episode = run(Listed(), dict.fromkeys("ab", fa.Random()))
    assert episode.error is None and {turn.action for turn in episode.turns[:2]} <= {"go", "stop"}


def test_make_gives_the_parallel_environment_itself(own_registry):
    fa.register("t/Auction-v0", max_turns=6)(Auction)
    env = fa.make("t/Auction-v0")
    assert type(env) is Auction and env.max_turns == 6 and str(env) == "t/Auction-v0"
