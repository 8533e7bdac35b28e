"""Stage times from measured runs: reads run folders and fits the coefficients of `forge_trainers.forecast.model`.

Several runs are fitted by least squares on relative errors with coefficients of at least 0. A prior divides the time
where the runs do not determine the division (`_PRIOR_...`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge_agents import safe_yaml
from forge_agents.errors import RunFolderError
from forge_agents.files import check_plain_files, user_path
from forge_agents.serving.client import waves
from forge_agents.serving.routing import router_class
from forge_trainers.forecast.model import EpisodeShape, Plan, StageTimes, TurnShape, Workload, collection_work
from forge_trainers.learner.plan import LEAST_MICROBATCH
from forge_trainers.losses.registry import find_loss
from forge_trainers.records.run_folder import read_rows
from forge_trainers.run.plan import share_threads

TO_MEASURE = (
    "forge-agents train CONFIG --steps 8 --trainer.max_staleness 0 --trainer.keep_episodes 10000 "
    "--out_dir runs/measured"
)
"""Command line that measures a run."""
_METRICS = ("time/step_s", "groups/used", "groups/zero_variance", "groups/failed", "groups/abstained")
"""Metrics that every step must have."""
_SYNCHRONOUS_METRICS = ("time/collect_s", "time/score_s", "time/learn_s", "time/sync_s")
"""Metrics that a synchronous step must have, too."""
_PRIOR_ENGINE = (1 / 3, 1 / 3, 1 / 3)
"""Fractions of a collection: iterations, sampled tokens, prompt tokens."""
_PRIOR_LEARNER = (0.8, 0.2, 0.0)
"""Fractions of forward and backward passes: positions, loss tokens, microbatches. The head of a small model is a
fifth."""
_PRIOR_SYNC = (0.4, 0.6)
"""Fractions of publish and fetch, as `make perf` measures them."""
_PRIOR_SCORE = (0.0, 1.0)
"""Fractions of a call and of its trajectories."""
_PASSES = 6
"""Passes of the reweighted fit."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Content of a run folder."""

    folder: Path
    env_ids: frozenset[str]
    plan: Plan
    on_gpu: bool
    rows: Sequence[Mapping[str, Any]]
    """Metrics of warm steps without an evaluation."""
    episodes: Sequence[EpisodeShape]
    outcomes: Sequence[Sequence[Hashable]] = ()
    """Rewards of the episodes of whole groups. Groups in which a reward abstained are left out."""

    @property
    def step_s(self) -> float:
        """Mean over the warm steps, without checkpoints."""
        return float(np.mean([row["time/step_s"] - row.get("time/save_s", 0.0) for row in self.rows]))


def plan_of(policies: Mapping[str, Mapping[str, Any]], trainer: Mapping[str, Any], *, cores: float) -> Plan:
    """Return the plan that settings describe.

    `policies` and `trainer` (a ``GRPOConfig``) are as ``dataclasses.asdict`` or config.yaml has them. Engines and
    learner share `cores`, which is infinite on GPUs.

    Raises:
        ValueError: The routing or the loss is unknown.
    """
    engine, learner = trainer["engine"], trainer["learner"]
    router_class(engine.get("routing", "prefix"))  # its check
    first: dict[str, str] = {}
    homes = {
        name: name if policy.get("lora") is None else first.setdefault(str(policy["model"]), name)
        for name, policy in policies.items()
    }
    tp, resamples = engine.get("tp", 1), trainer["max_resamples"]
    trained = frozenset(name for name, policy in policies.items() if policy.get("trainable", True))
    learners = len({_learner_key(name, policies[name]) for name in trained})
    engine_threads = engine.get("threads")
    if math.isfinite(cores):
        share = share_threads(
            max(1, round(cores)),
            engines=len(set(homes.values())) * engine.get("replicas", 1) * tp,
            ranks=learners * trainer["learner_procs"],
            overlap=trainer["max_staleness"] > 0,
        )
        engine_threads = engine_threads or share.engine
    return Plan(
        group_size=trainer["group_size"],
        groups_per_step=trainer["groups_per_step"],
        max_staleness=trainer["max_staleness"],
        trained=trained,
        homes=homes,
        max_tokens={name: policy["sampling"]["max_tokens"] for name, policy in policies.items()},
        replicas=engine.get("replicas", 1),
        engine_ranks=tp,
        max_num_seqs=engine["max_num_seqs"],
        max_concurrent_episodes=trainer["max_concurrent_episodes"],
        max_resamples=find_loss(learner["loss"]).max_resamples if resamples is None else resamples,
        max_tokens_per_microbatch=learner["max_tokens_per_microbatch"] or LEAST_MICROBATCH,
        learners=learners,
        iterations=learner.get("num_iterations", 1),
        learner_ranks=trainer["learner_procs"],
        cores=cores,
        engine_threads=(engine_threads or math.inf) * tp,
    )


