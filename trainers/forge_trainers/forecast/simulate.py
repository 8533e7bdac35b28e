"""Prediction of a run: step time and idle fractions on other hardware, from short measured runs.

The model scales the measured seconds of each stage with its work:

- A third of the engines' seconds scales with the waves of episodes that run at once, two thirds with the episodes of
  each engine. The seconds in which engines wait for environments scale with the waves.
- The passes of a learner scale with the episodes that it trains on, and its other seconds are fixed.
- Scoring scales with episodes. Publishing weights is fixed, and fetching them scales with the replicas that take turns.
- Synchronous stages add up. Asynchronous rollouts take the slower of generation and training. On CPU both share the
  cores: engines use half of them, and a step takes at least the core seconds of both divided by the cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_agents import safe_yaml
from forge_agents.errors import RunFolderError
from forge_agents.files import check_plain_files, user_path
from forge_agents.serving.client import waves
from forge_agents.serving.fleet import assign_engines
from forge_agents.settings import named_arguments, settings_class
from forge_trainers.records.run_folder import read_rows
from forge_trainers.run.plan import learner_groups
from forge_trainers.run_file import RunConfig

if TYPE_CHECKING:
    from rich.table import Table

_TO_MEASURE = "forge-agents train CONFIG --steps 8 --trainer.max_staleness 0 --out_dir runs/measured"
_FIRST_STEPS = 1
"""Steps that are left out, because memory is new and caches are cold in them."""
_PER_WAVE = 1 / 3
"""Fraction of the engines' seconds that scales with waves of episodes. The rest scales with the episodes."""
_GROUPS = ("groups/used", "groups/zero_variance", "groups/failed", "groups/abstained")
"""Metrics that add up to the groups of a step."""
_PUBLISH = 0.4
"""Fraction of a sync that is the transfer to the store, as `make perf` measures it."""


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
    gpu_gb: float = 80.0
    """Memory of each GPU in GB (1e9 bytes), for the question whether a run fits."""
    host_gb: float | None = None
    """Free memory of each host in GB, for the same question. None: not checked."""

    def __post_init__(self) -> None:
        allowed = {
            "gpus": (self.gpus >= 0, "at least 0 (0: the measured machine)"),
            "gpus_per_host": (self.gpus_per_host >= 1, "at least 1"),
            "learner_scaling": (0.5 <= self.learner_scaling <= 1, "in [0.5, 1]; 0.5 means no speedup"),
            "gpu_gb": (0 < self.gpu_gb < math.inf, "finite and above 0"),
            "host_gb": (self.host_gb is None or 0 < self.host_gb < math.inf, "above 0, or None if it is not known"),
        }
        for name, (holds, expected) in allowed.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)} must be {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Expected times of a run. Seconds are those of a warm step."""

    step_s: float
    """The whole step. With asynchronous rollouts the stages overlap, and the step is shorter than their sum."""
    collect_s: float
    score_s: float
    """Scoring, and the collection of resampled groups."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a run that determine the work of a step."""

    env_ids: frozenset[str]
    policies: frozenset[str]
    """Descriptions of the policies: name, trained weights, maximum number of tokens."""
    group_size: int
    groups: int
    max_staleness: int
    replicas: int
    """Replicas of each engine."""
    tp: int
    """Processes of each replica."""
    max_num_seqs: int
    max_concurrent_episodes: int
    learner_procs: int
    iterations: int
    """Passes over each batch."""

    @classmethod
    def of(cls, env_ids: Iterable[str], policies: Mapping[str, Mapping[str, Any]], trainer: Mapping[str, Any]) -> Plan:
        """Return the plan that settings describe. They are as ``dataclasses.asdict`` or config.yaml has them."""
        engine = trainer["engine"]
        return cls(
            env_ids=frozenset(name.rpartition(":")[2] for name in env_ids),  # before a colon is a module to import
            policies=frozenset(map(_description, policies, policies.values())),
            group_size=trainer["group_size"],
            groups=trainer["groups_per_step"],
            max_staleness=trainer["max_staleness"],
            replicas=engine["replicas"],
            tp=engine["tp"],
            max_num_seqs=engine["max_num_seqs"],
            max_concurrent_episodes=trainer["max_concurrent_episodes"],
            learner_procs=trainer["learner_procs"],
            iterations=trainer["learner"]["num_iterations"],
        )

    @property
    def episodes(self) -> int:
        """Episodes of a step without resampling."""
        return self.group_size * self.groups

    def waves(self, episodes: float) -> float:
        """Return the number of times that all places for episodes are filled, at least 1."""
        return max(1.0, episodes / min(self.max_concurrent_episodes, self.replicas * self.max_num_seqs))


def _description(name: str, policy: Mapping[str, Any]) -> str:
    weights = "frozen" if not policy["trainable"] else "all weights" if policy["lora"] is None else "an adapter"
    return f"{name} ({weights}, max_tokens {policy['sampling']['max_tokens']})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Means over the warm steps of a synchronous run."""

    plan: Plan
    on_gpu: bool
    collect_s: float
    waiting_s: float
    """Part of `collect_s` in which no engine computed."""
    engine_busy: float
    """Fraction of the collection time in which an engine computed, in [0, 1]. Mean over the engines."""
    score_s: float
    learn_s: float
    passes_s: float
    """Part of `learn_s`: forward and backward passes."""
    sync_s: float
    played: float
    """Groups of a step, with resampled ones."""
    used: float
    """Informative groups of a step."""
    tokens: float
    """Sampled tokens of a step."""
    learner_cores: float
    """CPU cores that the learners keep busy."""

    def engine_s(self, plan: Plan, episodes: float) -> float:
        """Return the seconds in which the engines of a plan collect this many episodes."""
        waves = plan.waves(episodes) / self.plan.waves(self.plan.episodes)
        load = (episodes / plan.replicas) / (self.plan.episodes / self.plan.replicas)
        busy_s = self.collect_s - self.waiting_s
        return self.waiting_s * waves + busy_s * (_PER_WAVE * waves + (1 - _PER_WAVE) * load)

    def learner_s(self, plan: Plan, groups: float, speed: float) -> float:
        """Return the seconds of training on this many informative groups, with passes `speed` times as fast."""
        work = groups * plan.group_size * plan.iterations / (self.used * self.plan.group_size * self.plan.iterations)
        return self.learn_s - self.passes_s + self.passes_s * work / speed


def read_run(folder: str | os.PathLike[str], *, engines: int = 1) -> Measurement:
    """Read a folder of a synchronous run with ``config.yaml`` and ``metrics.jsonl``.

    `engines` is the number of its engines, without replicas.

    Raises:
        RunFolderError: A file is missing or of another version, there are too few steps, no step trained anything, or
            the run was asynchronous.
    """
    path = user_path(folder)
    check_plain_files(path)
    config, metrics = path / "config.yaml", path / "metrics.jsonl"
    for file in (config, metrics):
        if not file.is_file():
            raise RunFolderError(
                f"no measured run: {path} has no {file.name}. Train a few steps: {_TO_MEASURE}; then --measured "
                "runs/measured. The question whether a run fits needs no measurement: --gpus 8 --model 8b"
            )
    try:
        settings = safe_yaml.read(config)
    except ValueError as cause:
        raise RunFolderError(f"{cause}. Give the out_dir of a run") from cause
    warm = [row for row in read_rows(metrics) if row["step"] > _FIRST_STEPS]
    rows = [row for row in warm if "time/evaluate_s" not in row]  # evaluations slow a collection down
    if len(rows) < 2:
        excluded = f" without an evaluation (of {len(warm)})" if len(rows) < len(warm) else ""
        raise RunFolderError(
            f"{path} has {len(rows)} steps after the first {_FIRST_STEPS}{excluded}. At least 2 are needed"
        )
    with _same_version(config):
        plan = Plan.of(settings["env"], settings["policies"], settings["trainer"])
    if plan.max_staleness:
        raise RunFolderError(
            f"{path} is of a run with max_staleness={plan.max_staleness}, whose stages overlap, so that their times "
            f"cannot be separated. Measure a few synchronous steps: {_TO_MEASURE}"
        )
    with _same_version(metrics):
        measured = _means(plan, rows, engines * plan.replicas)
    if not measured.used:
        raise RunFolderError(
            f"no measured step of {path} trained anything. See groups/zero_variance and groups/failed in metrics.jsonl"
        )
    return measured


def _means(plan: Plan, rows: Sequence[Mapping[str, Any]], engines: int) -> Measurement:
    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    def of_learners(name: str) -> float:
        """Return the mean over steps of a sum over policies, whose metrics are in ``learner/`` or ``learner/NAME/``."""
        keys = [key for key in rows[0] if key.startswith("learner/") and key.endswith(f"/{name}")]
        return statistics.fmean(math.fsum(row.get(key) or 0.0 for key in keys) for row in rows)

    # the mean over engines: engines that take turns keep each other waiting, but not the collection
    engine_s = statistics.fmean((1 - row["idle/engines"]) * row["time/step_s"] for row in rows)
    collect_s, learn_s, learners_s = mean("time/collect_s"), mean("time/learn_s"), of_learners("step_s")
    resample_s = statistics.fmean(row.get("time/resample_s", 0.0) for row in rows)
    return Measurement(
        plan=plan,
        on_gpu=any(name.endswith("peak_device_bytes") for name in rows[0]),
        collect_s=collect_s,
        waiting_s=max(0.0, collect_s - engines * engine_s * collect_s / (collect_s + resample_s)),
        engine_busy=min(1.0, engine_s / (collect_s + resample_s)),
        score_s=mean("time/score_s"),
        learn_s=learn_s,
        passes_s=learn_s * of_learners("forward_backward_s") / learners_s if learners_s else 0.0,
        sync_s=mean("time/sync_s"),
        played=sum(map(mean, _GROUPS)),
        used=mean("groups/used"),
        tokens=mean("tokens"),
        learner_cores=of_learners("cpu_s") * plan.learner_procs / learn_s,
    )


@contextlib.contextmanager
def _same_version(file: Path) -> Iterator[None]:
    """Raise RunFolderError if a file lacks a key of this version or has an unknown value."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        problem = (
            f"has no {error}" if isinstance(error, KeyError) else f"is malformed ({type(error).__name__}: {error})"
        )
        raise RunFolderError(
            f"{file} {problem}: another version of forge_agents wrote it. Measure a few steps again: {_TO_MEASURE}"
        ) from error


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
    if run.league is not None:
        raise ValueError("a run with a league cannot be predicted, because its opponents change engines. Remove league")
    folders = {name: Path(policy.model) for name, policy in run.models.items()}
    engines, learners = len(assign_engines(run.models, folders)[1]), len(learner_groups(run.models, folders))
    if not learners:
        raise ValueError("no agent has a trainable policy, so there is no learner to predict")
    env_ids = [run.env] if isinstance(run.env, str) else [*run.env]
    policies = {name: dataclasses.asdict(policy) for name, policy in run.models.items()}
    plan = Plan.of(env_ids, policies, dataclasses.asdict(run.trainer))
    gpus = engines * plan.replicas * plan.tp, learners * plan.learner_procs
    _check_gpus(plan, hardware, *gpus)
    runs = [read_run(folder, engines=engines) for folder in measured or [run.out_dir]]
    _check_same(plan, runs)
    predictions = [_predict(run, each, plan, hardware, gpus) for each in runs]
    floats = [name for name, value in predictions[0].json().items() if isinstance(value, float)]
    means: dict[str, Any] = {name: statistics.fmean(getattr(each, name) for each in predictions) for name in floats}
    return dataclasses.replace(predictions[0], **means)


def _check_gpus(plan: Plan, hardware: Hardware, engine_gpus: int, learner_gpus: int) -> None:
    if not hardware.gpus:
        return
    if engine_gpus + learner_gpus > hardware.gpus:
        raise ValueError(
            f"gpus={hardware.gpus}: the engines need {engine_gpus} and the learner {learner_gpus}. Change "
            "engine.replicas, engine.tp or learner_procs, or give more GPUs"
        )
    if plan.tp > hardware.gpus_per_host:
        raise ValueError(
            f"engine.tp={plan.tp}: the ranks of one engine are on one host, and a host has {hardware.gpus_per_host} "
            "GPUs. Lower engine.tp"
        )


def _check_same(plan: Plan, runs: Sequence[Measurement]) -> None:
    for name, of in (("environments", "env_ids"), ("policies", "policies")):
        predicted, *others = (", ".join(sorted(getattr(each, of))) for each in (plan, *(run.plan for run in runs)))
        if different := next((other for other in others if other != predicted), None):
            raise ValueError(
                f"a measured run has the {name} {different}, and this run has {predicted}. Measure the same {name}"
            )
    if len({run.on_gpu for run in runs}) > 1:
        raise ValueError("the measured runs have different kinds of device, GPU and CPU. Simulate each alone")


def _predict(
    run: RunConfig, measured: Measurement, plan: Plan, hardware: Hardware, gpus: tuple[int, int]
) -> Prediction:
    before, speed = measured.plan, 1.0
    if hardware.gpus:
        # on a CPU all learners together had one host
        ratio = plan.learner_procs / before.learner_procs * (1 if measured.on_gpu else gpus[1] // plan.learner_procs)
        speed = ratio ** (1 + math.log2(hardware.learner_scaling))
    collect_s = measured.engine_s(plan, plan.episodes)
    informative = measured.used / measured.played
    used = plan.groups * (1 - (1 - informative) ** (run.trainer.resamples + 1))
    resampled = used / informative - plan.groups
    resample_s = min(1.0, resampled) * measured.engine_s(plan, max(1.0, resampled) * plan.group_size)
    episodes = (plan.groups + resampled) * plan.group_size / (measured.played * before.group_size)
    score_s = measured.score_s * episodes + resample_s
    learn_s = measured.learner_s(plan, used, speed)
    publish_s = _PUBLISH * measured.sync_s
    turns = len(waves(range(plan.replicas))) / len(waves(range(before.replicas)))
    sync_s = publish_s + (measured.sync_s - publish_s) * turns
    step_s = collect_s + score_s + learn_s + sync_s
    if plan.max_staleness:
        step_s = max(collect_s + score_s, learn_s + publish_s)
        if not (measured.on_gpu or hardware.gpus):
            step_s = max(step_s, collect_s / 2 + learn_s * min(1.0, measured.learner_cores / (os.cpu_count() or 1)))
    evaluations = math.ceil(run.steps / run.trainer.eval_every) if run.trainer.eval_every else 0
    evaluate_s = measured.engine_s(plan, run.trainer.eval_episodes)
    return Prediction(
        step_s=step_s,
        collect_s=collect_s,
        score_s=score_s,
        learn_s=learn_s,
        sync_s=sync_s,
        engines_idle=max(0.0, 1 - measured.engine_busy * (collect_s + resample_s) / step_s),
        learner_idle=max(0.0, 1 - (learn_s + publish_s) / step_s),
        tokens_per_s=measured.tokens * episodes / step_s,
        steps=run.steps,
        hours=(run.steps * step_s + evaluations * evaluate_s) / 3600,
        engine_gpus=gpus[0] if hardware.gpus else 0,
        learner_gpus=gpus[1] if hardware.gpus else 0,
        assumptions=_assumptions(plan, measured, hardware),
    )


def _assumptions(plan: Plan, measured: Measurement, hardware: Hardware) -> tuple[str, ...]:
    before = measured.plan
    assumptions = [
        "episodes are as long as the measured ones, and the same fraction of groups is informative",
        "microbatches of another size cost as much per episode",
        "nothing fails; startup, checkpoints and logging take no time, and evaluations overlap with nothing",
        "a stage takes its mean time, and engines and learner overlap without waiting for single episodes",
        "an engine computes during the same fraction of a collection",
    ]
    if plan.tp != before.tp:
        assumptions.append(f"an engine of {plan.tp} rank(s) is as fast as the measured engines of {before.tp}")
    if hardware.gpus:
        speedup = 2 * hardware.learner_scaling
        assumptions += [
            f"every engine replica has {plan.tp} GPU(s) of the measured kind, and engines never run out of cache",
            f"twice the GPUs make the learner {speedup:.2f} times as fast (learner_scaling)",
            "weights are transferred at the measured speed, to half of the replicas at a time",
        ]
        if not measured.on_gpu:
            assumptions.append("stages were measured on a CPU, and a GPU counts as this host. Measure on one GPU")
    elif plan.learner_procs != before.learner_procs:
        assumptions.append(f"the learner takes as long with {plan.learner_procs} ranks as with {before.learner_procs}")
    return tuple(assumptions)
