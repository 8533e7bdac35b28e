import asyncio
import dataclasses
import math
import time
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from fake_processes import Counting, sampled_turn
from plain_env import Plain

import forge_agents as fa
import forge_verifiers as fv
from forge_agents.errors import ArgumentError, StallError
from forge_agents.policy import Endpoint, Policy
from forge_agents.types import Episode, EpisodeError, EpisodeGroup, Trajectory, VersionSpan
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.credit import Baselines, Credit
from forge_trainers.rl.evaluation import EvalResult, eval_metrics, eval_result
from forge_trainers.rl.metrics import group_spread, mean_and_ci, rates, summarize
from forge_trainers.rl.reward_state import RewardState
from forge_trainers.rl.rewards import EnvTurnReward, MultiReward, engines_of, env_reward, models_of
from forge_trainers.rl.samples import compute_advantages, credit_groups, make_samples
from forge_trainers.rl.scoring import Scorer, score
from forge_trainers.rl.trainer import GRPOTrainer

turn = partial(sampled_turn, policy="hero")


def episode(a, b, *, seed=0, error=None, b_policy="rival"):
    return Episode(
        env_id="t",
        seed=seed,
        error=error,
        trajectories={
            "a": Trajectory(agent="a", policy="hero", turns=(turn("a", 0, a),)),
            "b": Trajectory(agent="b", policy=b_policy, turns=(turn("b", 1, b, policy=b_policy),)),
        },
    )


def group(*rewards, seed=0, **kwargs):
    return EpisodeGroup(env_id="t", seed=seed, episodes=tuple(episode(a, b, seed=seed, **kwargs) for a, b in rewards))


def with_turn(item, siblings, **changes):
    """Change the turns of agent a in some episodes."""

    def changed(episode):
        own = episode.trajectories["a"]
        turns = tuple(dataclasses.replace(turn, **changes) for turn in own.turns)
        own = dataclasses.replace(own, turns=turns)
        return dataclasses.replace(episode, trajectories={**episode.trajectories, "a": own})

    episodes = [changed(e) if at in siblings else e for at, e in enumerate(item.episodes)]
    return dataclasses.replace(item, episodes=tuple(episodes))


def scored(groups, reward=env_reward, timeout_s=60.0):
    return asyncio.run(score(groups, reward, timeout_s=timeout_s))


def test_rewards_are_split_by_group_and_role():
    items = scored([group((1, 2), (3, 4)), group((5, 6), (7, 8), seed=1)])
    assert [{k: v.tolist() for k, v in item.rewards.items()} for item in items] == [
        {"a": [1, 3], "b": [2, 4]},
        {"a": [5, 7], "b": [6, 8]},
    ]


def test_only_trainable_policies_learn_with_a_baseline_per_role():
    samples = credit_groups(scored([group((0, 10), (1, 30), b_policy="hero")]), Credit(scale="none"), {"hero"})
    assert [s.advantages[-1] for s in samples.samples["hero"]] == [-0.5, 0.5, -10, 10]
    assert samples.advantages == {(0, 0): {"a": [-0.5], "b": [-10.0]}, (0, 1): {"a": [0.5], "b": [10.0]}}
    frozen = credit_groups(scored([group((0, 10), (1, 30))]), Credit(), {"hero"})
    assert len(frozen.samples["hero"]) == 2
    assert [sorted(own) for own in frozen.advantages.values()] == [["a"], ["a"]]


def with_sessions(*rewards, turns_each=1):
    """Return a group whose agent a has sessions with these rewards, by episode. Turns alternate between sessions."""
    episodes = []
    for of_episode in rewards:
        turns = tuple(
            dataclasses.replace(
                turn("a", number, 0.0), session=number % len(of_episode), branch=number % len(of_episode)
            )
            for number in range(turns_each * len(of_episode))
        )
        own = Trajectory(agent="a", policy="hero", turns=turns, session_rewards=of_episode)
        episodes.append(Episode(env_id="t", seed=0, trajectories={"a": own}))
    return EpisodeGroup(env_id="t", seed=0, episodes=tuple(episodes))


def test_sessions_are_compared_over_all_episodes_of_the_group():
    (item,) = scored([with_sessions((1.0, 0.0), (0.0, 0.0), turns_each=2)])
    assert item.rewards["a"].tolist() == [0.5, 0.0]
    assert [each.tolist() for each in item.session_rewards["a"]] == [[1.0, 0.0], [0.0, 0.0]]
    samples = credit_groups([item], Credit(), {"hero"})
    assert samples.advantages == {  # mean 0.25, standard deviation 0.5
        (0, 0): {"a": [1.5, -0.5, 1.5, -0.5]},
        (0, 1): {"a": [-0.5, -0.5, -0.5, -0.5]},
    }
    learned = {sample.trajectory: set(sample.advantages[sample.loss_mask]) for sample in samples.samples["hero"]}
    assert learned == {0: {1.5}, 1: {-0.5}, 2: {-0.5}, 3: {-0.5}}


def test_sessions_of_different_number_and_a_whole_trajectory_are_compared():
    pair = with_sessions((3.0, 0.0))
    failed = dataclasses.replace(pair.episodes[0].trajectories["a"], session_rewards=None)
    failed = dataclasses.replace(pair.episodes[0], trajectories={"a": failed})
    groups = scored([dataclasses.replace(pair, episodes=(*pair.episodes, failed))])
    assert [each.tolist() for each in groups[0].session_rewards["a"]] == [[3.0, 0.0], [0.0]]
    samples = credit_groups(groups, Credit(scale="none"), {"hero"})
    assert samples.advantages == {(0, 0): {"a": [2.0, -1.0]}, (0, 1): {"a": [-1.0, -1.0]}}


def test_every_session_without_a_turn_counts_in_the_mean():
    pair = with_sessions((3.0,))
    own = dataclasses.replace(pair.episodes[0].trajectories["a"], session_rewards=(3.0, 0.0, 0.0))
    episode = dataclasses.replace(pair.episodes[0], trajectories={"a": own})
    groups = scored([dataclasses.replace(pair, episodes=(episode,))])
    assert credit_groups(groups, Credit(scale="none"), {"hero"}).advantages == {(0, 0): {"a": [2.0]}}


