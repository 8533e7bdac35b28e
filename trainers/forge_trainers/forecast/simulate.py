"""Prediction of a run: step time and idle fractions on other hardware, from short measured runs."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_agents.files import user_path
from forge_agents.settings import named_arguments, settings_class
from forge_trainers.forecast.measured import TO_MEASURE, plan_of, read_run
from forge_trainers.forecast.model import Measurement, Plan, evaluation_s, step_times
from forge_trainers.run_file import RunConfig

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Expected times of a run. Seconds are those of a warm step."""

    step_s: float
    """The whole step. With asynchronous rollouts the stages overlap, and the step is shorter than their sum."""
    collect_s: float
    score_s: float
    learn_s: float
    sync_s: float
    engines_idle: float
    """Idle fraction of the engines, in [0, 1]."""
    learner_idle: float
    """Idle fraction of the learner, in [0, 1]."""
    tokens_per_s: float
    """Sampled tokens per second."""
    steps: int
    """Steps of the whole run."""
    hours: float
    """Duration of the whole run with evaluations, without startup and checkpoints."""
    engine_gpus: int
    """GPUs of all engines. 0: the measured hardware."""
    learner_gpus: int
    """GPUs of all learners. 0: the measured hardware."""
    assumptions: Sequence[str]

    def json(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)

    def table(self) -> Table:
        """Return a table with a row per quantity."""
        from rich.table import Table

        rows = {
            "step": f"{self.step_s:.2f} s",
            "  collect": f"{self.collect_s:.2f} s",
            "  score": f"{self.score_s:.2f} s",
            "  learn": f"{self.learn_s:.2f} s",
            "  sync": f"{self.sync_s:.2f} s",
            "engines idle": f"{self.engines_idle:.0%}",
            "learner idle": f"{self.learner_idle:.0%}",
            "sampled tokens": f"{self.tokens_per_s:,.0f} per second",
            "run": f"{self.steps} steps in {self.hours:.2f} hours",
        }
        if self.learner_gpus:
            rows["GPUs"] = f"{self.engine_gpus} for engines, {self.learner_gpus} for the learner"
        table = Table("quantity", "predicted", title="prediction")
        for row in rows.items():
            table.add_row(*row)
        return table


@settings_class
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Hardware that a run is predicted for."""

    gpus: int = 0
    """Number of GPUs, one for each process of engines and learners. 0 (default): the measured machine."""
    gpus_per_host: int = 8
    """GPUs of each host. The ranks of one engine are on one host."""
    learner_scaling: float = 0.9
    """Fraction of the ideal speedup that each doubling of the learner's GPUs keeps, in [0.5, 1]."""
    cores: float | None = None
    """CPU cores that engines and learner share. None: this machine's cores if the runs were measured on CPU. With GPUs
    none are shared."""
    gpu_gb: float = 80.0
    """Memory of each GPU in GB (1e9 bytes), for the question whether a run fits."""
    host_gb: float | None = None
    """Free memory of each host in GB, for the same question. None: not checked."""

    def __post_init__(self) -> None:
        allowed = {
            "gpus": (self.gpus >= 0, "at least 0 (0: the measured machine)"),
            "gpus_per_host": (self.gpus_per_host >= 1, "at least 1"),
            "learner_scaling": (0.5 <= self.learner_scaling <= 1, "in [0.5, 1]; 0.5 means no speedup"),
            "cores": (self.cores is None or self.cores > 0, "above 0"),
            "gpu_gb": (0 < self.gpu_gb < math.inf, "finite and above 0"),
            "host_gb": (self.host_gb is None or 0 < self.host_gb < math.inf, "above 0, or None if it is not known"),
        }
        for name, (holds, expected) in allowed.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)} must be {expected}")


