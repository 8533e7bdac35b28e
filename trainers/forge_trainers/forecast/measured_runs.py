"""Runs as their folders tell them: settings, warm steps, the shapes of episodes.

In: run folders. Out: `MeasuredRun`s for `forge_trainers.forecast.stage_times`. Waits for nothing.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from forge_agents.errors import RunFolderError
from forge_agents.files import check_plain_files
from forge_trainers.forecast.simulation import Plan
from forge_trainers.forecast.workload import Rounds, TurnShape
from forge_trainers.losses.registry import find_loss
from forge_trainers.records.run_folder import read_rows
from forge_trainers.run.config import share_threads


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
        """Mean over the warm steps."""
        return float(np.mean([row["time/step_s"] for row in self.rows]))


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
    """
    engine, learner = trainer["engine"], trainer["learner"]
    first: dict[str, str] = {}
    homes = {
        name: name if policy.get("lora") is None else first.setdefault(str(policy["model"]), name)
        for name, policy in policies.items()
    }
    share = learner.get("share_prefixes")
    trained = frozenset(name for name, policy in policies.items() if policy.get("trainable", True))
    engine_threads, learner_threads = engine.get("threads"), learner.get("threads")
    if math.isfinite(cores):
        shares = share_threads(
            max(1, round(cores)),
            engines=len(set(homes.values())) * engine.get("replicas", 1),
            ranks=len({homes[name] for name in trained}) * trainer["learner_procs"],
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
        max_num_seqs=engine["max_num_seqs"],
        affine=engine.get("routing", "prefix") == "prefix",
        max_live_episodes=trainer["max_live_episodes"],
        refills=find_loss(learner["loss"]).refills if trainer["refills"] is None else trainer["refills"],
        max_tokens_per_microbatch=learner["max_tokens_per_microbatch"],
        share_prefixes=not on_gpu if share is None else share,
        learner_ranks=trainer["learner_procs"],
        cores=cores,
        engine_threads=engine_threads or math.inf,
        learner_threads=(learner_threads or math.inf) * trainer["learner_procs"],
        isolated=isolated,
    )


def read_run(folder: str | os.PathLike[str], *, cores: float | None = None, skip: int = 1) -> MeasuredRun:
    """Read a run folder.

    Args:
        folder: With ``config.yaml``, ``metrics.jsonl`` and ``episodes.jsonl``.
        cores: That engines and learner shared; None: this machine's, or on GPUs none.
        skip: First steps that are left out: memory is new and caches are cold.

    Raises:
        RunFolderError: A file is missing, or there are not enough steps or episodes.
    """
    path = Path(folder)
    check_plain_files(path)
    files = {name: path / name for name in ("config.yaml", "metrics.jsonl", "episodes.jsonl")}
    for file in files.values():
        if not file.is_file():
            raise RunFolderError(f"{path} has no {file.name}; give the out_dir of a run of at least {skip + 2} steps")
    settings = yaml.safe_load(files["config.yaml"].read_text())
    rows = [row for row in read_rows(files["metrics.jsonl"]) if row["step"] >= skip]
    if len(rows) < 2:
        raise RunFolderError(f"{path} has {len(rows)} steps after the first {skip}; at least 2 are needed")
    on_gpu = any(name.endswith("peak_device_bytes") for name in rows[0])
    shared = cores if cores is not None else math.inf if on_gpu else float(os.cpu_count() or 1)
    episodes: dict[int, list[Sequence[Rounds]]] = {}
    siblings: dict[tuple[int, str, int], list[Mapping[str, Any]]] = {}
    for row in read_rows(files["episodes.jsonl"]):
        if row["step"] >= skip and row.get("error") is None:
            siblings.setdefault((row["step"], row["env_id"], row["seed"]), []).append(row)
    for (step, _, _), found in siblings.items():
        episodes.setdefault(step, []).append(shapes(found))
    if not episodes:
        raise RunFolderError(f"{path} kept no episode; set keep_episodes above 0")
    plan = plan_of(settings["policies"], settings["trainer"], cores=shared, on_gpu=on_gpu)
    earned = [[tuple(sorted(row["rewards"].items())) for row in found] for found in siblings.values()]
    whole = [group for group in earned if len(group) == plan.group_size > 1]
    return MeasuredRun(
        folder=path,
        env_ids=frozenset(settings["env"]),
        plan=plan,
        on_gpu=on_gpu,
        rows=rows,
        episodes=episodes,
        outcomes=[group for group in whole if all(math.isfinite(reward) for one in group for _, reward in one)],
    )


def shapes(siblings: Sequence[Mapping[str, Any]]) -> list[Rounds]:
    """The shapes of one group's episodes, as ``episodes.jsonl`` holds them."""
    first: dict[str, list[list[int]]] = {}
    for episode in siblings:
        for agent, trajectory in episode["trajectories"].items():
            if trajectory["turns"]:
                first.setdefault(agent, []).append(trajectory["turns"][0]["prompt_ids"])
    common = {agent: _common(min(prompts), max(prompts)) for agent, prompts in first.items()}
    return [_rounds(episode, common) for episode in siblings]


def _common(first: Sequence[int], last: Sequence[int]) -> int:
    """Tokens that both begin with, and so does all that is sorted between them."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return sum(1 for _ in same)


def _rounds(episode: Mapping[str, Any], common: Mapping[str, int]) -> Rounds:
    turns: list[TurnShape] = []
    said: dict[str, list[int]] = {}
    by_index = sorted((t for own in episode["trajectories"].values() for t in own["turns"]), key=lambda t: t["index"])
    for turn in by_index:
        agent, prompt = turn["agent"], turn["prompt_ids"]
        before = said.get(agent)
        turns.append(
            TurnShape(
                agent=agent,
                policy=turn["policy"],
                prompt_tokens=len(prompt),
                response_tokens=len(turn["response_ids"]),
                cut=turn["finish_reason"] == "length",
                common_tokens=common[agent] if before is None else 0,
                continues=before is not None and prompt[: len(before)] == before,
                answer_s=turn["generate_s"],
            )
        )
        said[agent] = [*prompt, *turn["response_ids"]]
    together = sum(turn.answer_s for turn in turns) > episode["duration_s"]  # a parallel environment
    rounds = _side_by_side(turns) if together else [[turn] for turn in turns]
    played = sum(max(turn.answer_s for turn in own) for own in rounds)
    think_s = max(0.0, episode["duration_s"] - played) / max(1, len(rounds))
    return tuple((replace(own[0], think_s=think_s), *own[1:]) for own in rounds)


def _side_by_side(turns: Sequence[TurnShape]) -> list[list[TurnShape]]:
    """Rounds in which every agent decides once."""
    rounds: list[list[TurnShape]] = []
    for turn in turns:
        if not rounds or any(turn.agent == other.agent for other in rounds[-1]):
            rounds.append([])
        rounds[-1].append(turn)
    return rounds
