"""Evaluation on held-out seeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from forge_agents.types import Episode, EpisodeGroup
from forge_trainers.rl.collect import Collector
from forge_trainers.rl.failures import explain_idle, idle_policies
from forge_trainers.rl.lifecycle import Lifecycle
from forge_trainers.rl.metrics import failed_by, mean_and_ci, rewards_by, summarize
from forge_trainers.rl.plan import RunPlan
from forge_trainers.rl.reward_state import RewardState
from forge_trainers.rl.rewards import all_rewards, compares_groups, reward_name
from forge_trainers.rl.scoring import score
from forge_trainers.rl.tasks import ProcessRandomness
from forge_trainers.run.checkpoints import Stateful


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Rewards on held-out seeds."""

    reward: float
    """Mean over episodes of the mean over agents of trainable policies, or over all agents if no policy is trainable.
    Scored by the run's reward, or by the reward passed to `GRPOTrainer.evaluate`. NaN if no trainable policy had a
    turn."""
    ci: float
    """Half-width of the 95 % confidence interval of `reward`."""
    by_agent: dict[str, float]
    """Mean reward of each agent."""
    by_policy: dict[str, float]
    """Mean reward of each trainable policy. NaN for a policy that had no turn."""
    episodes: Sequence[Episode] = dataclasses.field(repr=False)  # too long to print
    """All episodes, including failed ones."""
    failed: int
    """Number of episodes that ended in an error. Failed episodes count in no mean."""
    abstained: int = 0
    """Number of other episodes in which the reward was NaN for a trained agent that acted. Agents without reward count
    in no mean."""
    by_env: dict[str, float] = dataclasses.field(default_factory=dict)
    """`reward` of each environment or level by id. NaN if none of its episodes counts."""
    env_reward: float = math.nan
    """The environment's own reward of the same episodes and agents, whatever `reward` is."""
    env_ci: float = math.nan
    """Half-width of the 95 % confidence interval of `env_reward`."""
    scored_by: str = "environment"
    """Name of the reward that `reward` is the mean of; "environment" for the environment's own."""


class Evaluator:
    """Evaluates the current weights on held-out seeds.

    `state` is the state of the run's reward. The next step may be scored before the held-out episodes are, so a reward
    that learns scores them in its state after the last training step.
    """

    def __init__(
        self, plan: RunPlan, collector: Collector, lifecycle: Lifecycle, state: RewardState | None = None
    ) -> None:
        self._plan, self._config, self._collector, self._lifecycle = plan, plan.config, collector, lifecycle
        self._state = state

    def is_due(self, step: int, *, last: bool) -> bool:
        """Return whether `step` is followed by an evaluation."""
        every = self._config.eval_every
        return bool(every) and (last or (step + 1) % every == 0)

    async def metrics(self) -> dict[str, float]:
        """Evaluate and return metrics. The caller must not train meanwhile."""
        metrics = eval_metrics(await self.evaluate(self._config.eval_episodes))
        if samples := self._config.exploitability_samples:
            from forge_agents.bench.exploitability import exploited

            processes = self._lifecycle.running
            trained = {name: self._plan.models[name] for name in processes.learners}
            agents = self._plan.agents_by_policy
            work = exploited(self._plan.games, trained, processes.policy_engines, samples=samples, agents=agents)
            metrics |= await self._collector.while_engines_answer(work, "exploitability")
        return metrics

    async def evaluate(self, episodes: int) -> EvalResult:
        """Collect and score at least `episodes` held-out episodes."""
        reward, trained = self._plan.reward, self._plan.trained
        await self._lifecycle.weights.done()
        size = min(self._config.group_size, episodes) if compares_groups(reward) else 1
        groups = await self._collector.held_out(episodes, size)
        env_scored = scored = await score(groups)
        if not self._plan.uses_env_reward:
            async with self._lifecycle.reward_lock:
                with unchanged(reward, {} if self._state is None else self._state.trained()):
                    scored = await score(groups, reward, timeout_s=self._config.stage_timeout_s)
        valid = [episode for group in groups for episode in group.episodes if episode.error is None]
        if idle := idle_policies(valid, trained):
            explanation = explain_idle(valid, idle)
            self._lifecycle.messages.say(f"held-out episodes do not measure {', '.join(idle)}: {explanation}")
        measured = self._plan.policies.measured
        return eval_result(
            groups, measured(scored), measured(env_scored), trained, idle=idle, scored_by=reward_name(reward)
        )


