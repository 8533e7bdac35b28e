"""What ``config.yaml`` says of a GRPO run: all that decides what the run does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from forge_agents.bench.fingerprints import with_content
from forge_agents.envs import registry
from forge_agents.envs.spec import EnvSpec
from forge_agents.policy import AnyPolicy, Policy
from forge_agents.runtime.hosts import Hosts
from forge_trainers.losses.registry import find_loss
from forge_trainers.records.description import describe
from forge_trainers.records.run_folder import hashes_of_models, installed_packages
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.credit import Credit
from forge_trainers.rl.tasks import TaskSampler


def run_settings(
    sampler: TaskSampler,
    players: Mapping[str, AnyPolicy],
    config: GRPOConfig,
    *,
    reward: Any,
    seats: Any,
    steps: int,
    hosts: Hosts,
) -> dict[str, Any]:
    """Settings of a run as plain values, for ``config.yaml`` and for experiment trackers.

    Args:
        sampler: The environments, with their arguments.
        players: Every player of the run by name.
        config: Settings of the trainer.
        reward: Description of the reward; None is the environment's own.
        seats: Description of the function that chooses players; None where none was given.
        steps: Optimizer steps of the run.
        hosts: Where processes run.
    """
    models = {name: player for name, player in players.items() if isinstance(player, Policy)}
    others = {name: describe(player) for name, player in players.items() if name not in models}
    loss = describe(find_loss(config.learner.loss))
    return {
        "method": "grpo",
        "env": list(sampler.env_ids),
        "env_args": _arguments(sampler.env_args),
        "environments": {name: _environment(sampler, name) for name in sampler.env_ids},
        **({} if sampler.curriculum is None else {"curriculum": dataclasses.asdict(sampler.curriculum)}),
        "policies": {name: dataclasses.asdict(policy) for name, policy in models.items()},
        "weights": hashes_of_models(models),
        **({"players": others} if others else {}),
        **({} if seats is None else {"seat_function": seats}),
        "reward": reward,
        "loss": loss,
        "steps": steps,
        "trainer": _trainer(config),
        "mesh": describe(dataclasses.asdict(hosts)),
        "packages": installed_packages(),
    }


def _environment(sampler: TaskSampler, env_id: str) -> dict[str, Any]:
    """The class or factory of an environment, its registered arguments and its share of the groups."""
    facts: dict[str, Any] = {"weight": sampler.weights[env_id]}
    if (factory := sampler.factory) is not None:
        return {**facts, **describe(factory)}
    spec: EnvSpec = registry.spec(env_id)
    arguments = {"max_turns": spec.max_turns, "isolation": spec.isolation, "arguments": _arguments(spec.kwargs)}
    return {**facts, **describe(spec.load()), **arguments}


def _arguments(given: Mapping[str, Any]) -> Any:
    """Arguments of an environment; of files and data sets of tasks also a hash of what they hold."""
    return describe({name: with_content(value) for name, value in given.items()})


def _trainer(config: GRPOConfig) -> dict[str, Any]:
    """Settings of the trainer; a rule for credit that the user wrote with its class and source."""
    plain = dataclasses.replace(config, learner=config.learning, credit=None)
    own = config.credit
    credit = dataclasses.asdict(own) if type(own) is Credit else describe(own)
    return {**dataclasses.asdict(plain), "credit": credit}
