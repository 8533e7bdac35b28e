"""Exports a checkpoint of a run as a model folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forge_agents import safe_yaml
from forge_agents.errors import RunFolderError
from forge_agents.files import check_contained, user_path
from forge_agents.models import resolve as models
from forge_agents.policy import LoRA, Policy
from forge_agents.private_folder import use_code_folder
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.records.run_folder import hashes_of_models
from forge_trainers.run.checkpoints import Checkpoints, Mark, checked_mark


def export_checkpoint(
    run: str | os.PathLike[str],
    *,
    checkpoint: str = "best",
    out: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Write the weights of one checkpoint in Hugging Face format, in this process alone.

    Args:
        run: Run folder: the ``out_dir`` of a `GRPOTrainer`, `SFTTrainer` or `DPOTrainer`.
        checkpoint: "best" (lowest exploitability if the run measures it, or else highest held-out reward, or else the
            newest), "newest", or a name such as "step-000020".
        out: New folder. None: ``RUN/export-step-NNNNNN``.
        say: Called with a line about the checkpoint before the export.

    Returns:
        The folder: a model, or one subfolder per policy if several were trained.

    Raises:
        RunFolderError: Run or checkpoint are missing or damaged, or `out` exists.
    """
    folder = user_path(run)
    check_contained(folder)
    settings, chosen = _settings(folder), _select(folder, checkpoint)
    target = user_path(out) if out else folder / f"export-{chosen.name}"
    if target.exists():
        raise RunFolderError(f"{target} exists already. Name another folder with --out, or remove it")
    try:
        mark = checked_mark(chosen)
    except (OSError, ValueError) as cause:
        raise RunFolderError(f"checkpoint {chosen} is damaged: {cause}") from cause
    if say is not None:
        say(f"checkpoint  {chosen.name}, {_score_of(mark, settings)}")
    for name in mark.policies:
        dtype = mark.compute_dtypes.get(name, "auto")
        _export_policy(settings, name, dtype, chosen / name, target if len(mark.policies) == 1 else target / name)
    return target


def _score_of(mark: Mark, settings: Mapping[str, Any]) -> str:
    """Describe the score of a checkpoint: minus the exploitability in runs that measure it."""
    trainer = settings.get("trainer")
    exploited = isinstance(trainer, Mapping) and trainer.get("exploitability_samples")
    name = "exploitability" if exploited else "held-out reward"
    return f"no {name}" if mark.score is None else f"{name} {-mark.score if exploited else mark.score:.4f}"


def _select(folder: Path, name: str) -> Path:
    """Return the checkpoint of a run that `name` stands for. Raises RunFolderError if there is none."""
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    complete = {path.name: path for path in checkpoints.complete()}
    if not complete:
        raise RunFolderError(f"{folder} holds no complete checkpoint. checkpoint_every sets how often one is written")
    newest = next(iter(complete.values()))
    by_name = {"best": checkpoints.best() or newest, "newest": newest, **complete}
    if name not in by_name:
        raise RunFolderError(f"{folder} has no checkpoint {name!r}. It has {', '.join(by_name)}")
    return by_name[name]


def _export_policy(settings: Mapping[str, Any], name: str, dtype: Any, checkpoint: Path, target: Path) -> None:
    """Write the weights of one policy, rounded as by a learner that computes in `dtype`.

    Weights that were trained in float32 are rounded randomly: rounding to nearest would undo small updates.

    Raises RunFolderError if the run's settings do not have it, or its adapter was trained on another model.
    """
    use_code_folder()
    from forge_trainers.learner.core import LearnerCore

    with tempfile.TemporaryDirectory() as dump:
        try:
            policy = settings["policies"][name]
            lora = None if policy.get("lora") is None else LoRA(**policy["lora"])
            weights = settings["weights"] if isinstance(settings.get("weights"), Mapping) else {}
            model = str(models.resolve(policy["model"], offline=True))
            computed = LearnerConfig(compute_dtype=dtype)
            plan = LearnerPlan.of(computed, model=model, lora=lora, seed=_seed(settings), dump_folder=dump)
        except (KeyError, TypeError, AttributeError) as cause:
            raise RunFolderError(
                f"config.yaml has no policy {name!r}, which is in the checkpoint, or other values than a run writes: "
                f"{cause!r}"
            ) from cause
        now = hashes_of_models({name: Policy(policy["model"])}).get(name)
        if lora is not None and weights.get(name, now) != now:
            raise RunFolderError(
                f"{policy['model']}, the start model of policy {name}, has changed since the run (hash "
                f"{weights[name]}, now {now}), so its adapter does not fit. Restore the model, and export again"
            )
        core = LearnerCore(plan)
        core.load(checkpoint, to_train=False)
        core.export(target)


def _seed(settings: Mapping[str, Any]) -> int:
    """Return the seed of a run, which exports are rounded with."""
    seed = (settings.get("trainer") or {}).get("seed", 0)
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise TypeError(f"seed={seed!r:.40}")
    return seed


def _settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings of a run, with its policies by name under ``policies``."""
    file = folder / "config.yaml"
    try:
        settings = safe_yaml.read(file)
        return {**settings, "policies": settings.get("policies") or {settings["policy"]["name"]: settings["policy"]}}
    except OSError as cause:
        raise RunFolderError(f"{file} cannot be read ({cause}). Give the folder of a training run") from cause
    except (ValueError, AttributeError, KeyError, TypeError) as cause:
        raise RunFolderError(f"{file} names no policies ({cause!r}). Give the folder of a training run") from cause
