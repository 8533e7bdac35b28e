"""What runs tell: how long each stage takes, how long episodes are, how much stages hinder each other.

In: run folders, by their settings, metrics and episodes. Out: `MeasuredRun`s, and what is `Measured` by them for
`forge_trainers.forecast.simulation`. Waits for the disk.

What several runs, or several steps, tell apart is fitted by least squares on relative errors with coefficients of at
least 0. What they do not tell apart is divided as the `_PRIOR...` below say.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forge_agents import safe_yaml
from forge_agents.errors import RunFolderError
from forge_agents.files import check_plain_files, user_path
from forge_agents.serving.client import waves
from forge_agents.serving.routing import router_class
from forge_trainers.forecast.engine import NOTHING, Counts, EngineTimes, Request
from forge_trainers.forecast.simulation import (
    LearnerTimes,
    Plan,
    Rounds,
    SimulatedRun,
    StageTimes,
    TurnShape,
    Workload,
    simulate,
)
from forge_trainers.learner.config import LEAST_MICROBATCH
from forge_trainers.losses.registry import find_loss
from forge_trainers.records.run_folder import read_rows
from forge_trainers.run.config import share_threads

TO_MEASURE = (
    "forge-agents train CONFIG --steps 8 --trainer.max_staleness 0 --trainer.keep_episodes 10000 "
    "--out_dir runs/measured"
)
"""What makes a folder that can be read."""
CPU_BLOCK, GPU_BLOCK = 128, 16
"""Tokens of a block of vLLM's prefix cache."""
_EVERY_STEP = ("time/step_s", "groups/used", "groups/zero_variance", "groups/failed", "groups/abstained")
"""What is read of a row of metrics."""
_SYNCHRONOUS = ("time/collect_s", "time/score_s", "time/learn_s", "time/sync_s")
"""And of one in which stages do not overlap."""
_PRIOR_ENGINE = (1 / 3, 1 / 3, 1 / 3)
"""Of a collection: iterations, sampled tokens, prompt tokens."""
_PRIOR_LEARNER = (0.8, 0.2, 0.0)
"""Of forward and backward passes: positions, loss tokens, passes. A head is a fifth of a small model's work."""
_PRIOR_SYNC = (0.4, 0.6)
"""Publish and fetch: as `make perf` measures them."""
_PRIOR_JUDGE = (0.0, 1.0)
"""A call and its trajectories."""
_PRIOR_SPREAD = 1.0
"""How far a share may well be from its prior."""
_PASSES = 6
_SHARE_PRICE = 1e-3
"""Squared relative error that is borne rather than to believe that more cores are worth nothing."""
_SHARES = tuple(np.linspace(1.0, 0.5, 11).tolist())
_SCALINGS = tuple(np.linspace(1.0, 0.0, 6).tolist())
_SEARCHES = 2
"""Times that each of two is searched while the other stays."""
_FIT_ROUNDS = 3
"""Replays, each with the seconds that the one before gave."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run as its folder tells it."""

    folder: Path
    env_ids: frozenset[str]
    plan: Plan
    on_gpu: bool
    rows: Sequence[Mapping[str, Any]]
    """Metrics of warm steps."""
    episodes: Mapping[int, Sequence[Sequence[Rounds]]]
    """By step, the groups that were kept."""
    outcomes: Sequence[Sequence[Hashable]] = ()
    """What the siblings of whole groups earned; groups in which a reward abstained are left out."""

    @property
    def groups(self) -> list[Sequence[Rounds]]:
        """All that were kept."""
        return [group for groups in self.episodes.values() for group in groups]

    @property
    def whole_steps(self) -> dict[int, Sequence[Sequence[Rounds]]]:
        """Those of which every episode was kept."""
        played = self.plan.group_size * self.plan.groups_per_step
        return {step: groups for step, groups in self.episodes.items() if sum(map(len, groups)) == played}

    @property
    def step_s(self) -> float:
        """Mean over the warm steps, the begin of checkpoints left out."""
        return float(np.mean([row["time/step_s"] - row.get("time/save_s", 0.0) for row in self.rows]))


