"""Balanced roles: the roles that a policy plays in an environment have the same advantage mass in each step."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fake_processes import sampled_turn
from fake_run import TEAM, Draws

import forge_agents as fa
from forge_agents.types import Alternatives, Episode, EpisodeGroup, Trajectory
from forge_trainers.rl.plan import RunPlan
from forge_trainers.rl.policy_mapping import RunPolicies
from forge_trainers.rl.rewards import env_reward
from forge_trainers.rl.samples import compute_advantages
from forge_trainers.rl.tasks import TaskSampler

BALANCED = fa.Credit(balance_roles=True)
SIZE = np.sqrt(0.5)
"""Standard score of one of two rewards."""


def group_of(rewards, tokens, *, env_id="t", policies=None, notes=0):
    """A group. `rewards` has one number per episode and agent, `tokens` the length of each agent's only response."""

    def trajectory(agent):
        policy = (policies or {}).get(agent, "team")
        turn = sampled_turn(agent, 0, 0.0, policy, (3,) * tokens[agent])
        if notes:
            turn = replace(turn, notes=sampled_turn(agent, 0, 0.0, policy, (3,) * notes))
        return Trajectory(agent=agent, policy=policy, turns=(turn,))

    episodes = [
        Episode(env_id=env_id, seed=0, trajectories={agent: trajectory(agent) for agent in tokens})
        for _ in next(iter(rewards.values()))
    ]
    scores = {agent: np.array(each, np.float32) for agent, each in rewards.items()}
    return EpisodeGroup(env_id=env_id, seed=0, episodes=tuple(episodes), rewards=scores)


def advantages(groups, credit=BALANCED):
    """The advantages by agent: the list of all its informative turns."""
    result = {}
    for group in compute_advantages(groups, credit, {"team"}):
        for agent, rows in group.advantages.items():
            result.setdefault(agent, []).extend(float(row[0]) for row in rows if row is not None)
    return result


def close_to(**by_agent):
    return {agent: pytest.approx(values, rel=1e-5) for agent, values in by_agent.items()}


def test_balanced_roles_have_the_same_advantage_mass():
    step = [group_of({"long": [1, 0], "short": [1, 0]}, {"long": 30, "short": 10})]
    assert advantages(step, fa.Credit()) == close_to(long=[SIZE, -SIZE], short=[SIZE, -SIZE])
    # masses 60 and 20 become 40 each, and their sum stays 80
    expected = {"long": [SIZE * 2 / 3, -SIZE * 2 / 3], "short": [SIZE * 2, -SIZE * 2]}
    assert advantages(step) == close_to(**expected)
    assert not BALANCED.is_per_group and fa.Credit().is_per_group


def test_roles_that_are_informative_in_different_groups_are_balanced():
    tokens = {"long": 30, "short": 10}
    step = [group_of({"long": [1, 0], "short": [0, 0]}, tokens), group_of({"long": [0, 0], "short": [1, 0]}, tokens)]
    assert advantages(step) == close_to(long=[SIZE * 2 / 3, -SIZE * 2 / 3], short=[SIZE * 2, -SIZE * 2])


def test_roles_that_a_league_trains_in_different_groups_are_balanced():
    """Against opponents, the policy plays one agent of each group."""
    tokens, rewards = {"long": 30, "short": 10}, {"long": [1, 0], "short": [1, 0]}
    step = [group_of(rewards, tokens, policies={opponent: "past"}) for opponent in ("short", "long")]
    assert advantages(step) == close_to(long=[SIZE * 2 / 3, -SIZE * 2 / 3], short=[SIZE * 2, -SIZE * 2])


def test_roles_are_balanced_within_their_environment():
    step = [group_of({"long": [1, 0], "short": [1, 0]}, {"long": 30, "short": 10})]
    other = group_of({"long": [1, 0], "short": [1, 0]}, {"long": 500, "short": 500}, env_id="u")
    both = advantages([*step, other])
    assert both["long"] == pytest.approx([SIZE * 2 / 3, -SIZE * 2 / 3, SIZE, -SIZE])
    assert both["short"] == pytest.approx([SIZE * 2, -SIZE * 2, SIZE, -SIZE])


def test_balance_of_roles_is_bounded_and_skips_uninformative_roles():
    rewards = {"a": [1, 0], "b": [1, 0], "equal": [0, 0]}
    step = [group_of(rewards, {"a": 1000, "b": 1, "equal": 5})]
    # the mean mass is 500.5: factors 0.5005, and 500.5 limited to 10
    assert advantages(step) == close_to(a=[SIZE * 0.5005, -SIZE * 0.5005], b=[SIZE * 10, -SIZE * 10], equal=[])
    assert advantages([group_of({"a": [0, 0], "b": [1, 1]}, {"a": 1, "b": 1})]) == {"a": [], "b": []}


