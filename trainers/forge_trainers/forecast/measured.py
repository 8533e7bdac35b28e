"""Measurements of short runs: reads run folders for `forge_trainers.forecast.model`."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_agents import safe_yaml
from forge_agents.errors import RunFolderError
from forge_agents.files import check_plain_files, user_path
from forge_agents.imports import exclude_run_folder, restrict_modules_of
from forge_agents.serving.routing import router_class
from forge_trainers.forecast.model import EpisodeShape, Measurement, Plan, TurnShape
from forge_trainers.losses.registry import find_loss
from forge_trainers.records.run_folder import read_rows
from forge_trainers.rl.samples import prefix
from forge_trainers.run.plan import share_threads

TO_MEASURE = (
    "forge-agents train CONFIG --steps 8 --trainer.max_staleness 0 --trainer.keep_episodes 10000 "
    "--out_dir runs/measured"
)
"""Command line that measures a run."""
_GROUPS = ("groups/used", "groups/zero_variance", "groups/failed", "groups/abstained")
"""Metrics that add up to the groups of a step."""
_SECONDS = ("time/collect_s", "time/score_s", "time/learn_s", "time/sync_s")
"""Metrics of the stages' seconds."""
_FIRST_STEPS = 1
"""Steps that are left out, because memory is new and caches are cold in them."""


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
        learners=learners,
        iterations=learner.get("num_iterations", 1),
        learner_ranks=trainer["learner_procs"],
        cores=cores,
        engine_threads=(engine_threads or math.inf) * tp,
    )


def _learner_key(name: str, policy: Mapping[str, Any]) -> str:
    """Return a key that policies with one learner share: adapters of one shape on one model."""
    return name if policy.get("lora") is None else repr((policy["model"], sorted(policy["lora"].items())))


def read_run(folder: str | os.PathLike[str], *, cores: float | None = None) -> Measurement:
    """Read a folder of a synchronous run with ``config.yaml``, ``metrics.jsonl`` and ``episodes.jsonl``.

    Engines and learner shared `cores`. None: this machine's cores. On GPUs they share none.

    Raises:
        RunFolderError: A file is missing or of another version, there are too few steps or episodes, no step trained
            anything, or the run was asynchronous.
    """
    path = user_path(folder)
    check_plain_files(path)
    files = {name: path / name for name in ("config.yaml", "metrics.jsonl", "episodes.jsonl")}
    for file in files.values():
        if not file.is_file():
            raise RunFolderError(
                f"{path} has no {file.name}. Give the out_dir of a run of at least {_FIRST_STEPS + 2} steps"
            )
    try:
        settings = safe_yaml.read(files["config.yaml"])
    except ValueError as cause:
        raise RunFolderError(f"{cause}. Give the out_dir of a run") from cause
    restrict_modules_of([settings])
    exclude_run_folder(path)
    warm = [row for row in read_rows(files["metrics.jsonl"]) if row["step"] > _FIRST_STEPS]
    rows = [row for row in warm if "time/evaluate_s" not in row]  # evaluations slow a collection down
    if len(rows) < 2:
        excluded = f" without an evaluation (of {len(warm)})" if len(rows) < len(warm) else ""
        raise RunFolderError(
            f"{path} has {len(rows)} steps after the first {_FIRST_STEPS}{excluded}. At least 2 are needed"
        )
    on_gpu = any(name.endswith("peak_device_bytes") for name in rows[0])
    shared = math.inf if on_gpu else cores or float(os.cpu_count() or 1)
    with _same_version(files["config.yaml"]):
        plan = plan_of(settings["policies"], settings["trainer"], cores=shared)
        env_ids = frozenset(settings["env"])
    if plan.max_staleness:
        raise RunFolderError(
            f"{path} is of a run with max_staleness={plan.max_staleness}, whose stages overlap, so that their times "
            f"cannot be separated. Measure a few synchronous steps: {TO_MEASURE}"
        )
    groups: dict[tuple[int, str, int], list[Mapping[str, Any]]] = {}
    with _same_version(files["episodes.jsonl"]):
        for row in read_rows(files["episodes.jsonl"]):
            if row["step"] > _FIRST_STEPS and row.get("error") is None:
                groups.setdefault((row["step"], row["env_id"], row["seed"]), []).append(row)
        episodes = [shape for group in groups.values() for shape in _shapes(group)]
    if not episodes:
        raise RunFolderError(f"{path} has no episodes. Set keep_episodes above 0")
    with _same_version(files["metrics.jsonl"]):
        agents = float(np.mean([episode.agents for episode in episodes]))
        learners = {name: _learner_key(name, settings["policies"][name]) for name in plan.trained}
        means = _means(rows, plan, agents=agents, learners=learners)
    if not means["used_groups"]:
        raise RunFolderError(
            f"no measured step of {path} trained anything. See groups/zero_variance and groups/failed in metrics.jsonl"
        )
    return Measurement(plan=plan, on_gpu=on_gpu, env_ids=env_ids, episodes=episodes, **means)