def plan_of(
    policies: Mapping[str, Mapping[str, Any]],
    trainer: Mapping[str, Any],
    *,
    cores: float,
    on_gpu: bool,
    isolated: bool = False,
) -> Plan:
    """The plan that settings describe.

    Args:
        policies: Those that a model plays, by name; each as ``dataclasses.asdict`` gives it, or config.yaml.
        trainer: ``GRPOConfig`` in the same form.
        cores: That engines and learner share.
        on_gpu: Engines and learner compute on GPUs.
        isolated: Environments run in worker processes.

    Raises:
        ValueError: There is no such routing or loss.
    """
    engine, learner = trainer["engine"], trainer["learner"]
    first: dict[str, str] = {}
    homes = {
        name: name if policy.get("lora") is None else first.setdefault(str(policy["model"]), name)
        for name, policy in policies.items()
    }
    share, tp = learner.get("share_prefixes"), engine.get("tp", 1)
    trained = frozenset(name for name, policy in policies.items() if policy.get("trainable", True))
    learners = len({_learner_of(name, policies[name]) for name in trained})
    engine_threads, learner_threads = engine.get("threads"), learner.get("threads")
    if math.isfinite(cores):
        shares = share_threads(
            max(1, round(cores)),
            engines=len(set(homes.values())) * engine.get("replicas", 1) * tp,
            ranks=learners * trainer["learner_procs"],
            overlap=trainer["max_staleness"] > 0,
        )
        engine_threads, learner_threads = engine_threads or shares[0], learner_threads or shares[1]
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
        affine=getattr(router_class(engine.get("routing", "prefix")), "keeps_conversations", False),
        max_concurrent_episodes=trainer["max_concurrent_episodes"],
        max_resamples=find_loss(learner["loss"]).max_resamples
        if trainer["max_resamples"] is None
        else trainer["max_resamples"],
        max_tokens_per_microbatch=learner["max_tokens_per_microbatch"] or LEAST_MICROBATCH,
        share_prefixes=not on_gpu if share is None else share,
        learners=learners,
        iterations=learner.get("num_iterations", 1),
        learner_ranks=trainer["learner_procs"],
        cores=cores,
        engine_threads=(engine_threads or math.inf) * tp,
        learner_threads=(learner_threads or math.inf) * trainer["learner_procs"],
        isolated=isolated,
    )


def _learner_of(name: str, policy: Mapping[str, Any]) -> str:
    """What policies that share a learner have in common: adapters of one shape on one model."""
    return name if policy.get("lora") is None else repr((policy["model"], sorted(policy["lora"].items())))


def read_run(folder: str | os.PathLike[str], *, cores: float | None = None, skip: int = 1) -> MeasuredRun:
    """Read a run folder.

    Args:
        folder: With ``config.yaml``, ``metrics.jsonl`` and ``episodes.jsonl``.
        cores: That engines and learner shared; None: this machine's, or on GPUs none.
        skip: First steps that are left out: memory is new and caches are cold.

    Raises:
        RunFolderError: A file is missing or of another version, or there are not enough steps or episodes.
    """
    path = user_path(folder)
    check_plain_files(path)
    files = {name: path / name for name in ("config.yaml", "metrics.jsonl", "episodes.jsonl")}
    for file in files.values():
        if not file.is_file():
            raise RunFolderError(f"{path} has no {file.name}; give the out_dir of a run of at least {skip + 2} steps")
    try:
        settings = safe_yaml.read(files["config.yaml"])
    except ValueError as cause:
        raise RunFolderError(f"{cause}; give the out_dir of a run") from cause
    # here steps count from 0, as the simulated ones do
    logged = [{**row, "step": row["step"] - 1} for row in read_rows(files["metrics.jsonl"])]
    warm = [row for row in logged if row["step"] >= skip]
    rows = [row for row in warm if "time/evaluate_s" not in row]  # the others were played beside an evaluation
    if len(rows) < 2:
        beside = f", less {len(warm) - len(rows)} beside evaluations" if len(rows) < len(warm) else ""
        raise RunFolderError(f"{path} has {len(rows)} steps after the first {skip}{beside}; at least 2 are needed")
    on_gpu = any(name.endswith("peak_device_bytes") for name in rows[0])
    shared = cores if cores is not None else math.inf if on_gpu else float(os.cpu_count() or 1)
    with _of_this_version(files["config.yaml"]):
        plan = plan_of(settings["policies"], settings["trainer"], cores=shared, on_gpu=on_gpu)
        env_ids = frozenset(settings["env"])
    with _of_this_version(files["metrics.jsonl"]):
        for row in rows:
            _ = [row[name] for name in (*_EVERY_STEP, *_SYNCHRONOUS * (plan.max_staleness == 0))]
    episodes: dict[int, list[Sequence[Rounds]]] = {}
    siblings: dict[tuple[int, str, int], list[Mapping[str, Any]]] = {}
    with _of_this_version(files["episodes.jsonl"]):
        for row in read_rows(files["episodes.jsonl"]):
            if row["step"] - 1 >= skip and row.get("error") is None:
                siblings.setdefault((row["step"] - 1, row["env_id"], row["seed"]), []).append(row)
        for (step, _, _), found in siblings.items():
            episodes.setdefault(step, []).append(_shapes(found))
        earned = [[tuple(sorted(row["rewards"].items())) for row in found] for found in siblings.values()]
    if not episodes:
        raise RunFolderError(f"{path} kept no episode; set keep_episodes above 0")
    whole = [group for group in earned if len(group) == plan.group_size > 1]
    return MeasuredRun(
        folder=path,
        env_ids=env_ids,
        plan=plan,
        on_gpu=on_gpu,
        rows=rows,
        episodes=episodes,
        outcomes=[group for group in whole if all(math.isfinite(reward) for one in group for _, reward in one)],
    )