def _learner_key(name: str, policy: Mapping[str, Any]) -> str:
    """Return a key that policies with one learner share: adapters of one shape on one model."""
    return name if policy.get("lora") is None else repr((policy["model"], sorted(policy["lora"].items())))


def read_run(folder: str | os.PathLike[str], *, cores: float | None = None, skip: int = 1) -> MeasuredRun:
    """Read a run folder with ``config.yaml``, ``metrics.jsonl`` and ``episodes.jsonl``.

    Engines and learner shared `cores`. None: those of this machine, or none on GPUs. The first `skip` steps are left
    out, because memory is new and caches are cold in them.

    Raises:
        RunFolderError: A file is missing or of another version, or there are too few steps or episodes.
    """
    path = user_path(folder)
    check_plain_files(path)
    files = {name: path / name for name in ("config.yaml", "metrics.jsonl", "episodes.jsonl")}
    for file in files.values():
        if not file.is_file():
            raise RunFolderError(f"{path} has no {file.name}. Give the out_dir of a run of at least {skip + 2} steps")
    try:
        settings = safe_yaml.read(files["config.yaml"])
    except ValueError as cause:
        raise RunFolderError(f"{cause}. Give the out_dir of a run") from cause
    warm = [row for row in read_rows(files["metrics.jsonl"]) if row["step"] > skip]
    rows = [row for row in warm if "time/evaluate_s" not in row]  # evaluations slow a collection down
    if len(rows) < 2:
        excluded = f" without an evaluation (of {len(warm)})" if len(rows) < len(warm) else ""
        raise RunFolderError(f"{path} has {len(rows)} steps after the first {skip}{excluded}. At least 2 are needed")
    on_gpu = any(name.endswith("peak_device_bytes") for name in rows[0])
    shared = cores if cores is not None else math.inf if on_gpu else float(os.cpu_count() or 1)
    with _same_version(files["config.yaml"]):
        plan = plan_of(settings["policies"], settings["trainer"], cores=shared)
        env_ids = frozenset(settings["env"])
    with _same_version(files["metrics.jsonl"]):
        for row in rows:
            _ = [row[name] for name in (*_METRICS, *_SYNCHRONOUS_METRICS * (plan.max_staleness == 0))]
    groups: dict[tuple[int, str, int], list[Mapping[str, Any]]] = {}
    with _same_version(files["episodes.jsonl"]):
        for row in read_rows(files["episodes.jsonl"]):
            if row["step"] > skip and row.get("error") is None:
                groups.setdefault((row["step"], row["env_id"], row["seed"]), []).append(row)
        shapes = [shape for group in groups.values() for shape in _shapes(group)]
        rewards = [[tuple(sorted(row["rewards"].items())) for row in group] for group in groups.values()]
    if not shapes:
        raise RunFolderError(f"{path} has no episodes. Set keep_episodes above 0")
    whole = [group for group in rewards if len(group) == plan.group_size > 1]
    return MeasuredRun(
        folder=path,
        env_ids=env_ids,
        plan=plan,
        on_gpu=on_gpu,
        rows=rows,
        episodes=shapes,
        outcomes=[group for group in whole if all(math.isfinite(r) for episode in group for _, r in episode)],
    )


