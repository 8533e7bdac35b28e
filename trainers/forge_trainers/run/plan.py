"""Resolved plan of a run's processes: which there are, and the settings that each of them receives."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from forge_agents.models import families
from forge_agents.models import resolve as models
from forge_agents.policy import Policy
from forge_agents.runtime.hosts import Hosts
from forge_agents.serving.client import names_of
from forge_agents.serving.config import EnginePlan
from forge_agents.serving.fleet import assign_engines
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.degrees import shards_of
from forge_trainers.learner.plan import MEMORY_DRIVEN, LearnerPlan
from forge_trainers.learner.rates import described, weak_rate, with_rate
from forge_trainers.records.run_folder import write_atomically
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.parts import Compute

_log = logging.getLogger(__name__)
STORE = "weights"
"""Name of the weight store's process."""
_ANSWER_TIMEOUT_S = 600.0
_OF_AN_ADAPTER = frozenset({
    "lr", "warmup_steps", "lr_decay", "lr_min_ratio", "weight_decay", "betas", "max_grad_norm",
    "optimizer_state_dtype", "loss", "clip", "sequence", "correction", "kl", "kl_coef", "entropy_coef",
    "num_iterations", "num_minibatches",
})  # fmt: skip
"""Fields in which adapters on one model may differ. The others belong to the model or its processes."""


@dataclass(frozen=True, kw_only=True)
class Threads:
    """CPU threads of each process. None leaves the number to the libraries."""

    engine: int | None = None
    learner: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings that the processes of a run receive. `resolve` computes them once."""

    engines: Mapping[str, EnginePlan]
    """By the name of the first policy that the engine serves."""
    learners: Mapping[str, LearnerPlan]
    """By policy."""

    def as_yaml(self) -> str:
        """Return the plan as YAML text, as in ``plan.yaml`` of the run folder."""
        plain = json.loads(json.dumps(asdict(self), default=str))
        return str(yaml.safe_dump(plain, sort_keys=False, width=120))

    def write(self, folder: Path) -> None:
        """Write ``plan.yaml``, with a warning if that fails: an evaluation needs no writable folder."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "plan.yaml", self.as_yaml())
        except OSError as cause:
            _log.warning("the plan of the processes is not recorded: %s", cause.__cause__ or cause)


def resolve(
    policies: Mapping[str, Policy],
    folders: Mapping[str, Path],
    config: ProcessConfig,
    *,
    out_dir: Path,
    engines: Mapping[str, EnginePlan] | None = None,
    learners: Mapping[str, LearnerPlan] | None = None,
    threads: Threads | None = None,
) -> Plan:
    """Compute the settings of every process from the user's settings, the policies and the machine.

    Args:
        policies: By name.
        folders: Model folder of each policy.
        config: User settings.
        out_dir: Run folder.
        engines: Settings after placement, by the name of the engine's processes. None: without placement.
        learners: Settings after placement, by the name of the learner's processes. None: without placement.
        threads: CPU threads of processes whose settings name none.
    """
    threads = threads or Threads()
    _, adapters = assign_engines(policies, folders)
    engine_plans, learner_plans = {}, {}
    for home in adapters:
        placed = (engines or {}).get(names_of(home, config.engine.replicas)[0], config.engine)
        engine_plans[home] = EnginePlan.of(
            placed,
            model=str(folders[home]),
            adapters=adapters[home],
            seed=config.seed,
            answer_timeout_s=_answer_timeout_s(config.stage_timeout_s),
            threads=placed.threads or threads.engine,
        )
    for names in learner_groups(policies, folders):
        for name in names:
            settings = _located(config.learner_of(policies[name]))
            plan = LearnerPlan.of(
                settings,
                model=str(folders[name]),
                lora=policies[name].lora,
                temperature=policies[name].sampling.temperature,
                seed=config.seed,
                dump_folder=str(out_dir / "learner" / name),
                max_sample_tokens=config.engine.max_model_len or families.context_of(folders[name]),
                threads=settings.threads or threads.learner,
            )
            by_memory = (learners or {}).get(learner_name(names), plan).with_memory()
            memory = {field: getattr(by_memory, field) for field in MEMORY_DRIVEN}
            learner_plans[name] = with_rate(plan.with_memory(**memory))
    return Plan(engines=engine_plans, learners=learner_plans)