@contextlib.contextmanager
def _of_this_version(file: Path) -> Iterator[None]:
    """Say what a file lacks that another version has written."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as odd:
        what = f"has no {odd}" if isinstance(odd, KeyError) else f"has another form ({type(odd).__name__}: {odd})"
        raise RunFolderError(
            f"{file} {what}: another version of forge_agents wrote it. Measure a few steps anew: {TO_MEASURE}"
        ) from odd


def _shapes(siblings: Sequence[Mapping[str, Any]]) -> list[Rounds]:
    """The shapes of one group's episodes, as ``episodes.jsonl`` holds them."""
    first: dict[str, list[list[int]]] = {}  # prompts, by agent
    for episode in siblings:
        for agent, trajectory in episode["trajectories"].items():
            if trajectory["turns"]:
                first.setdefault(agent, []).append(trajectory["turns"][0]["prompt_ids"])
    common = {agent: _common(min(prompts), max(prompts)) for agent, prompts in first.items()}
    return [_rounds(episode, common) for episode in siblings]


def _common(first: Sequence[int], last: Sequence[int]) -> int:
    """Tokens that both begin with, and so does all that is sorted between them."""
    pairs = enumerate(zip(first, last, strict=False))
    return next((at for at, (one, other) in pairs if one != other), len(first))


