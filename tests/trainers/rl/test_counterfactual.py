"""Counterfactual credit: the expected advantage is exact, and what cannot work is refused before a run."""

import asyncio
import itertools
import json
from collections import defaultdict
from dataclasses import replace
from functools import partial

import fake_run
import numpy as np
import pytest
from branching import every_outcome
from plain_env import Plain, PlainAEC, PlainRound

import forge_agents as fa
import forge_verifiers as fv
from forge_agents.errors import ArgumentError, EmptyBatchError, PreflightError
from forge_agents.rollout.alternatives import ForkRule
from forge_agents.rollout.rollout import Rollout
from forge_agents.tools import mcp
from forge_trainers.rl.counterfactual import alternatives_metrics, try_fork
from forge_trainers.rl.credit import Credit, Overlong, Scored
from forge_trainers.rl.samples import compute_advantages
from forge_trainers.rl.scoring import score

COUNTERFACTUAL = Credit(baseline="counterfactual", scale="none", samples=1)
PAY = {  # rewards of leader and helper, by the bits of all decisions
    bits: (float(1 + 3 * bits[0] - bits[1] * bits[0]), float(2 * bits[-1] - bits[0]))
    for bits in (*itertools.product((0, 1), repeat=2), *itertools.product((0, 1), repeat=3))
}


class InTurn(Plain):
    """Leader, helper and leader choose a bit each, and see all bits so far."""

    possible_agents = ["leader", "helper"]
    num_bits = 3

    def setup(self, rng):
        self.bits = ()

    def observe_text(self, agent):
        return "".join(map(str, self.bits))

    def act(self, agent, action):
        self.bits += (int(action),)
        over = len(self.bits) == self.num_bits
        return fa.Outcome(
            rewards=dict(zip(self.possible_agents, PAY[self.bits], strict=True)) if over else {}, done=over
        )


class Together(PlainRound):
    """Leader and helper choose a bit at the same time."""

    possible_agents = InTurn.possible_agents

    def observe_text(self, agent):
        return ""

    def act_all(self, actions):
        bits = tuple(map(int, actions.values()))
        return fa.Outcome(rewards=dict(zip(self.possible_agents, PAY[bits], strict=True)), done=True)


def chance(agent, observation):
    """The probability of a 1."""
    return {"leader": 0.3, "helper": 0.6}[agent] + 0.1 * len(observation) - 0.05 * observation.count("1")


def collect(env, choose, *, size=1, **rule):
    """Collect a group of a team that chooses bits."""

    def decide(observation, agent):
        return str(choose((1 - chance(agent, observation), chance(agent, observation))))

    forks = ForkRule(**({"samples": 1, "decisions": "every", "policies": {"team"}} | rule))
    rollout = Rollout(make_env=env, env_id="t", policies=fa.Scripted(decide, name="team"), forks=forks)
    return asyncio.run(scored(rollout, size))


async def scored(rollout, size, reward=None):
    return (await score([await rollout.group(1, size)], reward))[0]


def value(bits, agent, num_bits=3):
    """The expected reward of an agent after these decisions."""
    if len(bits) == num_bits:
        return PAY[bits][InTurn.possible_agents.index(agent)]
    p = chance(InTurn.possible_agents[len(bits) % 2], "".join(map(str, bits)))
    return (1 - p) * value((*bits, 0), agent) + p * value((*bits, 1), agent)


def expected_advantages(env, **rule):
    """By agent, observation and bit: the mean advantage over everything that can happen."""
    sums = defaultdict(lambda: np.zeros(2))
    credit = replace(COUNTERFACTUAL, samples=rule.get("samples", 1))
    for probability, group in every_outcome(lambda choose: collect(env, choose, **rule)):
        (done,) = compute_advantages([group], credit, {"team"})
        for agent, trajectory in group.episodes[0].trajectories.items():
            advantages = done.advantages[agent][0]
            for turn, advantage in zip(trajectory.turns, [0] * 9 if advantages is None else advantages, strict=False):
                others = group.episodes[0].turns[1 - turn.index].action if env is Together else turn.observation
                sums[agent, others, int(turn.action)] += probability * np.array([advantage, 1])
    return {key: total / weight for key, (total, weight) in sums.items()}