@contextmanager
def unchanged(reward: Any, trained_state: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Score without side effects: the reward's state and the process's random state are restored at the end.

    Inside the block the reward has the state `trained_state`, or its present one if that is empty. A fitted ensemble
    does not learn there. An ensemble without data learns from the scored episodes, and forgets them at the end.
    """
    randomness = ProcessRandomness()
    random_state = randomness.state_dict()
    state = None
    if isinstance(reward, Stateful):
        state = {name: np.array(value) for name, value in reward.state_dict().items()}
        if trained_state:
            reward.load_state_dict(trained_state)
    fitted = [part for part in all_rewards(reward) if getattr(part, "learning", False) and getattr(part, "version", 0)]
    for ensemble in fitted:
        ensemble.learning = False
    try:
        yield
    finally:
        for ensemble in fitted:
            ensemble.learning = True
        if state is not None:
            reward.load_state_dict(state)
        randomness.load_state_dict(random_state)


def eval_result(
    groups: Sequence[EpisodeGroup],
    scored: Sequence[EpisodeGroup],
    env_scored: Sequence[EpisodeGroup],
    trained: Collection[str],
    *,
    idle: Collection[str] = (),
    scored_by: str,
) -> EvalResult:
    """Compute the means of an evaluation.

    Args:
        groups: All groups.
        scored: The groups that count, with the measured reward.
        env_scored: The same groups with the environment's own reward.
        trained: Policies whose agents count. Empty counts all agents.
        idle: Trained policies without a turn. Their rewards say nothing about them.
        scored_by: Name of the measured reward.
    """
    unmeasured = bool(idle) and set(idle) == set(trained)
    summary, env = summarize(scored, trained), summarize(env_scored, trained)
    abstained = sum(
        any(
            np.isnan(reward) and (not trained or episode.trajectories[agent].policy in trained)
            for agent, reward in group.episode_rewards(index).items()
            if agent in episode.trajectories and episode.trajectories[agent].turns
        )
        for group in scored
        for index, episode in enumerate(group.episodes)
        if episode.error is None
    )
    by_env: dict[str, list[EpisodeGroup]] = {}
    for group in scored:
        by_env.setdefault(group.env_id, []).append(group)
    return EvalResult(
        reward=math.nan if unmeasured else summary["reward/mean"],
        ci=summary["reward/ci"],
        by_agent={agent: mean_and_ci(*rewards)[0] for agent, rewards in rewards_by(scored, "agent").items()},
        by_policy={
            name: math.nan if name in idle else mean_and_ci(*rewards)[0]
            for name, rewards in rewards_by(scored, "policy").items()
            if name in trained
        },
        episodes=tuple(episode for group in groups for episode in group.episodes),
        failed=sum(len(group.failed) for group in groups),
        abstained=abstained,
        by_env={env_id: summarize(env_groups, trained)["reward/mean"] for env_id, env_groups in by_env.items()},
        env_reward=math.nan if unmeasured else env["reward/mean"],
        env_ci=env["reward/ci"],
        scored_by=scored_by,
    )


def eval_metrics(result: EvalResult) -> dict[str, float]:
    """Return ``eval/reward`` and related metrics, also ``eval/env_reward`` if another reward is measured."""
    metrics = {"eval/reward": result.reward, "eval/ci": result.ci, "eval/failed": float(result.failed)}
    if result.scored_by != "environment":
        metrics |= {"eval/env_reward": result.env_reward, "eval/env_ci": result.env_ci}
        metrics |= {"eval/abstained": float(result.abstained)}
    metrics |= failed_by("eval/failed", result.episodes)
    metrics |= {f"eval/reward/{name}": reward for name, reward in result.by_policy.items()}
    if len(result.by_env) > 1:
        metrics |= {f"eval/env/{env_id}": reward for env_id, reward in result.by_env.items()}
    return metrics
