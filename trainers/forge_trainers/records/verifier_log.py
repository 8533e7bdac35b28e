"""What a training run has learned of its verifiers, read from its folder.

In: a run folder. Out: the reports of its steps, the newest with its score rows. Waits for nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from forge_agents.errors import RunFolderError
from forge_agents.files import check_plain_files
from forge_trainers.records.run_folder import read_rows
from forge_trainers.run.checkpoints import saved_reward

if TYPE_CHECKING:
    from forge_verifiers.report.data import Snapshot

_LOG = "verifiers.jsonl"


def verifier_history(folder: str | os.PathLike[str]) -> list[Snapshot]:
    """One snapshot per logged step of a run, oldest first, at least one.

    The last report carries the score rows of the newest checkpoint, where there is one.

    Raises:
        RunFolderError: The folder holds no run, a run without verifiers, or a damaged one.
    """
    from forge_verifiers.report.evidence import Evidence

    path = Path(folder)
    check_plain_files(path)
    if not (path / "config.yaml").exists():
        raise RunFolderError(f"{path} is no run folder: it has no config.yaml; give the out_dir of a training run")
    if not (path / _LOG).exists():
        raise RunFolderError(
            f"the run in {path} has no verifiers: there is no {_LOG}. Training writes it where the reward is or holds "
            "an Ensemble"
        )
    metrics = read_rows(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    rewards = {row["step"]: row.get("reward/mean") for row in metrics}
    snapshots = [_snapshot(path / _LOG, row, rewards) for row in read_rows(path / _LOG)]
    if not snapshots:
        raise RunFolderError(f"{path / _LOG} is empty: no step of the run is finished yet; wait for the first")
    last = snapshots[-1]
    names = [v.name for v in last.report.verifiers]
    state = _state_of(names, saved_reward(path / "checkpoints"))
    if not state:
        return snapshots
    evidence = Evidence.from_state(state, [v.family for v in last.report.verifiers])
    return [*snapshots[:-1], replace(last, report=replace(last.report, evidence=evidence))]


def _state_of(names: list[str], saved: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The state of the ensemble over `names`, which may be a part of the saved reward; empty where there is none."""
    for key, value in saved.items():
        if (key == "names" or key.endswith("/names")) and value.tolist() == names:
            prefix = key.removesuffix("names")
            return {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
    return {}


def _snapshot(file: Path, row: Mapping[str, Any], rewards: Mapping[int, float | None]) -> Snapshot:
    from forge_verifiers.report.data import EnsembleReport, Snapshot

    try:
        step, report = int(row["step"]), EnsembleReport.from_row(row)
    except (KeyError, TypeError, ValueError) as cause:
        raise RunFolderError(f"{file} holds something that is no report: {cause}") from cause
    reward = rewards.get(step)
    return Snapshot(step=step, report=report, reward=math.nan if reward is None else reward)
