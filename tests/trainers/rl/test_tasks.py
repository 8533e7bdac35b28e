"""Environments of a run, the policies of their agents, and the random state of the process."""

import asyncio
import contextlib
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from plain_env import Plain

import forge_agents as fa
from forge_agents.envs.seeds import HELD_OUT_FROM
from forge_trainers.rl.collect import Collector
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.credit import Credit
from forge_trainers.rl.league_policies import policies_of
from forge_trainers.rl.metrics import summarize
from forge_trainers.rl.plan import RunPlan
from forge_trainers.rl.rewards import env_reward
from forge_trainers.rl.samples import credit_groups
from forge_trainers.rl.scoring import score
from forge_trainers.rl.tasks import ProcessRandomness, TaskSampler
from forge_trainers.rl.trainer import GRPOTrainer

GAMES = {"forge/AlphabetSort-v0": 1.0, "forge/Relay-v0": 1.0, "forge/KuhnPoker-v0": 2.0}
SEATS = {
    "forge/AlphabetSort-v0": ("sorter",),
    "forge/Relay-v0": ("asker", "answerer"),
    "forge/KuhnPoker-v0": ("player_0", "player_1"),
}


def test_environments_of_a_run_may_have_different_agents(tmp_path):
    sampler = TaskSampler(GAMES)
    tasks = sampler.tasks(0, 0, 400)
    assert {task.env_id: task.agents for task in tasks} == SEATS
    assert sum(task.env_id == "forge/KuhnPoker-v0" for task in tasks) == pytest.approx(200, abs=40)
    held_out = sampler.held_out(4)
    assert [task.agents for task in held_out] == [*SEATS.values(), SEATS["forge/AlphabetSort-v0"]]
    assert [task.seed - HELD_OUT_FROM for task in held_out] == [0, 1, 2, 3]


@pytest.mark.parametrize("by_seat", [False, True])
def test_environments_get_the_policies_of_their_agents(tmp_path, by_seat):
    pupil, poker = fa.Policy("model", name="pupil"), fa.Random(name="poker")
    everyone = {
        agent: poker if agent in ("player_0", "player_1") else pupil for agents in SEATS.values() for agent in agents
    }
    policies = policies_of(everyone if by_seat else pupil, GRPOConfig(), tmp_path)
    assert policies.declared(SEATS) == ({"pupil": pupil, "poker": poker} if by_seat else {"pupil": pupil})
    sampler = TaskSampler(GAMES)

    async def play(task, seats, served):
        return seats

    played = asyncio.run(policies.collect(sampler.held_out(3), play, SimpleNamespace(policy_engines={})))
    if by_seat:
        assert played == [{agent: everyone[agent] for agent in agents} for agents in SEATS.values()]
    else:
        assert played == [pupil] * 3


def test_invalid_seed_is_refused():
    with pytest.raises(ValueError, match="non-negative"):
        TaskSampler("forge/KuhnPoker-v0").tasks(-1, 0, 1)
    with pytest.raises(ValueError, match="seed=-1 must be at least 0"):
        GRPOConfig(seed=-1)
    with pytest.raises(ValueError, match=r"seed=4294967296 must be at least 0 and below 2\*\*32"):
        GRPOConfig(seed=2**32)  # an engine would refuse it at its start
    assert GRPOConfig(seed=2**32 - 1).seed == 4294967295


def test_environment_object_is_refused_because_each_episode_needs_its_own():
    with pytest.raises(TypeError, match=r"got an object of the class .*\. Each episode .* so pass the class or its id"):
        TaskSampler(fa.make("forge/KuhnPoker-v0"))


def test_agent_that_no_environment_has_is_refused(tmp_path):
    everyone = dict.fromkeys(["sorter", "asker", "answerer", "player_0", "player_1", "player_2"], fa.Random())
    with pytest.raises(
        ValueError, match=r"no agent 'player_2'. The agents are sorter, asker, answerer, player_0, player_1"
    ):
        policies_of(everyone, GRPOConfig(), tmp_path).declared(SEATS)


def test_single_environment_of_a_run_can_be_evaluated(tmp_path):
    pupil, poker = fa.Policy("model", name="pupil"), fa.Random(name="poker")
    policies = policies_of({"sorter": pupil, "player_0": poker, "player_1": poker}, GRPOConfig(), tmp_path)
    alone = {"forge/AlphabetSort-v0": ("sorter",)}
    assert policies.declared(alone, partial=True) == {"pupil": pupil, "poker": poker}
    with pytest.raises(ValueError, match="no agent 'player_0'. The agents are sorter"):
        policies.declared(alone)
    with pytest.raises(ValueError, match="agent 'asker' has no policy"):
        policies.declared({"forge/Relay-v0": ("asker", "answerer")}, partial=True)