def _rounds(episode: Mapping[str, Any], common: Mapping[str, int]) -> Rounds:
    turns: list[TurnShape] = []
    said: dict[tuple[str, int], list[int]] = {}  # by conversation
    by_index = sorted((t for own in episode["trajectories"].values() for t in own["turns"]), key=lambda t: t["index"])
    for turn in by_index:
        agent, prompt = turn["agent"], turn["prompt_ids"]
        before = said.get((agent, turn.get("branch", 0)))
        turns.append(
            TurnShape(
                agent=agent,
                policy=turn["policy"],
                prompt_tokens=len(prompt),
                response_tokens=len(turn["response_ids"]),
                cut=turn["finish_reason"] == "length",
                common_tokens=common[agent] if before is None and not turn.get("branch") else 0,
                continues=before is not None and prompt[: len(before)] == before,
                answer_s=turn["generate_s"],
            )
        )
        said[agent, turn.get("branch", 0)] = [*prompt, *turn["response_ids"]]
    rounds: list[list[TurnShape]] = []
    together = sum(turn.answer_s for turn in turns) > episode["duration_s"]  # a parallel environment
    for shape in turns:  # in a round of it every agent decides once
        if not together or not rounds or shape.agent in {other.agent for other in rounds[-1]}:
            rounds.append([])
        rounds[-1].append(shape)
    played = sum(max(turn.answer_s for turn in own) for own in rounds)
    think_s = max(0.0, episode["duration_s"] - played) / max(1, len(rounds))
    return tuple((replace(own[0], think_s=think_s), *own[1:]) for own in rounds)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What runs tell of the machine and the episodes."""

    stages: StageTimes
    workload: Workload
    run: MeasuredRun
    """One of them, not asynchronous; environments, devices and ranks of the learner are the same in all."""
    core_share: float = 1.0
    """Of the host's cores that do work as if each were alone, when all are busy: two hardware threads of one core are
    less than two cores, and memory is shared."""


def measure(runs: Sequence[MeasuredRun]) -> Measured:
    """Fit the stages' seconds.

    Args:
        runs: At least one synchronous. On a CPU host, asynchronous ones and those with few threads also say how much
            engine and learner hinder each other.

    Raises:
        ValueError: No run is synchronous, or the runs are of different environments, devices or numbers of ranks.
    """
    alone = [run for run in runs if run.plan.max_staleness == 0]
    if not alone:
        raise ValueError(
            "no measured run has max_staleness=0; in an asynchronous one stages overlap and their times cannot be told "
            "apart. Measure a few synchronous steps: forge-agents train CONFIG --trainer.max_staleness 0 --steps 6"
        )
    for what, values in (
        ("environments", {", ".join(sorted(run.env_ids)) for run in runs}),
        ("kinds of device", {"GPU" if run.on_gpu else "CPU" for run in runs}),
        ("values of learner_procs", {str(run.plan.learner_ranks) for run in runs}),
        ("values of engine.tp", {str(run.plan.engine_ranks) for run in runs}),
    ):
        if len(values) > 1:
            raise ValueError(f"measured runs have different {what}: {'; '.join(sorted(values))}; measure them apart")
    threads = {(run.plan.engine_threads, run.plan.learner_threads) for run in runs}
    if math.isinf(runs[0].plan.cores) or (len(alone) == len(runs) and len(threads) == 1):
        return _measured(runs, 1.0, 1.0)[1]  # nobody shared cores, or all in the same way
    found: dict[tuple[float, float], tuple[float, Measured]] = {}

    def price(share: float, scaling: float) -> float:
        if (share, scaling) not in found:
            found[share, scaling] = _measured(runs, share, scaling)
        return found[share, scaling][0] + _SHARE_PRICE * (2 - share - scaling)

    share, scaling = 1.0, 1.0
    for _ in range(_SEARCHES):
        scaling = min(_SCALINGS, key=lambda other: price(share, other))
        share = min(_SHARES, key=lambda other: price(other, scaling))
    return found[share, scaling][1]


def _measured(runs: Sequence[MeasuredRun], core_share: float, scaling: float) -> tuple[float, Measured]:
    """What the runs tell if this is how much more cores are worth, and how wrong step times then are."""
    runs = [replace(run, plan=replace(run.plan, cores=run.plan.cores * core_share)) for run in runs]
    alone = [run for run in runs if run.plan.max_staleness == 0]
    first = alone[0]
    loads = {run.plan.replicas: float(len(waves(range(run.plan.replicas)))) for run in alone}
    publish_s, fetch_s = _fit(
        [((1.0, loads[run.plan.replicas]), row["time/sync_s"]) for run in alone for row in run.rows], _PRIOR_SYNC
    )
    score_s, score_trajectory_s = _judge_times(alone)
    stages = StageTimes(
        engine=EngineTimes(
            iteration_s=1e-3, sequence_s=1e-4, prompt_token_s=1e-5, cores=_usable(first.plan), scaling=scaling
        ),
        learner=_learner_times(alone, scaling),
        publish_s=publish_s,
        fetch_s=fetch_s,
        score_s=score_s,
        score_trajectory_s=score_trajectory_s,
        cache_block=GPU_BLOCK if first.on_gpu else CPU_BLOCK,
    )
    found = Measured(
        stages=replace(stages, engine=_engine_times(alone, stages)),
        workload=_workload(runs),
        run=first,
        core_share=core_share,
    )
    return sum(_error(run, found.stages) for run in runs), found


def _error(run: MeasuredRun, stages: StageTimes) -> float:
    """Squared logarithms of predicted over measured seconds: of stages that are alone, else of the step."""
    cold = int(run.rows[0]["step"])
    total = cold + len(run.rows)
    steps = simulate(run.plan, stages, _workload([run]), steps=total, played=run.whole_steps)[cold:]
    compared = ("collect_s", "learn_s") if run.plan.max_staleness == 0 else ("step_s",)
    measured = [np.mean([row[f"time/{name}"] for row in run.rows]) for name in compared]
    predicted = [np.mean([getattr(step, name) for step in steps]) for name in compared]
    ratios = np.maximum(predicted, 1e-9) / np.maximum(measured, 1e-9)
    return float(np.mean(np.log(ratios) ** 2))


def _workload(runs: Sequence[MeasuredRun]) -> Workload:
    """Episodes of the runs that let responses be longest; the share of groups that taught something, of all."""
    most = max(sum(run.plan.max_tokens.values()) for run in runs)
    groups = [group for run in runs if sum(run.plan.max_tokens.values()) == most for group in run.groups]
    ends: dict[str, list[int]] = {}
    for turn in (turn for group in groups for rounds in group for turns in rounds for turn in turns):
        if turn.response_tokens:
            own = ends.setdefault(turn.policy, [0, 0])
            own[0] += not turn.cut
            own[1] += turn.response_tokens
    outcomes = [group for run in runs for group in run.outcomes]
    fates = np.sum([_fates(row) for run in runs for row in run.rows], axis=0)
    told = fates[0] + fates[1] + (0 if outcomes else fates[2])  # where outcomes tell how often siblings are alike
    return Workload(
        groups=groups,
        stop_rates={policy: stops / tokens for policy, (stops, tokens) in ends.items()},
        used_share=float(fates[0] / told) if told else 1.0,
        outcomes=outcomes,
    )


def _fates(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Groups that taught something, those that could not, and those whose siblings were alike."""
    return row["groups/used"], row["groups/failed"] + row["groups/abstained"], row["groups/zero_variance"]