def _means(
    rows: Sequence[Mapping[str, Any]], plan: Plan, *, agents: float, learners: Mapping[str, str]
) -> dict[str, float]:
    """Return the means over steps that `Measurement` has. `learners` are keys of learners by trained policy."""
    groups = np.array([[row[name] for name in _GROUPS] for row in rows], dtype=float)
    collect_s, score_s, learn_s, sync_s = np.array([[row[name] for name in _SECONDS] for row in rows], dtype=float).T
    used = groups[:, 0]
    whole = groups.sum(axis=1)
    alone = whole <= plan.groups_per_step  # in other steps, scoring includes the collection of resampled groups
    trajectories = float(whole[alone].sum()) * plan.group_size * agents
    learned = [_learner_metrics(row, learners) for row in rows]
    passes_s = [max((totals["forward_backward_s"] for totals in each), default=0.0) for each in learned]
    cores = [[t["cpu_s"] * plan.learner_ranks / t["step_s"] for t in each if t["step_s"] > 0] for each in learned]
    busy = [math.fsum(each) for each in cores if each]
    most = plan.cores if math.isfinite(plan.cores) else 1.0
    return {
        "collect_s": float(collect_s.mean()),
        "score_trajectory_s": float(score_s[alone].sum()) / trajectories if trajectories else 0.0,
        "learn_s": float(learn_s.mean()),
        "passes_s": float(np.minimum(passes_s, learn_s).mean()),
        "sync_s": float(sync_s.mean()),
        "used_groups": float(used.mean()),
        "used_fraction": float(used.sum() / whole.sum()) if whole.any() else 0.0,
        "learner_cores": min(most, max(0.1, float(np.median(busy)))) if busy else most,
    }


def _learner_metrics(row: Mapping[str, Any], learners: Mapping[str, str]) -> list[dict[str, float]]:
    """Return the seconds of each learner of a step. Learners compute at the same time, and policies of one in turn."""
    names = ("forward_backward_s", "cpu_s", "step_s")
    totals = {learner: dict.fromkeys(names, 0.0) for learner in learners.values()}
    for policy, learner in learners.items():
        for name in names:
            totals[learner][name] += row.get(f"{prefix(policy, learners)}/{name}") or 0.0
    return [*totals.values()]


@contextlib.contextmanager
def _same_version(file: Path) -> Iterator[None]:
    """Raise RunFolderError if a file lacks a key of this version or has an unknown value."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
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
    decided: set[str] = set()
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
        )
        conversations[agent, branch] = [*prompt, *turn["response_ids"]]
        # in a round of a parallel environment every agent decides once
        if not parallel or not rounds or agent in decided:
            rounds.append([])
            decided.clear()
        rounds[-1].append((turn, shape))
        decided.add(agent)
    model_s = sum(max((t["generate_s"] for t, s in pairs if s.response_tokens), default=0.0) for pairs in rounds)
    return EpisodeShape(
        rounds=tuple(tuple(shape for _, shape in pairs if shape.response_tokens) for pairs in rounds),
        agents=len(episode["trajectories"]),
        other_s=max(0.0, episode["duration_s"] - model_s),
    )
