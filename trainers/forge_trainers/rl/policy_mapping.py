"""Which policy plays which agent, and checks that the learner can train the policies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from forge_agents.envs.oracles import oracle_of
from forge_agents.policy import (
    AnyPolicy,
    Oracle,
    Policy,
    PolicyMapping,
    candidate_policies,
    policies_by_name,
    resolve_policies,
    with_unique_names,
)
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import EpisodeGroup
from forge_trainers.rl.prefetch import ahead_and_late
from forge_trainers.rl.tasks import Task, TaskSampler

if TYPE_CHECKING:
    from forge_trainers.run.processes import Processes

CollectGroup: TypeAlias = Callable[[Task, PolicyMapping, Mapping[str, PolicyEngine]], Coroutine[Any, Any, EpisodeGroup]]
"""Collects one group of a task with these policies and engines."""

_MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this value, and reports it only in its log."""


def check_trainable(models: Mapping[str, Policy], max_staleness: int = 0) -> None:
    """Raise ValueError if the learner cannot compute the distribution that a trainable policy samples from.

    The policy truncates, penalizes or constrains its distribution, is greedy, or changes its temperature although a
    batch may hold groups of two steps.
    """
    for name, policy in models.items():
        if not policy.trainable:
            continue
        sampling = policy.sampling
        if sampling.temperature == 0:
            raise ValueError(
                f"policy {name!r} samples with temperature=0, always the most probable token, so the episodes of a "
                "group would not differ and nothing could be learned. Training needs a temperature above 0"
            )
        lowest = min(sampling.temperature, sampling.initial_temperature or sampling.temperature)
        if lowest < _MIN_TEMPERATURE:
            raise ValueError(
                f"policy {name!r} samples with temperature={lowest}. vLLM samples at {_MIN_TEMPERATURE} or above, so "
                f"the learner would compute another distribution. Training needs at least {_MIN_TEMPERATURE}"
            )
        if sampling.logit_settings:
            settings = ", ".join(f"{key}={value!r}" for key, value in sampling.logit_settings.items())
            raise ValueError(
                f"policy {name!r} samples with {settings}. Training needs the model's full distribution, changed only "
                "by the temperature. The learner computes each token's probability from all logits, without the tokens "
                "that the sampler excluded or penalized, so the gradient would be wrong. Remove it, or set "
                "trainable=False"
            )
        if sampling.initial_temperature is not None and ahead_and_late(max_staleness)[1]:
            raise ValueError(
                f"policy {name!r} changes its temperature, and with max_staleness={max_staleness} a batch may hold "
                "groups of two steps, at two temperatures. Set max_staleness to 0 or 1, or remove initial_temperature"
            )
        if policy.constrain_actions:
            raise ValueError(
                f"policy {name!r} is trainable and constrains its actions. The sampler's log-probabilities would "
                "be those of the constrained distribution, which the learner does not compute: set trainable=False "
                "or constrain_actions=False"
            )


def at_step(policies: Any, step: int) -> Any:
    """Return a policy, or a policy mapping, with the temperature of a training step."""
    if isinstance(policies, Mapping):
        return {agent: at_step(policy, step) for agent, policy in policies.items()}
    if not isinstance(policies, AnyPolicy):
        return lambda agent, seed: at_step(policies(agent, seed), step)
    if not isinstance(policies, Policy) or policies.sampling.initial_temperature is None:
        return policies
    return replace(policies, sampling=policies.sampling.at_step(step))


class RunPolicies:
    """The policies of a run and their assignment to agents: one policy, one per agent, or a function of agent and seed.

    The assignment does not change, unlike that of `LeaguePolicies`.
    """

    def __init__(self, policies: PolicyMapping) -> None:
        self._policies = policies = with_unique_names(policies)
        if isinstance(policies, Mapping):
            check_trainable({policy.name: policy for policy in policies.values() if isinstance(policy, Policy)})
        elif isinstance(policies, Policy):
            check_trainable({policies.name: policies})

    def declared(self, agents: Mapping[str, tuple[str, ...]], *, partial: bool = False) -> dict[str, AnyPolicy]:
        """Return every policy of the run by name. Each `Policy` gets an engine.

        With `partial`, the run has more environments than `agents`, so policies of other agents are no error.
        """
        names = dict.fromkeys(agent for each in agents.values() for agent in each)
        if partial and isinstance(self._policies, Mapping):
            names |= dict.fromkeys(self._policies)
        candidate_policies(self._policies, tuple(names))  # refuses a function whose policies have equal names
        return policies_by_name(self._policies, tuple(names))

    def mapping(self, agents: Sequence[str], seed: int) -> Mapping[str, AnyPolicy]:
        """Return the policy of each agent in an episode."""
        return resolve_policies(self._of(agents), agents, seed)

    def agents_by_policy(self, agents: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
        """Return the agents that each policy may play."""
        result: dict[str, list[str]] = {}
        for names in agents.values():
            for agent, policies in candidate_policies(self._of(names), names).items():
                for name in dict.fromkeys(policy.name for policy in policies):
                    if agent not in result.setdefault(name, []):
                        result[name].append(agent)
        return result

    def is_zero_sum_self_play(self, sampler: TaskSampler, trained: Collection[str]) -> bool:
        """Return whether `trained` policies play all agents of games with several agents and the tag zero-sum.

        Their mean reward is then constant, however well they play.
        """
        zero_sum = all("zero-sum" in getattr(spec, "tags", ()) for spec in sampler.specs.values())
        several = all(len(agents) > 1 for agents in sampler.agents.values())
        return zero_sum and several and self.agents_by_policy(sampler.agents).keys() <= set(trained)

    def check_oracles(self, sampler: TaskSampler, declared: Mapping[str, AnyPolicy]) -> None:
        """Raise ValueError if an `Oracle` may play an environment that has no scripted policy."""
        oracles = {name for name, policy in declared.items() if isinstance(policy, Oracle)}
        for env_id, agents in sampler.agents.items() if oracles else ():
            if oracles & self.agents_by_policy({env_id: agents}).keys():
                oracle_of(sampler.specs[env_id], env_id)

    def settings(self) -> dict[str, Any]:
        """Return additional settings for config.yaml."""
        return {}

    async def collect(
        self,
        tasks: Sequence[Task],
        collect_group: CollectGroup,
        processes: Processes,
        *,
        step: int | None = None,
        resample: int = 0,
    ) -> list[EpisodeGroup]:
        """Collect the groups of a step, of its resampling round `resample`, or of an evaluation if `step` is None."""
        return await all_or_first_error(
            collect_group(task, self._of(task.agents), processes.policy_engines) for task in tasks
        )

    def measured(self, groups: Sequence[EpisodeGroup]) -> Sequence[EpisodeGroup]:
        """Return the groups, with the rewards that count in the mean reward."""
        return groups

    async def record(self, step: int, groups: Sequence[EpisodeGroup], processes: Processes) -> dict[str, float]:
        """Record a step after training. Returns metrics."""
        return {}

    def _of(self, agents: Sequence[str]) -> PolicyMapping:
        """Return the policies of an environment's agents."""
        if isinstance(self._policies, Mapping):
            return {agent: self._policies[agent] for agent in agents}
        return self._policies
