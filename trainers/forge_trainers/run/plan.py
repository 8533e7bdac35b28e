"""Resolved plan of a run's processes: which there are, and the settings that each of them receives."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from forge_agents.models import resolve as models
from forge_agents.policy import LoRA, Policy
from forge_agents.runtime.hosts import Hosts
from forge_agents.serving.client import names_of
from forge_agents.serving.config import EnginePlan
from forge_agents.serving.fleet import assign_engines
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.degrees import shards_of
from forge_trainers.learner.plan import MEMORY_DRIVEN, LearnerPlan
from forge_trainers.learner.rates import with_rate
from forge_trainers.records.run_folder import write_atomically
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.learner_settings import shared_settings

STORE = "weights"
"""Name of the weight store's process."""
_ANSWER_TIMEOUT_S = 600.0


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
        """Write ``plan.yaml``."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "plan.yaml", self.as_yaml())


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

    Raises:
        ModelNotFoundError: A model file is missing or incomplete.
    """
    threads = threads or Threads()
    _, adapters = assign_engines(policies, folders)
    engine_plans = {}
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
    learner_plans = {}
    for names in learner_groups(policies, folders):
        for name in names:
            learner_plans[name] = _learner_plan(
                policies[name],
                folders[name],
                config,
                placed=(learners or {}).get(learner_name(names)),
                dump_folder=out_dir / "learner" / name,
                threads=threads.learner,
            )
    return Plan(engines=engine_plans, learners=learner_plans)


def _answer_timeout_s(stage_timeout_s: float) -> float:
    """Return the timeout of one completion: 600 s, or a third of `stage_timeout_s` if that is longer.

    It is at most half of `stage_timeout_s`, so that a late completion fails its episode and not the run.
    """
    return min(stage_timeout_s / 2, max(_ANSWER_TIMEOUT_S, stage_timeout_s / 3))


def _learner_plan(
    policy: Policy,
    folder: Path,
    config: ProcessConfig,
    *,
    placed: LearnerPlan | None,
    dump_folder: Path,
    threads: int | None,
) -> LearnerPlan:
    settings = config.learner_of(policy)
    plan = LearnerPlan.of(
        settings,
        model=str(folder),
        lora=policy.lora,
        temperature=policy.sampling.temperature,
        seed=config.seed,
        dump_folder=str(dump_folder),
        max_sample_tokens=config.engine.max_model_len or models.context_of(folder),
        threads=settings.threads or threads,
    )
    by_memory = (placed or plan).with_memory()
    return with_rate(plan.with_memory(**{name: getattr(by_memory, name) for name in MEMORY_DRIVEN}))


def share_threads(cores: int, *, engines: int, ranks: int, overlap: bool) -> Threads:
    """Divide the cores of a host without GPUs among the processes that compute at the same time, at least 1 for each.

    Args:
        cores: Number of cores of the host.
        engines: Number of processes of all engines.
        ranks: Number of ranks of all learners.
        overlap: Whether engines compute while learners do.
    """
    half = cores // 2
    for_engines, for_learners = (half, cores - half) if overlap and ranks else (cores, cores)
    engine, learner = max(1, for_engines // max(1, engines)), max(1, for_learners // max(1, ranks))
    return Threads(engine=engine if engine < cores else None, learner=learner if learner < cores else None)


def threads_of(config: ProcessConfig, hosts: Hosts, *, engines: int, learners: int) -> Threads:
    """Return the threads of each process that names none: on one host without GPUs they divide its cores.

    Args:
        config: User settings.
        hosts: Hosts of the run.
        engines: Number of engines, replicas not counted.
        learners: Number of learners.
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
) -> tuple[dict[str, tuple[Path, Sequence[LoRA]]], dict[str, tuple[LearnerPlan, int]]]:
    """Return engines and learners of a run by the names of their processes, as placement needs them.

    Returns:
        For each engine its model folder and adapters. For each learner its settings and the number of policies that
        share it.
    """
    _, adapters = assign_engines(policies, folders)
    engines: dict[str, tuple[Path, Sequence[LoRA]]] = {
        process: (folders[home], tuple(adapters[home].values()))
        for home in adapters
        for process in names_of(home, config.engine.replicas)
    }
    learners = {}
    for names in learner_groups(policies, folders):
        plan = LearnerPlan.of(
            shared_settings([policies[name] for name in names], config),
            model=str(folders[names[0]]),
            lora=policies[names[0]].lora,
            max_sample_tokens=config.engine.max_model_len,
        )
        learners[learner_name(names)] = (plan, len(names))
    return engines, learners


def policies_by_process(
    policies: Mapping[str, Policy], folders: Mapping[str, Path], config: ProcessConfig
) -> dict[str, tuple[str, ...]]:
    """Return the policies of each engine and learner by the name of its processes."""
    homes, adapters = assign_engines(policies, folders)
    by_process = {learner_name(names): tuple(names) for names in learner_groups(policies, folders)}
    for home in adapters:
        served = tuple(name for name in policies if homes[name] == home)
        by_process.update(dict.fromkeys(names_of(home, config.engine.replicas), served))
    return by_process


def meshes_of(
    policies: Mapping[str, Policy], folders: Mapping[str, Path], config: ProcessConfig
) -> list[tuple[str, str, int]]:
    """Return name, role and number of processes of each process mesh that a run starts with."""
    _, adapters = assign_engines(policies, folders)
    engines = [name for home in adapters for name in names_of(home, config.engine.replicas)]
    learners = [learner_name(names) for names in learner_groups(policies, folders)]
    return [
        (STORE, "store", 1),
        *((name, "learner", config.learner_procs) for name in learners),
        *((name, "engines", config.engine.tp) for name in engines),
    ]


def check_hosts(
    meshes: Iterable[tuple[str, str, int]], hosts: Hosts, config: ProcessConfig, learners: Iterable[LearnerConfig]
) -> None:
    """Check that processes have different names and fit the hosts and the parallel degrees.

    Raises:
        ValueError: Two processes have one name, or their number does not fit. The message says what to do.
    """
    counts, roles = Counter[str](), dict[str, str]()
    for name, role, procs in meshes:
        counts[role] += procs
        if name in roles:
            raise ValueError(
                f"{name!r} would be the name of processes of the {roles[name]} and of the {role}. Both are named after "
                'policies, such as "hero" and "hero-learner"; rename one of the policies'
            )
        roles[name] = role
    hosts.check_processes("engines", counts["engines"])
    hosts.check_processes("learner", counts["learner"], each=config.learner_procs)
    for settings in learners:
        shards_of(settings, config.learner_procs)


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

