"""Where the curves of a run go beside ``metrics.jsonl``: TensorBoard, Weights & Biases or MLflow.

In: metrics by step. Out: the tracker's own files or its server's. Waits for the tracker, `OPEN_TIMEOUT_S` at the start;
a run gives it `TRACKER_TIMEOUT_S` for a row and `CLOSE_TIMEOUT_S` to close.
"""

from __future__ import annotations

import importlib.util
import io
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

from forge_agents.errors import DISTRIBUTION, MissingExtraError, StallError, did_you_mean
from forge_agents.runtime.threads import begin_in_thread

Tracker: TypeAlias = Literal["tensorboard", "wandb", "mlflow"]
"""Names that `GRPOConfig.tracker` takes."""

PROJECT = "forge-agents"
"""The project or experiment, where ``WANDB_PROJECT`` or ``MLFLOW_EXPERIMENT_NAME`` say nothing."""

OPEN_TIMEOUT_S = 120.0
"""Seconds that a run waits for its tracker to open; W&B itself gives up after 90."""

TRACKER_TIMEOUT_S = 30.0
"""Seconds that a run waits for a tracker to take a row."""

CLOSE_TIMEOUT_S = 300.0
"""Seconds that it waits for one to close, which may be an upload over a slow line."""

_MLFLOW_PARAMS, _MLFLOW_METRICS = 100, 1000
"""Parameters and metrics that MLflow takes at once."""
_MOST_REFUSED = 5
"""Metrics that a tracker may refuse before it counts as out of reach."""


def check_tracker(tracker: str) -> None:
    """Raise ValueError unless there is such a tracker."""
    if tracker not in get_args(Tracker):
        raise ValueError(
            f"tracker={tracker!r} is none of {', '.join(get_args(Tracker))}.{did_you_mean(tracker, get_args(Tracker))}"
        )


def check_installed(tracker: Tracker) -> None:
    """Raise MissingExtraError, which names the command that installs it, unless the tracker's package is there."""
    if importlib.util.find_spec(tracker) is None and tracker != "tensorboard":
        raise MissingExtraError(f"tracker={tracker} needs a package: pip install '{DISTRIBUTION}[{tracker}]'")


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
            f"for nothing ({_SETTINGS[tracker]}), or leave out tracker={tracker}",
            who=tracker,
        ) from late


class TrackerNames:
    """Names that a tracker takes, by ours: what it does not take becomes an underscore, and no two become one.

    Args:
        allowed: Characters that stay, as in a regular expression's brackets.
        longest: Most characters of a name.
        nested: Whether a name may begin with another one and a slash. A tracker that keeps each metric in a file of its
            name has no folder of that name.
    """

    def __init__(self, allowed: str, *, longest: int = 250, nested: bool = True) -> None:
        self._others, self._longest, self._nested = re.compile(f"[^{allowed}]"), longest, nested
        self._given: dict[str, str] = {}

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """The tracker's name of each."""
        for name in sorted(names):
            if name not in self._given:
                clean = self._clean(name)
                if clean in self._given.values():
                    clean = f"{clean[: self._longest - 9]}_{zlib.crc32(name.encode('utf-8', 'replace')):08x}"
                self._given[name] = clean
        return {name: self._given[name] for name in names}

    def _clean(self, name: str) -> str:
        parts = [part for part in self._others.sub("_", name).split("/") if part.strip()]
        clean = "/".join("_" * len(part) if set(part) == {"."} else part for part in parts)[: self._longest] or "_"
        for known in () if self._nested else sorted(self._given.values(), key=len):
            if clean.startswith(f"{known}/"):
                clean = f"{known}.{clean.removeprefix(f'{known}/')}"
        return clean


def _each(metrics: Mapping[str, float], take: Callable[[Mapping[str, float]], Any]) -> None:
    """Give a tracker a row; where it refuses the whole, give it each metric alone.

    Raises:
        RuntimeError: It refused some, whose names are told; the others are there.
    """
    try:
        take(metrics)
    except Exception as whole:
        refused: dict[str, Exception] = {}
        for name, value in metrics.items():
            try:
                take({name: value})
            except Exception as error:  # noqa: BLE001  # a tracker's own
                refused[name] = error
            if len(refused) in (_MOST_REFUSED, len(metrics)):  # it is down, rather than at odds with a name
                raise whole from None
        if refused:
            why = next(iter(refused.values()))
            names = ", ".join(refused)
            raise RuntimeError(f"{names} left out: {type(why).__name__}: {why}") from None


class _TensorBoard:
    """Event files in ``FOLDER/tensorboard``, written in the thread that logs, so that a full disk is told once."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder / "tensorboard"
        policies = config.get("policies")
        self._policies = list(policies) if isinstance(policies, Mapping) else []
        self._names = TrackerNames(r"-\w./", longest=500)
        self._file: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
            self._file = (self._folder / name).open("wb", buffering=0)
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            begun = SessionLog(status=SessionLog.START)  # hides what an earlier session logged from here on
            self._write(Event(wall_time=time.time(), step=step, session_log=begun))
            if (layout := self._layout(metrics)) is not None:
                self._write(Event(wall_time=time.time(), summary=layout))
        names = self._names.of(metrics)
        values = [Summary.Value(tag=names[name], simple_value=value) for name, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _layout(self, metrics: Mapping[str, float]) -> Any:
        """A chart with the curves of all policies, under "custom scalars"; None where there are not several."""
        groups = {what: [f"{what}/{name}" for name in self._policies] for what in ("reward", "eval/reward")}
        charts = {what: [tag for tag in tags if tag in metrics] for what, tags in groups.items()}
        several = {what: ["Multiline", [self._names.of(tags)[tag] for tag in tags]] for what, tags in charts.items()}
        several = {what: chart for what, chart in several.items() if len(chart[1]) > 1}
        if not several:
            return None
        from torch.utils.tensorboard.summary import custom_scalars

        return custom_scalars({"policies": several})  # type: ignore[no-untyped-call]

    def _write(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        whole = io.BytesIO()
        RecordWriter(whole).write(event.SerializeToString())
        self._file.write(whole.getvalue())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


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
        self._names = TrackerNames(r"-\w./")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        names = self._names.of(metrics)
        row = {names[name]: value for name, value in metrics.items()}
        _each(row, lambda some: self._run.log({"step": step, **some}))

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow: at ``MLFLOW_TRACKING_URI``, or where MLflow itself would put it."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        self._names = TrackerNames(r"-\w. /", nested=False)
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
        settings = dict(leaves(config))
        names = TrackerNames(r"-\w. /").of(settings)
        params = [Param(names[key], str(value)[:500]) for key, value in settings.items()]  # it takes no longer values
        for start in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self._run, params=params[start : start + _MLFLOW_PARAMS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = round(time.time() * 1000)
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        names = self._names.of(finite)
        rows = [(names[name], value) for name, value in finite.items()]

        def take(some: Mapping[str, float]) -> None:
            self._client.log_batch(self._run, metrics=[Metric(*one, now_ms, step) for one in some.items()])

        for start in range(0, len(rows), _MLFLOW_METRICS):
            _each(dict(rows[start : start + _MLFLOW_METRICS]), take)

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