def test_notes_of_a_full_context_count_in_the_mass():
    """The learner trains on the notes with the advantage of their turn."""
    step = [group_of({"a": [1, 0], "b": [1, 0]}, {"a": 1, "b": 11}, notes=9)]
    # masses 10 and 20 become 15 each
    assert advantages(step) == close_to(a=[SIZE * 1.5, -SIZE * 1.5], b=[SIZE * 0.75, -SIZE * 0.75])


def test_the_sums_of_several_rewards_are_balanced():
    """One part scores both roles, the other only the first one."""
    tokens = {"a": 10, "b": 10}
    both, first = group_of({"a": [1, 0], "b": [1, 0]}, tokens), group_of({"a": [1, 0], "b": [np.nan] * 2}, tokens)
    step = [replace(both, parts={"both": (1.0, both), "first": (1.0, first)})]
    plain = advantages(step, fa.Credit())
    assert plain == close_to(a=[2 * SIZE, -2 * SIZE], b=[SIZE, -SIZE])
    assert advantages(step) == close_to(a=[1.5 * SIZE, -1.5 * SIZE], b=[1.5 * SIZE, -1.5 * SIZE])


def test_roles_are_balanced_with_counterfactual_credit_as_well():
    group = group_of({"a": [3], "b": [1]}, {"a": 1, "b": 1})
    again = group_of({"a": [0, 0], "b": [0, 0]}, {"a": 1, "b": 1})
    turns = {agent: replace(again.episodes[0].trajectories[agent].turns[0], index=at) for at, agent in enumerate("ab")}
    episode = group.episodes[0]
    trajectories = {agent: replace(each, turns=(turns[agent],)) for agent, each in episode.trajectories.items()}
    group = replace(
        group,
        episodes=(replace(episode, trajectories=trajectories),),
        alternatives=Alternatives(decisions=((0, 0), (0, 1)), group=again, tokens=2),
    )
    credit = fa.Credit(baseline="counterfactual", scale="none")
    assert advantages([group], credit) == {"a": [3.0], "b": [1.0]}
    assert advantages([group], replace(credit, balance_roles=True)) == {"a": [2.0], "b": [2.0]}


class Two(Draws):
    possible_agents = ("a", "b")


def test_roles_of_different_policies_are_not_balanced():
    """Each policy has a gradient of its own: only `a` and `b` share one."""
    tokens = {"a": 30, "b": 10, "c": 500}
    step = [group_of({agent: [1, 0] for agent in tokens}, tokens, policies={"c": "other"})]
    (done,) = compute_advantages(step, BALANCED, {"team", "other"})
    got = {agent: [float(row[0]) for row in rows] for agent, rows in done.advantages.items()}
    assert got == close_to(a=[SIZE * 2 / 3, -SIZE * 2 / 3], b=[SIZE * 2, -SIZE * 2], c=[SIZE, -SIZE])


def test_balanced_roles_without_several_trained_roles_are_refused():
    config = fa.GRPOConfig(credit=BALANCED)
    frozen = {"a": TEAM, "b": replace(TEAM, name="other", trainable=False)}
    apart = {"a": TEAM, "b": replace(TEAM, name="other")}
    for env, policies in ((Draws, TEAM), (Two, frozen), (Two, apart)):
        with pytest.raises(ValueError, match=re.escape("has no effect: each trained policy plays one agent")):
            RunPlan(TaskSampler(env), RunPolicies(policies), config, env_reward)
    for policies in (TEAM, lambda agent, seed: frozen["b" if (agent == "a") == (seed % 2) else "a"]):
        assert RunPlan(TaskSampler(Two), RunPolicies(policies), config, env_reward).credit.balance_roles


@pytest.mark.parametrize(("loss", "refused"), [("grpo", True), ("gspo", True), ("dr_grpo", False), ("rloo", False)])
def test_balanced_roles_are_refused_with_losses_that_average_over_sequences(loss, refused):
    """Roles of 300 and 10 tokens have equal gradients there, and 1 to 19 after balancing."""
    config = fa.GRPOConfig(learner=fa.LearnerConfig(loss=loss), credit=BALANCED)
    made = partial(RunPlan, TaskSampler(Two), RunPolicies(TEAM), config, env_reward)
    if refused:
        with pytest.raises(ValueError, match=f"loss='{loss}' of policy 'team' averages over each sequence first"):
            made()
    else:
        assert made().credit.balance_roles