@pytest.mark.parametrize("samples", [1, 2])
def test_expected_advantage_is_that_of_coma_exactly(samples):
    """Q(s, u) - V(s) of the acting agent's reward, in all states, although every run has few samples."""
    env = InTurn if samples == 1 else type("Shorter", (InTurn,), {"num_bits": 2})
    expected = expected_advantages(env, samples=samples)
    assert len(expected) == (14 if samples == 1 else 6)
    of = partial(value, num_bits=env.num_bits) if samples == 1 else value_of_two
    for (agent, observation, bit), advantage in expected.items():
        bits = tuple(map(int, observation))
        assert advantage == pytest.approx(of((*bits, bit), agent) - of(bits, agent), abs=1e-5)


def value_of_two(bits, agent):
    if len(bits) == 2:
        return PAY[bits][InTurn.possible_agents.index(agent)]
    p = chance(InTurn.possible_agents[len(bits)], "".join(map(str, bits)))
    return (1 - p) * value_of_two((*bits, 0), agent) + p * value_of_two((*bits, 1), agent)


def test_simultaneous_decisions_of_others_stay_the_same():
    """COMA's baseline marginalizes the agent's own action only: arXiv 1705.08926, eq. 4."""
    expected = expected_advantages(Together, samples=2)
    assert len(expected) == 8
    for (agent, other, bit), advantage in expected.items():
        place, p = InTurn.possible_agents.index(agent), chance(agent, "")
        rewards = [PAY[(own, int(other)) if place == 0 else (int(other), own)][place] for own in (0, 1)]
        assert advantage == pytest.approx(rewards[bit] - (1 - p) * rewards[0] - p * rewards[1], abs=1e-5)


def test_random_decisions_are_unbiased_as_well():
    """The other turns are compared with other episodes, of which there are none here: the advantage is 0."""
    rng = np.random.default_rng(0)
    chosen = defaultdict(int)
    for _ in range(300):
        group = collect(InTurn, lambda p: int(rng.random() < p[1]), decisions=1)
        ((index, turn),) = group.alternatives.decisions
        assert index == 0
        chosen[turn] += 1
    assert sorted(chosen) == [0, 1, 2] and min(chosen.values()) > 70


# ---- the rule


def trajectory(reward, alternatives=(), turns=2, role="a", tokens=1):
    own = {t: [trajectory(r) for r in rewards] for t, rewards in dict(alternatives).items()}
    return Scored(group=0, role=role, reward=reward, response_tokens=[tokens] * turns, alternatives=own)


def assigned(credit, scored):
    return [None if row is None else row.tolist() for row in credit.assign(scored)]


def test_turns_without_alternatives_are_compared_with_the_other_episodes():
    step = [trajectory(3.0, {1: [1.0, 0.0]}), trajectory(1.0)]
    assert assigned(COUNTERFACTUAL, step) == [[2.0, 2.5], [-2.0, -2.0]]
    assert assigned(replace(COUNTERFACTUAL, decisions="longest"), step) == [[0.0, 2.5], None]
    assert assigned(COUNTERFACTUAL, [trajectory(3.0, {1: [1.0]})]) == [[0.0, 2.0]]


def test_the_scale_is_that_of_all_rewards_of_a_role():
    step = [trajectory(3.0, {1: [1.0, 0.0]}), trajectory(1.0, {0: [1.0]}), trajectory(100.0, {0: [0.0]}, role="b")]
    std = np.std([3, 1, 1, 0, 1], ddof=1)
    got = assigned(replace(COUNTERFACTUAL, scale="std"), step)
    np.testing.assert_allclose(got[:2], [[2 / std, 2.5 / std], [0.0, -2 / std]], rtol=1e-6)
    got = assigned(replace(COUNTERFACTUAL, scale="batch_std"), step)
    np.testing.assert_allclose(got[:2], np.array([[2, 2.5], [0, -2]]) / np.std([2, 2.5, 0, -2]), rtol=1e-6)