@named_arguments
def simulate(
    run: RunConfig, *, measured: Sequence[str | os.PathLike[str]] = (), hardware: Hardware | None = None
) -> Prediction:
    """Predict a run from measured ones.

    Args:
        run: Settings, as ``forge-agents train`` takes them.
        measured: Folders of short synchronous runs of the same environment and policies, whose predictions are
            averaged. Empty: the run's `out_dir`.
        hardware: Hardware of the run. None: the measured machine.

    Raises:
        RunFolderError: A folder holds no synchronous run, or too short a run.
        ValueError: The runs have other environments or policies, or there are too few GPUs.
    """
    hardware = hardware or Hardware()
    if not measured and not (user_path(run.out_dir) / "metrics.jsonl").is_file():
        fits = f". Whether it fits needs no measurement: --gpus {hardware.gpus} --model 8b" * bool(hardware.gpus)
        raise ValueError(
            f"no measured run: out_dir={run.out_dir} holds none. Train a few steps, keep their episodes, and name the "
            f"folder: {TO_MEASURE}; then --measured runs/measured{fits}"
        )
    runs = [read_run(folder, cores=hardware.cores) for folder in measured or [run.out_dir]]
    _check_alike(runs)
    plan = planned(run, runs[0], hardware)
    if hardware.gpus:
        plan = on_gpus(plan, runs[0], hardware)
    predictions = [_predict(run, each, plan, hardware) for each in runs]
    floats = [name for name, value in predictions[0].json().items() if isinstance(value, float)]
    means: dict[str, Any] = {name: statistics.fmean(getattr(each, name) for each in predictions) for name in floats}
    return dataclasses.replace(predictions[0], **means)


def _check_alike(runs: Sequence[Measurement]) -> None:
    for name, values in (
        ("environments", {", ".join(sorted(run.env_ids)) for run in runs}),
        ("kinds of device", {"GPU" if run.on_gpu else "CPU" for run in runs}),
        ("values of learner_procs", {str(run.plan.learner_ranks) for run in runs}),
        ("values of engine.tp", {str(run.plan.engine_ranks) for run in runs}),
    ):
        if len(values) > 1:
            raise ValueError(f"measured runs have different {name}: {'; '.join(sorted(values))}. Simulate each alone")


def planned(run: RunConfig, measured: Measurement, hardware: Hardware) -> Plan:
    """Return the plan of a run on the measured machine.

    Raises:
        ValueError: The run has a league, or other environments or policies than the measured runs.
    """
    if run.league is not None:
        raise ValueError("a run with a league cannot be predicted, because its opponents change engines. Remove league")
    env_ids = {run.env} if isinstance(run.env, str) else set(run.env)
    # the part before a colon names a module to import
    if {name.rpartition(":")[2] for name in env_ids} != {name.rpartition(":")[2] for name in measured.env_ids}:
        raise ValueError(
            f"the measured runs have the environments {', '.join(sorted(measured.env_ids))}, this run has "
            f"{', '.join(sorted(env_ids))}. Measure the same environments"
        )
    mapping = run.policy_mapping
    names = set(mapping.values()) if isinstance(mapping, dict) else {mapping}
    policies = {name: dataclasses.asdict(policy) for name, policy in run.policies.items() if name in names}
    if set(policies) != set(measured.plan.homes):
        raise ValueError(
            f"the measured runs have the policies {', '.join(sorted(measured.plan.homes))}, this run has "
            f"{', '.join(sorted(policies))}. Measure the same policies"
        )
    on_gpu = measured.on_gpu or bool(hardware.gpus)
    cores = math.inf if on_gpu else hardware.cores or float(os.cpu_count() or 1)
    plan = plan_of(policies, dataclasses.asdict(run.trainer), cores=cores)
    if not plan.trained:
        raise ValueError("no agent has a trainable policy, so there is no learner to predict")
    return plan