def _answer_timeout_s(stage_timeout_s: float) -> float:
    """Return the timeout of one completion: 600 s, or a third of `stage_timeout_s` if that is longer.

    The timeout is at most half of `stage_timeout_s`, so that a late completion fails its episode and not the run.
    """
    return min(stage_timeout_s / 2, max(_ANSWER_TIMEOUT_S, stage_timeout_s / 3))


def share_threads(cores: int, *, engines: int, ranks: int, overlap: bool) -> Threads:
    """Divide the cores of a host without GPUs among processes that compute at the same time, at least 1 for each.

    With `overlap`, engines compute while the ranks of learners do.
    """
    half = cores // 2
    for_engines, for_learners = (half, cores - half) if overlap and ranks else (cores, cores)
    engine, learner = max(1, for_engines // max(1, engines)), max(1, for_learners // max(1, ranks))
    return Threads(engine=engine if engine < cores else None, learner=learner if learner < cores else None)


def threads_of(config: ProcessConfig, hosts: Hosts, *, engines: int, learners: int) -> Threads:
    """Return the threads of processes that name none: on one host without GPUs they divide its cores.

    `engines` counts no replicas.
    """
    import torch

    if hosts.kind != "local" or torch.accelerator.is_available():
        return Threads()
    return share_threads(
        len(os.sched_getaffinity(0)),
        engines=engines * config.engine.replicas * config.engine.tp,
        ranks=learners * config.learner_procs,
        overlap=config.max_staleness > 0,
    )


def compute_processes(
    policies: Mapping[str, Policy], folders: Mapping[str, Path], config: ProcessConfig
) -> list[Compute]:
    """Return the learners and the engines of a run."""
    homes, adapters = assign_engines(policies, folders)
    processes = []
    for names in learner_groups(policies, folders):
        first, folder = policies[names[0]], folders[names[0]]
        plan = LearnerPlan.of(
            _located(shared_settings([policies[name] for name in names], config)),
            model=str(folder),
            lora=first.lora,
            max_sample_tokens=config.engine.max_model_len,
        )
        ranks = config.learner_procs
        name, trained = learner_name(names), tuple(names)
        processes.append(Compute(name=name, policies=trained, folder=folder, ranks=ranks, learner=plan))
    for home in adapters:
        served, own = tuple(name for name in policies if homes[name] == home), tuple(adapters[home].values())
        processes += [
            Compute(name=name, policies=served, folder=folders[home], ranks=config.engine.tp, adapters=own)
            for name in names_of(home, config.engine.replicas)
        ]
    return processes


def _located(settings: LearnerConfig) -> LearnerConfig:
    """Return the settings with the folders of teachers that are on this machine."""
    return settings.with_teachers(lambda name: str(models.local_folder(name) or name))


def teachers_of(policies: Iterable[Policy], config: ProcessConfig) -> list[str]:
    """Return the names or folders of the teachers of trainable policies, without duplicates."""
    trained = [policy for policy in policies if policy.trainable]
    return list(dict.fromkeys(name for policy in trained for name in config.learner_of(policy).teachers.values()))


def meshes_of(processes: Iterable[Compute]) -> list[tuple[str, str, int]]:
    """Return name, role and number of processes of each process mesh that a run starts with."""
    return [(STORE, "store", 1), *((each.name, each.role, each.ranks) for each in processes)]


def check_hosts(processes: Sequence[Compute], hosts: Hosts, config: ProcessConfig) -> None:
    """Raise ValueError if processes have equal names, or do not fit the hosts and the parallel degrees."""
    counts, roles = Counter[str](), dict[str, str]()
    for name, role, procs in meshes_of(processes):
        counts[role] += procs
        if name in roles:
            raise ValueError(
                f"{name!r} would be the name of processes of the {roles[name]} and of the {role}. Both are named after "
                'policies, such as "hero" and "hero-learner". Rename one of the policies'
            )
        roles[name] = role
    hosts.check_processes("engines", counts["engines"])
    hosts.check_processes("learner", counts["learner"], each=config.learner_procs)
    for each in processes:
        if each.learner is not None:
            shards_of(each.learner, each.ranks)


def learner_groups(policies: Mapping[str, Policy], folders: Mapping[str, Path]) -> list[list[str]]:
    """Return the names of trainable policies, grouped by learner: adapters of one shape on one model share one."""
    groups: dict[object, list[str]] = {}
    for name, policy in policies.items():
        if policy.trainable:
            key: object = name if policy.lora is None else (folders[name], policy.lora)
            groups.setdefault(key, []).append(name)
    return [*groups.values()]


def learner_name(policies: Iterable[str]) -> str:
    """Return the name of the processes that train `policies`."""
    return f"{'-'.join(policies)}-learner"


def shared_settings(policies: Sequence[Policy], config: ProcessConfig) -> LearnerConfig:
    """Return the settings of the first policy. Raises ValueError if the others cannot share its learner."""
    first, *others = [config.learner_of(policy) for policy in policies]
    for policy, settings in zip(policies[1:], others, strict=True):
        for field in fields(settings):
            value, first_value = getattr(settings, field.name), getattr(first, field.name)
            if value != first_value and field.name not in _OF_AN_ADAPTER:
                raise ValueError(
                    f"policies {policies[0].name!r} and {policy.name!r} have adapters on one model and share its "
                    f"learner, but learner.{field.name} is {first_value!r} for one and {value!r} for the other. Give "
                    "both the same value, or adapters of different shapes, which get separate learners"
                )
    return first


def resolved_settings(policies: Mapping[str, Policy], config: ProcessConfig) -> dict[str, LearnerPlan]:
    """Return the learner settings of each trainable policy, with model, adapter and learning rate."""
    return {
        name: with_rate(
            LearnerPlan.of(config.learner_of(policy), model=str(models.resolve(policy.model)), lora=policy.lora)
        )
        for name, policy in policies.items()
        if policy.trainable
    }


def record_rates(settings: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, Any]:
    """Return plain `settings` for config.yaml with the learning rates in use, by policy.

    A rate that all trainable policies share is written to ``trainer.learner``, other rates to
    ``policies.NAME.learner``.
    """
    trainer, policies = settings["trainer"], settings["policies"]
    if trainer["learner"]["lr"] is not None:
        return dict(settings)
    if len({*rates.values()}) == 1 and not any("lr" in (policy["learner"] or {}) for policy in policies.values()):
        learner = {**trainer["learner"], "lr": next(iter(rates.values()))}
        return {**settings, "trainer": {**trainer, "learner": learner}}
    changed = {
        name: {**policies[name], "learner": {**(policies[name]["learner"] or {}), "lr": rate}}
        for name, rate in rates.items()
    }
    return {**settings, "policies": {**policies, **changed}}


def rate_line(settings: LearnerPlan, *, chosen: bool) -> str:
    """Return a line about the learning rate of a policy. `chosen` is whether the user set it."""
    description = described(settings, models.weight_count(models.resolve(settings.model)))
    return f"lr {settings.lr:g}" + ("" if chosen else f", the default for {description}")


def weak_rates(resolved: Mapping[str, LearnerPlan], steps: int) -> list[str]:
    """Return warnings about learning rates that are too low to change a model within `steps` training steps."""
    warnings = ((name, weak_rate(settings, steps)) for name, settings in resolved.items())
    return [f"policy {name}: {warning}" for name, warning in warnings if warning]