def test_verifiers_score_each_session():
    def by_number(trajectories):
        return [{0: 1.0, 1: 0.0, 2: math.nan}[t.turns[0].session] for t in trajectories]

    groups = scored([with_sessions((0, 0, 0), (0, 0))], by_number)
    assert groups[0].rewards["a"].tolist() == [0.5, 0.5]
    samples = credit_groups(groups, Credit(scale="none"), {"hero"})
    assert samples.advantages == {(0, 0): {"a": [0.5, -0.5, 0.0]}, (0, 1): {"a": [0.5, -0.5]}}
    assert len(samples.samples["hero"]) == 4  # the session without a score is no sample
    both = MultiReward({"env": env_reward, "number": by_number}, {"number": 2.0})
    groups = scored([with_sessions((1.0, 1.0, 4.0), (1.0, 1.0))], both)
    assert [each.tolist() for each in groups[0].session_rewards["a"]] == [[3.0, 1.0, 4.0], [3.0, 1.0]]
    samples = credit_groups(groups, Credit(scale="none"), {"hero"})  # 2.4 above the mean 1.6; 0.5 twice
    assert samples.advantages[0, 0]["a"] == pytest.approx([0.4, -1.6, 2.4])


def test_turn_rewards_and_noise_of_sessions():
    def assess(trajectories):
        assert [len(t.turns) for t in trajectories] == [2, 2, 2]
        number = [t.turns[0].session for t in trajectories]
        turns = [np.array([n, n + 0.5], np.float32) for n in number]
        return SimpleNamespace(scores=[0.0, 1.0, 0.0], turns=turns, noise=[3.0, 4.0, 1.0])

    reward = partial(env_reward)
    reward.assess = assess
    (item,) = scored([with_sessions((0, 0), (0,), turns_each=2)], reward)
    assert [each.tolist() for each in item.turn_rewards["a"]] == [[0.0, 1.0, 0.5, 1.5], [0.0, 0.5]]
    np.testing.assert_allclose(item.noise["a"], [math.sqrt(12.5), 1.0], rtol=1e-6)
    samples = credit_groups([item], Credit(scale="none", turns="return"), {"hero"})
    # sums to the end of each session: 0.5, 2.5, 0.5, 1.5 and 0.5, 0.5
    assert samples.advantages == {(0, 0): {"a": [-0.5, 1.5, -0.5, 0.5]}, (0, 1): {"a": [-0.5, -0.5]}}


def test_agent_without_sessions_in_an_episode_abstains_there():
    groups = scored([with_sessions((1.0, 0.0), ())])
    assert np.isnan(groups[0].rewards["a"]).tolist() == [False, True]
    samples = credit_groups(groups, Credit(scale="none"), {"hero"})
    assert samples.advantages == {(0, 0): {"a": [0.5, -0.5]}} and samples.abstained == 1


def test_groups_are_counted_by_outcome():
    broken = EpisodeError(where="step", kind="X", message="m")
    groups = [group((0, 0), (1, 0)), group((1, 0), (1, 5)), group((0, 0), (1, 0), error=broken)]
    samples = credit_groups(scored(groups), Credit(), {"hero"})
    assert samples.counts == {"used": 1, "zero_variance": 1, "failed": 1, "abstained": 0, "too_long": 0}


def test_too_long_samples_are_dropped_and_counted():
    items = scored([group((0, 0), (1, 0)), group((0, 0), (1, 0), seed=1)])
    items = [with_turn(items[0], [1], prompt_ids=(1, 2, 4)), with_turn(items[1], [0, 1], prompt_ids=(1, 2, 4))]
    samples = credit_groups(items, Credit(scale="none"), {"hero"}, max_tokens={"hero": 3})
    assert [(len(s.token_ids), s.advantages[-1]) for s in samples.samples["hero"]] == [(3, -0.5)]
    assert samples.too_long == 3
    assert samples.counts == {"used": 1, "too_long": 1, "zero_variance": 0, "failed": 0, "abstained": 0}
    assert credit_groups(items, Credit(), {"hero"}, max_tokens={"hero": 4}).too_long == 0


def test_tokens_with_invalid_logprobs_are_masked_and_counted():
    items = scored([group((0, 0), (1, 0))])
    whole = (VersionSpan(version=1, start=0, end=4),)
    logprobs = (-1.0, math.nan, -math.inf, 0.5)
    item = with_turn(items[0], [1], response_ids=(3, 4, 5, 6), logprobs=logprobs, versions=whole)
    samples = credit_groups([item], Credit(), {"hero"})
    good, bad = samples.samples["hero"]
    assert good.loss_mask.tolist() == [False, False, True]
    assert bad.loss_mask.tolist() == [False, False, True, False, False, False]
    assert bad.token_ids.tolist() == [1, 2, 3, 4, 5, 6] and bad.logprobs.tolist() == [0.0, 0.0, -1.0, 0.0, 0.0, 0.0]
    assert samples.bad_logprobs == {"hero": 3 / 5}


def scores_of(*rewards):
    """Return a reward with these values, agent a before agent b in each episode."""
    return lambda trajectories: list(rewards)


def advantages(samples):
    """Return the rounded advantage of the first turn, by group and episode, then by agent."""
    return {at: {agent: round(own[0], 3) for agent, own in by.items()} for at, by in samples.advantages.items()}


def test_abstention_leaves_out_only_its_trajectory():
    items = scored([group((0, 0), (0, 0), (0, 0), b_policy="hero")], scores_of(None, 1.0, 0.0, 2.0, 1.0, 3.0))
    samples = credit_groups(items, Credit(scale="none"), {"hero"})
    assert advantages(samples) == {(0, 0): {"b": -1.0}, (0, 1): {"a": -0.5, "b": 0.0}, (0, 2): {"a": 0.5, "b": 1.0}}
    assert samples.abstained == 1 and samples.counts["used"] == 1
    assert samples.metrics({"hero"})["dropped/abstained"] == 1.0


class Forfeits(Plain):
    """The rival may forfeit before the hero acts."""

    possible_agents = ("rival", "hero")

    def act(self, agent, action):
        if agent == "hero" or action == "forfeit":
            return fa.Outcome(done=True)
        return fa.Outcome(next="hero")