def test_the_scale_over_a_step_counts_only_turns_with_an_advantage():
    """Turns that were not chosen have none, and zeros in their place would halve the standard deviation."""
    step = [trajectory(3.0, {1: [1.0, 0.0]}, turns=4), trajectory(1.0, {0: [2.0]}, turns=4)]
    got = assigned(replace(COUNTERFACTUAL, scale="batch_std", decisions="longest"), step)
    np.testing.assert_allclose(got, np.array([[0, 2.5, 0, 0], [-1, 0, 0, 0]]) / np.std([2.5, -1]), rtol=1e-6)
    alone = trajectory(3.0, {1: [1.0], 2: [0.0]}, turns=4)
    got = assigned(replace(COUNTERFACTUAL, scale="batch_std", decisions=2), [alone])
    np.testing.assert_allclose(got, np.array([[0, 2, 3, 0]]) / np.std([2, 3]), rtol=1e-6)


def test_equal_rewards_of_episodes_and_alternatives_are_not_informative():
    assert assigned(COUNTERFACTUAL, [trajectory(1.0, {0: [1.0]}), trajectory(1.0)]) == [None, None]
    step = [trajectory(1.0, {0: [0.0]}, turns=1), *(trajectory(1.0, {0: [1.0]}, turns=1) for _ in range(3))]
    assert assigned(COUNTERFACTUAL, step) == [[1.0], [0.0], [0.0], [0.0]], "the group is, with all of its trajectories"
    got = assigned(replace(COUNTERFACTUAL, scale="batch_std"), step)
    np.testing.assert_allclose(got, np.array([[1], [0], [0], [0]]) / np.std([1, 0, 0, 0]), rtol=1e-6)


