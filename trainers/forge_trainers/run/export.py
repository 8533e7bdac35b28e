"""A checkpoint of a run as models that others load: ``forge-agents export RUN``.

In: a run's folder. Out: a Hugging Face folder for each trained policy. Waits for the disk; computes in this process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from forge_agents.errors import RunFolderError
from forge_agents.files import check_plain_files
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.run.checkpoints import Checkpoints


def export_checkpoint(
    run: str | os.PathLike[str], *, checkpoint: str = "best", out: str | os.PathLike[str] | None = None
) -> Path:
    """Write the weights of one checkpoint in Hugging Face format, without engines and without the run's ranks.

    Args:
        run: The folder of a training: what `GRPOTrainer`, `SFTTrainer` or `DPOTrainer` had as ``out_dir``.
        checkpoint: "best", of the highest held-out reward (the newest where none was measured); "newest"; or the name
            of one, such as "step-000020".
        out: The new folder; None is ``RUN/export-step-NNNNNN``.

    Returns:
        The folder: a model, or a subfolder for each policy where several were trained.

    Raises:
        RunFolderError: There is no such run or checkpoint, it is damaged, or `out` exists.
    """
    from forge_trainers.learner.core import LearnerCore

    folder = Path(run)
    check_plain_files(folder)
    policies, kept = _policies(folder), Checkpoints(folder / "checkpoints", keep=1)
    chosen = _chosen(kept, checkpoint, folder)
    target = Path(out) if out else folder / f"export-{chosen.name}"
    if target.exists():
        raise RunFolderError(f"{target} is there already; name another folder with --out, or remove it")
    names = kept.policies(chosen)
    for name in names:
        with tempfile.TemporaryDirectory() as dump:
            core = LearnerCore(_config(name, policies, dump))
            core.load(chosen / name)
            core.export(target if len(names) == 1 else target / name)
    return target


def _policies(folder: Path) -> Mapping[str, Any]:
    """Settings of the run's policies, by name."""
    file = folder / "config.yaml"
    try:
        settings = yaml.safe_load(file.read_text())
        found: Mapping[str, Any] = settings.get("policies") or {settings["policy"]["name"]: settings["policy"]}
    except OSError as cause:
        raise RunFolderError(f"{file} cannot be read ({cause}); give the folder of a training run") from cause
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as cause:
        raise RunFolderError(f"{file} names no policies ({cause!r}); give the folder of a training run") from cause
    return found


def _chosen(kept: Checkpoints, which: str, folder: Path) -> Path:
    complete = {one.name: one for one in kept.complete()}
    if not complete:
        raise RunFolderError(f"{folder} holds no complete checkpoint; `checkpoint_every` says how often one is written")
    newest = next(iter(complete.values()))
    found = {"best": kept.best() or newest, "newest": newest, **complete}
    if which not in found:
        raise RunFolderError(f"{folder} has no checkpoint {which!r}; there are {', '.join(found)}")
    return found[which]


def _config(name: str, policies: Mapping[str, Any], dump: str) -> LearnerConfig:
    """What is needed to hold the weights; how they were learned does not matter any more."""
    from forge_agents.models import resolve as models
    from forge_agents.policy import LoRA

    try:
        policy = policies[name]
        adapter = policy.get("lora")
        lora = None if adapter is None else LoRA(**adapter)
        model = str(models.resolve(policy["model"]))
    except (KeyError, TypeError, AttributeError) as cause:
        raise RunFolderError(f"config.yaml says nothing of the policy {name!r} in the checkpoint: {cause!r}") from cause
    return LearnerConfig(model=model, lora=lora, dump_folder=dump)