@contextlib.contextmanager
def _same_version(file: Path) -> Iterator[None]:
    """Raise RunFolderError if a file lacks a key of this version."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        problem = (
            f"has no {error}" if isinstance(error, KeyError) else f"is malformed ({type(error).__name__}: {error})"
        )
        raise RunFolderError(
            f"{file} {problem}: another version of forge_agents wrote it. Measure a few steps again: {TO_MEASURE}"
        ) from error


def _shapes(group: Sequence[Mapping[str, Any]]) -> list[EpisodeShape]:
    """Return the shapes of a group's episodes, as ``episodes.jsonl`` has them."""
    first_prompts: dict[str, list[list[int]]] = {}
    for episode in group:
        for agent, trajectory in episode["trajectories"].items():
            if trajectory["turns"]:
                first_prompts.setdefault(agent, []).append(trajectory["turns"][0]["prompt_ids"])
    shared = {agent: _common(min(prompts), max(prompts)) for agent, prompts in first_prompts.items()}
    return [_shape(episode, shared) for episode in group]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix. All sequences that sort between the two share it."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _shape(episode: Mapping[str, Any], shared: Mapping[str, int]) -> EpisodeShape:
    turns = sorted(
        (turn for trajectory in episode["trajectories"].values() for turn in trajectory["turns"]),
        key=lambda turn: turn["index"],
    )
    parallel = sum(turn["generate_s"] for turn in turns) > episode["duration_s"]
    rounds: list[list[tuple[Mapping[str, Any], TurnShape]]] = []
    conversations: dict[tuple[str, int], list[int]] = {}
    for turn in turns:
        agent, prompt, branch = turn["agent"], turn["prompt_ids"], turn.get("branch", 0)
        before = conversations.get((agent, branch))
        known = _common(before, prompt) if before is not None else 0
        shape = TurnShape(
            policy=turn["policy"],
            prompt_tokens=len(prompt) - known,
            shared_tokens=shared[agent] if before is None and not branch else 0,
            response_tokens=len(turn["response_ids"]),
            cut=turn["finish_reason"] == "length",
        )
        conversations[agent, branch] = [*prompt, *turn["response_ids"]]
        # in a round of a parallel environment every agent decides once
        if not parallel or not rounds or agent in {other["agent"] for other, _ in rounds[-1]}:
            rounds.append([])
        rounds[-1].append((turn, shape))
    model_s = sum(max((t["generate_s"] for t, s in pairs if s.response_tokens), default=0.0) for pairs in rounds)
    return EpisodeShape(
        rounds=tuple(tuple(shape for _, shape in pairs if shape.response_tokens) for pairs in rounds),
        agents=len(episode["trajectories"]),
        other_s=max(0.0, episode["duration_s"] - model_s),
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Stage times and episodes of measured runs."""

    stages: StageTimes
    workload: Workload
    run: MeasuredRun
    """A synchronous run. Environments, devices and ranks are the same in all."""


def measure(runs: Sequence[MeasuredRun]) -> Measured:
    """Fit the stage times to at least one synchronous run. Asynchronous runs only contribute episodes.

    Raises:
        ValueError: No run is synchronous or trained anything, or the runs differ in environments, devices or ranks.
    """
    synchronous = [run for run in runs if run.plan.max_staleness == 0]
    if not synchronous:
        raise ValueError(
            "no measured run has max_staleness=0, and in an asynchronous run the times of overlapping stages cannot be "
            "separated. Measure a few synchronous steps: forge-agents train CONFIG --trainer.max_staleness 0 --steps 6"
        )
    for name, values in (
        ("environments", {", ".join(sorted(run.env_ids)) for run in runs}),
        ("kinds of device", {"GPU" if run.on_gpu else "CPU" for run in runs}),
        ("values of learner_procs", {str(run.plan.learner_ranks) for run in runs}),
        ("values of engine.tp", {str(run.plan.engine_ranks) for run in runs}),
    ):
        if len(values) > 1:
            raise ValueError(f"measured runs have different {name}: {'; '.join(sorted(values))}. Measure them apart")
    workload = _workload(runs)
    engine = _fit_engine(synchronous, workload)
    fixed_s, passes = _fit_learner(synchronous)
    sync = [
        ((1.0, float(len(waves(range(run.plan.replicas))))), row["time/sync_s"])
        for run in synchronous
        for row in run.rows
    ]
    publish_s, fetch_s = _fit(sync, _PRIOR_SYNC)
    score_s, score_trajectory_s = _fit_score(synchronous)
    stages = StageTimes(
        iteration_s=engine[0],
        sampled_token_s=engine[1],
        prompt_token_s=engine[2],
        learner_fixed_s=fixed_s,
        position_s=passes[0],
        loss_token_s=passes[1],
        microbatch_s=passes[2],
        publish_s=publish_s,
        fetch_s=fetch_s,
        score_s=score_s,
        score_trajectory_s=score_trajectory_s,
        learner_cores=max(_learner_cores(run) for run in synchronous),
    )
    return Measured(stages=stages, workload=workload, run=synchronous[0])


def _workload(runs: Sequence[MeasuredRun]) -> Workload:
    """Return the episodes of the runs with the longest responses, and the learner's work per episode of all runs."""
    most = max(sum(run.plan.max_tokens.values()) for run in runs)
    episodes = [shape for run in runs if sum(run.plan.max_tokens.values()) == most for shape in run.episodes]
    ends: dict[str, list[int]] = {}
    for turn in (turn for episode in episodes for turns in episode.rounds for turn in turns):
        counts = ends.setdefault(turn.policy, [0, 0])
        counts[0] += not turn.cut
        counts[1] += turn.response_tokens
    outcomes = [group for run in runs for group in run.outcomes]
    used, unusable, zero_variance = np.sum([_group_counts(row) for run in runs for row in run.rows], axis=0)
    total = used + unusable + (0 if outcomes else zero_variance)  # outcomes already tell how often episodes are equal
    longest = [run for run in runs if sum(run.plan.max_tokens.values()) == most]
    learned = [
        (_learner_metrics(row), row["groups/used"] * run.plan.group_size, run) for run in longest for row in run.rows
    ]
    trained = max(1.0, sum(count for _, count, _ in learned))
    return Workload(
        episodes=episodes,
        stop_rates={policy: stops / tokens for policy, (stops, tokens) in ends.items()},
        used_fraction=float(used / total) if total else 1.0,
        outcomes=outcomes,
        positions=sum(metrics["positions"] / run.plan.iterations for metrics, _, run in learned) / trained,
        loss_tokens=sum(metrics["loss_tokens"] for metrics, _, _ in learned) / trained,
    )


def _group_counts(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the numbers of informative, unusable and zero-variance groups."""
    return row["groups/used"], row["groups/failed"] + row["groups/abstained"], row["groups/zero_variance"]


def _fit_engine(runs: Sequence[MeasuredRun], workload: Workload) -> tuple[float, ...]:
    rows = []
    for run in runs:
        measured = Workload(episodes=run.episodes, stop_rates=workload.stop_rates)
        work = collection_work(run.plan, measured, run.plan.groups_per_step * run.plan.group_size)
        for row in run.rows:
            # at least a tenth of the collection is the engine's, so that a slow environment leaves something to fit
            seconds = max(row["time/collect_s"] - work.other_s, 0.1 * row["time/collect_s"])
            rows.append((work.features, seconds))
    return _fit(rows, _PRIOR_ENGINE)


def _fit_learner(runs: Sequence[MeasuredRun]) -> tuple[float, tuple[float, ...]]:
    """Return the fixed seconds of a step, and those of a position, a loss token and a microbatch."""
    rows, fixed = [], []
    for run in runs:
        for row in run.rows:
            metrics = _learner_metrics(row)
            if not metrics["loss_tokens"]:
                continue
            passes_s = min(metrics["forward_backward_s"], row["time/learn_s"])
            loss_tokens = metrics["loss_tokens"] * run.plan.iterations  # the other counts are of all passes
            rows.append(((metrics["positions"], loss_tokens, metrics["microbatches"]), passes_s))
            fixed.append(row["time/learn_s"] - passes_s)
    if not rows:
        raise ValueError(
            "no measured step trained anything. See groups/zero_variance and groups/failed in metrics.jsonl"
        )
    return float(np.mean(fixed)), _fit(rows, _PRIOR_LEARNER)


def _fit_score(runs: Sequence[MeasuredRun]) -> tuple[float, ...]:
    """Fit the seconds of a call and of a trajectory. Steps with resampled groups are left out."""
    rows: list[tuple[tuple[float, ...], float]] = []
    for run in runs:
        agents = float(np.mean([episode.agents for episode in run.episodes]))
        for row in run.rows:
            groups = sum(_group_counts(row))
            if groups <= run.plan.groups_per_step:
                rows.append(((1.0, groups * run.plan.group_size * agents), row["time/score_s"]))
    return _fit(rows, _PRIOR_SCORE) if rows else (0.0, 0.0)


def _learner_cores(run: MeasuredRun) -> float:
    """Return the CPU cores that all ranks kept busy."""
    most = run.plan.cores if math.isfinite(run.plan.cores) else 1.0
    metrics = [_learner_metrics(row) for row in run.rows]
    busy = [m["cpu_s"] * run.plan.learner_ranks / m["step_s"] for m in metrics if m["step_s"] > 0]
    return min(most, max(0.1, float(np.median(busy)))) if busy else most


def _learner_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the sums over all learners of a step."""
    names = ("positions", "loss_tokens", "microbatches", "forward_backward_s", "cpu_s", "step_s")
    totals = dict.fromkeys(names, 0.0)
    for key, value in row.items():
        group, _, name = key.rpartition("/")
        if group.startswith("learner") and name in totals:
            totals[name] += value or 0.0
    return totals


def _fit(rows: Sequence[tuple[Sequence[float], float]], prior: Sequence[float]) -> tuple[float, ...]:
    """Return coefficients of at least 0 that minimize relative errors of the seconds that features took.

    `prior` is the fraction of the seconds per feature. Its weight grows with the scatter of the rows.
    """
    from scipy.optimize import nnls

    x = np.array([features for features, _ in rows], dtype=float)
    y = np.array([seconds for _, seconds in rows], dtype=float)
    size, mean_s = np.maximum(x.mean(axis=0), 1e-12), max(float(y.mean()), 1e-9)
    shares = mean_s * np.asarray(prior)
    solution = shares
    # Iteratively reweighted: an error counts relative to the previous pass. The prior adds one row per coefficient:
    # min |(X b - y) / e|^2 + (s / mean y)^2 |b - b_0|^2, b >= 0, where s is the scatter of the rows.
    for _ in range(_PASSES):
        predicted = (x / size) @ solution
        expected = np.maximum(predicted, 0.02 * mean_s)
        scatter = math.sqrt(float(np.mean(((y - predicted) / expected) ** 2)))
        weight = max(scatter, 1e-4) / mean_s
        a = np.vstack([(x / size) / expected[:, None], weight * np.eye(x.shape[1])])
        solution, _ = nnls(a, np.concatenate([y / expected, weight * shares]))
    return tuple((solution / size).tolist())