@pytest.mark.parametrize(
    "reward",
    [
        fv.Length(high=4, slack=4),
        fa.Ensemble([fv.Length(high=4, slack=4)], combine="mean"),
        fv.Length(high=4, slack=4) + 0.5 * fv.Length(high=4, slack=4, name="other"),
        fv.Gate(fv.Length(high=100, name="check"), fv.Length(high=4, slack=4)),
        lambda completion: max(0.0, 1 - max(len(completion) - 4, 0) / 4),
        lambda trajectory: None if not trajectory.turns else float(trajectory.turns[-1].action != "forfeit"),
        MultiReward({"length": fv.Length(high=4, slack=4), "hero only": fv.ForAgent("hero", lambda trajectory: None)}),
    ],
    ids=["rule", "ensemble", "sum", "gate", "completion", "trajectory", "columns"],
)
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "rae", "none"])
def test_forfeit_before_the_other_agent_acts_is_penalized(reward, baseline):
    def played(action):
        return fa.play(Forfeits, fa.Scripted(lambda observation, agent: action if agent == "rival" else "go"), seed=0)

    episodes = tuple(played(action) for action in ("forfeit", "play", "play", "forfeit"))
    assert [len(one.trajectories["hero"].turns) for one in episodes] == [0, 1, 1, 0]
    items = scored([EpisodeGroup(env_id=episodes[0].env_id, seed=0, episodes=episodes)], reward)
    credit = Credit(baseline=baseline, scale="none")
    samples = credit_groups(with_policy(items, "hero"), credit, {"hero"})
    by = [one.get("rival") for one in (samples.advantages.get((0, at), {}) for at in range(4))]
    assert None not in by and by[0] == by[3] < by[1] == by[2], "the forfeits are worse than the moves"
    assert not [at for at in (0, 3) if "hero" in samples.advantages[(0, at)]], "the hero never acted there"


def with_policy(items, name):
    """Return the groups with one sampled token of a policy in every turn."""

    def sampled(one):
        turns = (
            dataclasses.replace(turn("a", 0, 0.0), agent=old.agent, action=old.action, policy=name) for old in one.turns
        )
        return dataclasses.replace(one, policy=name, turns=tuple(turns))

    def changed(item):
        episodes = tuple(
            dataclasses.replace(e, trajectories={a: sampled(t) for a, t in e.trajectories.items()})
            for e in item.episodes
        )
        parts = item.parts and {n: (w, changed(part)) for n, (w, part) in item.parts.items()}
        return dataclasses.replace(item, episodes=episodes, parts=parts)

    return [changed(item) for item in items]


def test_abstaining_parts_are_left_out_of_multi_reward():
    """The first two of four episodes are about sums, the last two about code."""
    columns = MultiReward(
        {"sums": scores_of(0.0, 1.0, None, None), "code": scores_of(None, None, 1.0, 0.0)}, weights={"code": 2.0}
    )
    episodes = tuple(
        dataclasses.replace(one, trajectories={"a": one.trajectories["a"]}) for one in (episode(0, 0),) * 4
    )
    groups = [EpisodeGroup(env_id="t", seed=0, episodes=episodes)]
    items = scored(groups, columns)
    assert items[0].rewards["a"].tolist() == [0.0, 1.0, 2.0, 0.0] == columns(groups[0].trajectories).tolist()
    samples = credit_groups(items, Credit(scale="none"), {"hero"})
    assert advantages(samples) == {(0, 0): {"a": -0.5}, (0, 1): {"a": 0.5}, (0, 2): {"a": 1.0}, (0, 3): {"a": -1.0}}
    assert samples.abstained == 0
    nothing = MultiReward({"sums": scores_of(None, 1.0, 1.0, 1.0), "code": scores_of(None, None, None, None)})
    assert np.isnan(nothing(groups[0].trajectories)).tolist() == [True, False, False, False]
    assert credit_groups(scored(groups, nothing), Credit(), {"hero"}).abstained == 1