def _learner_times(runs: Sequence[MeasuredRun], scaling: float) -> LearnerTimes:
    """On as many cores as the run whose learner used most."""
    own_cores = {run.folder: _learner_cores(run) for run in runs}
    cores = max(own_cores.values())
    rows, fixed = [], []
    for run in runs:
        faster = (own_cores[run.folder] / cores) ** scaling
        for row in run.rows:
            own = _learners(row)
            if not own["loss_tokens"]:
                continue
            passes_s = min(own["forward_backward_s"], row["time/learn_s"])
            loss_tokens = own["loss_tokens"] * run.plan.iterations  # positions and microbatches are those of all passes
            rows.append(((own["positions"], loss_tokens, own["microbatches"]), passes_s * faster))
            fixed.append((row["time/learn_s"] - passes_s) * faster)
    if not rows:
        raise ValueError(
            "no measured step learned anything; see groups/zero_variance and groups/failed in metrics.jsonl"
        )
    position_s, loss_token_s, microbatch_s = _fit(rows, _PRIOR_LEARNER)
    return LearnerTimes(
        step_s=float(np.mean(fixed)),
        position_s=position_s,
        loss_token_s=loss_token_s,
        microbatch_s=microbatch_s,
        cores=cores,
        scaling=scaling,
    )


def _learner_cores(run: MeasuredRun) -> float:
    """That all ranks kept busy, of those that can be used."""
    learned = [_learners(row) for row in run.rows]
    shares = [own["cpu_s"] * run.plan.learner_ranks / own["step_s"] for own in learned if own["step_s"] > 0]
    most = min(_usable(run.plan), run.plan.learner_threads)
    return min(most, max(0.1, float(np.median(shares)))) if shares else most


def _learners(row: Mapping[str, Any]) -> dict[str, float]:
    """What all learners of a step say, added up; positions are those of a forecast, which knows single groups only."""
    names = ("positions", "group_positions", "loss_tokens", "microbatches", "forward_backward_s", "cpu_s", "step_s")
    totals = dict.fromkeys(names, 0.0)
    for key, value in row.items():
        group, _, name = key.rpartition("/")
        if group.startswith("learner") and name in totals:
            totals[name] += value or 0.0
    totals["positions"] = totals["group_positions"] or totals["positions"]
    return totals


def _judge_times(runs: Sequence[MeasuredRun]) -> tuple[float, ...]:
    """Of steps without max_resamples."""
    rows: list[tuple[tuple[float, ...], float]] = []
    for run in runs:
        agents = np.mean([len({t.agent for turns in rounds for t in turns}) for g in run.groups for rounds in g])
        size = run.plan.group_size * float(agents)
        played = [(sum(_fates(row)), row["time/score_s"]) for row in run.rows]
        rows += [((1.0, count * size), score_s) for count, score_s in played if count <= run.plan.groups_per_step]
    return _fit(rows, _PRIOR_JUDGE) if rows else (0.0, 0.0)