@pytest.mark.parametrize("where", ["make", "reset", "step", "close"])
def test_groups_of_a_broken_environment_are_dropped_and_counted(where):
    class Coin(Plain):
        made = 0

        def __init__(self):
            super().__init__()
            Coin.made += 1
            self.broken = where == "close" or Coin.made > 5  # one is made to get its agents, four for the first group
            self.breaks("make")

        def breaks(self, place):
            if self.broken and place == where:
                raise RuntimeError("boom")

        def setup(self, rng):
            self.breaks("reset")

        def act(self, agent, action):
            self.breaks("step")
            return fa.Outcome(rewards={agent: 1.0}, done=True)

        def close(self):
            self.breaks("close")

    async def run():
        sampler = TaskSampler(Coin)
        config, messages = GRPOConfig(), SimpleNamespace(report_failure=lambda *_: None)
        plan = SimpleNamespace(sampler=sampler, config=config)
        collector = Collector(plan, None, weights=None, limit=None, messages=messages)
        player = fa.Scripted(lambda seen: "x")
        groups = [await collector._group(task, player, {}, size=4, key="0") for task in sampler.tasks(0, 0, 2)]
        return await score(groups, env_reward, timeout_s=60.0)

    with pytest.warns(RuntimeWarning, match="boom") if where == "close" else contextlib.nullcontext():
        judged = asyncio.run(run())
    counts = credit_groups(judged, Credit(), {"scripted"}).counts
    assert (counts["failed"], counts["zero_variance"]) == ((0, 2) if where == "close" else (1, 1))
    assert judged[0].rewards["a"].tolist() == [1.0] * 4 and summarize(judged)["reward/mean"] == 1.0
    assert Coin.made == (9 if where == "close" else 1 + 4 + 8), "what failed was played again in a fresh environment"


def talk(task, client):
    """Not run here."""


def models_of(trainer, sampler):
    return RunPlan(sampler, trainer._policies, trainer.config, trainer.reward).model_by_agent


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_model_names_of_programs_resolve_to_policies(tmp_path, isolation):
    fa.register(
        f"test/Asks-{isolation}-v0",
        entry_point=fa.Program,
        program=talk,
        agents=("planner", "coder", "other"),
        models={"gpt-4o": "planner", "o3": "other"},
        isolation=isolation,
    )
    seats = {
        "planner": fa.Policy("tiny-random", name="a"),
        "coder": fa.Policy("tiny-random", name="b", trainable=False),
        "other": fa.Random(),
    }
    sampler = TaskSampler(f"test/Asks-{isolation}-v0")
    with GRPOTrainer(seats, out_dir=tmp_path) as trainer:
        assert models_of(trainer, sampler) == {
            "planner": "a",
            "coder": "b",
            "gpt-4o": "a",
        }
    either = [fa.Policy("tiny-random", name="a"), fa.Policy("tiny-random", name="b", trainable=False)]
    with GRPOTrainer(lambda agent, seed: either[seed % 2], out_dir=tmp_path) as trainer:
        names = {"planner", "coder", "other", "gpt-4o", "o3"}
        assert models_of(trainer, sampler) == dict.fromkeys(names, "a"), "of several the one that learns"


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        *(("NumPy's random state is damaged", changes) for changes in (
            {"numpy_place": np.array([700, 0])}, {"numpy_place": np.array([-5, 0])}, {"numpy_place": np.array([0, 2])},
            {"numpy_normal": np.array(math.nan)}, {"numpy": np.zeros(623, np.uint32)},
            {"numpy": np.zeros(624, np.int64)},
        )),
        *(("would draw the same number forever", changes) for changes in (
            {"numpy": np.zeros(624, np.uint32)}, {"numpy": np.eye(1, 624, dtype=np.uint32)[0] * (2**31 - 1)},
            {"python": np.zeros(625, np.uint64)}, {"python": np.array([2**32] * 624 + [0], np.uint64)},
            {"python_normal": np.array(math.inf)},
        )),
    ],
)  # fmt: skip
def test_random_state_outside_of_its_memory_or_of_zeros_is_refused(message, changes):
    randomness = ProcessRandomness()
    before = randomness.state_dict()
    with pytest.raises(ValueError, match=message):
        randomness.load_state_dict(before | changes)
    after = randomness.state_dict()
    assert all(np.array_equal(before[name], after[name], equal_nan=True) for name in before)


def test_random_state_of_a_seeded_process_is_accepted():
    np.random.seed(0)  # noqa: NPY002  # the first word of such a state is 2**31
    random.seed(0)
    randomness = ProcessRandomness()
    state = randomness.state_dict()
    drawn = random.random(), np.random.random()  # noqa: NPY002
    randomness.load_state_dict(state)
    assert (random.random(), np.random.random()) == drawn  # noqa: NPY002