def test_group_is_abstained_only_without_comparable_rewards():
    def counts(*rewards):
        items = scored([group(*(((0, 0),) * (len(rewards) // 2)))], scores_of(*rewards))
        return {fate: n for fate, n in credit_groups(items, Credit(), {"hero"}).counts.items() if n}

    assert counts(None, 1, 1.0, 1, None, 1) == {"abstained": 1}
    assert counts(None, 1, 1.0, 1, 1.0, 1) == {"zero_variance": 1}
    assert counts(None, 1, 1.0, 1, 2.0, 1) == {"used": 1}


def test_metrics_leave_out_abstentions():
    items = scored([group((0, 0), (0, 0), (0, 0))], scores_of(None, None, 0.0, None, 1.0, None))
    assert group_spread(items, 1, {"hero"})["groups/reward_std"] == pytest.approx(0.5)
    result = summarize(items)
    assert result["reward/mean"] == result["reward/a"] == 0.5 and "reward/b" not in result


def test_reward_spread_is_that_of_trained_policies():
    items = scored([group((0, -1), (4, 5)), group((2, 0), (2, 10), seed=1)])  # standard deviations: 2 and 3, 0 and 5
    assert group_spread(items, 2, {"hero"})["groups/reward_std"] == 1.0
    assert group_spread(items, 2, {"hero", "rival"})["groups/reward_std"] == 2.5
    failed = group((0, 1), error=EpisodeError(where="step", kind="ValueError", message="m", trace=""))
    assert np.isnan(group_spread([failed], 1, {"hero"})["groups/reward_std"])


def test_reward_defaults_to_the_environment_and_classes_are_refused():
    assert asyncio.run(score([group((1, 2), (3, 4))]))[0].rewards["b"].tolist() == [2, 4]
    for ask in (lambda: scored([group((0, 0), (1, 1))], fv.Numeric), lambda: GRPOTrainer(Policy("m"), fv.Numeric)):
        with pytest.raises(ArgumentError, match="Numeric"):
            ask()
    with pytest.raises(ArgumentError, match="Numeric"):
        fa.Ensemble([fv.Numeric])


def test_a_reward_that_raises_is_named():
    with pytest.raises(KeyError) as caught:
        scored([group((0, 0), (1, 1))], lambda trajectories: {}["gold"])
    assert caught.value.__notes__ == ["reward <lambda> raised this for a batch of 4 trajectories"]


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError])
def test_a_reward_that_would_end_the_program_is_named(kind):
    def ends(trajectories):
        raise kind(4)

    with pytest.raises(RuntimeError, match=f"reward ends raised {kind.__name__}: 4"):
        scored([group((0, 0), (1, 1))], ends)


def test_untrained_groups_are_warned_of(caplog):
    items = scored([group((0, 0), (1, 0))])
    with pytest.raises(TypeError, match="trained='hero' is a string"):
        credit_groups(items, Credit(), "hero")
    assert credit_groups(items, Credit(), {"hreo"}).counts["zero_variance"] == 1
    assert "(hreo) plays in these 1 groups, only hero, rival" in caplog.text
    caplog.clear()
    credit_groups(items, Credit(), {"hero", "absent"})
    credit_groups([], Credit(), {"hero"})
    assert not caplog.text


class Assessing:
    """A reward with noise and turn scores."""

    name = "assessing"

    def __init__(self, noise=None, turns=None, left_out=0):
        self.noise, self.turns, self.left_out = noise, turns, left_out

    def __call__(self, trajectories):
        raise AssertionError("assess is there and was not asked")

    def assess(self, trajectories):
        n = len(trajectories)
        return SimpleNamespace(
            scores=np.array([t.reward for t in trajectories], np.float32),
            noise=None if self.noise is None else np.full(n - self.left_out, self.noise, np.float32),
            turns=None if self.turns is None else [np.array(self.turns(t)) for t in trajectories],
        )


def test_group_within_the_noise_has_zero_variance():
    groups = [group((0.5, 0), (0.52, 0)), group((0, 0), (1, 0), seed=1)]
    samples = credit_groups(scored(groups, Assessing(noise=0.1)), Credit(noise_multiple=1.0), {"hero"})
    assert samples.counts == {"used": 1, "zero_variance": 1, "failed": 0, "abstained": 0, "too_long": 0}
    assert credit_groups(scored(groups, Assessing(noise=0.1)), Credit(), {"hero"}).counts["used"] == 2


def praise(returned):
    """Return a reward called praise with this result."""

    def praise(trajectories):
        return returned

    return praise


def sleepy(trajectories):
    time.sleep(60)  # in a thread for which nothing waits


NOT_NUMBERS = "reward praise returned .*for 4 trajectories. Return one number each"


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        (praise(np.zeros(1)), ValueError, r"shape \(1,\) for 4 trajectories"),
        (praise(np.zeros((4, 1))), ValueError, r"shape \(4, 1\)"),
        (praise(["good", "bad"] * 2), ValueError, NOT_NUMBERS),
        (praise({"a": 1.0}), ValueError, NOT_NUMBERS),
        (praise([[1.0], [1.0, 2.0]]), ValueError, NOT_NUMBERS),
        (Assessing(noise=1.0, left_out=1), ValueError, r"reward assessing returned noise of shape \(3,\)"),
        (Assessing(turns=lambda t: [0.0] * 7), ValueError, "assessing returned a wrong number of turn scores"),
        (sleepy, StallError, "reward sleepy"),
    ],
)
def test_invalid_result_of_a_reward_is_reported(reward, error, message):
    with pytest.raises(error, match=message):
        scored([group((0, 0), (1, 1))], reward, timeout_s=0.05 if reward is sleepy else 60.0)


def two_turns(first, second, seed=0):
    turns = (turn("a", 0, first), dataclasses.replace(turn("a", 1, second), prompt_ids=(1, 2, 3, 4)))
    trajectory = Trajectory(agent="a", policy="hero", turns=turns)
    return Episode(env_id="t", seed=seed, trajectories={"a": trajectory})


def test_turn_with_the_higher_reward_gets_the_larger_advantage():
    episodes = (two_turns(1.0, 0.0), two_turns(0.0, 1.0), two_turns(0.0, 0.0))
    groups = [EpisodeGroup(env_id="t", seed=0, episodes=episodes)]
    by_turn = Assessing(turns=lambda t: [turn.reward for turn in t.turns])
    for credit in (Credit(), Credit(turns="to_go")):
        samples = credit_groups(scored(groups, by_turn), credit, {"hero"}).samples["hero"]
        first, last = [[float(s.advantages[at]) for s in samples] for at in (2, 4)]
        assert first[0] > last[0] and last[1] > first[1], credit
        assert min(first[0], last[1]) > 0 > max(first[2], last[2])
    whole = credit_groups(scored(groups), Credit(), {"hero"}).samples["hero"]
    assert all(float(s.advantages[2]) == float(s.advantages[4]) for s in whole)


def test_verifiers_of_turns_reach_the_samples():
    last = fv.PerTurn(fa.Rule(lambda t: float(t.turns[-1].reward > 0), name="paid"))
    groups = [EpisodeGroup(env_id="t", seed=0, episodes=(two_turns(1.0, 0.0), two_turns(0.0, 0.0)))]
    samples = credit_groups(scored(groups, 0.5 * last + 0.5 * fa.EnvReward()), Credit(), {"hero"}).samples["hero"]
    assert float(samples[0].advantages[2]) > float(samples[0].advantages[4]) > float(samples[1].advantages[2])


def test_the_mean_reward_is_that_of_trained_policies():
    """In a zero-sum game the mean over all agents is 0, whatever the hero does."""
    result = summarize(scored([group((-1, 1), (-1, 1), (0, 0))]), {"hero"})
    assert result["reward/mean"] == result["reward/hero"] == result["reward/a"] == pytest.approx(-2 / 3)
    assert result["reward/b"] == pytest.approx(2 / 3) and "reward/rival" not in result
    both = summarize(scored([group((-1, 1), (-1, 1)), group((-1, 1), (-1, 1), seed=1)]), {"hero", "rival"})
    assert (both["reward/mean"], both["reward/hero"], both["reward/rival"]) == (0.0, -1.0, 1.0)
    assert both["reward_ci/hero"] == 0.0


def test_policy_metrics_precede_agents_of_the_same_name():
    trajectories = {
        agent: Trajectory(agent=agent, policy=policy, turns=(turn(agent, at, reward, policy=policy),))
        for at, (agent, policy, reward) in enumerate((("a", "b", 3.0), ("b", "a", 5.0)))
    }
    swapped = EpisodeGroup(env_id="t", seed=0, episodes=(Episode(env_id="t", seed=0, trajectories=trajectories),))
    result = summarize(scored([swapped]), {"a", "b"})
    assert (result["reward/a"], result["reward/b"]) == (5.0, 3.0)


def test_mean_reward_precedes_agents_and_policies_called_mean_or_ci():
    trajectories = {
        agent: Trajectory(agent=agent, policy=policy, turns=(turn(agent, at, reward, policy=policy),))
        for at, (agent, policy, reward) in enumerate((("mean", "ci", 3.0), ("ci", "mean", 5.0)))
    }
    one = EpisodeGroup(env_id="t", seed=0, episodes=(Episode(env_id="t", seed=0, trajectories=trajectories),))
    for trained in ((), {"ci", "mean"}):
        result = summarize(scored([one]), trained)
        assert (result["reward/mean"], result["reward/ci"]) == (4.0, np.inf)


def test_printed_result_omits_episodes():
    episodes = group((0, 1), (2, 3)).episodes
    result = EvalResult(reward=0.5, ci=0.1, by_agent={"a": 1.0}, by_policy={}, episodes=episodes, failed=0)
    assert "reward=0.5" in str(result) and len(str(result)) < 200


def test_metrics_count_response_and_reasoning_tokens():
    item = scored([group((0, 0), (0, 0))])[0]
    item = with_turn(item, [0], response_ids=(7,) * 9, logprobs=(-1.0,) * 9, reasoning_tokens=6, finish_reason="length")
    turns = [turn for trajectory in item.trajectories for turn in trajectory.turns]
    result, all_tokens = rates([item], 2.0), sum(len(turn.response_ids) for turn in turns)
    thinking = sum(turn.finish_reason == "length" for turn in turns)
    assert result["turns"] == len(turns) and result["tokens_per_s"] == all_tokens / 2
    assert result["response_tokens"] == pytest.approx(all_tokens / len(turns))
    assert result["reasoning_tokens"] == pytest.approx(6 * thinking / len(turns))
    assert result["cut_off"] == pytest.approx(thinking / len(turns))
    assert rates([], 1.0)["reasoning_tokens"] == 0.0


def test_turns_of_scripts_are_no_short_responses():
    item = with_turn(scored([group((0, 0), (0, 0))])[0], [1], finish_reason="length")
    item = with_turn(item, [0], prompt_ids=(), response_ids=(), logprobs=(), versions=(), finish_reason="scripted")
    result, sampled = rates([item], 1.0), item.episodes[0].trajectories["b"].turns[0].response_ids
    assert result["turns"] == 4 and result["response_tokens"] == len(sampled)
    assert result["cut_off"] == pytest.approx(1 / 3)


def test_metrics_name_players_whose_failures_dropped_episodes():
    error = EpisodeError(where="policy", kind="EndpointError", message="gone", agent="b")
    failed = group((0, 1), (1, 0), error=error)
    player = failed.episodes[0].trajectories["b"].policy
    assert rates([failed, failed], 1.0)[f"failed/{player}"] == 4.0
    broken = group((0, 1), (1, 0), error=dataclasses.replace(error, where="step", agent=""))
    assert not any(name.startswith("failed/") for name in rates([broken], 1.0))
    result = eval_result([failed], [failed], [failed], (), scored_by="environment")
    assert eval_metrics(result)[f"eval/failed/{player}"] == 2.0


def test_metrics_count_failed_programs():
    def told(episode, info):
        saved = {agent: dataclasses.replace(one, info=info) for agent, one in episode.trajectories.items()}
        return dataclasses.replace(episode, trajectories=saved)

    whole = group((0, 1), (1, 0))
    first, second = whole.episodes
    failed = dataclasses.replace(whole, episodes=(told(first, {"program_error": "KeyError: 1"}), second))
    assert rates([failed], 1.0)["program_failed"] == 0.5
    assert rates([whole], 1.0)["program_failed"] == 0.0
    moved = dataclasses.replace(whole, episodes=(told(first, {"error": "illegal move"}), second))  # not of a program
    assert rates([moved], 1.0)["program_failed"] == 0.0


def test_confidence_interval_is_students():
    mean, half = mean_and_ci([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert half == pytest.approx(3.182446 * 1.2909944 / 2, rel=1e-6)
    assert mean_and_ci([1.0]) == (1.0, float("inf"))
    assert np.isnan(mean_and_ci([])[0])


def test_confidence_interval_counts_groups():
    """Eight repetitions of a game count as one game, 64 independent games as 64."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        difficulty = rng.beta(0.5, 0.5, size=8)
        wins = (rng.random((8, 8)) < difficulty[:, None]).astype(float)
        mean, half = mean_and_ci(wins.ravel().tolist(), np.repeat(range(8), 8).tolist())
        covered += abs(mean - 0.5) <= half
    assert 0.91 < covered / 400 < 0.98, "taken as 64 it is 0.6"
    apart = [3.0, 1.0, 4.0]
    assert mean_and_ci(apart, [7, 8, 9]) == pytest.approx(mean_and_ci(apart))
    items = scored([group((0, 0), (0, 0), (0, 0)), group((1, 0), (1, 0), (1, 0), seed=1)])
    result = summarize(items, {"hero"})
    assert result["reward/mean"] == 0.5
    for name in ("reward/ci", "reward_ci/hero", "reward_ci/a"):
        assert result[name] == pytest.approx(mean_and_ci([0.0, 1.0])[1]), name
    assert summarize(items[:1], {"hero"})["reward/ci"] == np.inf


def test_samples_know_their_trajectory_and_turns():
    rewritten = dataclasses.replace(two_turns(1.0, 0.0).trajectories["a"].turns[1], prompt_ids=(9, 9))
    broken = Trajectory(agent="a", policy="hero", turns=(turn("a", 0, 1.0), rewritten))
    episodes = (two_turns(0.0, 0.0), Episode(env_id="t", seed=0, trajectories={"a": broken}))
    samples = credit_groups(scored([EpisodeGroup(env_id="t", seed=0, episodes=episodes)]), Credit(), {"hero"}).samples
    assert [(s.trajectory, s.turns.tolist()) for s in samples["hero"]] == [
        (0, [-1, -1, 0, -1, 1]),
        (1, [-1, -1, 0]),
        (1, [-1, -1, 1]),
    ]


def test_environment_reward_can_be_credited_by_turn():
    groups = [EpisodeGroup(env_id="t", seed=0, episodes=(two_turns(1.0, 0.0), two_turns(0.0, 1.0)))]
    credit = Credit(turns="return", discount=0.5, scale="none")
    samples = credit_groups(scored(groups, EnvTurnReward()), credit, {"hero"}).samples["hero"]
    returns = [[1.0, 0.0], [0.5, 1.0]]
    assert [[s.advantages[2], s.advantages[4]] for s in samples] == [[r - 0.625 for r in own] for own in returns]
    assert credit_groups(scored(groups), credit, {"hero"}).counts["zero_variance"] == 1


def test_running_means_count_trained_roles_of_valid_groups():
    broken = EpisodeError(where="step", kind="X", message="m")
    running = Baselines()
    credit = Credit(baseline="rae", scale="none", rae_decay=0.5)
    samples = credit_groups(scored([group((1, 5)), group((9, 9), error=broken)]), credit, {"hero"}, running)
    assert {k: v.tolist() for k, v in running.state_dict().items()} == {"names": ["t/a"], "means": [0.5]}
    assert [s.advantages[-1] for s in samples.samples["hero"]] == [0.5] and samples.counts["used"] == 1


def test_uninformative_groups_are_resampled():
    requests = []

    class Collector:
        async def resample(self, step, count, attempt):
            requests.append((step, count, attempt))
            return [group((0, 0), (int(attempt == 2), 0), seed=10 * attempt + i) for i in range(count)]

    first = [group((0, 0), (1, 0)), group((0, 0), (0, 0), seed=1), group((0, 0), (0, 0), seed=2)]
    processes = SimpleNamespace(max_sample_tokens={}, learners={"hero"})
    lifecycle = SimpleNamespace(running=processes, reward_lock=asyncio.Lock())
    for max_resamples, expected in ((0, []), (1, [(7, 2, 1)]), (9, [(7, 2, 1), (7, 2, 2)])):
        config = GRPOConfig(groups_per_step=3, max_resamples=max_resamples)
        plan = SimpleNamespace(reward=env_reward, credit=config.credit_rule, config=config)
        scorer = Scorer(plan, Collector(), lifecycle, RewardState(env_reward), None)
        requests.clear()
        groups = asyncio.run(scorer.score(7, list(first)))
        assert requests == expected
        assert credit_groups(groups, Credit(), {"hero"}).counts["used"] == (3 if max_resamples == 9 else 1)
        assert len(groups) == 3 + 2 * len(expected) and (scorer.resample_s.get(7, 0) > 0) == bool(expected)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "rloo"])
@pytest.mark.parametrize("loss_normalization", [None, "sampled", "used"])
def test_loss_normalization_counts_zero_variance_groups_by_loss_or_config(loss, loss_normalization):
    """One group is informative, and one of longer episodes has zero variance."""
    flat = group((1, 0), (1, 0), seed=1)
    longer = dataclasses.replace(turn("a", 0, 1), response_ids=(3, 3, 3), logprobs=(-1.0,) * 3)
    trajectories = {"a": Trajectory(agent="a", policy="hero", turns=(longer,))}
    flat = dataclasses.replace(
        flat, episodes=tuple(dataclasses.replace(e, trajectories=e.trajectories | trajectories) for e in flat.episodes)
    )
    config = GRPOConfig(learner=LearnerConfig(loss=loss), loss_normalization=loss_normalization)
    items = scored([group((0, 0), (1, 0)), flat])
    whole = credit_groups(items, config.credit_rule, {"hero"})
    result = credit_groups(items, config.credit_rule, {"hero"}, size_of=config.size_of)
    counts_all = loss_normalization == "sampled" or (loss_normalization is None and loss != "dapo")
    share = (2 / 8 if loss == "dapo" else 1 / 2) if counts_all else 1.0
    assert [s.advantages[-1] for s in result.samples["hero"]] == pytest.approx(
        [share * s.advantages[-1] for s in whole.samples["hero"]]
    )
    assert result.fractions == ({"hero": share} if counts_all else {}) and result.advantages == whole.advantages
    assert result.counts == whole.counts


def test_zero_variance_groups_do_not_change_the_step(tiny_llama, random_batch):
    """As in GRPO as published: the batch contains zero-variance groups with advantages 0."""
    whole, without = random_batch(groups=4), random_batch(groups=4)
    keep = whole["samples"]["group"] < 3
    starts, lengths = whole["samples"]["start"].tolist(), whole["samples"]["length"].tolist()
    flat = [range(s, s + n) for s, n, saved in zip(starts, lengths, keep.tolist(), strict=True) if not saved]
    for places in flat:
        whole["tokens"]["advantages"][list(places)] = 0.0
    tokens = without["tokens"][torch.tensor([p for p in range(len(whole["tokens"])) if not any(p in f for f in flat)])]
    tokens["advantages"] *= float(keep.sum()) / len(keep)
    samples = without["samples"][keep]
    samples["start"] = samples["length"].cumsum(0) - samples["length"]
    without["tokens"], without["samples"] = tokens, samples
    config = LearnerPlan(model=str(tiny_llama), compute_dtype="float32", threads=1, lr=0.0, loss="grpo")
    one, other = LearnerCore(config).train_step(whole), LearnerCore(config).train_step(without)
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5) and other["grad_norm"] == pytest.approx(
        one["grad_norm"], rel=1e-5
    )


def test_zero_variance_trajectories_of_regularized_policies_are_kept():
    items = scored([group((0, 0), (1, 0)), group((1, 0), (1, 0), seed=1), group((0, 0), (0, 0), seed=2)])
    size_of = GRPOConfig(learner=LearnerConfig(loss="grpo")).size_of
    for keep, expected in (((), [-1 / 6, 1 / 6]), (("rival",), [-1 / 6, 1 / 6]), (("hero",), [-0.5, 0.5, 0, 0, 0, 0])):
        groups = compute_advantages(items, Credit(scale="none"), {"hero"})
        result = make_samples(groups, {"hero"}, size_of=size_of, keep=keep, max_tokens={"hero": 9})
        assert [s.advantages[-1] for s in result.samples["hero"]] == pytest.approx(expected)
        assert sum(result.samples["hero"][-1].loss_mask) == 1 and result.too_long == 0
        assert result.counts["used"] == 1 and result.counts["zero_variance"] == 2
        assert result.advantages == {(0, 0): {"a": [-0.5]}, (0, 1): {"a": [0.5]}}
        assert result.metrics(["hero", "rival"])["groups/used/hero"] == 1
    unlike = compute_advantages(items, Credit(baseline="none", scale="none"), {"hero"})
    assert make_samples(unlike, {"hero"}).metrics(["hero", "rival"])["groups/used/hero"] == 3, "also those of reward 0"
    too_long = make_samples(groups, {"hero"}, size_of=size_of, keep=["hero"], max_tokens={"hero": 1})
    assert too_long.counts["too_long"] == 1 and too_long.counts["zero_variance"] == 2 and too_long.too_long == 2


def test_dapo_resamples_by_default():
    assert GRPOConfig().resamples == 3 and GRPOConfig(max_resamples=0).resamples == 0
    assert {GRPOConfig(learner=LearnerConfig(loss=name)).resamples for name in ("grpo", "gspo", "rloo")} == {0}
    with pytest.raises(ValueError, match="loss_normalization='all'. Choose one of 'sampled', 'used'"):
        GRPOConfig(loss_normalization="all")


def test_parts_of_multi_reward_are_credited_separately():
    def of(index):
        return lambda trajectories: np.array([t.turns[index].reward for t in trajectories])

    pairs = [(1.0, 0.0), (0.0, 10.0), (1.0, 10.0), (0.0, 0.0)]
    groups = [EpisodeGroup(env_id="t", seed=0, episodes=tuple(two_turns(*pair) for pair in pairs))]
    columns = MultiReward({"format": of(0), "answer": of(1)}, weights={"answer": 2.0})
    items = scored(groups, columns)
    assert items[0].rewards["a"].tolist() == [1.0, 20.0, 21.0, 0.0] == columns(groups[0].trajectories).tolist()
    samples = credit_groups(items, Credit(), {"hero"}).samples["hero"]
    unit = 1 / np.std([0, 0, 1, 1], ddof=1) / 2  # both rewards have the same standard scores
    assert [s.advantages[2] for s in samples] == pytest.approx([-unit, unit, 3 * unit, -3 * unit], rel=1e-6)
    flat = MultiReward({"a": of(0), "b": lambda ts: np.ones(len(ts))})
    one_flat = credit_groups(scored(groups, flat), Credit(), {"hero"})
    assert [s.advantages[2] for s in one_flat.samples["hero"]] == pytest.approx([unit, -unit, unit, -unit], rel=1e-6)
    unsure = credit_groups(
        scored(groups, MultiReward({"a": of(0), "b": lambda ts: [None] * len(ts)})), Credit(), {"hero"}
    )
    assert [s.advantages[2] for s in unsure.samples["hero"]] == pytest.approx([unit, -unit, unit, -unit], rel=1e-6)
    running = Baselines()
    credit_groups(items, Credit(baseline="rae", scale="none"), {"hero"}, running)
    assert running.state_dict()["names"].tolist() == ["t/a/format", "t/a/answer"]


def test_groups_that_are_scored_again_forget_the_earlier_reward():
    groups = scored([group((1.0, 0.0), (0.0, 0.0))], MultiReward({"a": env_reward, "b": env_reward}))
    groups = compute_advantages(groups, Credit(), {"hero"})
    (again,) = compute_advantages(scored(groups, lambda ts: [-t.reward for t in ts]), Credit(), {"hero"})
    assert again.parts is None
    assert [float(values[0]) for values in again.advantages["a"]] == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_multi_reward_saves_the_state_of_its_rewards():
    old, new = Counting(7), Counting()
    MultiReward({"x": new, "y": env_reward}).load_state_dict(MultiReward({"x": old, "y": env_reward}).state_dict())
    assert new.seen == 7


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [
        ({}, None),
        ([env_reward], None),
        ({"a": env_reward}, {"b": 1.0}),
        ({"a": env_reward}, {"a": float("nan")}),
        ({"a": env_reward}, {"a": None}),
        ({"a": env_reward}, {"a": "1"}),
        ({"a": MultiReward({"b": env_reward})}, None),
    ],
)
def test_invalid_multi_reward_is_refused(rewards, weights):
    with pytest.raises(ValueError, match="at least one reward|must be finite|inside a MultiReward"):
        MultiReward(rewards, weights)


@pytest.mark.parametrize(
    "use", [lambda c, v: c + v, lambda c, v: v + c, lambda c, v: fv.Gate(v, c), lambda c, v: fa.Ensemble([c, v])]
)
def test_multi_reward_cannot_be_part_of_a_verifier(use):
    """Inside a verifier, only the sum would be compared, and the state of its rewards would not be saved."""
    verifier = fa.Rule(lambda trajectory: 1.0, name="one")
    with pytest.raises(ArgumentError, match="compares each of its rewards separately"):
        use(MultiReward({"a": verifier}), verifier)


def test_episodes_without_an_agent_keep_their_index_and_failed_ones_have_no_part_in_the_summary():
    """One episode has no agents, another failed before its second agent joined."""
    broken = EpisodeError(where="make", kind="RuntimeError", message="boom")
    nobody = Episode(env_id="t", seed=0, trajectories={}, error=broken, end_reason="error")
    whole = episode(3, 4)
    alone = dataclasses.replace(whole, trajectories={"a": episode(7, 4).trajectories["a"]})
    mixed = EpisodeGroup(env_id="t", seed=0, episodes=(nobody, whole, dataclasses.replace(alone, error=broken)))
    (item,) = scored([mixed])
    assert np.array_equal(item.rewards["a"], [np.nan, 3, 7], equal_nan=True)
    assert np.array_equal(item.rewards["b"], [np.nan, 4, np.nan], equal_nan=True)
    assert item.episode_rewards(1) == {"a": 3, "b": 4}
    summary = summarize([item])
    assert (summary["reward/mean"], summary["reward/a"], summary["reward/b"]) == (3.5, 3.0, 4.0)
    samples = credit_groups([item], Credit(), {"hero"})
    assert samples.counts["failed"] == 1 and not samples.samples
    (item,) = scored([EpisodeGroup(env_id="t", seed=0, episodes=(whole, alone))], EnvTurnReward())
    assert credit_groups([item], Credit(), {"rival"}).counts["abstained"] == 1


@pytest.mark.parametrize("bad", [np.inf, -np.inf, 1e39])
def test_infinite_score_is_a_counted_abstention(bad, caplog):
    """One overflow late in a long run costs only its group."""

    def overflows(trajectories):
        return np.array([bad, *range(1, len(trajectories) - 1), np.nan])

    items = scored([group((0, 0), (1, 1)), group((0, 0), (1, 1), seed=1), group((0, 0), (1, 1), seed=2)], overflows)
    samples = credit_groups(items, Credit(), {"hero"})
    assert samples.counts == {"used": 2, "abstained": 1, "failed": 0, "zero_variance": 0, "too_long": 0}
    assert "reward overflows returned 1 infinite scores" in caplog.text
    items = scored([group((0, 0), (1, 1))], Assessing(turns=lambda t: [bad if t.reward == 0 else 1.0]))
    assert np.isnan(items[0].turn_rewards["a"][0]).all()
    assert sum(credit_groups(items, Credit(), {"hero"}).counts.values()) == 1


def test_too_long_samples_do_not_count_in_the_loss_normalization():
    """One group is informative, one has zero variance, one is too long."""
    items = scored([group((0, 0), (1, 0)), group((1, 0), (1, 0), seed=1), group((0, 0), (1, 0), seed=2)])
    items[2] = with_turn(items[2], [0, 1], prompt_ids=(1, 2, 4))
    size_of = GRPOConfig(learner=LearnerConfig(loss="grpo")).size_of
    result = credit_groups(items, Credit(), {"hero"}, max_tokens={"hero": 3}, size_of=size_of)
    assert result.counts["too_long"] == 1 and result.fractions == {"hero": 2 / 4}


def test_dropped_part_of_a_trajectory_does_not_count_in_the_loss_normalization():
    def split(first, last, seed):
        long = turn("a", 1, last, response_ids=(7,) * 9, prompt_ids=(8, 8))  # a sample of its own, of 11 tokens
        trajectory = Trajectory(agent="a", policy="hero", turns=(turn("a", 0, first), long))
        return Episode(env_id="t", seed=seed, trajectories={"a": trajectory})

    episodes = [tuple(split(reward, 0, seed) for reward in rewards) for seed, rewards in enumerate([(0, 1), (1, 1)])]
    items = scored([EpisodeGroup(env_id="t", seed=seed, episodes=each) for seed, each in enumerate(episodes)])
    config = GRPOConfig(learner=LearnerConfig(loss="dapo"), loss_normalization="sampled")
    for limit, share in ((11, 20 / 40), (10, 2 / 22)):
        result = credit_groups(items, Credit(), {"hero"}, max_tokens={"hero": limit}, size_of=config.size_of)
        assert result.fractions == {"hero": pytest.approx(share)}


def test_function_of_one_trajectory_is_a_reward(tmp_path, caplog):
    def worth(trajectory):
        return 3.0 / trajectory.reward

    trainer = GRPOTrainer(Policy("nowhere"), reward=worth, out_dir=tmp_path / "run")
    [item] = asyncio.run(score([group((1.0, 1.0), (2.0, 1.0), (0.0, 0.0))], trainer.reward))
    assert item.rewards["a"].tolist() == pytest.approx([3.0, 1.5, math.nan], nan_ok=True)
    assert "reward worth fails on 2 of 6 trajectories" in caplog.text
    assert "ZeroDivisionError: float division by zero (test_rewards.py:" in caplog.text
    with pytest.raises(ZeroDivisionError):  # an error on all trajectories ends the run
        asyncio.run(score([group((0.0, 0.0))], trainer.reward))
    with pytest.raises(ArgumentError, match=r"reward <lambda>\(a, b\) at .* unknown meaning \(a, b\); name its"):
        GRPOTrainer(Policy("nowhere"), reward=lambda a, b: 0.0, out_dir=tmp_path / "run")
    columns = MultiReward({"worth": worth, "env": env_reward}, {"env": 2.0})
    assert columns(group((1.0, 2.0)).trajectories).tolist() == [5.0, 5.5]


def test_engines_of_all_judges_of_a_reward_are_found_once():
    first = fv.Judge("tiny-random", "Is it polite?", name="first")
    beside = fv.Judge(first, "Is it short?", name="beside")
    second = fv.Judge("tiny-random", "Is it true?", name="second")
    served = fv.Judge(Endpoint("http://localhost", "m"), "Is it kind?", name="served")
    ensemble = fa.Ensemble([first, beside, served, fa.Rule(lambda t: True, name="rule")], "mean")
    gated = fv.Gate(lambda t: True, ensemble + second)
    for reward in (gated, MultiReward({"env": env_reward, "judged": gated})):
        assert engines_of(reward) == [first.own_engine, second.own_engine]
    assert engines_of(env_reward) == []


def test_declared_judges_of_a_function_are_found(tmp_path):
    polite, kind = (fv.Judge("tiny-random", "Is it so?", name=name) for name in ("polite", "kind"))
    graded = fv.RewardModel("tiny-random", device="cuda")

    def plain(trajectories):
        return polite(trajectories)

    assert engines_of(plain) == []  # undeclared

    def reward(trajectory):
        return 0.0

    reward.judges = [polite, graded]
    wrapped = GRPOTrainer(Policy("nowhere"), reward=reward, out_dir=tmp_path).reward
    for given in (reward, wrapped, partial(reward), fa.Rule(reward), MultiReward({"a": reward, "b": env_reward})):
        assert (engines_of(given), models_of(given)) == ([polite.own_engine], [graded.own_model])

    class Panel:
        judges: ClassVar = {"kind": 0.5 * kind + polite, "graded": graded}

        def score(self, trajectories):
            return 0.0

    assert engines_of(Panel().score) == [kind.own_engine, polite.own_engine]
    reward.judges = "polite"
    assert engines_of(reward) == []
    reward.judges = polite
    assert engines_of(reward) == [polite.own_engine]

    class Itself:
        def __init__(self):
            self.function = self.score  # a reference cycle

        def score(self, trajectories):
            return 0.0

    assert engines_of(Itself()) == engines_of(Itself().score) == []
    assert (graded.own_model.name, graded.own_model.device) == ("reward_model", "cuda")
    assert (graded.own_model.model, graded.own_model.batch_tokens) == ("tiny-random", 8192)