def on_gpus(plan: Plan, measured: Measurement, hardware: Hardware) -> Plan:
    """Return a plan whose engines and learners have a GPU for each process.

    Raises:
        ValueError: There are too few GPUs, or an engine has more ranks than a host has GPUs.
    """
    engine_gpus, learner_gpus = _gpus_of(plan)
    if engine_gpus + learner_gpus > hardware.gpus:
        raise ValueError(
            f"gpus={hardware.gpus}: the engines need {engine_gpus} and the learner {learner_gpus}. Change "
            "engine.replicas, engine.tp or learner_procs, or give more GPUs"
        )
    if plan.engine_ranks > hardware.gpus_per_host:
        raise ValueError(
            f"engine.tp={plan.engine_ranks}: the ranks of one engine are on one host, and a host has "
            f"{hardware.gpus_per_host} GPUs. Lower engine.tp"
        )
    # on a CPU all learners together had one host
    ratio = plan.learner_ranks / measured.plan.learner_ranks * (1 if measured.on_gpu else plan.learners)
    speed = ratio ** (1 + math.log2(hardware.learner_scaling))
    return dataclasses.replace(plan, learner_speed=speed, engine_threads=math.inf)


def _gpus_of(plan: Plan) -> tuple[int, int]:
    """Return the numbers of processes of all engines and of all learners."""
    return len(set(plan.homes.values())) * plan.replicas * plan.engine_ranks, plan.learners * plan.learner_ranks


def _predict(run: RunConfig, measured: Measurement, plan: Plan, hardware: Hardware) -> Prediction:
    times = step_times(plan, measured)
    hours = (run.steps * times.step_s + _evaluations_s(run, measured, plan)) / 3600
    engine_gpus, learner_gpus = _gpus_of(plan) if hardware.gpus else (0, 0)
    return Prediction(
        step_s=times.step_s,
        collect_s=times.collect_s,
        score_s=times.score_s,
        learn_s=times.learn_s,
        sync_s=times.sync_s,
        engines_idle=max(0.0, 1 - times.collect_s / times.step_s),
        learner_idle=max(0.0, 1 - (times.learn_s + times.publish_s) / times.step_s),
        tokens_per_s=times.tokens / times.step_s,
        steps=run.steps,
        hours=hours,
        engine_gpus=engine_gpus,
        learner_gpus=learner_gpus,
        assumptions=_assumptions(run, measured, hardware),
    )


def _evaluations_s(run: RunConfig, measured: Measurement, plan: Plan) -> float:
    """Return the seconds of all evaluations. During each but the last, the next step is collected."""
    if not run.trainer.eval_every:
        return 0.0
    count = math.ceil(run.steps / run.trainer.eval_every) - 1
    episodes = run.trainer.eval_episodes
    seconds = [evaluation_s(plan, measured, episodes, alongside=flag) for flag in (True, False)]
    return count * seconds[0] + seconds[1]


def _assumptions(run: RunConfig, measured: Measurement, hardware: Hardware) -> tuple[str, ...]:
    assumptions = [
        "episodes are as long as the measured ones, or as max_tokens allows",
        "the same fraction of groups is informative, and microbatches of another size cost as much per position",
        "nothing fails; startup, checkpoints and logging take no time",
        "a stage takes its mean time, and engines and learner overlap without waiting for single episodes",
    ]
    ranks, before = run.trainer.engine.tp, measured.plan.engine_ranks
    if ranks != before:
        assumptions.append(f"an engine of {ranks} rank(s) is as fast as the measured engines of {before}")
    if hardware.gpus:
        speedup = 2 * hardware.learner_scaling
        assumptions += [
            f"every engine replica has {ranks} GPU(s) of the measured kind, and engines never run out of cache",
            f"twice the GPUs make the learner {speedup:.2f} times as fast (learner_scaling)",
            "weights are transferred at the measured speed, to half of the replicas at a time",
        ]
        if not measured.on_gpu:
            assumptions.append("stages were measured on a CPU, and a GPU counts as this host. Measure on one GPU")
    elif (procs := run.trainer.learner_procs) != measured.plan.learner_ranks:
        assumptions.append(f"the learner takes as long with {procs} ranks as with {measured.plan.learner_ranks}")
    return tuple(assumptions)