def _engine_times(runs: Sequence[MeasuredRun], stages: StageTimes) -> EngineTimes:
    """Replay collections, count iterations and tokens, and fit their seconds; the next replay uses these."""
    engine = stages.engine
    for _ in range(_FIT_ROUNDS):
        rows, weights = [], []
        for run in runs:
            for row in run.rows:
                found = list(_replayed(run, row, replace(stages, engine=engine)))
                rows += found
                weights += [1.0, *[1 / math.sqrt(max(1, len(found) - 1))] * (len(found) - 1)]
        iteration_s, sequence_s, prompt_token_s = _fit(rows, _PRIOR_ENGINE, weights)
        engine = replace(
            engine, iteration_s=max(iteration_s, 1e-9), sequence_s=sequence_s, prompt_token_s=prompt_token_s
        )
    return engine


def _replayed(
    run: MeasuredRun, row: Mapping[str, Any], stages: StageTimes
) -> Iterator[tuple[tuple[float, ...], float]]:
    """What the engine did for the whole collection, and for each response where all were kept, with its seconds."""
    whole = run.whole_steps.get(row["step"])
    own = SimulatedRun(run.plan, stages, Workload(groups=run.groups), seed=row["step"])
    asked = own.play(whole or own.draw(row["step"], run.plan.groups_per_step))
    _, last = max(asked, key=lambda item: item[1].ended_s)
    yield _features(last, stages.engine, since=NOTHING, begun_s=0.0), row["time/collect_s"]
    for turn, request in asked if whole else ():
        yield _features(request, stages.engine, since=request.arrived, begun_s=request.asked_s), turn.answer_s


def _features(request: Request, engine: EngineTimes, *, since: Counts, begun_s: float) -> tuple[float, ...]:
    """Iterations, sampled and prompt tokens, stretched by what the engine did not work, or worked slowly, meanwhile."""
    counted = [after - before for after, before in zip(request.ended, since, strict=True)]
    seconds = (engine.iteration_s, engine.sequence_s, engine.prompt_token_s)
    worked_s = sum(count * each_s for count, each_s in zip(counted, seconds, strict=True))
    stretch = (request.ended_s - begun_s) / worked_s
    return tuple(count * stretch for count in counted)


def _usable(plan: Plan) -> float:
    """Cores that one process can keep busy; 1 where they do not matter."""
    return plan.cores if math.isfinite(plan.cores) else 1.0


def _fit(
    rows: Sequence[tuple[tuple[float, ...], float]], prior: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Coefficients of at least 0, by errors relative to what is expected, so that sums come out right.

    Args:
        rows: What was counted, and the seconds it took.
        prior: Each one's share of the seconds, where the rows do not tell. It weighs as much as the rows scatter.
        weights: Of the rows; None: alike.
    """
    from scipy.optimize import nnls

    x = np.array([row[0] for row in rows], dtype=float)
    y = np.array([row[1] for row in rows], dtype=float)
    weighed = np.ones(len(y)) if weights is None else np.asarray(weights)
    size, mean_s = np.maximum(x.mean(axis=0), 1e-12), max(float(y.mean()), 1e-9)
    shares = mean_s * np.asarray(prior)
    found = shares
    # Iteratively reweighted: an error counts relative to the prediction of the pass before. The prior is a row more for
    # each coefficient: min |w (X b - y) / e|^2 + (s / mean y)^2 |b - b_0|^2, b >= 0, where s is how the rows scatter.
    for _ in range(_PASSES):
        predicted = (x / size) @ found
        expected = np.maximum(predicted, 0.02 * mean_s)
        scatter = math.sqrt(float(np.average(((y - predicted) / expected) ** 2, weights=weighed**2)))
        scale, believed = weighed / expected, max(scatter, 1e-4) / _PRIOR_SPREAD / mean_s
        a = np.vstack([(x / size) * scale[:, None], believed * np.eye(x.shape[1])])
        found, _ = nnls(a, np.concatenate([y * scale, believed * shares]))
    return tuple((found / size).tolist())