def test_alternatives_have_the_penalty_for_long_responses_as_well():
    credit = replace(COUNTERFACTUAL, overlong=Overlong(max_tokens=8, cache_tokens=4))
    long = trajectory(1.0, tokens=8)
    own = replace(trajectory(1.0), alternatives={0: [long]})
    assert assigned(credit, [own]) == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples=0 must be at least 1"),
        ({"samples": 257}, "samples=257 must be at least 1 and at most 256"),
        ({"samples": 10**12}, "samples=1000000000000 must be at least 1 and at most 256"),
        ({"decisions": 0}, "decisions=0 must be at least 1"),
        ({"decisions": 10**12}, "decisions=1000000000000 must be at least 1 and at most 256"),
        ({"decisions": "first"}, "decisions='first' must be 'every', 'longest' or a number"),
        ({"by": ("seed", "turn")}, "has a baseline for each turn"),
        ({"turns": "return"}, "turns=return has no effect without a baseline other than 'counterfactual'"),
        ({"noise_multiple": 1.0}, "noise_multiple=1.0 has no effect"),
        ({"baseline": "mean", "samples": 2}, "samples=2 has no effect without baseline='counterfactual'"),
        ({"baseline": "mean", "decisions": 2}, "decisions=2 has no effect without baseline='counterfactual'"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Credit(**{"baseline": "counterfactual"} | settings)


def test_a_rule_of_your_own_is_refused_because_it_would_not_be_called():
    class Halved(Credit):
        def advantages(self, rewards_n, noise_n=None):
            return rewards_n / 2

    with pytest.raises(ValueError, match="Halved overrides advantages"):
        Halved(baseline="counterfactual")
    with pytest.raises(ValueError, match="Call assign"):
        COUNTERFACTUAL.advantages(np.array([0.0, 1.0]))


# ---- groups


class Fragile(InTurn):
    """Cannot be copied after the first decision, and fails if the first bit is 1 in a copy."""

    copies = False

    def __deepcopy__(self, memo):
        if self.bits:
            raise OSError("the state is in a file")
        twin = type(self)()
        twin.__dict__ |= {name: value for name, value in vars(self).items() if name != "copies"}
        twin.copies, twin.agents, twin.rewards, twin._cumulative_rewards = (
            True, list(self.agents), dict(self.rewards), dict(self._cumulative_rewards),
        )  # fmt: skip
        twin.terminations, twin.truncations, twin.infos = (
            dict(self.terminations), dict(self.truncations), dict(self.infos),
        )  # fmt: skip
        return twin

    def act(self, agent, action):
        if self.copies and action == "1":
            raise ZeroDivisionError
        return super().act(agent, action)


def test_failed_alternatives_are_data_and_their_turns_are_compared_with_other_episodes():
    bits = itertools.chain([1, 0, 0, 0, 0, 0], itertools.repeat(1))  # of the two episodes, then of the alternatives
    group = collect(Fragile, lambda _: next(bits), size=2)
    errors = [
        episode.error and (episode.error.where, episode.error.kind) for episode in group.alternatives.group.episodes
    ]
    assert group.alternatives.decisions == tuple((index, turn) for index in (0, 1) for turn in (0, 1, 2))
    assert errors.count(("fork", "OSError")) == 4 and not group.failed
    assert errors.count(("step", "ZeroDivisionError")) == 2
    assert alternatives_metrics([group]) == {"credit/tokens": 0, "credit/alternatives": 6, "credit/failed": 6}
    (done,) = compute_advantages([group], COUNTERFACTUAL, {"team"})
    rewards = group.rewards["helper"]
    difference = float(rewards[0] - rewards[1])
    assert done.advantages["helper"][0].tolist() == [difference] and difference != 0


def test_a_copy_that_shares_state_with_the_episode_is_a_failure():
    class Shared(InTurn):
        def __deepcopy__(self, memo):
            twin = type(self)()
            twin.__dict__ |= vars(self)  # the list of agents is emptied with that of the episode
            return twin

    group = collect(Shared, lambda _: 0)
    errors = [episode.error for episode in group.alternatives.group.episodes]
    assert len(errors) == 3 and all("a copy of t before turn" in error.message for error in errors)


def test_a_group_without_alternatives_is_refused_by_counterfactual_credit():
    group = collect(InTurn, lambda p: 0)
    with pytest.raises(ArgumentError, match="a group of t has none"):
        compute_advantages([replace(group, alternatives=None)], COUNTERFACTUAL, {"team"})
    with pytest.raises(ArgumentError, match="sessions of t have rewards of their own"):
        compute_advantages([replace(group, session_rewards={"leader": []})], COUNTERFACTUAL, {"team"})


def test_alternatives_are_scored_by_the_same_call_of_each_part_of_the_reward():
    calls = []

    def ones(trajectories):
        calls.append(len(trajectories))
        return [float(sum(turn.action == "1" for turn in t.turns)) for t in trajectories]

    choices = iter([1, 1, 1] + [0] * 9)
    rollout = Rollout(
        make_env=InTurn,
        env_id="t",
        policies=fa.Scripted(lambda _: str(next(choices)), name="team"),
        forks=ForkRule(samples=1, decisions="every", policies={"team"}),
    )
    reward = fa.MultiReward({"ones": ones, "zero": lambda ts: [0.0] * len(ts)}, weights={"ones": 2.0})
    group = asyncio.run(scored(rollout, 1, reward))
    assert calls == [8]  # two trajectories of the episode and of each alternative
    (done,) = compute_advantages([group], COUNTERFACTUAL, {"team"})
    # leader: 2 ones, alternatives of turns 0 and 2 have 0 and 1; helper: 1 and 0; the weight is 2
    assert [row.tolist() for row in (done.advantages["leader"][0], done.advantages["helper"][0])] == [[4.0, 2.0], [2.0]]


# ---- runs


def plan_of(folder, env=fake_run.Draws, policies=fake_run.TEAM, reward=None, **settings):
    """Return the trainer of a run with counterfactual credit."""
    credit = Credit(baseline="counterfactual", samples=2)
    return fake_run.trainer(folder, policies=policies, reward=reward, credit=credit, group_size=1, **settings)


class Uncopyable(fake_run.Draws):
    """Each copy fails."""

    def fork(self):
        raise OSError("the state is in a file")


def test_the_first_failed_alternative_is_reported(tmp_path, capsys):
    with plan_of(tmp_path, Uncopyable) as run, pytest.raises(EmptyBatchError):
        run.fit(Uncopyable, steps=9)
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("failed: fork: OSError: the state is in a file") == 1
    assert "Its turn counts as not chosen" in output


@pytest.mark.parametrize(
    ("env", "policies", "reward", "message"),
    [
        (PlainAEC, fake_run.TEAM, None, "PlainAEC has no method fork. Derive it from fa.TurnEnv"),
        (InTurn, {"leader": fake_run.TEAM, "helper": fa.Human(name="me")}, None, "me is a person"),
        (fake_run.Draws, fake_run.TEAM, fv.SelfConsistency(), "compares the episodes of a group"),
    ],
)
def test_runs_that_cannot_play_alternatives_are_refused_by_name(tmp_path, env, policies, reward, message):
    with plan_of(tmp_path, policies=policies, reward=reward) as run, pytest.raises(ArgumentError, match=message):
        run.fit(env, steps=1)
    assert not (tmp_path / "config.yaml").exists()


def test_tools_of_an_mcp_server_are_refused_because_copies_share_the_server():
    @fa.tool
    def search(query: str) -> str:
        """Search."""
        return query

    class Searching(fa.ToolEnv, fake_run.Draws):
        def tools(self, agent):
            return [search]

    try_fork(Searching, "Searching", 0)
    search.fn.__module__ = mcp.__name__
    with pytest.raises(PreflightError, match="Searching has the tool search of an MCP server"):
        try_fork(Searching, "Searching", 0)


def test_rollouts_ahead_of_the_learner_play_alternatives(tmp_path):
    with plan_of(tmp_path, max_staleness=1) as run:
        rows = run.fit(fake_run.Draws, steps=3).metrics
    assert [(row["credit/tokens"], row["staleness/max"]) for row in rows] == [(12, 0), (12, 1), (12, 1)]


def test_run_counts_and_records_alternatives(tmp_path):
    """Two decisions of one agent: the alternatives of the first have two new tokens, those of the second one."""
    with plan_of(tmp_path, keep_episodes=1) as run:
        rows = run.fit(fake_run.Draws, steps=2).metrics
    assert [row["credit/tokens"] for row in rows] == [2 * 2 * (2 + 1)] * 2
    assert [(row["tokens"], row["credit/alternatives"], row["credit/failed"]) for row in rows] == [(4, 8, 0)] * 2
    lines = (tmp_path / "episodes.jsonl").read_text().splitlines()
    for line in lines:
        stored = json.loads(line)
        reward, alternatives = stored["rewards"]["a"], stored["alternatives"]
        assert [each["turn"] for each in alternatives] == [0, 0, 1, 1]
        means = [np.mean([each["rewards"]["a"] for each in alternatives if each["turn"] == turn]) for turn in (0, 1)]
        spread = np.std([reward, *(each["rewards"]["a"] for each in alternatives)], ddof=1)
        np.testing.assert_allclose(stored["advantages"]["a"], (reward - np.array(means)) / spread, rtol=1e-5)
        assert fa.Episode.from_json(line).rewards["a"] == pytest.approx(reward)


def test_alternatives_do_not_change_the_episodes_and_are_repeated_by_a_resumed_run(tmp_path):
    def columns(folder, steps, credit=None, **settings):
        credit = credit or Credit(baseline="counterfactual", samples=2, decisions=1)
        with fake_run.trainer(folder, credit=credit, **settings) as run:
            return [
                (row["reward/mean"], row.get("credit/tokens")) for row in run.fit(fake_run.Draws, steps=steps).metrics
            ]

    whole = columns(tmp_path / "whole", 4)
    columns(tmp_path / "parts", 2)
    assert columns(tmp_path / "parts", 4) == whole and len(whole) == 4
    plain = columns(tmp_path / "plain", 4, Credit())
    assert [reward for reward, _ in plain] == [reward for reward, _ in whole]
    assert all(tokens is None for _, tokens in plain)


def test_evaluations_play_no_alternatives_and_resampled_groups_do(tmp_path):
    engine_calls = []
    with plan_of(tmp_path, max_resamples=1, eval_episodes=3) as run:
        engine = run._lifecycle.processes.engine
        generate = engine.generate

        async def counted(*args, **options):
            engine_calls.append(options)
            return await generate(*args, **options)

        engine.generate = counted
        run.evaluate(fake_run.Draws)
        assert len(engine_calls) == 6
        assert run.evaluate(fake_run.Draws, reward=fv.SelfConsistency()).abstained == 3  # groups of one episode

        def constant(trajectories):
            return [1.0] * len(trajectories)

    with plan_of(tmp_path / "flat", max_resamples=1, reward=constant) as run:
        row = run.fit(fake_run.Draws, steps=1).metrics[0]
    assert row["groups/resampled"] == 2 and row["credit/alternatives"] == 16 and row["groups/zero_variance"] == 4
