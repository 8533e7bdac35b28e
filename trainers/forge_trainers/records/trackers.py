"""Where the curves of a run go beside ``metrics.jsonl``: TensorBoard, Weights & Biases or MLflow.

In: metrics by step. Out: the tracker's own files or its server's. Waits for the tracker, `OPEN_TIMEOUT_S` at the start;
a run gives it `TRACKER_TIMEOUT_S` for a row and `CLOSE_TIMEOUT_S` to close.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

from forge_agents.errors import DISTRIBUTION, MissingExtraError, StallError, did_you_mean
from forge_agents.runtime.waits import begin_in_thread

Tracker: TypeAlias = Literal["tensorboard", "wandb", "mlflow"]
"""Names that `GRPOConfig.log_to` takes."""

PROJECT = "forge-agents"
"""The project or experiment, where ``WANDB_PROJECT`` or ``MLFLOW_EXPERIMENT_NAME`` say nothing."""

OPEN_TIMEOUT_S = 120.0
"""Seconds that a run waits for its tracker to open; W&B itself gives up after 90."""

TRACKER_TIMEOUT_S = 30.0
"""Seconds that a run waits for a tracker to take a row."""

CLOSE_TIMEOUT_S = 300.0
"""Seconds that it waits for one to close, which may be an upload over a slow line."""

_MLFLOW_BATCH = 100
"""Parameters that MLflow takes at once."""


def check_tracker(tracker: str) -> None:
    """Raise ValueError unless there is such a tracker."""
    if tracker not in get_args(Tracker):
        raise ValueError(
            f"log_to={tracker!r} is none of {', '.join(get_args(Tracker))}.{did_you_mean(tracker, get_args(Tracker))}"
        )


def check_installed(tracker: Tracker) -> None:
    """Raise MissingExtraError, which names the command that installs it, unless the tracker's package is there."""
    if importlib.util.find_spec(tracker) is None and tracker != "tensorboard":
        raise MissingExtraError(f"log_to={tracker} needs a package: pip install '{DISTRIBUTION}[{tracker}]'")


class Curves(Protocol):
    """Takes the curves of one run; raises whatever its tracker raises."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row; of a resumed run, steps may come again."""

    def close(self) -> None:
        """Nothing more comes in this session."""


def open_tracker(tracker: Tracker, folder: Path, config: Mapping[str, Any]) -> Curves:
    """A run's curves in a tracker; a resumed run goes on in its own.

    Args:
        tracker: Where to.
        folder: The run's folder.
        config: Settings that the tracker shows beside the curves.

    Raises:
        MissingExtraError: The tracker's package is not installed; the message names the command that installs it.
        StallError: It does not open in time: nothing has started yet, and nobody would see that its curves are missing.
    """
    check_installed(tracker)
    opening = begin_in_thread(_TRACKERS[tracker], folder, config, name=f"tracker {tracker}")
    try:
        return opening.result(OPEN_TIMEOUT_S)
    except TimeoutError as late:
        if opening.done():  # its own
            raise
        raise StallError(
            f"{tracker} did not open within {OPEN_TIMEOUT_S:g} s. See that its server can be reached and that it asks "
            f"for nothing ({_SETTINGS[tracker]}), or leave out log_to={tracker}",
            who=tracker,
        ) from late


class _TensorBoard:
    """Event files in ``FOLDER/tensorboard``."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder / "tensorboard"), purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _WandB:
    """A run of Weights & Biases; ``WANDB_MODE=offline`` keeps it in the run's folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        mark = folder / "wandb.id"
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.resolve().name,
            dir=str(folder),
            config=dict(config),
            id=mark.read_text() if mark.exists() else None,
            resume="allow",
        )
        mark.write_text(self._run.id)
        self._run.define_metric("*", step_metric="step")  # its own counter cannot go back when a run is resumed

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow: at ``MLFLOW_TRACKING_URI``, or where MLflow itself would put it."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        mark = folder / "mlflow.id"
        if mark.exists():
            self._run: str = mark.read_text()
            self._client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=folder.resolve().name).info.run_id
        mark.write_text(self._run)
        params = [Param(key, str(value)[:500]) for key, value in leaves(config)]  # it takes no longer values
        for start in range(0, len(params), _MLFLOW_BATCH):
            self._client.log_batch(self._run, params=params[start : start + _MLFLOW_BATCH])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = round(time.time() * 1000)
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._client.log_batch(self._run, metrics=[Metric(name, value, now_ms, step) for name, value in finite.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


_TRACKERS: Mapping[Tracker, Callable[[Path, Mapping[str, Any]], Curves]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
}


_SETTINGS: Mapping[Tracker, str] = {
    "tensorboard": "it writes into the run's folder",
    "wandb": "WANDB_API_KEY, WANDB_BASE_URL; WANDB_MODE=offline needs no server",
    "mlflow": "MLFLOW_TRACKING_URI",
}
"""What decides whether each opens."""


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Settings, each with its dotted key; items of a list that holds settings have their number."""
    if isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from leaves(part, f"{at}.{key}" if at else str(key))
    else:
        yield at, value
