"""Everything a call of the trainer knows before processes start: environments, policies, models and settings."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from forge_agents.bench.fingerprints import digest, with_content
from forge_agents.envs import registry
from forge_agents.envs.spec import EnvSpec
from forge_agents.errors import ArgumentError, ForgeError, ModelNotFoundError, did_you_mean
from forge_agents.models import resolve as models
from forge_agents.policy import AnyPolicy, Policy
from forge_agents.rollout.alternatives import ForkRule
from forge_agents.runtime.hosts import Hosts
from forge_agents.settings import values_of
from forge_agents.types import Reward
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.losses.registry import DISTILL, find_loss
from forge_trainers.records.description import describe
from forge_trainers.records.run_folder import check_resumable, hashes_of_models, installed_packages
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.counterfactual import fork_rule
from forge_trainers.rl.credit import Credit
from forge_trainers.rl.policy_mapping import RunPolicies, check_trainable
from forge_trainers.rl.rewards import is_env_reward, leaf_rewards, max_reward_of, reward_name
from forge_trainers.rl.tasks import TaskSampler
from forge_trainers.run.checkpoints import Checkpoints
from forge_trainers.run.plan import learner_groups, record_rates, resolved_settings

if TYPE_CHECKING:
    from forge_agents.bench.game_tree import GameTree

_log = logging.getLogger(__name__)
_MAX_LEFT_OUT = 0.05
"""Largest part of the held-out episodes without a reward with which a checkpoint may be the best one."""


class RunPlan:
    """Environments, policies and settings of one call of the trainer.

    With `partial`, the run has more environments than this call, such as in an evaluation. Raises ValueError if the
    learner cannot train a policy, or its settings conflict with the run's.
    """

    def __init__(
        self,
        sampler: TaskSampler,
        policies: RunPolicies,
        config: GRPOConfig,
        reward: Reward,
        *,
        partial: bool = False,
    ) -> None:
        self.sampler, self.policies, self.config, self.reward = sampler, policies, config, reward
        self._partial = partial
        self.players: dict[str, AnyPolicy] = policies.declared(sampler.agents, partial=partial)
        """All policies of the run by name."""
        self.models = {name: policy for name, policy in self.players.items() if isinstance(policy, Policy)}
        """The policies that need an engine."""
        policies.check_oracles(sampler, self.players)
        check_trainable(self.models, config.max_staleness)
        for policy in self.models.values():
            config.learner_of(policy)  # refuses conflicting overrides
        self.trained = [name for name, policy in self.models.items() if policy.trainable]
        """Names of the policies that learn."""
        if not partial:
            self._check_teachers()
            self._check_credit()
        self.uses_env_reward = is_env_reward(reward)
        self.credit, self.size_of = config.credit_rule, config.size_of
        self.regularized = [name for name in self.trained if self.size_of and self._is_regularized(name)]
        """Policies whose zero-variance trajectories count in a divergence or an entropy bonus."""
        self.games: list[GameTree] = []
        """Games in which the exploitability of policies is measured, see `make_games`."""
        self.forks = None if partial else self._fork_rule()
        """Decisions from which training episodes are played again. None: none."""

    def make_games(self) -> None:
        """Make the trees of `games`, if the run measures exploitability.

        Raises:
            ArgumentError: An environment has no tree, or answers of a policy cannot be measured.
        """
        if not (samples := self.config.exploitability_samples):
            return
        from forge_agents.bench.exploitability import check_sampling
        from forge_agents.bench.game_tree import GameTree

        sampler = self.sampler
        try:
            for name in self.trained:
                check_sampling(self.models[name], samples=samples)
            for env_id in sampler.env_ids:
                make = functools.partial(registry.make, env_id) if sampler.factory is None else sampler.factory
                self.games.append(GameTree(env_id, make=functools.partial(make, **sampler.env_args)))
        except ForgeError as cause:
            raise ArgumentError(
                f"exploitability cannot be measured: {cause}. Otherwise leave out exploitability_samples={samples}"
            ) from cause

    def _is_regularized(self, name: str) -> bool:
        learner = self.config.learner_of(self.models[name])
        return learner.kl_coef > 0 or learner.entropy_coef > 0

    def _fork_rule(self) -> ForkRule | None:
        not_forkable = self.sampler.not_forkable
        return fork_rule(self.credit, self.trained, players=self.players, not_forkable=not_forkable, reward=self.reward)

    @cached_property
    def loaded(self) -> dict[str, Policy]:
        """`models` as processes get them: a learner loads the teachers of the agents that its policies play."""
        if self._partial:
            return self.models
        folders = {name: models.local_folder(p.model) or Path(p.model) for name, p in self.models.items()}
        result = dict(self.models)
        for names in learner_groups(self.models, folders):
            agents = {agent for name in names for agent in self.agents_by_policy.get(name, ())}
            for name in names:
                teachers = self.config.learner_of(self.models[name]).teachers
                own = {agent: teacher for agent, teacher in teachers.items() if agent in agents}
                if own and len(own) < len(teachers):
                    learner = {**(self.models[name].learner or {}), "reference": own}
                    result[name] = dataclasses.replace(self.models[name], learner=learner)
        return result

    @cached_property
    def rewarded(self) -> list[str]:
        """Names of the policies that learn from advantages."""
        losses = {name: find_loss(self.config.learner_of(self.models[name]).loss).name for name in self.trained}
        return [name for name, loss in losses.items() if loss != DISTILL]

    @cached_property
    def agents_by_policy(self) -> dict[str, list[str]]:
        """The agents that each policy may play."""
        return self.policies.agents_by_policy(self.sampler.agents)

    @cached_property
    def learner_settings(self) -> dict[str, LearnerPlan]:
        """Settings of each learner, with its learning rate. Empty if a model is missing. The start reports this."""
        try:
            return resolved_settings(self.models, self.config)
        except ModelNotFoundError:
            return {}

    @cached_property
    def max_rewards(self) -> dict[str, float | None]:
        """Maximum reward by environment, or None if unknown."""
        sampler = self.sampler
        return {env_id: max_reward_of(self.reward, sampler.max_reward[env_id]) for env_id in sampler.env_ids}

    @cached_property
    def ranks_checkpoints(self) -> bool:
        """Whether exploitability is measured, or a higher held-out reward means better policies."""
        constant = self.uses_env_reward and self.policies.is_zero_sum_self_play(self.sampler, self.trained)
        return bool(self.config.exploitability_samples) or not constant

    def checkpoint_score(self, metrics: Mapping[str, float]) -> float | None:
        """Return the number whose highest value marks the best checkpoint, or None if it was not measured.

        The value is minus the exploitability, mean over policies, or else the held-out reward. A policy could raise the
        latter by failing where it would lose, so it does not count if many episodes failed or abstained.
        """
        names = ("eval/exploitability", *(f"eval/exploitability/{name}" for name in self.trained))
        if values := [metrics[name] for name in names if name in metrics]:
            return -sum(values) / len(values)
        if not self.ranks_checkpoints or "eval/reward" not in metrics:
            return None
        left_out, episodes = metrics["eval/failed"] + metrics.get("eval/abstained", 0), self.config.eval_episodes
        if left_out > _MAX_LEFT_OUT * episodes:
            _log.warning(
                "%d of %d held-out episodes failed or have no reward, so this checkpoint cannot be the best one: at "
                "most %.0f %% may be left out",
                *(left_out, episodes, 100 * _MAX_LEFT_OUT),
            )
            return None
        return metrics["eval/reward"]

    @property
    def model_by_agent(self) -> dict[str, str]:
        """The model of each agent, also by the names that a program uses. Of several models, the trained one."""
        names_of: dict[str, list[str]] = {}
        for name in sorted(self.models, key=lambda name: not self.models[name].trainable):
            for agent in self.agents_by_policy.get(name, ()):
                names_of.setdefault(agent, []).append(name)
        models = {
            agent: names[0]
            for agent, names in names_of.items()
            if len(names) == 1 or [self.models[name].trainable for name in names[:2]] == [True, False]
        }
        by_program = self.sampler.agents_by_model_name
        return models | {name: models[agent] for name, agent in by_program.items() if agent in models}

    def _check_teachers(self) -> None:
        """Raise ValueError unless teachers of agents are those of all agents that a policy plays."""
        agents = {agent for names in self.sampler.agents.values() for agent in names}
        learning = {agent for name in self.trained for agent in self.agents_by_policy.get(name, ())}
        for name in self.trained:
            teachers = self.config.learner_of(self.models[name]).teachers
            if not teachers or "" in teachers:
                continue
            if unknown := [agent for agent in teachers if agent not in agents]:
                raise ValueError(
                    f"policy {name!r}: learner.reference names {unknown[0]!r}. The agents are "
                    f"{', '.join(sorted(agents))}.{did_you_mean(unknown[0], agents)}"
                )
            if unused := [agent for agent in teachers if agent not in learning]:
                raise ValueError(
                    f"policy {name!r}: learner.reference names a teacher of {unused[0]!r}, which no policy that learns "
                    "plays. Leave it out"
                )
            if missing := [agent for agent in self.agents_by_policy.get(name, ()) if agent not in teachers]:
                raise ValueError(
                    f"policy {name!r} plays {', '.join(missing)}, and learner.reference has teachers of "
                    f"{', '.join(teachers)} only. Name a teacher for each. The start model is one, too"
                )

    def _check_credit(self) -> None:
        """Raise ValueError for a credit without effect.

        No loss reads it and it would only drop samples or play alternatives, there are no rewards of turns to sum, or
        there are no several roles to balance.
        """
        if self.config.credit is not None and self.trained and not self.rewarded:
            raise ValueError(
                f"credit={self.config.credit!r:.200} has no effect: loss={DISTILL!r} reads no advantages. Leave credit "
                "out, or choose another loss"
            )
        turns = self.config.credit_rule.turns
        if turns != "own" and not any(callable(getattr(leaf, "assess", None)) for leaf, _ in leaf_rewards(self.reward)):
            raise ValueError(
                f"credit.turns={turns!r} has no effect: the reward {reward_name(self.reward)!r} gives one number for a "
                "trajectory. Leave it out, or choose a reward of turns, such as forge_verifiers.PerTurn or "
                "forge_trainers.rl.rewards.EnvTurnReward, the environment's reward turn by turn"
            )
        if self.config.credit_rule.balance_roles:
            self._check_balance()

    def _check_balance(self) -> None:
        """Raise ValueError if no policy has several roles to balance, or a loss does not sum over tokens."""
        roles = [
            self.policies.agents_by_policy({env: agents}).get(name, [])
            for name in self.rewarded
            for env, agents in self.sampler.agents.items()
        ]
        if max(map(len, roles), default=0) < 2:
            raise ValueError(
                "credit.balance_roles=True has no effect: each trained policy plays one agent of each environment at "
                f"most ({', '.join(sorted(set().union(*roles))) or 'none'}), and roles of different policies do not "
                "compete for a gradient. Leave it out, or train a policy that several agents share"
            )
        for name in self.rewarded:
            loss = find_loss(self.config.learner_of(self.models[name]).loss)
            if loss.reduction == "sequence_mean":
                raise ValueError(
                    "credit.balance_roles=True balances sums over tokens, and "
                    f"loss={loss.name!r} of policy {name!r} averages over each sequence first, so a role with short "
                    "responses would get most of the gradient. Leave it out, or choose a loss such as 'dapo'"
                )

    def _teachers(self) -> dict[str, dict[str, str]]:
        """Return hashes of teachers by policy and agent, for policies that have any."""
        all_teachers = {name: self.config.learner_of(self.models[name]).teachers for name in self.trained}
        return {
            name: hashes_of_models({agent or "all agents": Policy(model) for agent, model in teachers.items()})
            for name, teachers in all_teachers.items()
            if teachers
        }

    def check_resumable(self, folder: Path, checkpoints: Checkpoints) -> None:
        """Raise RunFolderError if the run in `folder` has other adapters, start weights, policies or reward states."""
        trained = {name: self.models[name] for name in self.trained}
        settings = {
            "method": "grpo",
            "policies": {name: dataclasses.asdict(policy) for name, policy in trained.items()},
            "weights": hashes_of_models(trained),
            "teachers": {name: {} for name in trained} | self._teachers(),
        }
        fixed = ["method", *(key for name in trained for key in (f"policies.{name}.lora", f"weights.{name}"))]
        fixed += [f"teachers.{name}" for name in trained]
        check_resumable(folder, settings, fixed)
        checkpoints.check_resumable(trained)

    def settings(self, *, reward: Any, policy_function: Any, steps: int, hosts: Hosts) -> dict[str, Any]:
        """Return all settings of the run as plain values, for ``config.yaml`` and for experiment trackers.

        `reward` and `policy_function` are descriptions. None is the environment's own reward, or no function.
        """
        sampler, config = self.sampler, self.config
        rule = config.credit  # a user's rule is recorded with its class and source
        trainer = {
            **values_of(config),
            "learner": dataclasses.asdict(config.learning),
            "engine": dataclasses.asdict(config.engine),
            "credit": dataclasses.asdict(rule) if type(rule) is Credit else describe(rule),
        }
        others = {name: describe(player) for name, player in self.players.items() if name not in self.models}
        settings = {
            "method": "grpo",
            "env": list(sampler.env_ids),
            "env_args": _arguments(sampler.env_args),
            "environments": {name: _environment(sampler, name) for name in sampler.env_ids},
            **({} if sampler.curriculum is None else {"curriculum": dataclasses.asdict(sampler.curriculum)}),
            "policies": {name: _settings_of(policy) for name, policy in self.models.items()},
            "weights": hashes_of_models(self.models),
            **({"teachers": teachers} if (teachers := self._teachers()) else {}),
            **({"players": others} if others else {}),
            **({} if policy_function is None else {"policy_function": policy_function}),
            "reward": reward,
            "loss": describe(find_loss(config.learner.loss)),
            "steps": steps,
            "trainer": trainer,
            "mesh": describe(dataclasses.asdict(hosts)),
            "packages": installed_packages(),
        }
        rates = {name: one.lr for name, one in self.learner_settings.items() if one.lr is not None}
        return record_rates(settings, rates) | {"policy_mapping": self.model_by_agent} | self.policies.settings()

    def measure(self, settings: Mapping[str, Any]) -> str:
        """Return a hash of the `settings` that held-out rewards depend on besides the weights."""
        names = ("players", "policy_function", "policy_mapping")
        policies = {
            name: {field: value for field, value in policy.items() if field != "learner"}
            for name, policy in settings["policies"].items()
        }
        frozen = {name: weights for name, weights in settings["weights"].items() if name not in self.trained}
        facts = {name: settings.get(name) for name in names} | {"frozen": frozen, "policies": policies}
        facts |= _scoring(settings) | {"episodes": self.config.eval_episodes}
        if league := settings.get("league"):
            facts["opponents"] = league.get("held_out") or league.get("anchors")
        if samples := self.config.exploitability_samples:
            facts["exploitability_samples"] = samples
        return digest(yaml.safe_dump(facts))

    def scoring(self, settings: Mapping[str, Any]) -> str:
        """Return a hash of the `settings` that rewards depend on, whoever plays."""
        return digest(yaml.safe_dump(_scoring(settings)))


def _scoring(settings: Mapping[str, Any]) -> dict[str, Any]:
    environments = {
        env_id: {name: fact for name, fact in facts.items() if name != "weight"}  # evaluations use all evenly
        for env_id, facts in settings["environments"].items()
    }
    return {"env_args": settings.get("env_args"), "reward": settings.get("reward"), "environments": environments}


def _settings_of(policy: Policy) -> dict[str, Any]:
    """Return the user's settings of a policy. Those of a `SnapshotPolicy` are the frozen start model's."""
    return {name: value for name, value in dataclasses.asdict(policy).items() if name in values_of(policy, Policy)}


def _environment(sampler: TaskSampler, env_id: str) -> dict[str, Any]:
    """Return class or factory of an environment, its registered arguments and its share of the groups."""
    facts: dict[str, Any] = {"weight": sampler.weights[env_id]}
    if (factory := sampler.factory) is not None:
        return {**facts, **describe(factory)}
    spec: EnvSpec = registry.spec(env_id)
    arguments = {"max_turns": spec.max_turns, "isolation": spec.isolation, "arguments": _arguments(spec.kwargs)}
    return {**facts, **describe(spec.load()), **arguments}


def _arguments(values: Mapping[str, Any]) -> Any:
    """Return arguments of an environment. Files and data sets of tasks with a hash of their content."""
    return describe({name: with_content(value) for name, value in values.items()})
